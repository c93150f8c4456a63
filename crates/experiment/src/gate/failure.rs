//! Load-failure and crash gate on the **first** failure of each device in its window.
//!
//! FAIL acts at once, on open windows too: an e-process over the arms of the failures (conditioning on a failure
//! removes any common change over time), multiplied over phases. PASS needs closed windows: an anytime-valid upper
//! bound of the treatment's first-failure probability minus a lower bound of the control's. Silence is not success:
//! a device without any sign of life is not a trial.

use super::Input;
use super::report::{GateKind, GateResult, Method};
use crate::confidence::binomial::{ln_e_more_failures, lower_bound, upper_bound};
use crate::window::DeviceRecord;
use flywheel_types::Verdict;
use flywheel_types::assign::Arm;

/// Share of `alpha_pass` for the treatment's bound; the rest guards the control's, which matters less because a
/// good control has few failures.
const TREATMENT_SHARE: f64 = 0.8;

/// Name of the gate in reports.
pub(super) const NAME: &str = "failures";

pub(super) fn judge(input: &Input<'_>) -> GateResult {
    let gate = &input.spec.failure;
    let mut out = GateResult::new(NAME, GateKind::Failure, gate.required, Method::ExactBinomial);
    let ln_e = peak_evidence(input);
    out.e_value = Some(ln_e.min(700.0).exp());
    out.p_value = Some((-ln_e).exp().min(1.0));
    let (failed_c, n_c) = count(input, Arm::Control);
    let (failed_t, n_t) = count(input, Arm::Treatment);
    (out.control_devices, out.treatment_devices) = (n_c, n_t);
    (out.control_events, out.treatment_events) = (failed_c, failed_t);
    let share = |k: u64, n: u64| (n > 0).then(|| k as f64 / n as f64);
    (out.control_value, out.treatment_value) = (share(failed_c, n_c), share(failed_t, n_t));
    out.difference = out.treatment_value.zip(out.control_value).map(|(t, c)| t - c);
    let alpha_p = input.spec.alpha_pass;
    let upper = upper_bound(failed_t, n_t, alpha_p * TREATMENT_SHARE)
        - lower_bound(failed_c, n_c, alpha_p * (1.0 - TREATMENT_SHARE));
    out.upper = Some(upper);
    out.margin = Some(gate.pass_margin);
    out.information_pct = Some(100.0 * (gate.pass_margin / upper).clamp(0.0, 1.0));
    let surely = lower_bound(failed_t, n_t, input.alpha_fail());
    out.lower = Some(surely - upper_bound(failed_c, n_c, input.alpha_fail()));
    let threshold = -input.alpha_fail().ln();
    (out.verdict, out.reason) = if ln_e >= threshold {
        let text = format!(
            "{} failed devices with the candidate, {} with the incumbent: the rate is surely more than {:.0} % higher",
            all_failures(input, Arm::Treatment),
            all_failures(input, Arm::Control),
            100.0 * gate.ratio_margin
        );
        (Verdict::Fail, text)
    } else if surely > gate.absolute_max {
        let text = format!(
            "{failed_t} of {n_t} devices failed with the candidate: surely more than the {:.1} % allowed at all",
            100.0 * gate.absolute_max
        );
        (Verdict::Fail, text)
    } else {
        let seen = format!(
            "{failed_t} of {n_t} devices failed with the candidate, {failed_c} of {n_c} with the incumbent; at most {:+.2} pp more",
            100.0 * upper
        );
        let allowed = format!("the allowed {:+.2} pp", 100.0 * gate.pass_margin);
        if n_c > 0 && upper < gate.pass_margin {
            (Verdict::Pass, format!("{seen}: surely below {allowed}"))
        } else {
            (Verdict::Continue, format!("{seen}: not yet below {allowed}"))
        }
    };
    out
}

/// Closed devices with a sign of life, and how many of them failed.
fn count(input: &Input<'_>, arm: Arm) -> (u64, u64) {
    let devices = input.windows.closed.iter().filter(|r| r.arm == arm && r.reporting);
    devices.fold((0, 0), |(k, n), r| (k + u64::from(r.first_failure_at.is_some()), n + 1))
}

fn all_failures(input: &Input<'_>, arm: Arm) -> usize {
    input.windows.exposed().filter(|r| r.arm == arm && r.first_failure_at.is_some()).count()
}

/// Highest log e-value over time: failures in order of receipt, one factor per phase (their product is an e-process).
fn peak_evidence(input: &Input<'_>) -> f64 {
    let mut failures: Vec<&DeviceRecord> = input.windows.exposed().filter(|r| r.first_failure_at.is_some()).collect();
    failures.sort_unstable_by(|a, b| (a.first_failure_at, &a.install).cmp(&(b.first_failure_at, &b.install)));
    let gate = &input.spec.failure;
    let mut counts = vec![(0_u64, 0_u64); input.phases.len()];
    let mut parts = vec![0.0_f64; input.phases.len()];
    let mut best = 0.0_f64;
    for r in failures {
        let Some(i) = input.phase_index(r.phase).filter(|i| input.phases[*i].compares()) else {
            continue;
        };
        let c = &mut counts[i];
        *c = (c.0 + u64::from(r.arm == Arm::Treatment), c.1 + 1);
        let share = input.phases[i].treatment_share();
        parts[i] = ln_e_more_failures(c.0, c.1, share, gate.ratio_margin, gate.prior_strength);
        best = best.max(parts.iter().sum());
    }
    best
}
