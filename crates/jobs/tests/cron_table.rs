//! The promised cron table, row by row: New York 2026-03-08 and 2026-11-01, Lord Howe (half an hour), London.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests: a failure must fail the test, a skip must be seen"
)]

use chrono::{DateTime, TimeZone as _, Utc};
use flywheel_jobs::{ScheduleError, schedule_next};

fn utc(y: i32, m: u32, d: u32, h: u32, min: u32) -> DateTime<Utc> {
    Utc.with_ymd_and_hms(y, m, d, h, min, 0).unwrap()
}

/// Local wall-clock times with zone of the first `n` slots after `from`.
fn local(expr: &str, zone: &str, from: DateTime<Utc>, n: usize) -> Vec<String> {
    schedule_next(expr, zone, from, n)
        .unwrap()
        .into_iter()
        .map(|s| {
            let parts: Vec<&str> = s.local.split(' ').collect();
            format!("{} {} {}", &parts[0][5..], &parts[1][..5], parts[3])
        })
        .collect()
}

const NY: &str = "America/New_York";
const LORD_HOWE: &str = "Australia/Lord_Howe";
const LONDON: &str = "Europe/London";

#[test]
fn spring_gap_runs_a_fixed_time_once_after_the_gap() {
    // New York jumps from 02:00 EST to 03:00 EDT on 8 March 2026.
    let from = utc(2026, 3, 7, 12, 0);
    assert_eq!(local("30 2 * * *", NY, from, 3), ["03-08 03:00 -04:00", "03-09 02:30 -04:00", "03-10 02:30 -04:00"]);
    assert_eq!(local("30 1 * * *", NY, from, 2), ["03-08 01:30 -05:00", "03-09 01:30 -04:00"]);
    assert_eq!(local("30 3 * * *", NY, from, 2), ["03-08 03:30 -04:00", "03-09 03:30 -04:00"]);
    // London jumps from 01:00 GMT to 02:00 BST on 29 March 2026.
    let from = utc(2026, 3, 28, 12, 0);
    assert_eq!(local("30 1 * * *", LONDON, from, 2), ["03-29 02:00 +01:00", "03-30 01:30 +01:00"]);
    assert_eq!(local("30 0 * * *", LONDON, from, 2), ["03-29 00:30 +00:00", "03-30 00:30 +01:00"]);
    // Lord Howe jumps by half an hour, from 02:00 to 02:30, on 4 October 2026.
    let from = utc(2026, 10, 3, 10, 0);
    assert_eq!(local("15 2 * * *", LORD_HOWE, from, 2), ["10-04 02:30 +11:00", "10-05 02:15 +11:00"]);
    assert_eq!(local("30 2 * * *", LORD_HOWE, from, 2), ["10-04 02:30 +11:00", "10-05 02:30 +11:00"]);
    assert_eq!(local("45 2 * * *", LORD_HOWE, from, 2), ["10-04 02:45 +11:00", "10-05 02:45 +11:00"]);
}

#[test]
fn autumn_overlap_runs_a_fixed_time_once_in_the_first_pass() {
    // New York falls from 02:00 EDT back to 01:00 EST on 1 November 2026.
    let from = utc(2026, 10, 31, 12, 0);
    assert_eq!(local("30 1 * * *", NY, from, 3), ["11-01 01:30 -04:00", "11-02 01:30 -05:00", "11-03 01:30 -05:00"]);
    assert_eq!(local("30 2 * * *", NY, from, 2), ["11-01 02:30 -05:00", "11-02 02:30 -05:00"]);
    // A server that starts between the two passes has missed nothing and runs nothing twice.
    let between = utc(2026, 11, 1, 6, 10);
    assert_eq!(local("30 1 * * *", NY, between, 1), ["11-02 01:30 -05:00"]);
    // London falls from 02:00 BST back to 01:00 GMT on 25 October 2026.
    let from = utc(2026, 10, 24, 12, 0);
    assert_eq!(local("30 1 * * *", LONDON, from, 2), ["10-25 01:30 +01:00", "10-26 01:30 +00:00"]);
    // Lord Howe falls from 02:00 +11 back to 01:30 +10:30 on 5 April 2026.
    let from = utc(2026, 4, 4, 10, 0);
    assert_eq!(local("45 1 * * *", LORD_HOWE, from, 2), ["04-05 01:45 +11:00", "04-06 01:45 +10:30"]);
    assert_eq!(local("15 1 * * *", LORD_HOWE, from, 2), ["04-05 01:15 +11:00", "04-06 01:15 +10:30"]);
}

#[test]
fn midnight_is_once_a_day_across_changes() {
    for (zone, from) in [
        (NY, utc(2026, 3, 6, 12, 0)),
        (NY, utc(2026, 10, 30, 12, 0)),
        (LONDON, utc(2026, 10, 23, 12, 0)),
        (LORD_HOWE, utc(2026, 4, 3, 1, 0)),
        (LORD_HOWE, utc(2026, 10, 2, 1, 0)),
    ] {
        let slots = local("0 0 * * *", zone, from, 5);
        let days: std::collections::BTreeSet<&str> = slots.iter().map(|s| &s[..5]).collect();
        assert_eq!(days.len(), 5, "{zone}: {slots:?}");
        assert!(slots.iter().all(|s| s.contains(" 00:00 ")), "{zone}: {slots:?}");
    }
}

/// Interval jobs keep their distance in real time through both changes.
fn spacing(expr: &str, zone: &str, from: DateTime<Utc>, n: usize) -> Vec<i64> {
    let slots = schedule_next(expr, zone, from, n).unwrap();
    slots.windows(2).map(|w| (w[1].at - w[0].at).num_minutes()).collect()
}

#[test]
fn intervals_keep_real_time_spacing_in_both_passes() {
    for (zone, from) in [
        (NY, utc(2026, 3, 8, 4, 59)),
        (NY, utc(2026, 11, 1, 3, 59)),
        (LONDON, utc(2026, 3, 28, 22, 59)),
        (LONDON, utc(2026, 10, 24, 22, 59)),
        (LORD_HOWE, utc(2026, 4, 4, 12, 59)),
        (LORD_HOWE, utc(2026, 10, 3, 12, 59)),
    ] {
        let gaps = spacing("*/15 * * * *", zone, from, 24);
        assert!(gaps.iter().all(|g| *g == 15), "{zone} {from}: {gaps:?}");
    }
    for (zone, from) in
        [(NY, utc(2026, 3, 8, 4, 59)), (NY, utc(2026, 11, 1, 3, 59)), (LONDON, utc(2026, 10, 24, 22, 59))]
    {
        let gaps = spacing("0 * * * *", zone, from, 8);
        assert!(gaps.iter().all(|g| *g == 60), "{zone} {from}: {gaps:?}");
    }
}

#[test]
fn weekdays_are_vixie_weekdays() {
    let from = utc(2026, 3, 6, 0, 0); // a Friday
    assert_eq!(local("0 12 * * 1", "UTC", from, 1), ["03-09 12:00 +00:00"], "1 is Monday");
    assert_eq!(local("0 0 * * 0", "UTC", from, 1), ["03-08 00:00 +00:00"], "0 is Sunday");
    assert_eq!(local("0 0 * * 7", "UTC", from, 1), ["03-08 00:00 +00:00"], "7 is Sunday");
    assert_eq!(local("0 12 * * 1", NY, from, 2), ["03-09 12:00 -04:00", "03-16 12:00 -04:00"]);
}

#[test]
fn last_nth_and_nearest_weekday() {
    let from = utc(2026, 2, 1, 0, 0);
    assert_eq!(local("0 3 L * *", "UTC", from, 2), ["02-28 03:00 +00:00", "03-31 03:00 +00:00"]);
    assert_eq!(local("0 3 * * 5#2", "UTC", from, 2), ["02-13 03:00 +00:00", "03-13 03:00 +00:00"]);
    assert_eq!(local("0 3 15W * *", "UTC", from, 1), ["02-16 03:00 +00:00"], "15 February 2026 is a Sunday");
}

#[test]
fn what_cannot_work_is_refused_with_a_reason() {
    let next = |expr: &str, zone: &str| schedule_next(expr, zone, utc(2026, 1, 1, 0, 0), 1).unwrap_err();
    assert!(matches!(next("0 0 30 2 *", "UTC"), ScheduleError::NeverFires(_)));
    assert!(matches!(next("* * * * *", "Mars/Olympus"), ScheduleError::Zone(_)));
    assert!(matches!(next("0 0 0 * * *", "UTC"), ScheduleError::Expression { .. }), "no seconds");
    assert!(matches!(next("61 * * * *", "UTC"), ScheduleError::Expression { .. }));
    assert!(matches!(next("", "UTC"), ScheduleError::Expression { .. }));
    let outside = flywheel_types::Error::from(next("0 0 30 2 *", "UTC"));
    assert_eq!(outside.code, "never_fires");
}

#[test]
fn next_says_when_the_clock_changes() {
    let slots = schedule_next("30 2 * * *", NY, utc(2026, 3, 7, 12, 0), 2).unwrap();
    assert_eq!(slots[0].local, "2026-03-08 03:00:00 EDT -04:00");
    assert_eq!((slots[0].clock_changed, slots[1].clock_changed), (true, false));
}
