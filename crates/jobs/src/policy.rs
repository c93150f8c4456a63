//! What happens with the slots that are due: pure rules over slots, policies and open jobs.
//!
//! | case | rule |
//! |---|---|
//! | missed, `run_once` | one run for the latest due slot; earlier ones are skipped |
//! | missed, `skip` | only slots that are on time run |
//! | missed, `run_all` | the newest `max` due slots not older than the window, in order |
//! | start deadline | a slot found later than this is skipped, whatever else holds |
//! | overlap `skip` | while a job of the schedule is open, the slots are skipped |
//! | overlap `queue_one` | while a job of the schedule waits, the slots are skipped; beside a running one they wait |
//! | overlap `cancel_running` | open jobs are cancelled, then the slots run |
//! | overlap `allow` | jobs may run side by side |
//!
//! The overlap rule looks at jobs from before: the slots of one catch-up (`run_all`) do not count against each other, they
//! wait for each other, because every schedule except `allow` has a concurrency limit of one.
//!
//! Each slot that is not run is recorded with its reason; of very many, the [`MAX_SKIP_ROWS`] newest singly and the
//! others in one row.

use chrono::{DateTime, TimeDelta, Utc};
use flywheel_store::schedules::{MissedPolicy, OverlapPolicy};

/// Most skipped slots recorded one by one in one catch-up.
pub const MAX_SKIP_ROWS: usize = 100;

/// The parts of a schedule that decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    pub missed: MissedPolicy,
    pub missed_max: usize,
    pub missed_window: TimeDelta,
    pub start_deadline: Option<TimeDelta>,
    pub overlap: OverlapPolicy,
    /// Up to this age a slot is on time.
    pub on_time: TimeDelta,
}

/// Jobs of the schedule that are open before this decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Open {
    pub running: usize,
    pub queued: usize,
}

/// What to do with one slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Run { reason: String },
    Skip { reason: String },
}

/// Decisions in the order of the slots.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decided {
    /// Cancel the open jobs first.
    pub cancel_open: bool,
    pub slots: Vec<(DateTime<Utc>, Decision)>,
}

fn skip(reason: impl Into<String>) -> Decision {
    Decision::Skip { reason: reason.into() }
}

/// Decides the due slots (ascending, all at or before `now`).
#[must_use]
pub fn decide(policy: &Policy, due: &[DateTime<Utc>], open: Open, now: DateTime<Utc>) -> Decided {
    let mut slots: Vec<(DateTime<Utc>, Decision)> =
        due.iter().enumerate().map(|(i, slot)| (*slot, by_age(policy, *slot, due.len() - 1 - i, now))).collect();
    let runs = slots.iter().any(|(_, d)| matches!(d, Decision::Run { .. }));
    let blocked = match policy.overlap {
        OverlapPolicy::Skip if open.running + open.queued > 0 => {
            Some("overlap(skip): an earlier job of this schedule is still open")
        }
        OverlapPolicy::QueueOne if open.queued > 0 => {
            Some("overlap(queue_one): an earlier job of this schedule is waiting already")
        }
        _ => None,
    };
    if let Some(reason) = blocked {
        for (_, decision) in &mut slots {
            if matches!(decision, Decision::Run { .. }) {
                *decision = skip(reason);
            }
        }
    }
    Decided { cancel_open: runs && policy.overlap == OverlapPolicy::CancelRunning, slots: fold(slots) }
}

/// `newer`: how many due slots come after this one.
fn by_age(policy: &Policy, slot: DateTime<Utc>, newer: usize, now: DateTime<Utc>) -> Decision {
    let age = now - slot;
    if let Some(deadline) = policy.start_deadline.filter(|d| age > *d) {
        return skip(format!("deadline: found {} s late, {} s are allowed", age.num_seconds(), deadline.num_seconds()));
    }
    let on_time = age <= policy.on_time;
    let late = || format!("{} s late", age.num_seconds());
    let run = |word: &str| Decision::Run {
        reason: if on_time { "on time".into() } else { format!("missed({word}): {}", late()) },
    };
    match policy.missed {
        MissedPolicy::RunOnce if newer == 0 => run("run_once"),
        MissedPolicy::RunOnce => skip(format!("missed(run_once): {}, a later slot stands for it", late())),
        MissedPolicy::Skip if on_time => run("skip"),
        MissedPolicy::Skip => skip(format!("missed(skip): {}", late())),
        MissedPolicy::RunAll if age > policy.missed_window => {
            skip(format!("missed(run_all): {}, the window is {} s", late(), policy.missed_window.num_seconds()))
        }
        MissedPolicy::RunAll if newer >= policy.missed_max => {
            skip(format!("missed(run_all): {}, only the newest {} run", late(), policy.missed_max))
        }
        MissedPolicy::RunAll => run("run_all"),
    }
}

/// Keeps every run and the newest skips; the older skips become one row at the newest slot of theirs.
fn fold(slots: Vec<(DateTime<Utc>, Decision)>) -> Vec<(DateTime<Utc>, Decision)> {
    let skips = slots.iter().filter(|(_, d)| matches!(d, Decision::Skip { .. })).count();
    let Some(extra) = skips.checked_sub(MAX_SKIP_ROWS).filter(|n| *n > 0) else {
        return slots;
    };
    let (mut folded, mut seen, mut first) = (Vec::new(), 0, None);
    for (slot, decision) in slots {
        if matches!(decision, Decision::Run { .. }) || seen >= extra {
            folded.push((slot, decision));
            continue;
        }
        seen += 1;
        let since = *first.get_or_insert(slot);
        if seen == extra {
            folded.push((slot, skip(format!("missed: {extra} slots since {since} in one row"))));
        }
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeZone as _;

    fn at(minute: u32) -> DateTime<Utc> {
        Utc.with_ymd_and_hms(2026, 5, 1, 10, 0, 0).unwrap() + TimeDelta::minutes(i64::from(minute))
    }
    fn policy(missed: MissedPolicy, overlap: OverlapPolicy) -> Policy {
        Policy {
            missed,
            missed_max: 3,
            missed_window: TimeDelta::hours(2),
            start_deadline: None,
            overlap,
            on_time: TimeDelta::minutes(1),
        }
    }
    fn runs(d: &Decided) -> Vec<DateTime<Utc>> {
        d.slots.iter().filter(|(_, d)| matches!(d, Decision::Run { .. })).map(|(s, _)| *s).collect()
    }
    /// Ten slots, one each 30 minutes, found 20 minutes after the last.
    fn ten() -> (Vec<DateTime<Utc>>, DateTime<Utc>) {
        ((0..10).map(|i| at(30 * i)).collect(), at(290))
    }

    #[test]
    fn ten_missed_slots_by_policy() {
        let (due, now) = ten();
        let run = |missed| runs(&decide(&policy(missed, OverlapPolicy::Skip), &due, Open::default(), now));
        assert_eq!(run(MissedPolicy::RunOnce), vec![at(270)]);
        assert!(run(MissedPolicy::Skip).is_empty());
        assert_eq!(run(MissedPolicy::RunAll), vec![at(210), at(240), at(270)]);
    }

    #[test]
    fn the_window_cuts_before_the_number() {
        let (due, now) = ten();
        let mut p = policy(MissedPolicy::RunAll, OverlapPolicy::Skip);
        p.missed_max = 100;
        // Slots at 170 minutes and later are at most two hours old.
        assert_eq!(runs(&decide(&p, &due, Open::default(), now)), vec![at(180), at(210), at(240), at(270)]);
    }

    #[test]
    fn every_slot_leaves_a_row() {
        let (due, now) = ten();
        for missed in MissedPolicy::ALL {
            for overlap in OverlapPolicy::ALL {
                for open in [Open::default(), Open { running: 1, queued: 0 }, Open { running: 1, queued: 1 }] {
                    assert_eq!(decide(&policy(*missed, *overlap), &due, open, now).slots.len(), 10);
                }
            }
        }
    }

    #[test]
    fn overlap_looks_at_what_was_open_before() {
        let (due, now) = (vec![at(0)], at(0));
        let with = |overlap, running, queued| {
            let d = decide(&policy(MissedPolicy::RunOnce, overlap), &due, Open { running, queued }, now);
            (runs(&d).len(), d.cancel_open)
        };
        assert_eq!(with(OverlapPolicy::Skip, 0, 0), (1, false));
        assert_eq!(with(OverlapPolicy::Skip, 1, 0), (0, false));
        assert_eq!(with(OverlapPolicy::Skip, 0, 1), (0, false));
        assert_eq!(with(OverlapPolicy::QueueOne, 1, 0), (1, false));
        assert_eq!(with(OverlapPolicy::QueueOne, 1, 1), (0, false));
        assert_eq!(with(OverlapPolicy::CancelRunning, 1, 1), (1, true));
        assert_eq!(with(OverlapPolicy::Allow, 5, 5), (1, false));
    }

    #[test]
    fn a_skipped_slot_cancels_nothing() {
        let mut p = policy(MissedPolicy::RunOnce, OverlapPolicy::CancelRunning);
        p.start_deadline = Some(TimeDelta::minutes(5));
        let d = decide(&p, &[at(0)], Open { running: 1, queued: 0 }, at(6));
        assert!(!d.cancel_open);
        assert!(matches!(&d.slots[0].1, Decision::Skip { reason } if reason.starts_with("deadline: found 360 s")));
        assert_eq!(runs(&decide(&p, &[at(0)], Open::default(), at(5))).len(), 1);
    }

    #[test]
    fn very_many_skips_become_few_rows() {
        let due: Vec<_> = (0..1000).map(at).collect();
        let d = decide(&policy(MissedPolicy::RunOnce, OverlapPolicy::Skip), &due, Open::default(), at(999));
        assert_eq!(d.slots.len(), MAX_SKIP_ROWS + 2);
        let (slot, Decision::Skip { reason }) = &d.slots[0] else { panic!("not a skip") };
        assert_eq!(*slot, at(898));
        assert!(reason.contains("899 slots since 2026-05-01 10:00:00 UTC"), "{reason}");
        assert_eq!(runs(&d), vec![at(999)]);
    }
}
