//! The changes a plan can undergo. Each makes a new generation with its parent's digest; the legality of the state
//! step is checked here, once.

use super::policy::CONTROL_FROM;
use super::{
    Action, Answer, Change, FailOverrideV1, Inventory, Next, OperatorRequest, PassedStepV1, PlanV1, Proposal,
    RequestKind, RolloutPolicyV1,
};
use crate::error::ExperimentError;
use crate::gate::GateReportV1;
use crate::window::PhaseV1;
use chrono::{DateTime, Utc};
use flywheel_types::assign::PpmRange;
use flywheel_types::{Approval, Automation, RolloutState, Verdict};

/// Everything one planning call reads, and the answers it has given so far.
pub(super) struct Context<'a> {
    pub policy: &'a RolloutPolicyV1,
    pub plan: &'a PlanV1,
    pub inventory: &'a Inventory,
    pub report: Option<&'a GateReportV1>,
    pub now: DateTime<Utc>,
    pub requests: &'a [OperatorRequest],
    pub answers: Vec<Answer>,
}

/// Who may make a change.
pub(super) enum Need {
    Nobody,
    People(usize),
    /// The app only observes.
    OperatorOnly,
}

impl<'a> Context<'a> {
    // ---- answers ----

    pub fn answer(&mut self, request: &OperatorRequest, accepted: bool, text: impl Into<String>) {
        self.answers.push(Answer { request: request.id.clone(), accepted, text: text.into() });
    }
    pub fn is_open(&self, request: &OperatorRequest) -> bool {
        !self.answers.iter().any(|a| a.request == request.id)
    }
    pub fn refuse_stale_approvals(&mut self) {
        let expected = self.plan.generation + 1;
        for r in self.requests {
            if let RequestKind::Approve { generation, .. } = &r.kind
                && *generation != expected
                && self.is_open(r)
            {
                self.answer(r, false, format!("generation {generation} is not proposed (any more)"));
            }
        }
    }
    /// After a change every request that was not part of it refers to a plan that is gone.
    pub fn overtake_open_requests(&mut self) {
        for r in self.requests {
            if self.is_open(r) {
                self.answer(r, false, "overtaken by another change; look at the new plan and ask again");
            }
        }
    }

    // ---- results ----

    /// Nothing changes; `reason` says what is being waited for.
    pub fn stay(&self, reason: impl Into<String>) -> Next {
        Next {
            plan: self.plan.clone(),
            state: self.plan.state,
            reason: reason.into(),
            actions: Vec::new(),
            proposal: None,
            answers: Vec::new(),
        }
    }

    /// The next generation in `state`.
    pub fn successor(&self, state: RolloutState, reason: &str) -> Result<PlanV1, ExperimentError> {
        let from = self.plan.state;
        if !from.can_become(state) {
            return Err(ExperimentError::Request(format!("a rollout that is {from} cannot become {state}")));
        }
        let mut plan = self.plan.clone();
        plan.generation += 1;
        plan.parent = Some(self.plan.digest()?);
        plan.state = state;
        plan.changed_at = self.now;
        plan.reason = reason.to_owned();
        Ok(plan)
    }

    pub fn changed(plan: PlanV1, actions: Vec<Action>) -> Next {
        Next { state: plan.state, reason: plan.reason.clone(), plan, actions, proposal: None, answers: Vec::new() }
    }

    // ---- moves ----

    pub fn sign(&self) -> Result<Next, ExperimentError> {
        let mut plan = self.successor(RolloutState::Signed, "approved; the rollout may start")?;
        plan.signed_at = Some(self.now);
        Ok(Self::changed(plan, Vec::new()))
    }

    pub fn enter_ring(&self) -> Result<Next, ExperimentError> {
        let reason = format!("ring of {} named devices", self.plan.ring.len());
        let mut plan = self.successor(RolloutState::Ring, &reason)?;
        plan.step_since = self.now;
        Ok(Self::changed(plan, vec![Action::PublishAssignment]))
    }

    /// State of a step number.
    pub fn state_of_step(step: u32) -> RolloutState {
        match step {
            0 => RolloutState::Ring,
            1 => RolloutState::Canary,
            _ => RolloutState::Ramping,
        }
    }

    /// Whether the current step is the last one.
    pub fn at_final_step(&self) -> bool {
        self.plan.step as usize == self.policy.steps.len()
    }

    /// Widens to the next step. Ranges only grow until the treatment takes everything, which leaves no control.
    pub fn advance(&self, by: &str, reason: &str) -> Result<Next, ExperimentError> {
        let Some(step) = self.policy.steps.get(self.plan.step as usize).copied() else {
            return Err(ExperimentError::Request("this is the last step; there is nothing to advance to".into()));
        };
        let mut plan = self.successor(Self::state_of_step(self.plan.step + 1), reason)?;
        plan.passed.push(PassedStepV1 { step: self.plan.step, at: self.now, by: by.to_owned() });
        plan.step += 1;
        plan.step_since = self.now;
        plan.intake_closed = false;
        plan.treatment = PpmRange { from: 0, to: step.treatment_ppm };
        plan.control = PpmRange { from: CONTROL_FROM, to: CONTROL_FROM + step.control_ppm };
        self.open_phase(&mut plan, step.treatment_ppm, step.control_ppm);
        Ok(Self::changed(plan, vec![Action::PublishAssignment]))
    }

    fn open_phase(&self, plan: &mut PlanV1, treatment_ppm: u32, control_ppm: u32) {
        plan.phase += 1;
        plan.phases.push(PhaseV1 { number: plan.phase, treatment_ppm, control_ppm, started_at: self.now });
    }

    pub fn hold(&self, reason: &str, urgent: bool) -> Result<Next, ExperimentError> {
        let plan = self.successor(RolloutState::Holding, reason)?;
        Ok(Self::changed(plan, vec![Action::Alert { urgent, text: format!("rollout holds: {reason}") }]))
    }

    pub fn pause(&self, close_intake: bool, reason: &str) -> Result<Next, ExperimentError> {
        let mut plan = self.successor(RolloutState::Paused, reason)?;
        plan.intake_closed = close_intake || self.plan.intake_closed;
        let actions =
            if plan.intake_closed == self.plan.intake_closed { Vec::new() } else { vec![Action::PublishAssignment] };
        Ok(Self::changed(plan, actions))
    }

    pub fn resume(&self, reason: &str) -> Result<Next, ExperimentError> {
        let mut plan = self.successor(Self::state_of_step(self.plan.step), reason)?;
        plan.intake_closed = false;
        let actions = if self.plan.intake_closed { vec![Action::PublishAssignment] } else { Vec::new() };
        Ok(Self::changed(plan, actions))
    }

    /// A rollback is the next plan, naming the older bundle for the same ranges: nobody is left on the candidate.
    pub fn take_back(&self, reason: &str) -> Result<Next, ExperimentError> {
        let mut plan = self.successor(RolloutState::RollingBack, reason)?;
        plan.treatment_bundle = plan.control_bundle;
        plan.intake_closed = false;
        plan.step_since = self.now;
        let width = plan.treatment.width();
        self.open_phase(&mut plan, width, 0);
        let mut actions = vec![Action::PublishAssignment];
        if self.plan.state == RolloutState::Complete {
            actions.push(Action::SetDefaultBundle { bundle: plan.control_bundle });
        }
        actions.push(Action::Alert { urgent: true, text: format!("rolling back: {reason}") });
        Ok(Self::changed(plan, actions))
    }

    pub fn complete(&self, by: &str, reason: &str) -> Result<Next, ExperimentError> {
        let mut plan = self.successor(RolloutState::Complete, reason)?;
        plan.passed.push(PassedStepV1 { step: plan.step, at: self.now, by: by.to_owned() });
        plan.intake_closed = false;
        let actions = vec![
            Action::SetDefaultBundle { bundle: plan.candidate_bundle },
            Action::PublishAssignment,
            Action::Alert { urgent: false, text: format!("rollout complete: {reason}") },
        ];
        Ok(Self::changed(plan, actions))
    }

    pub fn note_override(&self, plan: &mut PlanV1, by: &str, approved_by: &str, reason: &str, gates: Vec<String>) {
        plan.fail_override = Some(FailOverrideV1 {
            by: by.to_owned(),
            approved_by: approved_by.to_owned(),
            reason: reason.to_owned(),
            at: self.now,
            gates,
        });
    }

    // ---- approval ----

    /// Who may make `change` in this app.
    pub fn need(&self, change: Change) -> Need {
        let n = self.policy.start_approvals();
        match (change, self.policy.automation) {
            (Change::Start, _) if n == 0 => Need::Nobody,
            (Change::Start, _) => Need::People(n),
            (_, Automation::Observe) => Need::OperatorOnly,
            (Change::Advance, Automation::Recommend) => Need::People(n),
            (_, Automation::Recommend) => Need::People(1),
            (Change::Advance, Automation::Act)
                if self.plan.state == RolloutState::Ring && self.policy.approval != Approval::Auto =>
            {
                Need::People(1)
            }
            (_, Automation::Act) => Need::Nobody,
        }
    }

    /// Makes the change if it may be made now: by itself, or because enough people approved it. `None` otherwise.
    pub fn if_allowed(
        &mut self,
        change: Change,
        need: &Need,
        make: impl FnOnce(&Self) -> Result<Next, ExperimentError>,
    ) -> Result<Option<Next>, ExperimentError> {
        match need {
            Need::Nobody => make(self).map(Some),
            Need::OperatorOnly => Ok(None),
            Need::People(n) => {
                let approvals = self.approvals(change);
                if distinct_people(&approvals) < *n {
                    return Ok(None);
                }
                let next = make(self)?;
                for r in approvals {
                    self.answer(r, true, "approved");
                }
                Ok(Some(next))
            }
        }
    }

    /// Stays, and says what would be done.
    pub fn propose(&mut self, change: Change, need: &Need, reason: &str) -> Next {
        let generation = self.plan.generation + 1;
        let mut next = self.stay(reason);
        let missing = match need {
            Need::People(n) => {
                next.actions.push(Action::AskApproval { generation, change });
                Some(n.saturating_sub(distinct_people(&self.approvals(change))))
            }
            Need::Nobody => Some(0),
            Need::OperatorOnly => None,
        };
        next.proposal = Some(Proposal { generation, change, reason: reason.to_owned(), approvals_missing: missing });
        next
    }

    /// [`Self::if_allowed`], else [`Self::propose`].
    pub fn make_or_propose(
        &mut self,
        change: Change,
        reason: &str,
        make: impl FnOnce(&Self) -> Result<Next, ExperimentError>,
    ) -> Result<Next, ExperimentError> {
        let need = self.need(change);
        match self.if_allowed(change, &need, make)? {
            Some(next) => Ok(next),
            None => Ok(self.propose(change, &need, reason)),
        }
    }

    /// Open approvals of the change. The creator of a rollout cannot approve its start.
    fn approvals(&mut self, change: Change) -> Vec<&'a OperatorRequest> {
        let generation = self.plan.generation + 1;
        let mut out = Vec::new();
        for r in self.requests {
            if r.kind != (RequestKind::Approve { generation, change }) || !self.is_open(r) {
                continue;
            }
            if change == Change::Start && r.by == self.plan.created_by {
                self.answer(r, false, "the creator of a rollout cannot approve its start");
            } else {
                out.push(r);
            }
        }
        out
    }
}

fn distinct_people(requests: &[&OperatorRequest]) -> usize {
    let mut people: Vec<&str> = requests.iter().map(|r| r.by.as_str()).collect();
    people.sort_unstable();
    people.dedup();
    people.len()
}

/// Where the evidence stands, leaving out what people have overridden.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Standing {
    Fail(String),
    Invalid(String),
    Other(Verdict),
    /// No report for this phase yet.
    Unknown,
}
