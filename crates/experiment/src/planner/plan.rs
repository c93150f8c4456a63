//! The plan: one immutable document per generation. What devices see is derived from it.

use super::policy::{CONTROL_FROM, RolloutPolicyV1};
use crate::error::ExperimentError;
use crate::gate::GateSpecV1;
use crate::window::PhaseV1;
use chrono::{DateTime, Utc};
use flywheel_types::assign::{PpmRange, Predicate, RolloutAssignmentV1};
use flywheel_types::{Digest, InstallId, RolloutId, RolloutState};
use serde::{Deserialize, Serialize};

/// One generation of a rollout. Never edited: every change is a new plan that names its parent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanV1 {
    /// Format version, 1.
    pub v: u8,
    pub rollout_id: RolloutId,
    /// 1, 2, 3, …
    pub generation: u64,
    /// Digest of generation - 1.
    pub parent: Option<Digest>,
    pub state: RolloutState,
    /// Current step of the policy, from 1; 0 before the first step.
    pub step: u32,
    /// Number of the current phase; devices report it. 0 before the first step.
    pub phase: u32,
    /// Phases so far, oldest first: what [`crate::window::close_windows`] and [`crate::gate::evaluate`] need.
    pub phases: Vec<PhaseV1>,
    pub salt: String,
    pub eligible: Vec<Predicate>,
    pub ring: Vec<InstallId>,
    pub treatment: PpmRange,
    pub control: PpmRange,
    /// The bundle under test.
    pub candidate_bundle: Digest,
    /// What the treatment range runs now: the candidate, or after a rollback the control bundle.
    pub treatment_bundle: Digest,
    /// The last good bundle.
    pub control_bundle: Digest,
    /// Halted: nobody new joins.
    pub intake_closed: bool,
    pub gate_spec: Digest,
    pub policy: Digest,
    pub created_by: String,
    /// When the rollout became `signed`; identities first seen later do not count.
    pub signed_at: Option<DateTime<Utc>>,
    /// When this generation was made.
    pub changed_at: DateTime<Utc>,
    /// When the current step (or ring) began.
    pub step_since: DateTime<Utc>,
    /// Why this generation exists.
    pub reason: String,
    /// How earlier steps were passed.
    pub passed: Vec<PassedStepV1>,
    /// A FAIL that two people overrode; these gates no longer roll this rollout back.
    pub fail_override: Option<FailOverrideV1>,
}

/// How a step was left upwards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedStepV1 {
    pub step: u32,
    pub at: DateTime<Utc>,
    /// `gate`, or the operator who promoted.
    pub by: String,
}

/// A FAIL or DATA PROBLEM that was overridden.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailOverrideV1 {
    pub by: String,
    pub approved_by: String,
    pub reason: String,
    pub at: DateTime<Utc>,
    /// Gates that were FAIL at that time.
    pub gates: Vec<String>,
}

/// What a new rollout needs.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutDraft {
    pub rollout_id: RolloutId,
    pub eligible: Vec<Predicate>,
    pub ring: Vec<InstallId>,
    pub candidate_bundle: Digest,
    pub control_bundle: Digest,
    pub created_by: String,
}

impl PlanV1 {
    /// Generation 1 in state `draft`. The salt is the rollout id, so every rollout shuffles the fleet anew.
    ///
    /// # Errors
    /// [`ExperimentError`] if policy or spec are not valid, or candidate and control are the same bundle.
    pub fn draft(
        draft: RolloutDraft,
        policy: &RolloutPolicyV1,
        spec: &GateSpecV1,
        now: DateTime<Utc>,
    ) -> Result<Self, ExperimentError> {
        if draft.candidate_bundle == draft.control_bundle {
            return Err(ExperimentError::Request(
                "candidate and control are the same bundle; there is nothing to compare".into(),
            ));
        }
        Ok(Self {
            v: 1,
            salt: draft.rollout_id.as_str().to_owned(),
            rollout_id: draft.rollout_id,
            generation: 1,
            parent: None,
            state: RolloutState::Draft,
            step: 0,
            phase: 0,
            phases: Vec::new(),
            eligible: draft.eligible,
            ring: draft.ring,
            treatment: PpmRange { from: 0, to: 0 },
            control: PpmRange { from: CONTROL_FROM, to: CONTROL_FROM },
            candidate_bundle: draft.candidate_bundle,
            treatment_bundle: draft.candidate_bundle,
            control_bundle: draft.control_bundle,
            intake_closed: false,
            gate_spec: spec.digest()?,
            policy: policy.digest()?,
            created_by: draft.created_by,
            signed_at: None,
            changed_at: now,
            step_since: now,
            reason: "created".into(),
            passed: Vec::new(),
            fail_override: None,
        })
    }

    /// Digest of the plan's canonical JSON.
    ///
    /// # Errors
    /// [`ExperimentError::Encode`] if the plan cannot be written as JSON.
    pub fn digest(&self) -> Result<Digest, ExperimentError> {
        let json = serde_json::to_vec(self).map_err(|e| ExperimentError::Encode(e.to_string()))?;
        Ok(Digest::of(&json))
    }

    /// Whether devices are told about this plan.
    #[must_use]
    pub fn is_published(&self) -> bool {
        use RolloutState as S;
        matches!(self.state, S::Ring | S::Canary | S::Ramping | S::Holding | S::Paused | S::RollingBack)
    }

    /// The entry of `assignment.json`; `None` while there is nothing to tell devices, and after the end, when the
    /// app's default bundle takes over (see [`PlanV1::default_bundle`]).
    #[must_use]
    pub fn assignment(&self) -> Option<RolloutAssignmentV1> {
        self.is_published().then(|| RolloutAssignmentV1 {
            rollout_id: self.rollout_id.clone(),
            phase: self.phase,
            salt: self.salt.clone(),
            eligible: self.eligible.clone(),
            treatment: self.treatment,
            control: self.control,
            treatment_bundle: self.treatment_bundle,
            control_bundle: self.control_bundle,
            ring: self.ring.clone(),
            retry_failed: false,
            intake_closed: self.intake_closed,
        })
    }

    /// The bundle for devices outside the rollout: the candidate once complete, else the control bundle.
    #[must_use]
    pub fn default_bundle(&self) -> Digest {
        if self.state == RolloutState::Complete { self.candidate_bundle } else { self.control_bundle }
    }
}
