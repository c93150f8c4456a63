//! State machine tests: what counts as a failure, what is remembered, what is reported.

use super::*;
use flywheel_types::wire::DeviceEventKind as K;

fn at(s: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(s, 0).unwrap()
}

fn d(name: &str) -> Digest {
    Digest::of(name.as_bytes())
}

fn to(bundle: &str) -> Decision {
    Decision { bundle: Some(d(bundle)), arm: None, retry_failed: false }
}

fn in_rollout(bundle: &str, rollout: &str, retry_failed: bool) -> Decision {
    let arm = Some((RolloutId::new(rollout).unwrap(), 1, Arm::Treatment));
    Decision { bundle: Some(d(bundle)), arm, retry_failed }
}

fn slot(state: &State, bundle: &str) -> Slot {
    Slot::new(d(bundle), state.next_install_no, 1, &HealthV1::default())
}

fn install(state: &mut State, decision: &Decision, bundle: &str, now: i64) {
    state.assigned(decision, None, at(now));
    let slot = slot(state, bundle);
    state.installed(slot, decision, None, at(now));
}

/// A device that runs `old` since long.
fn settled() -> State {
    let mut s = State::default();
    install(&mut s, &to("old"), "old", 0);
    s.load_begin(at(0));
    s.load_succeeded(5.0, at(0));
    for _ in 0..20 {
        s.generated(at(1));
    }
    assert!(s.active.as_ref().unwrap().baked);
    s.reports.clear();
    s
}

fn events(s: &State) -> Vec<K> {
    s.reports.iter().map(|r| r.event.event).collect()
}

#[test]
fn one_death_in_the_load_window_is_reported_two_in_a_row_fall_back() {
    let mut s = settled();
    let policy = FailurePolicy::default();
    let decision = in_rollout("new", "r", false);
    install(&mut s, &decision, "new", 10);
    s.load_begin(at(11));
    assert!(s.note_death_in_load(at(12)));
    assert_eq!(s.active.as_ref().unwrap().bundle, d("new"), "one death is not a failure");
    s.load_begin(at(13));
    s.note_death_in_load(at(14));
    assert_eq!(s.active.as_ref().unwrap().bundle, d("old"));
    assert_eq!(events(&s), [K::Exposed, K::Downloaded, K::Installed, K::LoadFailed, K::LoadFailed, K::FellBack]);
    assert!(s.reports.iter().all(|r| r.event.assignment.is_some()));
    assert_eq!(s.step(&decision, at(20), &policy), Step::Blocked { retry_at: None });
    assert_eq!(s.step(&to("old"), at(20), &policy), Step::Nothing);
}

#[test]
fn a_success_between_two_deaths_starts_the_count_again() {
    let mut s = settled();
    install(&mut s, &to("new"), "new", 10);
    for n in 0..5 {
        s.load_begin(at(n));
        s.note_death_in_load(at(n));
        s.load_begin(at(n));
        s.load_succeeded(1.0, at(n));
    }
    assert_eq!(s.active.as_ref().unwrap().bundle, d("new"));
}

#[test]
fn a_hundred_deaths_outside_the_load_window_change_nothing() {
    let mut s = settled();
    let before = s.clone();
    for n in 0..100 {
        assert!(!s.note_death_in_load(at(n)));
    }
    assert_eq!(s, before);
}

#[test]
fn without_a_previous_slot_the_device_runs_no_model() {
    let mut s = State::default();
    install(&mut s, &to("first"), "first", 0);
    for n in 0..2 {
        s.load_failed("out of memory".into(), K::OutOfMemory, at(n));
    }
    assert_eq!(s.active, None);
    assert_eq!(s.reports.last().unwrap().event.reason.as_deref(), Some("to=none"));
}

#[test]
fn roll_back_then_forward_again_needs_no_download_and_no_permission() {
    let mut s = settled();
    let policy = FailurePolicy::default();
    install(&mut s, &to("new"), "new", 10);
    assert_eq!(s.step(&to("old"), at(11), &policy), Step::SwitchBack);
    s.switch_back(&to("old"), at(11));
    assert_eq!(events(&s).last(), Some(&K::RolledBack));
    assert_eq!(s.reports.last().unwrap().event.bundle, Some(d("old")));
    assert_eq!(s.step(&to("old"), at(12), &policy), Step::Nothing, "a rollback to what runs is no loop");
    assert_eq!(s.step(&to("new"), at(13), &policy), Step::SwitchBack);
    s.switch_back(&to("new"), at(13));
    assert_eq!(events(&s).last(), Some(&K::Installed));
    // After each switch the device confirms again, so that the server sees it.
    s.load_succeeded(1.0, at(14));
    assert_eq!(events(&s).last(), Some(&K::Confirmed));
    s.load_succeeded(1.0, at(15));
    assert_eq!(events(&s).iter().filter(|k| **k == K::Confirmed).count(), 1);
}

#[test]
fn a_failed_bundle_is_retried_only_by_policy_within_its_budget() {
    let policy = FailurePolicy::default();
    let mut s = settled();
    let (no, yes) = (in_rollout("new", "r", false), in_rollout("new", "r", true));
    let mut now = 0;
    install(&mut s, &no, "new", now);
    for retry in 0..=policy.retry_budget {
        for _ in 0..2 {
            s.load_failed("x".into(), K::LoadFailed, at(now));
        }
        assert_eq!(s.active.as_ref().unwrap().bundle, d("old"));
        assert_eq!(s.step(&no, at(now + 100_000), &policy), Step::Blocked { retry_at: None });
        let retry_at = at(now + 3600);
        if retry == policy.retry_budget {
            assert_eq!(s.step(&yes, retry_at, &policy), Step::Blocked { retry_at: None });
            break;
        }
        assert_eq!(s.step(&yes, at(now + 3599), &policy), Step::Blocked { retry_at: Some(retry_at) });
        assert_eq!(s.step(&yes, retry_at, &policy), Step::Install(d("new")));
        now += 3600;
        install(&mut s, &yes, "new", now);
    }
    // Another rollout of the same bundle is another question, and so is the far future.
    assert_eq!(s.step(&in_rollout("new", "r2", false), at(now), &policy), Step::Install(d("new")));
    assert_eq!(s.step(&no, at(now + 31 * 86_400), &policy), Step::Install(d("new")));
}

#[test]
fn the_control_bundle_is_kept_when_an_unproven_one_is_replaced() {
    let mut s = settled();
    install(&mut s, &to("new"), "new", 10);
    let third = slot(&s, "third");
    s.installed(third, &to("third"), Some(d("old")), at(11));
    assert_eq!(s.previous.as_ref().unwrap().bundle, d("old"));
}

#[test]
fn exposure_and_refusal_are_reported_once_per_cause() {
    let mut s = settled();
    let decision = in_rollout("new", "r", false);
    for n in 0..3 {
        s.assigned(&decision, None, at(n));
    }
    s.refused("bad_signature", None, at(1));
    s.refused("bad_signature", None, at(2));
    s.refused("chunk_hash_mismatch", Some(d("new")), at(3));
    assert_eq!(events(&s), [K::Exposed, K::Refused, K::Refused]);
}

#[test]
fn report_numbers_never_repeat() {
    let mut s = settled();
    install(&mut s, &to("new"), "new", 1);
    s.reports.clear();
    install(&mut s, &to("newer"), "newer", 2);
    let json = serde_json::to_string(&s).unwrap();
    let again: State = serde_json::from_str(&json).unwrap();
    assert_eq!(again, s);
    assert!(s.reports.iter().all(|r| r.no > 4));
}

#[test]
fn a_raised_security_floor_limits_the_fall_back() {
    let mut s = settled();
    s.floor_raised(2);
    assert!(s.active.as_ref().unwrap().active_when_floor_raised);
    install(&mut s, &to("new"), "new", 10);
    let mut after = s.clone();
    for _ in 0..2 {
        after.load_failed("x".into(), K::LoadFailed, at(11));
    }
    assert_eq!(after.active.as_ref().unwrap().bundle, d("old"), "it was in use when the floor rose");
    assert!(after.reports.last().unwrap().event.reason.as_ref().unwrap().ends_with("below_floor"));
    // The floor rises again while `new` runs: `old` is no longer a way back.
    s.previous.as_mut().unwrap().active_when_floor_raised = false;
    for _ in 0..2 {
        s.load_failed("x".into(), K::LoadFailed, at(11));
    }
    assert_eq!(s.active, None);
    assert_eq!(s.reports.last().unwrap().event.reason.as_deref(), Some("to=none;below_floor"));
}

#[test]
fn a_stored_state_at_the_end_of_its_ranges_does_not_overflow() {
    let policy =
        FailurePolicy { retry_budget: u32::MAX, expire_s: u64::MAX, retry_after_s: u64::MAX, ..Default::default() };
    let end = DateTime::<Utc>::MAX_UTC;
    let decision = in_rollout("b", "r", true);
    let mut state = State::default();
    install(&mut state, &to("a"), "a", 1);
    state.next_report = u64::MAX;
    state.failures_in_a_row = u32::MAX;
    state.verdicts.push(FailureVerdict {
        bundle: d("b"),
        rollout: Some(RolloutId::new("r").unwrap()),
        at: end,
        retries: 0,
    });
    state.active.as_mut().unwrap().install_no = u64::MAX;
    state.active.as_mut().unwrap().confirm_after_s = u64::MAX;
    assert_eq!(state.step(&decision, at(2), &policy), Step::Blocked { retry_at: Some(end) });
    state.verdicts[0].retries = u32::MAX;
    state.load_succeeded(1.0, at(2));
    state.active.as_mut().unwrap().confirmed_at = Some(end);
    assert!(!state.generated(at(3)));
    install(&mut state, &decision, "b", 4);
    state.load_failed("x".into(), K::LoadFailed, at(5));
    assert_eq!((state.next_report, state.verdicts[0].retries), (u64::MAX, u32::MAX));
}
