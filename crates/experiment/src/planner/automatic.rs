//! What the controller does by itself, or proposes, in each state.

use super::moves::{Context, Standing};
use super::{Action, Change, InconclusivePolicy, Next};
use crate::confidence::binomial;
use crate::error::ExperimentError;
use chrono::TimeDelta;
use flywheel_types::{Automation, RolloutState as S, Verdict};

/// Name under which a breach of the last step's failure limit can be overridden.
const FINAL_FAILURES: &str = "final_failures";

impl Context<'_> {
    /// Gates that stand against the rollout and have not been overridden.
    fn standing_against(&self, verdict: Verdict) -> Vec<String> {
        let overridden = self.plan.fail_override.as_ref().map(|o| o.gates.as_slice()).unwrap_or_default();
        let mut names = self.report.map(|r| r.gates_with(verdict)).unwrap_or_default();
        if verdict == Verdict::Fail && self.final_failures().is_some() {
            names.push(FINAL_FAILURES.to_owned());
        }
        names.retain(|n| !overridden.contains(n));
        names
    }

    /// Every gate that is FAIL or INVALID now; an override covers exactly these.
    pub(super) fn problem_gates(&self) -> Vec<String> {
        let mut names = self.report.map(|r| r.gates_with(Verdict::Fail)).unwrap_or_default();
        names.extend(self.report.map(|r| r.gates_with(Verdict::Invalid)).unwrap_or_default());
        if self.final_failures().is_some() {
            names.push(FINAL_FAILURES.to_owned());
        }
        names
    }

    /// Where the evidence stands. A FAIL counts from any phase; everything else only from the current one.
    pub(super) fn standing(&self) -> Standing {
        let failed = self.standing_against(Verdict::Fail);
        if let Some(why) = self.final_failures()
            && failed.iter().any(|n| n == FINAL_FAILURES)
        {
            return Standing::Fail(why);
        }
        let Some(report) = self.report else {
            return Standing::Unknown;
        };
        if report.verdict == Verdict::Fail && !failed.is_empty() {
            return Standing::Fail(report.reason_of(&failed));
        }
        if report.phase != self.plan.phase {
            return Standing::Unknown;
        }
        let invalid = self.standing_against(Verdict::Invalid);
        match report.verdict {
            Verdict::Invalid if !invalid.is_empty() => Standing::Invalid(report.reason_of(&invalid)),
            // Overridden: the controller takes no step on this report, people do.
            Verdict::Fail | Verdict::Invalid => Standing::Other(Verdict::Continue),
            v => Standing::Other(v),
        }
    }

    /// At 100 %: the share of reporting devices with a failure is surely above the policy's limit.
    fn final_failures(&self) -> Option<String> {
        let t = self.inventory.treatment;
        if !self.at_final_step() || t.reporting == 0 || self.plan.step == 0 {
            return None;
        }
        let lower = binomial::lower_bound(t.failed.min(t.reporting), t.reporting, self.policy.final_alpha);
        (lower > self.policy.final_failure_max).then(|| {
            format!(
                "{} of {} reporting devices failed with the candidate; surely more than {:.1} % allowed",
                t.failed,
                t.reporting,
                100.0 * self.policy.final_failure_max
            )
        })
    }

    /// A ring device failed.
    pub(super) fn ring_problem(&self) -> Option<String> {
        let failed = self.inventory.ring.iter().filter(|d| d.failed && self.plan.ring.contains(&d.install)).count();
        (self.plan.state == S::Ring && failed > 0).then(|| format!("{failed} ring devices failed with the candidate"))
    }

    fn waited(&self) -> bool {
        self.now - self.plan.step_since >= TimeDelta::hours(i64::from(self.policy.min_step_hours))
    }

    fn not_reporting_share(&self) -> f64 {
        let t = self.inventory.treatment;
        if t.assigned == 0 {
            return 0.0;
        }
        1.0 - t.reporting.min(t.assigned) as f64 / t.assigned as f64
    }
}

/// FAIL: take the candidate back if that may be done now; under `recommend` stop widening and ask. In force in
/// every state that has devices, also while something else waits for approval.
pub(super) fn fail(ctx: &mut Context<'_>) -> Result<Option<Next>, ExperimentError> {
    if !matches!(ctx.plan.state, S::Ring | S::Canary | S::Ramping | S::Holding | S::Paused) {
        return Ok(None);
    }
    let Standing::Fail(why) = ctx.standing() else {
        return Ok(None);
    };
    let need = ctx.need(Change::RollBack);
    if let Some(next) = ctx.if_allowed(Change::RollBack, &need, |c| c.take_back(&why))? {
        return Ok(Some(next));
    }
    let widening = matches!(ctx.plan.state, S::Canary | S::Ramping);
    if ctx.policy.automation == Automation::Recommend && widening {
        return ctx.hold(&why, true).map(Some);
    }
    Ok(None)
}

/// The step of the current state.
pub(super) fn apply(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    match ctx.plan.state {
        S::Draft => draft(ctx),
        S::AwaitingApproval => ctx.make_or_propose(Change::Start, "waits for approval of the start", |c| c.sign()),
        S::Signed if ctx.plan.ring.is_empty() => ctx.advance("start", "first step; this rollout has no ring"),
        S::Signed => ctx.enter_ring(),
        S::Ring => ring(ctx),
        S::Canary | S::Ramping if ctx.at_final_step() => last_step(ctx),
        S::Canary | S::Ramping => step(ctx),
        S::Holding | S::Paused => stopped(ctx),
        S::RollingBack => restoring(ctx),
        S::RolledBack | S::Complete | S::Superseded => Ok(ctx.stay(ctx.plan.reason.clone())),
    }
}

fn draft(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    if ctx.policy.start_approvals() == 0 {
        return ctx.sign();
    }
    let plan = ctx.successor(S::AwaitingApproval, "waits for approval of the start")?;
    let ask = Action::AskApproval { generation: plan.generation + 1, change: Change::Start };
    Ok(Context::changed(plan, vec![ask]))
}

fn ring(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    if let Some(why) = ctx.ring_problem() {
        return if ctx.policy.automation == Automation::Observe { Ok(ctx.stay(why)) } else { ctx.hold(&why, true) };
    }
    let confirmed: Vec<_> = ctx
        .plan
        .ring
        .iter()
        .filter_map(|id| ctx.inventory.ring.iter().find(|d| d.install == *id).and_then(|d| d.confirmed_at))
        .collect();
    let total = ctx.plan.ring.len();
    let last = confirmed.iter().max().copied();
    match last {
        Some(last) if confirmed.len() == total => {
            let bake = TimeDelta::hours(i64::from(ctx.policy.ring_bake_hours));
            if ctx.now - last < bake {
                return Ok(ctx.stay(format!("ring: all {total} devices confirmed, bake time runs")));
            }
            let reason = format!("ring passed: {total} of {total} devices confirmed and baked");
            ctx.make_or_propose(Change::Advance, &reason, |c| c.advance("ring", &reason))
        }
        _ => Ok(ctx.stay(format!("ring: {} of {total} devices confirmed", confirmed.len()))),
    }
}

fn step(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    let observe = ctx.policy.automation == Automation::Observe;
    match ctx.standing() {
        Standing::Fail(why) => Ok(ctx.propose(Change::RollBack, &ctx.need(Change::RollBack), &why)),
        Standing::Invalid(why) if observe => Ok(ctx.stay(why)),
        Standing::Invalid(why) => ctx.hold(&why, true),
        Standing::Other(Verdict::Pass) => passed(ctx),
        Standing::Other(Verdict::Inconclusive) => inconclusive(ctx),
        Standing::Other(_) => Ok(ctx.stay(ctx.report.map_or_else(String::new, |r| r.reason.clone()))),
        Standing::Unknown => Ok(ctx.stay("no gate report for this phase yet")),
    }
}

/// The only way up without a person: PASS, enough time, enough devices reporting, below the exposure cap.
fn passed(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    if !ctx.waited() {
        return Ok(ctx.stay(format!("PASS; a step lasts at least {} hours", ctx.policy.min_step_hours)));
    }
    let silent = ctx.not_reporting_share();
    if silent > ctx.policy.max_not_reporting_share {
        return Ok(ctx.stay(format!(
            "PASS, but {:.0} % of the treatment's devices are not reporting ({:.0} % allowed)",
            100.0 * silent,
            100.0 * ctx.policy.max_not_reporting_share
        )));
    }
    let next_ppm = ctx.policy.steps.get(ctx.plan.step as usize).map_or(0, |s| s.treatment_ppm);
    if next_ppm > ctx.policy.exposure_cap_ppm {
        let why = format!(
            "PASS, but {} ppm would exceed the exposure cap of {} ppm; an operator must promote",
            next_ppm, ctx.policy.exposure_cap_ppm
        );
        return if ctx.policy.automation == Automation::Observe { Ok(ctx.stay(why)) } else { ctx.hold(&why, false) };
    }
    let reason = format!("step {} passed: {}", ctx.plan.step, ctx.report.map_or("", |r| r.reason.as_str()));
    ctx.make_or_propose(Change::Advance, &reason, |c| c.advance("gate", &reason))
}

fn inconclusive(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    let why = ctx.report.map_or_else(String::new, |r| r.reason.clone());
    match (ctx.policy.automation, ctx.policy.inconclusive) {
        (Automation::Observe, _) => Ok(ctx.stay(why)),
        (_, InconclusivePolicy::RollBack) => ctx.make_or_propose(Change::RollBack, &why, |c| c.take_back(&why)),
        (_, InconclusivePolicy::Hold | InconclusivePolicy::PromoteWithApproval) => ctx.hold(&why, false),
    }
}

fn last_step(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    match ctx.standing() {
        Standing::Fail(why) => {
            return Ok(ctx.propose(Change::RollBack, &ctx.need(Change::RollBack), &why));
        }
        Standing::Invalid(why) if ctx.policy.automation != Automation::Observe => {
            return ctx.hold(&why, true);
        }
        _ => {}
    }
    let t = ctx.inventory.treatment;
    let share = if t.reporting == 0 { 0.0 } else { t.confirmed.min(t.reporting) as f64 / t.reporting as f64 };
    let state = format!("{} of {} reporting devices confirmed the candidate", t.confirmed, t.reporting);
    if share < ctx.policy.complete_confirmed_share || !ctx.waited() {
        return Ok(ctx.stay(state));
    }
    ctx.make_or_propose(Change::Complete, &state, |c| c.complete("confirmations", &state))
}

fn stopped(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    match ctx.standing() {
        Standing::Fail(why) => Ok(ctx.propose(Change::RollBack, &ctx.need(Change::RollBack), &why)),
        Standing::Other(Verdict::Inconclusive)
            if ctx.plan.state == S::Holding
                && ctx.policy.inconclusive == InconclusivePolicy::PromoteWithApproval
                && !ctx.at_final_step() =>
        {
            propose_inconclusive(ctx)
        }
        _ => Ok(ctx.stay(ctx.plan.reason.clone())),
    }
}

/// The one way up without PASS, and only over a person's approval, whatever the automation.
fn propose_inconclusive(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    let people = ctx.policy.start_approvals().max(1);
    let need = if ctx.policy.automation == Automation::Observe {
        super::moves::Need::OperatorOnly
    } else {
        super::moves::Need::People(people)
    };
    let reason = "not decided in time; the policy allows the next step with approval";
    match ctx.if_allowed(Change::Advance, &need, |c| c.advance("approval", reason))? {
        Some(next) => Ok(next),
        None => Ok(ctx.propose(Change::Advance, &need, reason)),
    }
}

fn restoring(ctx: &mut Context<'_>) -> Result<Next, ExperimentError> {
    let (have, all) = (ctx.inventory.restored, ctx.inventory.to_restore);
    if have < all {
        return Ok(ctx.stay(format!("{have} of {all} reporting devices are back on the last good bundle")));
    }
    let reason = format!("all {all} reporting devices are back on the last good bundle");
    let plan = ctx.successor(S::RolledBack, &reason)?;
    let note = Action::Alert { urgent: false, text: format!("rolled back: {reason}") };
    Ok(Context::changed(plan, vec![Action::PublishAssignment, note]))
}
