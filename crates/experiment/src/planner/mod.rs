//! The rollout planner: `(policy, plan, inventory, report, now, requests) → next plan`. A dumb executor makes the
//! world match the plan and calls again; nothing here has a side effect, so every decision can be replayed.
//!
//! | verdict | what happens (`act`; `recommend` proposes, `observe` only says) |
//! |---|---|
//! | FAIL | roll back: the next plan names the older bundle. In force in every state that has devices |
//! | INVALID | hold and alert |
//! | PASS | next step, after the minimum time, if enough devices report, below the exposure cap |
//! | WARN, CONTINUE | wait |
//! | INCONCLUSIVE | hold (default), roll back, or propose the next step |
//!
//! **The last step** (everybody, no control) cannot be compared. It completes when (1) the step before it was
//! passed, (2) no gate fails on the comparison so far, (3) the share of reporting devices with a failure is not
//! surely above `final_failure_max` (anytime-valid bound; above it the rollout is taken back) and (4) the policy's
//! share of the reporting devices has confirmed the candidate, after the minimum time.

mod automatic;
mod moves;
mod operator;
pub mod plan;
pub mod policy;

pub use plan::{FailOverrideV1, PassedStepV1, PlanV1, RolloutDraft};
pub use policy::{CONTROL_FROM, InconclusivePolicy, RolloutPolicyV1, StepV1};

use crate::error::ExperimentError;
use crate::gate::GateReportV1;
use chrono::{DateTime, Utc};
use flywheel_types::{Digest, InstallId, RolloutState};
use serde::{Deserialize, Serialize};

/// What the fleet looks like, from telemetry up to the watermark. Count only devices that the gates would count.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    pub treatment: ArmInventory,
    pub control: ArmInventory,
    /// One entry per ring device of the plan; a missing one counts as not confirmed.
    pub ring: Vec<RingDevice>,
    /// Reporting devices that ever ran or downloaded the candidate (ring included).
    pub to_restore: u64,
    /// Of these: confirmed the last good bundle after the rollback began.
    pub restored: u64,
}

/// Devices of one arm in the current step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArmInventory {
    /// Known devices whose bucket and facts put them into the arm.
    pub assigned: u64,
    /// Of these: heard from since the step began.
    pub reporting: u64,
    /// Of the reporting: confirmed the arm's bundle.
    pub confirmed: u64,
    /// Of the reporting: had a load failure or crash with the arm's bundle in this step.
    pub failed: u64,
}

/// One named device of the ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingDevice {
    pub install: InstallId,
    pub confirmed_at: Option<DateTime<Utc>>,
    pub failed: bool,
}

/// Something an operator asked for. The caller checks roles; the planner checks state and people.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperatorRequest {
    pub id: String,
    /// Who asked.
    pub by: String,
    pub reason: String,
    pub kind: RequestKind,
}

/// Kinds of requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RequestKind {
    /// Agrees to the proposal with this generation and change. A proposal that has moved on is not approved.
    Approve { generation: u64, change: Change },
    /// Stop advancing; devices go on as assigned.
    Pause,
    /// Pause, and assign nobody new.
    Halt,
    /// Leave `paused` or `holding` into the same step.
    Resume,
    /// Take the candidate back. Before any device has it: withdraw the rollout.
    Rollback,
    /// Go to the next step without waiting. While the report is FAIL or INVALID (or a ring device failed) this is
    /// an override and needs an approver other than the requester.
    Promote { approved_by: Option<String> },
}

/// Changes that can need approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Start,
    Advance,
    Complete,
    RollBack,
}

impl Change {
    /// The word on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Advance => "advance",
            Self::Complete => "complete",
            Self::RollBack => "roll_back",
        }
    }
}

/// A change that the controller would make but may not make alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal {
    /// Generation the change would have; approvals name it.
    pub generation: u64,
    pub change: Change,
    pub reason: String,
    /// People still missing; `None`: this app only observes, use `promote` or `rollback`.
    pub approvals_missing: Option<usize>,
}

/// What the executor has to do after storing the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Sign and publish `assignment.json` with this plan's entry (or without it, when it is over).
    PublishAssignment,
    /// The app's default bundle changes.
    SetDefaultBundle { bundle: Digest },
    /// Tell people: `urgent` for FAIL, DATA PROBLEM and rollbacks.
    Alert { urgent: bool, text: String },
    /// Ask approvers.
    AskApproval { generation: u64, change: Change },
}

/// Answer to one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub request: String,
    pub accepted: bool,
    /// Why not, or what happened.
    pub text: String,
}

/// Result of one planning call.
#[derive(Debug, Clone, PartialEq)]
pub struct Next {
    /// The next plan; equal to the given one when nothing changes.
    pub plan: PlanV1,
    pub state: RolloutState,
    /// One sentence: why, or what is being waited for.
    pub reason: String,
    pub actions: Vec<Action>,
    pub proposal: Option<Proposal>,
    /// Requests that are settled. A request without an answer stays open (an approval that waits for a second
    /// person) and must be passed again.
    pub answers: Vec<Answer>,
}

impl Next {
    /// Whether a new generation was made; the caller stores it, writes the audit entry and runs the actions.
    #[must_use]
    pub fn changed(&self, before: &PlanV1) -> bool {
        self.plan.generation != before.generation
    }
}

/// Decides the next plan. At most one change per call: call again until nothing changes.
///
/// Order of precedence: rollback by an operator, rollback by the gate, halt, pause, promote, resume, then what the
/// state does by itself. `requests` are all requests that have no answer yet.
///
/// # Errors
/// [`ExperimentError`] if the policy is not valid or is not the plan's policy.
pub fn plan_next(
    policy: &RolloutPolicyV1,
    plan: &PlanV1,
    inventory: &Inventory,
    report: Option<&GateReportV1>,
    now: DateTime<Utc>,
    requests: &[OperatorRequest],
) -> Result<Next, ExperimentError> {
    let digest = policy.digest()?;
    if digest != plan.policy {
        return Err(ExperimentError::Request(format!(
            "policy {digest} is not the policy {} this rollout was started with",
            plan.policy
        )));
    }
    let report = report.filter(|r| r.spec == plan.gate_spec);
    let mut ctx = moves::Context { policy, plan, inventory, report, now, requests, answers: Vec::new() };
    let mut next = match operator::roll_back(&mut ctx)? {
        Some(next) => next,
        None => match automatic::fail(&mut ctx)? {
            Some(next) => next,
            None => match operator::steer(&mut ctx)? {
                Some(next) => next,
                None => automatic::apply(&mut ctx)?,
            },
        },
    };
    ctx.refuse_stale_approvals();
    if next.changed(plan) {
        ctx.overtake_open_requests();
    }
    next.answers = ctx.answers;
    Ok(next)
}
