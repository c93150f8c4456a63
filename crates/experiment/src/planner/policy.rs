//! Rollout policy: how far the controller may go by itself, and in which steps. Frozen with the plan.

use crate::error::ExperimentError;
use crate::gate::spec::check;
use flywheel_types::assign::BUCKETS;
use flywheel_types::{Approval, Automation, Digest};
use serde::{Deserialize, Serialize};

/// First bucket of the control range; the treatment grows from 0 up to it.
pub const CONTROL_FROM: u32 = 500_000;

/// Rollout policy, version 1. The default is the cautious one: the controller proposes, one person approves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutPolicyV1 {
    /// Format version, 1.
    pub v: u8,
    /// `observe`: plans change only by operator requests. `recommend` (default): the controller proposes and an
    /// operator approves. `act`: it advances and rolls back by itself.
    pub automation: Automation,
    /// People who must approve the start (default one), each other than the creator.
    pub approval: Approval,
    /// Hours every ring device must have run the candidate, confirmed, before the ring is left (24).
    pub ring_bake_hours: u32,
    /// Steps after the ring: 10 % / 10 %, 50 % / 50 %, 100 %.
    pub steps: Vec<StepV1>,
    /// Fewest hours in a step before it may be passed (24).
    pub min_step_hours: u32,
    /// Largest share of the fleet (ppm) that may get the candidate without an operator's `promote` (1,000,000).
    pub exposure_cap_ppm: u32,
    /// A step is not passed while more than this share of the treatment's devices is not reporting (0.20).
    pub max_not_reporting_share: f64,
    /// Share of the reporting devices that must have confirmed the candidate before completion (0.95).
    pub complete_confirmed_share: f64,
    /// At 100 % (no control left): roll back if the share of reporting devices with a failure is surely above
    /// this (0.10, at `final_alpha`).
    pub final_failure_max: f64,
    /// Probability of a false rollback by the rule above (0.001).
    pub final_alpha: f64,
    /// What to do when a phase ends without a decision (hold).
    pub inconclusive: InconclusivePolicy,
}

impl Default for RolloutPolicyV1 {
    fn default() -> Self {
        Self {
            v: 1,
            automation: Automation::Recommend,
            approval: Approval::One,
            ring_bake_hours: 24,
            steps: vec![
                StepV1 { treatment_ppm: 100_000, control_ppm: 100_000 },
                StepV1 { treatment_ppm: 500_000, control_ppm: 500_000 },
                StepV1 { treatment_ppm: 1_000_000, control_ppm: 0 },
            ],
            min_step_hours: 24,
            exposure_cap_ppm: 1_000_000,
            max_not_reporting_share: 0.20,
            complete_confirmed_share: 0.95,
            final_failure_max: 0.10,
            final_alpha: 0.001,
            inconclusive: InconclusivePolicy::Hold,
        }
    }
}

/// Width of both arms in one step, ppm. The treatment holds buckets `0..treatment_ppm`, the control
/// `500_000..500_000 + control_ppm`. The last step gives the treatment to everybody and has no control.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepV1 {
    pub treatment_ppm: u32,
    pub control_ppm: u32,
}

impl StepV1 {
    /// Whether this step gives the candidate to everybody.
    #[must_use]
    pub fn is_final(self) -> bool {
        u64::from(self.treatment_ppm) == BUCKETS
    }
}

/// What to do with INCONCLUSIVE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InconclusivePolicy {
    /// Keep both arms, assign as before, wait for an operator.
    Hold,
    RollBack,
    /// Hold, and propose the next step to an operator.
    PromoteWithApproval,
}

impl RolloutPolicyV1 {
    /// Checks ranges and steps.
    ///
    /// # Errors
    /// [`ExperimentError::OutOfRange`] naming the first bad field.
    pub fn check(&self) -> Result<(), ExperimentError> {
        let share = |x: f64| x > 0.0 && x <= 1.0;
        check("v", f64::from(self.v), |x| x == 1.0, "this program reads version 1")?;
        check("max_not_reporting_share", self.max_not_reporting_share, share, "a share in (0, 1]")?;
        check("complete_confirmed_share", self.complete_confirmed_share, share, "a share in (0, 1]")?;
        check("final_failure_max", self.final_failure_max, share, "a share in (0, 1]")?;
        check("final_alpha", self.final_alpha, |x| x > 0.0 && x <= 0.1, "it must lie in (0, 0.1]")?;
        check(
            "exposure_cap_ppm",
            f64::from(self.exposure_cap_ppm),
            |x| x >= 1.0 && x <= BUCKETS as f64,
            "1 to 1,000,000 ppm",
        )?;
        self.check_steps()
    }

    fn check_steps(&self) -> Result<(), ExperimentError> {
        let bad = |step: &StepV1, rule: &str| ExperimentError::OutOfRange {
            field: "steps",
            value: format!("{} / {} ppm", step.treatment_ppm, step.control_ppm),
            rule: rule.to_owned(),
        };
        let Some((last, before)) = self.steps.split_last() else {
            return Err(ExperimentError::OutOfRange {
                field: "steps",
                value: "empty".into(),
                rule: "at least the step of 1,000,000 ppm is needed".into(),
            });
        };
        if !last.is_final() || last.control_ppm != 0 {
            return Err(bad(last, "the last step must be 1,000,000 / 0 ppm"));
        }
        for s in before {
            if s.treatment_ppm == 0
                || s.control_ppm == 0
                || s.treatment_ppm > CONTROL_FROM
                || s.control_ppm > CONTROL_FROM
            {
                return Err(bad(s, "every step but the last needs 1 to 500,000 ppm in each arm"));
            }
        }
        for w in before.windows(2) {
            if w[1].treatment_ppm <= w[0].treatment_ppm || w[1].control_ppm < w[0].control_ppm {
                return Err(bad(&w[1], "the treatment must grow from step to step and the control must not shrink"));
            }
        }
        Ok(())
    }

    /// Digest of the policy's canonical JSON.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn digest(&self) -> Result<Digest, ExperimentError> {
        self.check()?;
        let json = serde_json::to_vec(self).map_err(|e| ExperimentError::Encode(e.to_string()))?;
        Ok(Digest::of(&json))
    }

    /// People who must approve the start.
    #[must_use]
    pub fn start_approvals(&self) -> usize {
        let people = match self.approval {
            Approval::Auto => 0,
            Approval::One => 1,
            Approval::Two => 2,
        };
        if self.automation == Automation::Act { people } else { people.max(1) }
    }
}
