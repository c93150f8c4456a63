//! Plain words for what the program calls by its technical name.

use flywheel_experiment::gate::{GateKind, Method};
use flywheel_store::findings::FindingState;
use flywheel_types::{Approval, Automation, RolloutState, Verdict};

/// Class of a verdict's chip in the style sheet.
pub fn verdict_class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "PASS",
        Verdict::Fail | Verdict::Invalid => "FAIL",
        Verdict::Warn | Verdict::Continue | Verdict::Inconclusive => "WAIT",
    }
}

/// A rollout's state.
pub fn rollout_state(state: RolloutState) -> &'static str {
    match state {
        RolloutState::Draft => "draft",
        RolloutState::AwaitingApproval => "waits for approval",
        RolloutState::Signed => "approved",
        RolloutState::Ring => "named devices",
        RolloutState::Canary => "first step",
        RolloutState::Ramping => "going up",
        RolloutState::Holding => "holding",
        RolloutState::Paused => "paused",
        RolloutState::RollingBack => "rolling back",
        RolloutState::RolledBack => "rolled back",
        RolloutState::Complete => "complete",
        RolloutState::Superseded => "replaced",
    }
}

/// What a gate looks at.
pub fn gate_kind(kind: GateKind) -> &'static str {
    match kind {
        GateKind::Rejection => "Rejected answers",
        GateKind::Latency => "Slow answers",
        GateKind::Failure => "Crashes and failed loads",
        GateKind::Slice => "Rejected answers in one group",
        GateKind::Srm => "Devices per side as planned",
        GateKind::Leak => "Devices without traffic",
        GateKind::Crossover => "Devices that changed sides",
        GateKind::Attrition => "Not reporting",
        GateKind::Evidence => "Enough devices",
    }
}

/// How a gate's interval was made.
pub fn method(method: Method) -> &'static str {
    match method {
        Method::Asymptotic => "sequential test",
        Method::ExactBetting => "sequential test, exact for few devices",
        Method::ExactBinomial => "sequential test, exact, first failure per device",
        Method::DirichletMultinomial => "sequential test of the split",
        Method::Count => "count against a limit",
    }
}

/// How much the controller does alone.
pub fn automation(a: Automation) -> &'static str {
    match a {
        Automation::Observe => "only watches",
        Automation::Recommend => "recommends; people decide",
        Automation::Act => "acts by itself",
    }
}

/// Who has to approve a rollout.
pub fn approval(a: Approval) -> &'static str {
    match a {
        Approval::Auto => "nobody has to approve",
        Approval::One => "one person approves",
        Approval::Two => "two people approve",
    }
}

/// What became of a suspected cause.
pub fn finding_state(state: FindingState) -> &'static str {
    match state {
        FindingState::Open => "open",
        FindingState::Acted => "something was done",
        FindingState::Dismissed => "dismissed",
        FindingState::Resolved => "resolved",
    }
}

/// Class of its chip in the style sheet.
pub fn finding_class(state: FindingState) -> &'static str {
    match state {
        FindingState::Open => "WAIT",
        FindingState::Acted => "FAIL",
        FindingState::Dismissed => "",
        FindingState::Resolved => "PASS",
    }
}
