//! What operators ask for. People outrank the controller, except that nobody can widen a failed rollout alone.

use super::moves::{Context, Standing};
use super::{Action, Next, OperatorRequest, RequestKind};
use crate::error::ExperimentError;
use flywheel_types::RolloutState as S;

/// Rollback requests: they come before everything else.
pub(super) fn roll_back(ctx: &mut Context<'_>) -> Result<Option<Next>, ExperimentError> {
    let mut done = None;
    for r in ctx.requests.iter().filter(|r| r.kind == RequestKind::Rollback) {
        let reason = format!("rollback requested by {}: {}", r.by, r.reason);
        match ctx.plan.state {
            S::Ring | S::Canary | S::Ramping | S::Holding | S::Paused | S::Complete => {
                if done.is_none() {
                    done = Some(ctx.take_back(&reason)?);
                }
                ctx.answer(r, true, "rolling back");
            }
            S::Draft | S::AwaitingApproval | S::Signed => {
                if done.is_none() {
                    let plan = ctx.successor(S::Superseded, &reason)?;
                    done = Some(Context::changed(plan, Vec::new()));
                }
                ctx.answer(r, true, "withdrawn before any device had it");
            }
            S::RollingBack => ctx.answer(r, true, "it is rolling back already"),
            S::RolledBack | S::Superseded => ctx.answer(r, false, format!("the rollout is {}", ctx.plan.state)),
        }
    }
    Ok(done)
}

/// Halt, pause, promote, resume: the first that can be followed, in this order. The others are refused.
pub(super) fn steer(ctx: &mut Context<'_>) -> Result<Option<Next>, ExperimentError> {
    let order: [fn(&RequestKind) -> bool; 4] = [
        |k| *k == RequestKind::Halt,
        |k| *k == RequestKind::Pause,
        |k| matches!(k, RequestKind::Promote { .. }),
        |k| *k == RequestKind::Resume,
    ];
    for wanted in order {
        for r in ctx.requests.iter().filter(|r| wanted(&r.kind)) {
            match follow(ctx, r) {
                Ok(next) => {
                    ctx.answer(r, true, next.reason.clone());
                    return Ok(Some(next));
                }
                Err(ExperimentError::Request(why)) => ctx.answer(r, false, why),
                Err(other) => return Err(other),
            }
        }
    }
    Ok(None)
}

fn follow(ctx: &Context<'_>, r: &OperatorRequest) -> Result<Next, ExperimentError> {
    let refuse = |why: String| Err(ExperimentError::Request(why));
    let state = ctx.plan.state;
    let running = matches!(state, S::Ring | S::Canary | S::Ramping | S::Holding | S::Paused);
    if !running {
        return refuse(format!("the rollout is {state}; this needs a running rollout"));
    }
    if r.reason.trim().is_empty() {
        return refuse("a reason is needed for the audit log".into());
    }
    let reason = |what: &str| format!("{what} by {}: {}", r.by, r.reason);
    match &r.kind {
        RequestKind::Halt if ctx.plan.intake_closed => refuse("the rollout is halted already".into()),
        RequestKind::Halt => ctx.pause(true, &reason("halted")),
        RequestKind::Pause if state == S::Paused => refuse("the rollout is paused already".into()),
        RequestKind::Pause => ctx.pause(false, &reason("paused")),
        RequestKind::Resume if !matches!(state, S::Holding | S::Paused) => {
            refuse(format!("the rollout is {state}, neither holding nor paused"))
        }
        RequestKind::Resume => ctx.resume(&reason("resumed")),
        RequestKind::Promote { approved_by } => promote(ctx, r, approved_by.as_deref(), &reason("promoted")),
        RequestKind::Rollback | RequestKind::Approve { .. } => refuse("handled elsewhere".into()),
    }
}

fn promote(
    ctx: &Context<'_>,
    r: &OperatorRequest,
    approved_by: Option<&str>,
    reason: &str,
) -> Result<Next, ExperimentError> {
    let problem = match ctx.standing() {
        Standing::Fail(why) | Standing::Invalid(why) => Some(why),
        Standing::Other(_) | Standing::Unknown => ctx.ring_problem(),
    };
    let approver = approved_by.filter(|a| !a.trim().is_empty() && *a != r.by);
    if let (Some(why), None) = (&problem, approver) {
        return Err(ExperimentError::Request(format!("{why}; going on needs an approver other than {}", r.by)));
    }
    let mut next = if ctx.at_final_step() { ctx.complete(&r.by, reason)? } else { ctx.advance(&r.by, reason)? };
    if let (Some(why), Some(approver)) = (problem, approver) {
        ctx.note_override(&mut next.plan, &r.by, approver, &r.reason, ctx.problem_gates());
        let text = format!("{} and {approver} went on although {why}", r.by);
        next.actions.push(Action::Alert { urgent: true, text });
    }
    Ok(next)
}
