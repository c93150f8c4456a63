//! Gates on ratio metrics clustered by device: rejection rate, protected slices, share of slow events.

use super::report::{GateKind, GateResult, Method};
use super::{Input, LatencyGateV1};
use crate::confidence::asymptotic::{Sides, anytime_p, ln_e_value, multiplier};
use crate::confidence::betting::{BettingSequence, Outcome};
use crate::ratio::{PhaseSums, RatioSums, stratified, usable};
use crate::window::DeviceRecord;
use flywheel_types::Verdict;
use flywheel_types::assign::Arm;

/// Fewest devices per arm of a phase that enters the stratified estimate: its variance must be estimable.
const MIN_STRATUM: u64 = 20;

/// One metric: which devices, which counts, which margin.
struct Metric<'a> {
    result: GateResult,
    margin: f64,
    planned_devices: u64,
    burn_in_devices: u64,
    /// `(events, responses)` of a record; `None` leaves the device out.
    counts: &'a dyn Fn(&DeviceRecord) -> Option<(u32, u32)>,
    /// What rises, for the sentence.
    noun: &'a str,
}

/// Rejection rate of the whole fleet.
pub(super) fn rejection(input: &Input<'_>) -> GateResult {
    let gate = &input.spec.rejection;
    judge(
        input,
        Metric {
            result: GateResult::new("rejection_rate", GateKind::Rejection, gate.required, Method::Asymptotic),
            margin: gate.margin,
            planned_devices: input.spec.planned_devices,
            burn_in_devices: input.spec.burn_in.devices_per_arm,
            counts: &|r| Some((r.rejections, r.responses)),
            noun: "rejection rate",
        },
    )
}

/// One result per latency gate of the spec.
pub(super) fn latency(input: &Input<'_>) -> Vec<GateResult> {
    let one = |(i, gate): (usize, &LatencyGateV1)| {
        judge(
            input,
            Metric {
                result: GateResult::new(gate.name.clone(), GateKind::Latency, gate.required, Method::Asymptotic),
                margin: 0.0,
                planned_devices: input.spec.planned_devices,
                burn_in_devices: input.spec.burn_in.devices_per_arm,
                counts: &|r| r.latency.get(i).map(|l| (l.slow, l.timed)),
                noun: "share of slow answers",
            },
        )
    };
    input.spec.latency.iter().enumerate().map(one).collect()
}

/// One result per protected slice.
pub(super) fn slices(input: &Input<'_>) -> Vec<GateResult> {
    let one = |slice: &super::ProtectedSliceV1| {
        let inside = |r: &DeviceRecord| {
            slice.device_class.as_ref().is_none_or(|c| *c == r.device_class)
                && slice.locale.as_ref().is_none_or(|l| *l == r.locale)
        };
        judge(
            input,
            Metric {
                result: GateResult::new(format!("slice:{}", slice.name), GateKind::Slice, true, Method::Asymptotic),
                margin: slice.margin,
                planned_devices: slice.planned_devices,
                burn_in_devices: input.spec.burn_in.devices_per_arm,
                counts: &|r| inside(r).then_some((r.rejections, r.responses)),
                noun: "rejection rate in the slice",
            },
        )
    };
    input.spec.slices.iter().map(one).collect()
}

fn judge(input: &Input<'_>, metric: Metric<'_>) -> GateResult {
    let mut sums = vec![PhaseSums::default(); input.phases.len()];
    for r in &input.windows.closed {
        let (Some(i), Some((events, responses))) = (input.phase_index(r.phase), (metric.counts)(r)) else {
            continue;
        };
        match r.arm {
            Arm::Control => sums[i].control.add(events, responses),
            Arm::Treatment => sums[i].treatment.add(events, responses),
        }
    }
    let mut total = PhaseSums::default();
    for p in usable(&sums, MIN_STRATUM) {
        total.control.merge(&p.control);
        total.treatment.merge(&p.treatment);
    }
    let burn_in = input.spec.burn_in;
    let ready = total.control.devices >= metric.burn_in_devices
        && total.treatment.devices >= metric.burn_in_devices
        && total.control.with_event + total.treatment.with_event >= burn_in.devices_with_event;
    let with_event: u64 = sums.iter().map(|p| p.control.with_event + p.treatment.with_event).sum();
    let mut out = if ready { asymptotic(input, metric, &sums) } else { exact(input, metric, &sums) };
    if out.verdict == Verdict::Pass && with_event < burn_in.devices_with_event {
        // Nobody complains: content, or no working feedback button? Missing data is never success.
        out.verdict = Verdict::Continue;
        out.reason = format!(
            "only {with_event} devices with any event, {} are needed to tell success from missing data",
            burn_in.devices_with_event
        );
    }
    if out.reason.is_empty() {
        out.reason = "no closed device in both arms yet".into();
    }
    out
}

fn fill(result: &mut GateResult, control: &RatioSums, treatment: &RatioSums) {
    result.control_devices = control.devices;
    result.treatment_devices = treatment.devices;
    result.control_events = control.events;
    result.treatment_events = treatment.events;
}

fn all_phases(sums: &[PhaseSums]) -> PhaseSums {
    let mut all = PhaseSums::default();
    for p in sums {
        all.control.merge(&p.control);
        all.treatment.merge(&p.treatment);
    }
    all
}

fn asymptotic(input: &Input<'_>, metric: Metric<'_>, sums: &[PhaseSums]) -> GateResult {
    let Metric { mut result, margin, planned_devices, noun, .. } = metric;
    let all = all_phases(sums);
    fill(&mut result, &all.control, &all.treatment);
    let Some(d) = stratified(sums, MIN_STRATUM) else {
        return result;
    };
    let share = 1.0 - input.spec.exact_share;
    let (alpha_f, alpha_p) = (input.alpha_fail() * share, input.spec.alpha_pass * share);
    let (n, planned) = (d.effective_devices, planned_devices as f64);
    let below = d.se * multiplier(n, alpha_f, planned, Sides::One);
    let above = d.se * multiplier(n, alpha_p, planned, Sides::One);
    result.control_value = Some(d.control);
    result.treatment_value = Some(d.treatment);
    let ln_e = ln_e_value(d.theta / d.se, n, input.spec.alpha_pass, planned);
    result.e_value = Some(ln_e.min(700.0).exp());
    result.p_value = Some(anytime_p(ln_e));
    let information = if margin > 0.0 { (margin / above).powi(2) } else { n / planned };
    result.information_pct = Some(100.0 * information.clamp(0.0, 1.0));
    decide(&mut result, d.theta, d.theta - below, d.theta + above, margin, noun);
    result
}

fn exact(input: &Input<'_>, metric: Metric<'_>, sums: &[PhaseSums]) -> GateResult {
    let Metric { mut result, margin, counts, burn_in_devices, noun, .. } = metric;
    result.method = Method::ExactBetting;
    let all = all_phases(sums);
    fill(&mut result, &all.control, &all.treatment);
    let mut units = Vec::new();
    let mut means = [(0.0, 0.0); 2];
    for r in &input.windows.closed {
        let Some((events, responses)) = counts(r).filter(|(_, n)| *n > 0) else {
            continue;
        };
        let Some(phase) = input.phase_index(r.phase).map(|i| &input.phases[i]).filter(|p| p.compares()) else {
            continue;
        };
        let value = f64::from(events.min(responses)) / f64::from(responses);
        let treated = r.arm == Arm::Treatment;
        let m = &mut means[usize::from(treated)];
        *m = (m.0 + value, m.1 + 1.0);
        units.push(Outcome { value, treated, propensity: phase.treatment_share() });
    }
    let progress = all.control.devices.min(all.treatment.devices) as f64 / burn_in_devices as f64;
    result.information_pct = Some(100.0 * progress.clamp(0.0, 1.0));
    let mean = |(sum, n): (f64, f64)| (n > 0.0).then(|| sum / n);
    (result.control_value, result.treatment_value) = (mean(means[0]), mean(means[1]));
    let (Some(c), Some(t)) = (result.control_value, result.treatment_value) else {
        return result;
    };
    result.difference = Some(t - c);
    if input.spec.exact_share <= 0.0 {
        result.reason = format!("burn-in: {burn_in_devices} closed devices per arm are needed");
        return result;
    }
    let sequence = BettingSequence::new(&units);
    let lower = sequence.lower(input.alpha_fail() * input.spec.exact_share);
    let upper = sequence.upper(input.spec.alpha_pass * input.spec.exact_share);
    decide(&mut result, t - c, lower, upper, margin, noun);
    result.reason.push_str(" (small fleet: exact test on device averages)");
    result
}

/// FAIL if surely above the margin, PASS if surely below, WARN if harm is sure but within the margin.
fn decide(result: &mut GateResult, theta: f64, lower: f64, upper: f64, margin: f64, noun: &str) {
    result.difference = Some(theta);
    result.lower = lower.is_finite().then_some(lower);
    result.upper = upper.is_finite().then_some(upper);
    result.margin = Some(margin);
    let pp = |x: f64| format!("{:+.2} pp", 100.0 * x);
    let seen = format!("{noun} {} (between {} and {})", pp(theta), pp(lower), pp(upper));
    let allowed = pp(margin);
    (result.verdict, result.reason) = if lower > margin {
        (Verdict::Fail, format!("{seen}: surely above the allowed {allowed}"))
    } else if upper < margin {
        (Verdict::Pass, format!("{seen}: surely below the allowed {allowed}"))
    } else if lower > 0.0 {
        (Verdict::Warn, format!("{seen}: worse, but perhaps within the allowed {allowed}"))
    } else {
        (Verdict::Continue, format!("{seen}: not yet decided against the allowed {allowed}"))
    };
}
