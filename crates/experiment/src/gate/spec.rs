//! The frozen gate specification: every number a verdict depends on. Signed before the rollout starts and
//! named by digest; a changed number is another spec and needs another rollout.

use super::latency::LatencyGateV1;
use crate::error::ExperimentError;
use flywheel_types::Digest;
use serde::{Deserialize, Serialize};

/// Gate specification, version 1. `Default` holds the shipped values with a rejection margin of 0.5 pp and no
/// latency gates; use [`GateSpecV1::freeze`] to derive both from the incumbent's telemetry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GateSpecV1 {
    /// Format version, 1.
    pub v: u8,
    /// Probability of ever failing a harmless candidate, over the whole rollout and all gates (0.01).
    pub alpha_fail: f64,
    /// Probability of ever passing a candidate that is worse than the margin, per gate (0.05). Not divided by
    /// the number of gates: all of them must pass (intersection-union test).
    pub alpha_pass: f64,
    /// Share of both alphas spent on the exact sequence used below burn-in (0.1); the asymptotic sequence
    /// gets the rest, so that both together keep the promise.
    pub exact_share: f64,
    /// Devices (both arms) at which the intervals are narrowest; the number planned for the first step (4000).
    pub planned_devices: u64,
    pub burn_in: BurnInV1,
    pub window: WindowV1,
    pub trust: TrustV1,
    pub rejection: RejectionGateV1,
    /// Latency gates; the slow-event thresholds are frozen here.
    pub latency: Vec<LatencyGateV1>,
    pub failure: FailureGateV1,
    pub health: HealthV1,
    /// Slices with a margin of their own, for example a locale on a device class.
    pub slices: Vec<ProtectedSliceV1>,
    /// Closed devices per arm that the current phase must add before a step can pass (100).
    pub min_phase_devices: u64,
    /// Hours after the start of a phase at which "not decided" becomes INCONCLUSIVE (336).
    pub max_phase_hours: u32,
}

impl Default for GateSpecV1 {
    fn default() -> Self {
        Self {
            v: 1,
            alpha_fail: 0.01,
            alpha_pass: 0.05,
            exact_share: 0.1,
            planned_devices: 4000,
            burn_in: BurnInV1::default(),
            window: WindowV1::default(),
            trust: TrustV1::default(),
            rejection: RejectionGateV1::default(),
            latency: Vec::new(),
            failure: FailureGateV1::default(),
            health: HealthV1::default(),
            slices: Vec::new(),
            min_phase_devices: 100,
            max_phase_hours: 336,
        }
    }
}

/// When the asymptotic sequence may speak: below this only the exact one does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BurnInV1 {
    /// Closed devices in each arm (200).
    pub devices_per_arm: u64,
    /// Devices with at least one event, both arms together (20).
    pub devices_with_event: u64,
}

impl Default for BurnInV1 {
    fn default() -> Self {
        Self { devices_per_arm: 200, devices_with_event: 20 }
    }
}

/// The fixed window of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WindowV1 {
    /// Hours from the first exposure (72).
    pub hours: u32,
    /// Responses after which the window ends early, and the most one device can contribute (50).
    pub max_responses: u32,
    /// Hours after the window's end for late uploads and labels; then the device closes (24).
    pub grace_hours: u32,
}

impl Default for WindowV1 {
    fn default() -> Self {
        Self { hours: 72, max_responses: 50, grace_hours: 24 }
    }
}

/// Whose rows count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrustV1 {
    /// Count rows that no install key signed (false). They are shown in any case.
    pub count_anonymous: bool,
}

/// Rejection-rate gate: rejections / responses, clustered by device; lower is better.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RejectionGateV1 {
    /// Largest tolerated rise, absolute share: FAIL if surely above it, PASS if surely below (0.005).
    pub margin: f64,
    /// Whether the gate must PASS before a step; otherwise it can only stop (true).
    pub required: bool,
}

impl Default for RejectionGateV1 {
    fn default() -> Self {
        Self { margin: 0.005, required: true }
    }
}

/// Load-failure and crash gate on the first failure of each device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FailureGateV1 {
    /// FAIL if the rate ratio is surely above `1 + ratio_margin` (0.25).
    pub ratio_margin: f64,
    /// Concentration of the prior of the e-process (2).
    pub prior_strength: f64,
    /// PASS needs: upper bound of the treatment's first-failure probability minus lower bound of the control's
    /// below this absolute share (0.02). Too few devices give wide bounds, so missing data never passes.
    pub pass_margin: f64,
    /// FAIL if the treatment's first-failure probability is surely above this, whatever the control does (0.10).
    pub absolute_max: f64,
    pub required: bool,
}

impl Default for FailureGateV1 {
    fn default() -> Self {
        Self { ratio_margin: 0.25, prior_strength: 2.0, pass_margin: 0.02, absolute_max: 0.10, required: true }
    }
}

/// Health of the experiment itself; a violation gives INVALID and holds the rollout.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HealthV1 {
    /// Level of each sample-ratio test (0.001).
    pub srm_alpha: f64,
    /// Dirichlet concentration of the sample-ratio test (1000).
    pub srm_strength: f64,
    /// Devices seen in an arm that has no traffic, which are still tolerated (0).
    pub max_leaked: u64,
    /// Largest tolerated share of devices seen in both arms (0.01); judged from 100 devices on.
    pub max_crossover_share: f64,
    /// INVALID if the treatment's not-reporting share surely exceeds the control's by this (0.02).
    pub max_attrition_difference: f64,
    /// A step waits while more than this share of the treatment's devices is not reporting (0.20).
    pub max_not_reporting_share: f64,
}

impl Default for HealthV1 {
    fn default() -> Self {
        Self {
            srm_alpha: 0.001,
            srm_strength: 1000.0,
            max_leaked: 0,
            max_crossover_share: 0.01,
            max_attrition_difference: 0.02,
            max_not_reporting_share: 0.20,
        }
    }
}

/// A slice whose rejection rate is protected by its own margin. Too little data in it blocks a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProtectedSliceV1 {
    pub name: String,
    /// `None`: every device class.
    #[serde(default)]
    pub device_class: Option<String>,
    /// `None`: every locale.
    #[serde(default)]
    pub locale: Option<String>,
    /// Largest tolerated rise of the rejection rate in the slice, absolute share.
    pub margin: f64,
    /// Devices planned for the slice at the first step, both arms.
    pub planned_devices: u64,
}

/// What the incumbent's telemetry says, for freezing a spec.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BaselineV1 {
    /// Share of responses rejected.
    pub rejection_rate: f64,
    /// Time to first token in ms, by device class.
    pub ttft_ms: std::collections::BTreeMap<String, Vec<f64>>,
    /// Devices planned for the first step, both arms.
    pub planned_devices: u64,
}

/// Margin of the rejection gate for a baseline rate: the larger of 0.5 pp and 5 % of the baseline.
#[must_use]
pub fn rejection_margin(baseline_rate: f64) -> f64 {
    (0.05 * baseline_rate).max(0.005)
}

impl GateSpecV1 {
    /// The shipped defaults with the margin of [`rejection_margin`], the p50 (+5 %) and p95 (+10 %) latency
    /// gates of [`super::freeze_latency_thresholds`] and the planned device count.
    ///
    /// # Errors
    /// [`ExperimentError`] if the rate is not a share or a device class has too few latency samples. Without
    /// any latency sample the spec has no latency gate.
    pub fn freeze(baseline: &BaselineV1) -> Result<Self, ExperimentError> {
        check("baseline.rejection_rate", baseline.rejection_rate, |x| (0.0..=1.0).contains(&x), "a share in 0..=1")?;
        let latency =
            if baseline.ttft_ms.is_empty() { Vec::new() } else { super::freeze_latency_thresholds(&baseline.ttft_ms)? };
        let planned = baseline.planned_devices.max(2);
        let spec = Self {
            rejection: RejectionGateV1 { margin: rejection_margin(baseline.rejection_rate), required: true },
            latency,
            planned_devices: planned,
            min_phase_devices: (planned / 4).clamp(20, 100),
            ..Self::default()
        };
        spec.check()?;
        Ok(spec)
    }

    /// Number of tests that share `alpha_fail`: rejection, each latency gate, two failure tests, each slice.
    #[must_use]
    pub fn fail_tests(&self) -> usize {
        3 + self.latency.len() + self.slices.len()
    }

    /// Digest of the spec's canonical JSON (fields in declaration order, no spaces).
    ///
    /// # Errors
    /// [`ExperimentError::Encode`] if a number is not finite.
    pub fn digest(&self) -> Result<Digest, ExperimentError> {
        self.check()?;
        let json = serde_json::to_vec(self).map_err(|e| ExperimentError::Encode(e.to_string()))?;
        Ok(Digest::of(&json))
    }

    /// Checks every range.
    ///
    /// # Errors
    /// [`ExperimentError::OutOfRange`] naming the first bad field.
    pub fn check(&self) -> Result<(), ExperimentError> {
        const TINY: f64 = 1e-9;
        const SHARE: (f64, f64) = (TINY, 1.0 - TINY);
        const COUNT: f64 = 1e15;
        let (w, f, h) = (&self.window, &self.failure, &self.health);
        let ranges = [
            ("v", f64::from(self.v), (1.0, 1.0)),
            ("alpha_fail", self.alpha_fail, (TINY, 0.2)),
            ("alpha_pass", self.alpha_pass, (TINY, 0.2)),
            ("exact_share", self.exact_share, (0.0, 0.5)),
            ("planned_devices", self.planned_devices as f64, (2.0, COUNT)),
            ("burn_in.devices_per_arm", self.burn_in.devices_per_arm as f64, (2.0, COUNT)),
            ("window.hours", f64::from(w.hours), (1.0, 8760.0)),
            ("window.max_responses", f64::from(w.max_responses), (1.0, 1e6)),
            ("window.grace_hours", f64::from(w.grace_hours), (0.0, 8760.0)),
            ("rejection.margin", self.rejection.margin, SHARE),
            ("failure.ratio_margin", f.ratio_margin, (0.0, 10.0)),
            ("failure.prior_strength", f.prior_strength, (0.1, 1e4)),
            ("failure.pass_margin", f.pass_margin, SHARE),
            ("failure.absolute_max", f.absolute_max, SHARE),
            ("health.srm_alpha", h.srm_alpha, (TINY, 0.05)),
            ("health.srm_strength", h.srm_strength, (1.0, 1e6)),
            ("health.max_crossover_share", h.max_crossover_share, SHARE),
            ("health.max_attrition_difference", h.max_attrition_difference, SHARE),
            ("health.max_not_reporting_share", h.max_not_reporting_share, SHARE),
            ("max_phase_hours", f64::from(self.max_phase_hours), (1.0, 87_600.0)),
        ];
        for (field, value, (low, high)) in ranges {
            within(field, value, low, high)?;
        }
        for s in &self.slices {
            within("slices.margin", s.margin, SHARE.0, SHARE.1)?;
            within("slices.planned_devices", s.planned_devices as f64, 2.0, COUNT)?;
        }
        self.latency.iter().try_for_each(LatencyGateV1::check)
    }
}

/// Refuses a value outside `low..=high` and any that is not finite.
pub(crate) fn within(field: &'static str, value: f64, low: f64, high: f64) -> Result<(), ExperimentError> {
    let rule = format!("it must lie between {low} and {high}");
    check(field, value, |x| (low..=high).contains(&x), &rule)
}

/// Refuses `value` unless `ok` holds; a value that is not finite is always refused.
pub(crate) fn check(
    field: &'static str,
    value: f64,
    ok: impl Fn(f64) -> bool,
    rule: &str,
) -> Result<(), ExperimentError> {
    if value.is_finite() && ok(value) {
        return Ok(());
    }
    Err(ExperimentError::OutOfRange { field, value: value.to_string(), rule: rule.to_owned() })
}
