//! Gates: the comparison of both arms as one report with one verdict.
//!
//! | gate | FAIL (or INVALID) | PASS |
//! |---|---|---|
//! | rejection, slices | lower bound of the rise above the margin | upper bound below the margin |
//! | latency | lower bound of the slow-share difference above 0 | upper bound below 0 |
//! | failure | e-process on first failures, or share surely above the absolute limit | bound of the difference below the margin |
//! | sample ratio, leak, crossover, attrition | INVALID | no violation |
//! | evidence | – | the current phase has added enough closed devices |
//!
//! Order of the whole: INVALID, FAIL, PASS (every required gate), WARN, CONTINUE; CONTINUE and WARN become
//! INCONCLUSIVE when the phase has lasted too long. A FAIL stays: pass the previous report.

mod failure;
mod health;
mod latency;
mod ratio_gate;
pub mod report;
pub mod spec;

pub use latency::{LatencyGateV1, freeze_latency_thresholds, samples_needed};
pub use report::{GateKind, GateReportV1, GateResult, Method, PhaseCounts, SrmReport, plain_word};
pub use spec::{
    BaselineV1, BurnInV1, FailureGateV1, GateSpecV1, HealthV1, ProtectedSliceV1, RejectionGateV1, TrustV1, WindowV1,
    rejection_margin,
};

use crate::error::ExperimentError;
use crate::window::{PhaseV1, Windows, check_phases};
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_types::Verdict;
use flywheel_types::assign::Arm;

/// Judges the records of a rollout at watermark `now`. `previous` is the last report of the same rollout: a gate
/// that failed stays failed.
///
/// # Errors
/// [`ExperimentError`] if spec or phases are not valid, or `previous` was made with another spec.
pub fn evaluate(
    spec: &GateSpecV1,
    phases: &[PhaseV1],
    windows: &Windows,
    previous: Option<&GateReportV1>,
    now: DateTime<Utc>,
) -> Result<GateReportV1, ExperimentError> {
    let digest = spec.digest()?;
    check_phases(phases)?;
    if let Some(p) = previous.filter(|p| p.spec != digest) {
        return Err(ExperimentError::SpecChanged { previous: p.spec.to_hex(), current: digest.to_hex() });
    }
    let input = Input { spec, phases, windows };
    let mut gates = vec![ratio_gate::rejection(&input)];
    gates.extend(ratio_gate::latency(&input));
    gates.push(failure::judge(&input));
    gates.extend(ratio_gate::slices(&input));
    let (srm_gate, srm) = health::sample_ratio(&input, now);
    gates.extend([srm_gate, health::leak(&input), health::crossover(&input), health::attrition(&input, now)]);
    gates.push(health::evidence(&input));
    for g in &mut gates {
        keep_failed(g, previous, now);
        g.word = plain_word(g.verdict).to_owned();
    }
    let current = input.current();
    let (verdict, reason) = combine(&gates, previous, current, spec, now);
    let failed_at = previous.and_then(|p| p.failed_at).or_else(|| (verdict == Verdict::Fail).then_some(now));
    Ok(GateReportV1 {
        v: 1,
        spec: digest,
        now,
        phase: current.number,
        verdict,
        word: plain_word(verdict).to_owned(),
        reason,
        gates,
        phases: count_phases(&input),
        srm,
        exclusions: windows.exclusions.clone(),
        failed_at,
    })
}

/// What every gate reads.
struct Input<'a> {
    spec: &'a GateSpecV1,
    phases: &'a [PhaseV1],
    windows: &'a Windows,
}

impl Input<'_> {
    /// The newest phase ([`check_phases`] guarantees one).
    fn current(&self) -> &PhaseV1 {
        &self.phases[self.phases.len() - 1]
    }
    /// Index of a phase number.
    fn phase_index(&self, number: u32) -> Option<usize> {
        self.phases.iter().position(|p| p.number == number)
    }
    /// False once the control has been given the treatment.
    fn comparing(&self) -> bool {
        self.current().compares()
    }
    /// This gate's share of `alpha_fail`.
    fn alpha_fail(&self) -> f64 {
        self.spec.alpha_fail / self.spec.fail_tests() as f64
    }
}

fn keep_failed(gate: &mut GateResult, previous: Option<&GateReportV1>, now: DateTime<Utc>) {
    let before = previous.and_then(|p| p.gate(&gate.name)).and_then(|g| g.failed_at.map(|at| (at, g)));
    if let Some((at, g)) = before {
        if gate.verdict != Verdict::Fail {
            gate.reason = format!("failed at {}: {}", at.to_rfc3339(), strip_failed(&g.reason));
        }
        gate.verdict = Verdict::Fail;
        gate.failed_at = Some(at);
    } else if gate.verdict == Verdict::Fail {
        gate.failed_at = Some(now);
    }
}

/// The original sentence of a reason that was kept before.
fn strip_failed(reason: &str) -> &str {
    if reason.starts_with("failed at ") { reason.split_once(": ").map_or(reason, |(_, r)| r) } else { reason }
}

fn combine(
    gates: &[GateResult],
    previous: Option<&GateReportV1>,
    current: &PhaseV1,
    spec: &GateSpecV1,
    now: DateTime<Utc>,
) -> (Verdict, String) {
    let reasons = |v: Verdict| {
        let texts: Vec<_> =
            gates.iter().filter(|g| g.verdict == v).map(|g| format!("{}: {}", g.name, g.reason)).collect();
        texts.join("; ")
    };
    let any = |v: Verdict| gates.iter().any(|g| g.verdict == v);
    let failed_before = previous.is_some_and(|p| p.failed_at.is_some());
    if failed_before {
        return (Verdict::Fail, reasons(Verdict::Fail));
    }
    if any(Verdict::Invalid) {
        return (Verdict::Invalid, reasons(Verdict::Invalid));
    }
    if any(Verdict::Fail) {
        return (Verdict::Fail, reasons(Verdict::Fail));
    }
    let missing: Vec<_> = gates.iter().filter(|g| g.required && g.verdict != Verdict::Pass).collect();
    if missing.is_empty() {
        let n = gates.iter().filter(|g| g.required).count();
        return (Verdict::Pass, format!("all {n} required gates passed"));
    }
    let names: Vec<_> = missing.iter().map(|g| format!("{}: {}", g.name, g.reason)).collect();
    let open = names.join("; ");
    if now - current.started_at >= TimeDelta::hours(i64::from(spec.max_phase_hours)) {
        let text = format!("not decided after {} hours; {open}", spec.max_phase_hours);
        return (Verdict::Inconclusive, text);
    }
    let verdict = if any(Verdict::Warn) { Verdict::Warn } else { Verdict::Continue };
    (verdict, open)
}

fn count_phases(input: &Input<'_>) -> Vec<PhaseCounts> {
    let mut out: Vec<PhaseCounts> = input
        .phases
        .iter()
        .map(|p| PhaseCounts {
            phase: p.number,
            control_exposed: 0,
            treatment_exposed: 0,
            control_closed: 0,
            treatment_closed: 0,
        })
        .collect();
    let mut add = |phase: u32, arm: Arm, closed: u64| {
        let Some(i) = input.phase_index(phase) else {
            return;
        };
        match arm {
            Arm::Control => {
                out[i].control_exposed += 1;
                out[i].control_closed += closed;
            }
            Arm::Treatment => {
                out[i].treatment_exposed += 1;
                out[i].treatment_closed += closed;
            }
        }
    };
    input.windows.closed.iter().for_each(|r| add(r.phase, r.arm, 1));
    input.windows.open.iter().for_each(|r| add(r.phase, r.arm, 0));
    out
}
