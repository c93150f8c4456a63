//! Is the experiment itself in order? Sample ratio, leaks, crossovers, attrition; and whether the current phase has
//! added evidence of its own. A violation is INVALID: it holds the rollout and does not judge the candidate.

use super::Input;
use super::report::{GateKind, GateResult, Method, SrmReport};
use crate::confidence::binomial::{lower_bound, upper_bound};
use crate::confidence::ratio_mismatch::RatioTest;
use crate::window::{DeviceRecord, Exclusion};
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_types::Verdict;
use flywheel_types::assign::Arm;

/// Devices from which on a share of crossovers is judged.
const MIN_CROSSOVER_DEVICES: u64 = 100;
/// Closed devices from which on the treatment's not-reporting share is judged.
const MIN_ATTRITION_DEVICES: u64 = 20;

/// Sample-ratio test on all exposed devices, and on the reporting ones among those whose whole window has passed (a
/// crash that kills telemetry would hide from the first).
pub(super) fn sample_ratio(input: &Input<'_>, now: DateTime<Utc>) -> (GateResult, SrmReport) {
    let mut out = GateResult::new("sample_ratio", GateKind::Srm, true, Method::DirichletMultinomial);
    let mut exposed: Vec<&DeviceRecord> = input.windows.exposed().collect();
    exposed.sort_unstable_by(|a, b| (a.exposed_at, &a.install).cmp(&(b.exposed_at, &b.install)));
    let full = input.spec.window;
    let length = TimeDelta::hours(i64::from(full.hours) + i64::from(full.grace_hours));
    let matured = |r: &&&DeviceRecord| r.reporting && r.exposed_at + length <= now;
    let (ln_all, report) = ratio_evidence(input, exposed.iter().copied());
    let (ln_matured, _) = ratio_evidence(input, exposed.iter().filter(matured).copied());
    let ln_e = ln_all.max(ln_matured);
    let p = (-ln_e).exp().min(1.0);
    out.control_devices = report.observed_control;
    out.treatment_devices = report.observed_treatment;
    out.e_value = Some(ln_e.min(700.0).exp());
    out.p_value = Some(p);
    let n = report.observed_control + report.observed_treatment;
    let seen = format!(
        "{} devices in the treatment, {:.0} expected of {n}",
        report.observed_treatment, report.expected_treatment
    );
    (out.verdict, out.reason) = if p <= input.spec.health.srm_alpha {
        let which = if ln_matured > ln_all { "among reporting devices the arms" } else { "the arms" };
        (Verdict::Invalid, format!("{which} do not have the planned sizes ({seen}, p {p:.1e})"))
    } else if n == 0 {
        (Verdict::Continue, "no device in an arm yet".into())
    } else {
        (Verdict::Pass, seen)
    };
    (out, SrmReport { p_value: Some(p), ..report })
}

/// Highest log evidence over time against the designed shares, multiplied over phases.
fn ratio_evidence<'a>(input: &Input<'_>, devices: impl Iterator<Item = &'a DeviceRecord>) -> (f64, SrmReport) {
    let strength = input.spec.health.srm_strength;
    let mut tests: Vec<Option<RatioTest>> =
        input.phases.iter().map(|p| p.compares().then(|| RatioTest::new(p.treatment_share(), strength))).collect();
    let (mut total, mut best) = (0.0_f64, 0.0_f64);
    for r in devices {
        let Some(test) = input.phase_index(r.phase).and_then(|i| tests[i].as_mut()) else {
            continue;
        };
        total -= test.ln_e();
        test.add(r.arm == Arm::Treatment);
        total += test.ln_e();
        best = best.max(total);
    }
    let mut report = SrmReport::default();
    for (test, phase) in tests.iter().zip(input.phases) {
        let Some(test) = test else { continue };
        let [t, c] = test.counts();
        report.observed_treatment += t;
        report.observed_control += c;
        report.expected_treatment += (t + c) as f64 * phase.treatment_share();
    }
    (best, report)
}

/// Devices that report an arm or phase without traffic.
pub(super) fn leak(input: &Input<'_>) -> GateResult {
    let mut out = GateResult::new("leak", GateKind::Leak, true, Method::Count);
    let leaked = input.windows.excluded(Exclusion::Leaked);
    let limit = input.spec.health.max_leaked;
    (out.verdict, out.reason) = if leaked > limit {
        (Verdict::Invalid, format!("{leaked} devices report an arm or phase that has no traffic ({limit} tolerated)"))
    } else {
        (Verdict::Pass, format!("{leaked} devices outside the plan"))
    };
    out
}

/// Devices seen in both arms.
pub(super) fn crossover(input: &Input<'_>) -> GateResult {
    let mut out = GateResult::new("crossover", GateKind::Crossover, true, Method::Count);
    if !input.comparing() {
        out.verdict = Verdict::Pass;
        out.reason = "not judged after the comparison: every device changes to the candidate".into();
        return out;
    }
    let (crossed, n) = input.windows.exposed().fold((0_u64, 0_u64), |(k, n), r| (k + u64::from(r.crossed_over), n + 1));
    let share = crossed as f64 / n.max(1) as f64;
    let text = format!("{crossed} of {n} devices report both arms");
    let bad = n >= MIN_CROSSOVER_DEVICES && share > input.spec.health.max_crossover_share;
    out.verdict = if bad { Verdict::Invalid } else { Verdict::Pass };
    out.reason = text;
    out
}

/// Devices without any sign of life in their whole window.
pub(super) fn attrition(input: &Input<'_>, now: DateTime<Utc>) -> GateResult {
    let mut out = GateResult::new("attrition", GateKind::Attrition, true, Method::ExactBinomial);
    let count = |arm: Arm| {
        let closed = input.windows.closed.iter().filter(|r| r.arm == arm && r.closed_at <= now);
        closed.fold((0_u64, 0_u64), |(k, n), r| (k + u64::from(!r.reporting), n + 1))
    };
    let ((silent_c, n_c), (silent_t, n_t)) = (count(Arm::Control), count(Arm::Treatment));
    (out.control_devices, out.treatment_devices) = (n_c, n_t);
    (out.control_events, out.treatment_events) = (silent_c, silent_t);
    let share = |k: u64, n: u64| (n > 0).then(|| k as f64 / n as f64);
    (out.control_value, out.treatment_value) = (share(silent_c, n_c), share(silent_t, n_t));
    out.difference = out.treatment_value.zip(out.control_value).map(|(t, c)| t - c);
    let health = &input.spec.health;
    let alpha = health.srm_alpha / 2.0;
    let lower = lower_bound(silent_t, n_t, alpha) - upper_bound(silent_c, n_c, alpha);
    out.lower = Some(lower);
    out.margin = Some(health.max_attrition_difference);
    let seen =
        format!("{silent_t} of {n_t} devices not reporting in the treatment, {silent_c} of {n_c} in the control");
    let silent = out.treatment_value.unwrap_or(0.0);
    (out.verdict, out.reason) = if lower > health.max_attrition_difference {
        (Verdict::Invalid, format!("{seen}: the candidate silences devices, the comparison is biased"))
    } else if n_t < MIN_ATTRITION_DEVICES {
        (Verdict::Continue, format!("{seen}: too few closed devices"))
    } else if silent > health.max_not_reporting_share {
        let limit = 100.0 * health.max_not_reporting_share;
        (Verdict::Continue, format!("{seen}: more than {limit:.0} % are not reporting"))
    } else {
        (Verdict::Pass, seen)
    };
    out
}

/// The current phase must add devices of its own before it can be passed.
pub(super) fn evidence(input: &Input<'_>) -> GateResult {
    let mut out = GateResult::new("phase_evidence", GateKind::Evidence, true, Method::Count);
    let phase = input.current();
    if !phase.compares() {
        out.verdict = Verdict::Pass;
        out.reason = "no comparison in this phase".into();
        return out;
    }
    let count = |arm: Arm| {
        let closed = input.windows.closed.iter();
        closed.filter(|r| r.arm == arm && r.phase == phase.number && r.responses > 0).count() as u64
    };
    (out.control_devices, out.treatment_devices) = (count(Arm::Control), count(Arm::Treatment));
    let least = out.control_devices.min(out.treatment_devices);
    let needed = input.spec.min_phase_devices;
    out.information_pct = Some(100.0 * (least as f64 / needed.max(1) as f64).min(1.0));
    out.verdict = if least >= needed { Verdict::Pass } else { Verdict::Continue };
    out.reason = format!(
        "{} treatment and {} control devices closed in phase {}, {needed} needed in each",
        out.treatment_devices, out.control_devices, phase.number
    );
    out
}
