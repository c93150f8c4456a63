//! The window engine on hand-made histories.

use crate::support::{at, history, phase, response};
use flywheel_experiment::gate::{GateSpecV1, LatencyGateV1};
use flywheel_experiment::window::{Exclusion, Windows, close_windows};
use flywheel_types::assign::Arm;
use flywheel_types::rows::DeviceHistory;
use flywheel_types::{LabelKind, TrustClass};

fn close(histories: &[DeviceHistory], now: i64) -> Windows {
    let phases = [phase(1, 100_000, 100_000)];
    close_windows(histories, &GateSpecV1::default(), &phases, at(-1), &[], at(now)).unwrap()
}

#[test]
fn a_window_closes_after_72_hours_and_grace() {
    let mut h = history("a", Arm::Treatment);
    h.responses = vec![response(10, true), response(80, true), response(97, true)];
    assert_eq!(close(&[h.clone()], 95).closed.len(), 0);
    let w = close(&[h], 96);
    assert_eq!((w.closed.len(), w.open.len()), (1, 0));
    let r = &w.closed[0];
    assert_eq!(r.closed_at, at(96));
    assert_eq!((r.responses, r.rejections), (2, 2), "received in the grace time counts, later does not");
}

#[test]
fn fifty_responses_end_the_window_early_and_cap_it() {
    let mut h = history("a", Arm::Control);
    h.responses = (0..60).map(|i| response(i / 10, i >= 50)).collect();
    let w = close(&[h], 29);
    assert_eq!(w.closed.len(), 1, "50th response at hour 4, closed at hour 28");
    let r = &w.closed[0];
    assert_eq!((r.closed_at, r.responses, r.rejections), (at(28), 50, 0), "responses 51 to 60 do not count");
}

#[test]
fn late_labels_do_not_change_a_record() {
    let mut h = history("a", Arm::Control);
    let mut early = response(1, true);
    early.label_at = Some(at(95));
    let mut late = response(2, true);
    late.label_at = Some(at(97));
    let mut accepted = response(3, false);
    accepted.label = Some(LabelKind::Accepted);
    h.responses = vec![early, late, accepted];
    let r = &close(&[h], 200).closed[0];
    assert_eq!((r.responses, r.rejections), (3, 1));
}

#[test]
fn closed_records_win_over_rewritten_history() {
    let mut h = history("a", Arm::Control);
    h.responses = vec![response(1, false)];
    let before = close(&[h.clone()], 96);
    h.responses = vec![response(1, true), response(2, true)];
    h.arm = Arm::Treatment;
    let phases = [phase(1, 100_000, 100_000)];
    let spec = GateSpecV1::default();
    let after = close_windows(&[h], &spec, &phases, at(-1), &before.closed, at(300)).unwrap();
    assert_eq!(after.closed, before.closed);
}

#[test]
fn forged_devices_are_counted_but_do_not_count() {
    let mut anonymous = history("a", Arm::Treatment);
    anonymous.trust = TrustClass::Anonymous;
    anonymous.phase = 77;
    let mut fresh = history("b", Arm::Treatment);
    fresh.first_seen = at(0);
    fresh.failures = vec![at(1)];
    let mut leaked = history("c", Arm::Treatment);
    leaked.phase = 2;
    let future = DeviceHistory { exposed_at: at(500), ..history("d", Arm::Control) };
    let good = history("e", Arm::Control);
    let again = DeviceHistory { exposed_at: at(5), ..history("e", Arm::Treatment) };
    let w = close(&[anonymous, fresh, leaked, future, again, good], 100);
    assert_eq!(w.exposed().count(), 1);
    assert_eq!(w.closed[0].arm, Arm::Control, "the first exposure decides");
    for (why, n) in [
        (Exclusion::Anonymous, 1),
        (Exclusion::NewIdentity, 1),
        (Exclusion::Leaked, 1),
        (Exclusion::NotYet, 1),
        (Exclusion::Duplicate, 1),
    ] {
        assert_eq!(w.excluded(why), n, "{}", why.as_str());
    }
}

#[test]
fn anonymous_rows_count_when_the_spec_says_so() {
    let mut h = history("a", Arm::Treatment);
    h.trust = TrustClass::Anonymous;
    let mut spec = GateSpecV1::default();
    spec.trust.count_anonymous = true;
    let w = close_windows(&[h], &spec, &[phase(1, 100_000, 100_000)], at(-1), &[], at(100)).unwrap();
    assert_eq!(w.closed.len(), 1);
}

#[test]
fn silence_is_not_a_sign_of_life_and_failures_are_first_only() {
    let mut silent = history("a", Arm::Treatment);
    silent.confirmed_at = None;
    let mut crashing = history("b", Arm::Treatment);
    crashing.confirmed_at = None;
    crashing.failures = vec![at(200), at(50), at(40)];
    let w = close(&[silent, crashing], 100);
    assert!(!w.closed[0].reporting);
    assert!(w.closed[1].reporting);
    assert_eq!(w.closed[1].first_failure_at, Some(at(40)));
}

#[test]
fn latency_uses_the_arm_threshold_and_counts_bad_numbers() {
    let gate = LatencyGateV1 {
        name: "p50".into(),
        quantile: 0.5,
        margin: 0.10,
        thresholds_ms: [("mid".to_owned(), 100.0)].into(),
        required: true,
    };
    let spec = GateSpecV1 { latency: vec![gate], ..GateSpecV1::default() };
    let times = |arm| {
        let mut h = history(if arm == Arm::Control { "c" } else { "t" }, arm);
        h.responses = [Some(100.0), Some(105.0), Some(111.0), Some(f64::NAN), Some(-1.0), None, Some(1e9)]
            .into_iter()
            .map(|ms| flywheel_types::rows::Response { ttft_ms: ms, ..response(1, false) })
            .collect();
        h
    };
    let mut other = history("x", Arm::Control);
    other.device_class = "unknown".into();
    other.responses = vec![response(1, false)];
    let all = [times(Arm::Control), times(Arm::Treatment), other];
    let w = close_windows(&all, &spec, &[phase(1, 100_000, 100_000)], at(-1), &[], at(100)).unwrap();
    let slow = |i: usize| (w.closed[i].latency[0].slow, w.closed[i].latency[0].timed);
    assert_eq!(slow(0), (3, 4), "control: above 100 ms");
    assert_eq!(slow(1), (2, 4), "treatment: above 110 ms");
    assert_eq!(slow(2), (0, 0));
    assert_eq!(w.excluded(Exclusion::BadLatency), 4);
    assert_eq!(w.excluded(Exclusion::NoThreshold), 1);
}

#[test]
fn windows_that_outlive_the_comparison_are_left_out() {
    let mut end = phase(2, 1_000_000, 0);
    end.started_at = at(50);
    let h = history("a", Arm::Control);
    let phases = [phase(1, 100_000, 100_000), end];
    let w = close_windows(&[h], &GateSpecV1::default(), &phases, at(-1), &[], at(200)).unwrap();
    assert_eq!((w.exposed().count(), w.excluded(Exclusion::AfterComparison)), (0, 1));
}

#[test]
fn contradicting_phases_are_refused() {
    let bad = [phase(2, 1, 1), phase(1, 1, 1)];
    let e = close_windows(&[], &GateSpecV1::default(), &bad, at(0), &[], at(0)).unwrap_err();
    assert!(e.to_string().contains("phase 1 does not follow phase 2"), "{e}");
    assert!(close_windows(&[], &GateSpecV1::default(), &[], at(0), &[], at(0)).is_err());
}
