//! The gate report: what dashboard, audit log and planner read. Every number is finite or absent.

use chrono::{DateTime, Utc};
use flywheel_types::{Digest, Verdict};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One evaluation of all gates at a watermark. Serialisable; a pure function of spec, phases and records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GateReportV1 {
    /// Format version, 1.
    pub v: u8,
    /// Digest of the frozen gate spec.
    pub spec: Digest,
    /// Watermark up to which rows were read.
    pub now: DateTime<Utc>,
    /// Current phase.
    pub phase: u32,
    pub verdict: Verdict,
    /// Plain word for people, see [`plain_word`].
    pub word: String,
    /// One sentence: why this verdict.
    pub reason: String,
    pub gates: Vec<GateResult>,
    /// Devices by phase and arm.
    pub phases: Vec<PhaseCounts>,
    pub srm: SrmReport,
    /// Devices and rows that do not count, by reason.
    pub exclusions: BTreeMap<String, u64>,
    /// First time the whole report was FAIL; a failed rollout stays failed.
    pub failed_at: Option<DateTime<Utc>>,
}

impl GateReportV1 {
    /// The result of one gate by name.
    #[must_use]
    pub fn gate(&self, name: &str) -> Option<&GateResult> {
        self.gates.iter().find(|g| g.name == name)
    }
    /// The sentences of the named gates, in the order of the report.
    #[must_use]
    pub fn reason_of(&self, names: &[String]) -> String {
        let texts: Vec<_> = self
            .gates
            .iter()
            .filter(|g| names.contains(&g.name))
            .map(|g| format!("{}: {}", g.name, g.reason))
            .collect();
        texts.join("; ")
    }
    /// Names of the gates with this verdict.
    #[must_use]
    pub fn gates_with(&self, verdict: Verdict) -> Vec<String> {
        self.gates.iter().filter(|g| g.verdict == verdict).map(|g| g.name.clone()).collect()
    }
}

impl GateResult {
    /// An empty result: nothing measured, CONTINUE.
    pub(super) fn new(name: impl Into<String>, kind: GateKind, required: bool, method: Method) -> Self {
        Self {
            name: name.into(),
            kind,
            required,
            verdict: Verdict::Continue,
            word: String::new(),
            method,
            control_devices: 0,
            treatment_devices: 0,
            control_events: 0,
            treatment_events: 0,
            control_value: None,
            treatment_value: None,
            difference: None,
            lower: None,
            upper: None,
            margin: None,
            e_value: None,
            p_value: None,
            information_pct: None,
            reason: String::new(),
            failed_at: None,
        }
    }
}

/// What a gate measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateKind {
    Rejection,
    Latency,
    Failure,
    /// Rejection rate inside a protected slice.
    Slice,
    /// Sample-ratio mismatch.
    Srm,
    /// Devices in an arm without traffic.
    Leak,
    Crossover,
    /// Not-reporting devices.
    Attrition,
    /// Enough devices of the current phase.
    Evidence,
}

/// How an interval was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Asymptotic confidence sequence, clustered by device.
    Asymptotic,
    /// Exact betting sequence on device averages (small fleet; estimates the device average).
    ExactBetting,
    /// Exact e-process and bounds on first failures.
    ExactBinomial,
    /// Sequential Dirichlet-multinomial test.
    DirichletMultinomial,
    /// A count against a limit.
    Count,
}

/// One gate. Values are shares; `difference` is treatment minus control; lower is better.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GateResult {
    pub name: String,
    pub kind: GateKind,
    /// A step needs a PASS of this gate; otherwise it can only stop.
    pub required: bool,
    pub verdict: Verdict,
    pub word: String,
    pub method: Method,
    /// Devices that entered, per arm.
    pub control_devices: u64,
    pub treatment_devices: u64,
    /// Responses, timed events or failures behind the values.
    pub control_events: u64,
    pub treatment_events: u64,
    pub control_value: Option<f64>,
    pub treatment_value: Option<f64>,
    pub difference: Option<f64>,
    /// Anytime-valid lower bound of the difference (level: this gate's share of `alpha_fail`).
    pub lower: Option<f64>,
    /// Anytime-valid upper bound of the difference (level `alpha_pass`).
    pub upper: Option<f64>,
    /// FAIL if `lower` is above it, PASS if `upper` is below it.
    pub margin: Option<f64>,
    /// Evidence against "no difference" (ratio gates) or against the null of the gate's e-process.
    pub e_value: Option<f64>,
    /// `min(1, 1/e)`, valid at any time.
    pub p_value: Option<f64>,
    /// How far the interval has shrunk towards what a decision needs, 0..=100.
    pub information_pct: Option<f64>,
    /// One sentence for people.
    pub reason: String,
    /// First time this gate was FAIL.
    pub failed_at: Option<DateTime<Utc>>,
}

/// Devices of one phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseCounts {
    pub phase: u32,
    pub control_exposed: u64,
    pub treatment_exposed: u64,
    pub control_closed: u64,
    pub treatment_closed: u64,
}

/// Sample-ratio test by phase, newest last.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SrmReport {
    /// Smallest anytime p of the two tests (exposures; devices that report).
    pub p_value: Option<f64>,
    /// Devices expected in the treatment by design.
    pub expected_treatment: f64,
    pub observed_treatment: u64,
    pub observed_control: u64,
}

/// The word shown to people for a verdict.
#[must_use]
pub fn plain_word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Invalid => "DATA PROBLEM",
        Verdict::Fail => "FAIL",
        Verdict::Pass => "PASS",
        Verdict::Warn => "WARN",
        Verdict::Continue => "COLLECTING",
        Verdict::Inconclusive => "INCONCLUSIVE",
    }
}
