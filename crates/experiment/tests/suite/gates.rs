//! Gates on synthetic closed records.

use crate::support::{at, device, phase};
use flywheel_experiment::gate::{
    BaselineV1, GateReportV1, GateSpecV1, LatencyGateV1, Method, ProtectedSliceV1, evaluate, rejection_margin,
};
use flywheel_experiment::window::{DeviceRecord, Exclusion, LatencyCount, Windows};
use flywheel_types::Verdict as V;
use flywheel_types::assign::Arm;

/// `n` devices per arm with 12 responses; rejections spread so that the arm's mean is `events / 4` per device.
fn arms(n: usize, control: u32, treatment: u32) -> Windows {
    let one = |i: usize, arm, quarter: u32| {
        // Heterogeneous devices: 0, 1, 2 or 3 times the unit.
        let events = (quarter * (i % 4) as u32 * 2 / 3).min(12);
        device(i, arm, 1, events, 12)
    };
    let mut closed = Vec::new();
    for i in 0..n {
        closed.push(one(i, Arm::Control, control));
        closed.push(one(i, Arm::Treatment, treatment));
    }
    Windows { closed, ..Windows::default() }
}

fn judge(spec: &GateSpecV1, windows: &Windows, previous: Option<&GateReportV1>, now: i64) -> GateReportV1 {
    evaluate(spec, &[phase(1, 100_000, 100_000)], windows, previous, at(now)).unwrap()
}

fn spec() -> GateSpecV1 {
    GateSpecV1::freeze(&BaselineV1 { rejection_rate: 0.25, planned_devices: 400, ..BaselineV1::default() }).unwrap()
}

#[test]
fn a_large_improvement_passes_at_200_devices_per_arm() {
    // Control 3 of 12 (25 %), treatment 1 of 12 (8 %).
    let r = judge(&spec(), &arms(200, 3, 1), None, 120);
    assert_eq!(r.verdict, V::Pass, "{r:#?}");
    let g = r.gate("rejection_rate").unwrap();
    assert_eq!((g.method, g.control_devices), (Method::Asymptotic, 200));
    assert!(g.upper.unwrap() < 0.0, "even superiority is sure");
    assert_eq!(r.gate("failures").unwrap().verdict, V::Pass, "no failure in 200 devices per arm is below 2 pp");
}

#[test]
fn harm_fails_and_stays_failed() {
    let s = spec();
    let bad = judge(&s, &arms(300, 3, 6), None, 120);
    assert_eq!(bad.verdict, V::Fail, "{}", bad.reason);
    assert_eq!(bad.failed_at, Some(at(120)));
    let later = judge(&s, &arms(1000, 3, 1), Some(&bad), 130);
    assert_eq!(later.verdict, V::Fail);
    assert_eq!(later.failed_at, Some(at(120)));
    let again = judge(&s, &arms(1000, 3, 1), Some(&later), 140);
    let reason = &again.gate("rejection_rate").unwrap().reason;
    assert_eq!(reason.matches("failed at").count(), 1, "{reason}");
}

#[test]
fn below_burn_in_only_the_exact_test_speaks() {
    let few = judge(&spec(), &arms(60, 3, 3), None, 120);
    let g = few.gate("rejection_rate").unwrap();
    assert_eq!((g.method, g.verdict), (Method::ExactBetting, V::Continue));
    assert!(g.reason.contains("small fleet"), "{}", g.reason);
    let mut harm = arms(120, 0, 0);
    for r in &mut harm.closed {
        r.rejections = if r.arm == Arm::Treatment { 11 } else { 1 };
    }
    let g = judge(&spec(), &harm, None, 120);
    assert_eq!(g.gate("rejection_rate").unwrap().verdict, V::Fail, "a broken model fails a small fleet exactly");
}

#[test]
fn no_data_and_no_events_never_pass() {
    let empty = judge(&spec(), &Windows::default(), None, 120);
    assert_eq!((empty.verdict, empty.word.as_str()), (V::Continue, "COLLECTING"));
    let silent = judge(&spec(), &arms(2000, 0, 0), None, 120);
    assert_eq!(silent.verdict, V::Continue, "nobody rejects anything: {}", silent.reason);
    assert!(silent.reason.contains("missing data"), "{}", silent.reason);
    let late = judge(&spec(), &arms(210, 3, 3), None, 400);
    assert_eq!(late.verdict, V::Inconclusive);
    assert!(late.reason.contains("336 hours"), "{}", late.reason);
}

#[test]
fn small_harm_within_the_margin_warns() {
    let mut s = spec();
    s.rejection.margin = 0.3;
    s.planned_devices = 2000;
    s.alpha_fail = 0.05;
    let r = judge(&s, &arms(1000, 3, 6), None, 120);
    // The margin is wide: harm is sure, and it is surely below the margin, so the gate passes; between, it warns.
    assert_eq!(r.gate("rejection_rate").unwrap().verdict, V::Pass);
    s.rejection.margin = 0.25;
    let r = judge(&s, &arms(1000, 3, 6), None, 120);
    assert_eq!(r.gate("rejection_rate").unwrap().verdict, V::Warn, "{}", r.reason);
    assert_eq!(r.verdict, V::Warn);
}

fn latency_spec() -> GateSpecV1 {
    let gate = |name: &str, quantile, margin| LatencyGateV1 {
        name: name.into(),
        quantile,
        margin,
        thresholds_ms: [("*".to_owned(), 100.0)].into(),
        required: true,
    };
    GateSpecV1 { latency: vec![gate("ttft_p50", 0.5, 0.05), gate("ttft_p95", 0.95, 0.10)], ..spec() }
}

fn with_latency(mut w: Windows, treatment: [u32; 2]) -> Windows {
    for (i, r) in w.closed.iter_mut().enumerate() {
        let wobble = (i / 2 % 3) as u32; // 0, 1, 2 around the mean 1
        let slow = if r.arm == Arm::Treatment { treatment } else { [6, 1] };
        r.latency = slow.map(|s| LatencyCount { timed: 12, slow: (s + wobble).saturating_sub(1) }).to_vec();
    }
    w
}

#[test]
fn latency_gates_fail_on_a_slower_tail_and_pass_a_faster_one() {
    let s = latency_spec();
    let fast = judge(&s, &with_latency(arms(250, 3, 1), [4, 0]), None, 120);
    assert_eq!(fast.verdict, V::Pass, "{}", fast.reason);
    let slow = judge(&s, &with_latency(arms(250, 3, 1), [6, 4]), None, 120);
    assert_eq!(slow.verdict, V::Fail);
    assert_eq!(slow.gates_with(V::Fail), ["ttft_p95"]);
    let untimed = judge(&s, &arms(250, 3, 1), None, 120);
    assert_eq!(untimed.verdict, V::Continue, "no timed event is not a success: {}", untimed.reason);
}

#[test]
fn failures_fire_on_open_windows_without_any_control_failure() {
    let s = spec();
    let mut w = arms(100, 3, 3);
    for r in w.closed.drain(..).collect::<Vec<_>>() {
        w.open.push(DeviceRecord { closed_at: at(500), ..r });
    }
    let fail = |w: &mut Windows, n: usize| {
        let treated = w.open.iter_mut().filter(|r| r.arm == Arm::Treatment);
        treated.take(n).for_each(|r| r.first_failure_at = Some(at(2)));
    };
    fail(&mut w, 5);
    let five = judge(&s, &w, None, 3);
    assert_eq!(five.gate("failures").unwrap().verdict, V::Continue, "5:0 is not yet sure");
    fail(&mut w, 20);
    let twenty = judge(&s, &w, None, 3);
    assert_eq!(twenty.verdict, V::Fail, "{}", twenty.reason);
}

#[test]
fn failures_in_both_arms_hit_the_absolute_limit() {
    let mut w = arms(300, 3, 1);
    w.closed.iter_mut().enumerate().filter(|(i, _)| i % 4 < 2).for_each(|(_, r)| r.first_failure_at = Some(at(2)));
    let r = judge(&spec(), &w, None, 120);
    let g = r.gate("failures").unwrap();
    assert_eq!(g.verdict, V::Fail, "{}", g.reason);
    assert!(g.reason.contains("at all"), "{}", g.reason);
}

#[test]
fn missing_devices_make_a_data_problem_not_a_success() {
    let mut w = arms(400, 3, 1);
    w.closed.retain(|r| r.arm == Arm::Control || r.install.as_str() < "000100");
    let r = judge(&spec(), &w, None, 200);
    assert_eq!((r.verdict, r.word.as_str()), (V::Invalid, "DATA PROBLEM"));
    assert!(r.srm.p_value.unwrap() < 0.001);
    // Silent devices in the treatment: exposed equally, but a third never reports.
    let mut w = arms(400, 3, 1);
    for (i, r) in w.closed.iter_mut().enumerate().filter(|(_, r)| r.arm == Arm::Treatment) {
        if i % 3 == 1 {
            (r.reporting, r.responses, r.rejections) = (false, 0, 0);
        }
    }
    let r = judge(&spec(), &w, None, 200);
    assert_eq!(r.verdict, V::Invalid);
    assert!(r.gates_with(V::Invalid).contains(&"attrition".to_owned()), "{}", r.reason);
}

#[test]
fn leaks_and_crossovers_are_data_problems() {
    let mut w = arms(250, 3, 1);
    w.exclusions.insert(Exclusion::Leaked.as_str().into(), 1);
    assert_eq!(judge(&spec(), &w, None, 120).gates_with(V::Invalid), ["leak"]);
    let mut w = arms(250, 3, 1);
    w.closed.iter_mut().take(20).for_each(|r| r.crossed_over = true);
    assert_eq!(judge(&spec(), &w, None, 120).gates_with(V::Invalid), ["crossover"]);
}

#[test]
fn a_protected_slice_holds_and_fails_by_itself() {
    let slice = |margin| ProtectedSliceV1 {
        name: "zh-low".into(),
        device_class: Some("low".into()),
        locale: Some("zh".into()),
        margin,
        planned_devices: 400,
    };
    let s = GateSpecV1 { slices: vec![slice(0.02)], ..spec() };
    let w = arms(400, 3, 1);
    let r = judge(&s, &w, None, 120);
    assert_eq!(r.verdict, V::Continue, "too little data in the slice holds");
    let mut w = arms(800, 3, 1);
    for (i, r) in w.closed.iter_mut().enumerate().filter(|(i, _)| i / 2 % 2 == 0) {
        (r.device_class, r.locale) = ("low".into(), "zh".into());
        if r.arm == Arm::Treatment {
            r.rejections = 5 + (i / 4 % 3) as u32;
        }
    }
    let r = judge(&s, &w, None, 120);
    assert_eq!(r.gates_with(V::Fail), ["slice:zh-low"], "{}", r.reason);
}

#[test]
fn a_phase_needs_evidence_of_its_own() {
    let w = arms(400, 3, 1);
    let phases = [phase(1, 100_000, 100_000), phase(2, 500_000, 500_000)];
    let r = evaluate(&spec(), &phases, &w, None, at(120)).unwrap();
    assert_eq!(r.verdict, V::Continue);
    assert!(r.reason.contains("phase 2"), "{}", r.reason);
}

#[test]
fn a_changed_spec_is_refused() {
    let w = arms(250, 3, 1);
    let before = judge(&spec(), &w, None, 120);
    let mut other = spec();
    other.rejection.margin = 0.2;
    let e = evaluate(&other, &[phase(1, 100_000, 100_000)], &w, Some(&before), at(130)).unwrap_err();
    assert!(e.to_string().contains("new rollout"), "{e}");
}

#[test]
fn specs_are_versioned_digestible_and_strict() {
    let s = latency_spec();
    let json = serde_json::to_string(&s).unwrap();
    let again: GateSpecV1 = serde_json::from_str(&json).unwrap();
    assert_eq!(again.digest().unwrap(), s.digest().unwrap());
    assert!(serde_json::from_str::<GateSpecV1>(r#"{"alpha_fial":0.5}"#).is_err());
    let golden: GateSpecV1 = serde_json::from_str(include_str!("../data/gate_spec_v1.json")).unwrap();
    assert_eq!(golden, GateSpecV1::default(), "the golden sample of version 1 holds the shipped defaults");
    assert_eq!((rejection_margin(0.02), rejection_margin(0.25)), (0.005, 0.0125));
    for bad in [f64::NAN, 0.0, 1.5, f64::INFINITY] {
        let mut s = spec();
        s.rejection.margin = bad;
        assert!(s.digest().unwrap_err().to_string().contains("rejection.margin"));
    }
}

#[test]
fn reports_round_trip_through_json_without_null_traps() {
    let r = judge(&latency_spec(), &with_latency(arms(250, 3, 1), [4, 0]), None, 120);
    let json = serde_json::to_string(&r).unwrap();
    assert_eq!(serde_json::from_str::<GateReportV1>(&json).unwrap(), r);
    let empty = judge(&latency_spec(), &Windows::default(), None, 120);
    let json = serde_json::to_string(&empty).unwrap();
    assert_eq!(serde_json::from_str::<GateReportV1>(&json).unwrap(), empty);
}
