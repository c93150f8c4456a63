//! Schedules: downtime, replicas, crashes, overlap, run-now, pause, change.

use crate::{World, on_both, quick, start};
use async_trait::async_trait;
use chrono::TimeDelta;
use flywheel_jobs::{
    Enqueued, Handlers, JobContext, JobError, JobHandler, Outcome, ScheduleError, ScheduleSpec, Scheduler,
    SchedulerOptions, Worker, schedule_pause, schedule_put, schedule_resume, schedule_run_now,
};
use flywheel_store::jobs::JobClaim;
use flywheel_store::schedules::{MissedPolicy, OverlapPolicy, RunOutcome, RunRow, ScheduleRow};
use flywheel_types::{BusinessClock as _, JobState};
use std::sync::{Arc, Mutex};
use std::time::Duration;

on_both!(
    a_slot_that_passed_while_down_runs_once,
    a_crash_between_the_two_writes_loses_nothing,
    replicas_never_fire_a_slot_twice,
    catch_up_runs_in_order_and_one_at_a_time,
    overlap_leaves_visible_rows,
    queue_one_lets_one_wait,
    cancel_running_replaces_the_open_jobs,
    run_now_never_consumes_a_slot,
    start_deadline_is_recorded,
    pause_misses_nothing_and_change_keeps_the_next_slot,
    jitter_delays_but_does_not_move_the_slot,
    what_cannot_work_is_refused,
);

fn hourly() -> ScheduleSpec {
    ScheduleSpec::new("refresh", "reembed", "0 * * * *")
}

async fn put(w: &World, spec: &ScheduleSpec) -> ScheduleRow {
    let mut tx = w.begin().await;
    let row = schedule_put(&mut tx, &w.app, spec).await.unwrap();
    tx.commit().await.unwrap();
    row
}

fn scheduler(w: &World) -> Scheduler {
    Scheduler::new(w.store(), Arc::new(w.clock.clone()), SchedulerOptions::default())
}

/// Moves business time to `minutes` after the start (09:30).
fn at(w: &World, minutes: i64) {
    w.clock.advance_to(start() + TimeDelta::minutes(minutes));
}

async fn runs(w: &World, id: &str) -> Vec<RunRow> {
    let mut rows = w.store().schedule_run_list(&w.app, id, 1000).await.unwrap();
    rows.reverse();
    rows
}

/// Hour and minute, outcome and first word of the reason of each decided slot.
async fn lines(w: &World, id: &str) -> Vec<String> {
    let line = |r: RunRow| {
        let reason = r.reason.split(':').next().unwrap_or_default().to_owned();
        format!("{} {} {reason}", r.scheduled_for.format("%H:%M"), r.outcome)
    };
    runs(w, id).await.into_iter().map(line).collect()
}

async fn claim(w: &World) -> flywheel_jobs::JobRow {
    let kinds = ["reembed".to_owned()];
    let mut tx = w.begin().await;
    let claim = JobClaim { owner: "w", kinds: &kinds, ttl: Duration::from_secs(600) };
    let row = tx.job_claim(&claim).await.unwrap().unwrap();
    tx.commit().await.unwrap();
    row
}

async fn a_slot_that_passed_while_down_runs_once(w: &World) {
    let row = put(w, &hourly()).await;
    assert_eq!(row.next_slot, Some(start() + TimeDelta::minutes(30)));
    assert_eq!(scheduler(w).tick().await.unwrap(), 0, "not due yet");
    // Down from before 10:00 until 12:30.
    at(w, 180);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1);
    assert_eq!(scheduler(w).tick().await.unwrap(), 0, "the slots are decided");
    assert_eq!(
        lines(w, &row.schedule_id).await,
        ["10:00 skipped missed(run_once)", "11:00 skipped missed(run_once)", "12:00 enqueued missed(run_once)"]
    );
    let skipped = w.in_state(JobState::Skipped).await;
    assert_eq!(skipped.len(), 2);
    assert!(skipped[0].last_error.as_deref().unwrap().starts_with("missed(run_once): 9000 s late"));
    // On time from now on.
    let done = claim(w).await;
    let mut tx = w.begin().await;
    tx.job_succeed(&done.token(), None).await.unwrap();
    tx.commit().await.unwrap();
    at(w, 210);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1);
    assert_eq!(lines(w, &row.schedule_id).await[3], "13:00 enqueued on time");
}

async fn a_crash_between_the_two_writes_loses_nothing(w: &World) {
    let row = put(w, &hourly()).await;
    at(w, 31);
    let mut tx = w.begin().await;
    let next = row.next_slot.unwrap() + TimeDelta::hours(1);
    assert!(tx.schedule_advance(&row.schedule_id, row.next_slot.unwrap(), Some(next), Some(next)).await.unwrap());
    drop(tx); // killed before the commit
    assert_eq!(scheduler(w).tick().await.unwrap(), 1);
    assert_eq!(lines(w, &row.schedule_id).await, ["10:00 enqueued on time"]);
}

async fn replicas_never_fire_a_slot_twice(w: &World) {
    let spec = ScheduleSpec { overlap: OverlapPolicy::Allow, ..ScheduleSpec::new("m", "reembed", "* * * * *") };
    let row = put(w, &spec).await;
    for minute in 1..=10 {
        at(w, minute);
        let ticks: Vec<_> = (0..4)
            .map(|_| {
                let replica = scheduler(w);
                tokio::spawn(async move { replica.tick().await.unwrap() })
            })
            .collect();
        let mut started = 0;
        for tick in ticks {
            started += tick.await.unwrap();
        }
        assert_eq!(started, 1, "minute {minute}");
    }
    assert_eq!(runs(w, &row.schedule_id).await.len(), 10);
    assert_eq!(w.in_state(JobState::Queued).await.len(), 10);
}

/// Notes the slots in the order they run.
struct Notes(Arc<Mutex<Vec<String>>>);

#[async_trait]
impl JobHandler for Notes {
    async fn run(&self, ctx: &JobContext) -> Result<Outcome, JobError> {
        let slot = ctx.job().scheduled_for.map(|s| s.format("%H:%M").to_string());
        self.0.lock().unwrap().push(slot.unwrap_or_else(|| "by hand".into()));
        Ok(Outcome::Done(None))
    }
}

async fn catch_up_runs_in_order_and_one_at_a_time(w: &World) {
    let spec = ScheduleSpec {
        missed: MissedPolicy::RunAll,
        missed_max: 3,
        missed_window_s: 7200,
        ..ScheduleSpec::new("r", "reembed", "*/30 * * * *")
    };
    let row = put(w, &spec).await;
    // Ten slots pass: 10:00 … 14:30; found at 14:40.
    at(w, 310);
    assert_eq!(scheduler(w).tick().await.unwrap(), 3);
    let rows = runs(w, &row.schedule_id).await;
    assert_eq!(rows.len(), 10);
    assert_eq!(rows.iter().filter(|r| r.outcome == RunOutcome::Skipped).count(), 7);
    // One at a time.
    let first = claim(w).await;
    assert_eq!(first.scheduled_for.unwrap().format("%H:%M").to_string(), "13:30");
    let mut tx = w.begin().await;
    let kinds = ["reembed".to_owned()];
    let again = JobClaim { owner: "w2", kinds: &kinds, ttl: Duration::from_secs(60) };
    assert!(tx.job_claim(&again).await.unwrap().is_none());
    tx.job_succeed(&first.token(), None).await.unwrap();
    tx.commit().await.unwrap();
    w.pass(1);
    let order = Arc::new(Mutex::new(Vec::new()));
    let worker = Worker::new(w.store(), Handlers::new().with("reembed", Notes(order.clone())), quick());
    assert_eq!(worker.drain().await.unwrap(), 2);
    assert_eq!(*order.lock().unwrap(), ["14:00", "14:30"]);
}

async fn overlap_leaves_visible_rows(w: &World) {
    let row = put(w, &hourly()).await;
    at(w, 30);
    scheduler(w).tick().await.unwrap();
    let running = claim(w).await;
    at(w, 90);
    assert_eq!(scheduler(w).tick().await.unwrap(), 0);
    assert_eq!(lines(w, &row.schedule_id).await[1], "11:00 skipped overlap(skip)");
    let mut tx = w.begin().await;
    tx.job_succeed(&running.token(), None).await.unwrap();
    tx.commit().await.unwrap();
    at(w, 150);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1);
}

async fn queue_one_lets_one_wait(w: &World) {
    let row = put(w, &ScheduleSpec { overlap: OverlapPolicy::QueueOne, ..hourly() }).await;
    at(w, 30);
    scheduler(w).tick().await.unwrap();
    claim(w).await;
    at(w, 90);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1, "one may wait");
    at(w, 150);
    assert_eq!(scheduler(w).tick().await.unwrap(), 0, "but not two");
    assert_eq!(lines(w, &row.schedule_id).await[2], "12:00 skipped overlap(queue_one)");
    let worker = Worker::new(w.store(), Handlers::new().with("reembed", Notes(Arc::default())), quick());
    assert_eq!(worker.drain().await.unwrap(), 0, "the waiting one waits for the running one");
}

async fn cancel_running_replaces_the_open_jobs(w: &World) {
    put(w, &ScheduleSpec { overlap: OverlapPolicy::CancelRunning, ..hourly() }).await;
    at(w, 30);
    scheduler(w).tick().await.unwrap();
    let running = claim(w).await;
    at(w, 90);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1);
    let row = w.job(&running.job_id).await;
    assert!(row.cancel_requested_at.is_some());
    at(w, 150);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1);
    assert_eq!(w.in_state(JobState::Cancelled).await.len(), 1, "the one that waited");
    let mut tx = w.begin().await;
    tx.job_cancelled_set(&running.token(), "x").await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(claim(w).await.scheduled_for.unwrap().format("%H:%M").to_string(), "12:00");
}

async fn run_now_never_consumes_a_slot(w: &World) {
    let row = put(w, &hourly()).await;
    let mut tx = w.begin().await;
    let first = schedule_run_now(&mut tx, &w.app, "refresh", "click-1").await.unwrap();
    let twice = schedule_run_now(&mut tx, &w.app, "refresh", "click-1").await.unwrap();
    assert_eq!(twice, Enqueued::Existing(first.id().clone()));
    assert!(schedule_run_now(&mut tx, &w.app, "nothing", "k").await.is_err());
    tx.commit().await.unwrap();
    let hand = claim(w).await;
    assert_eq!((hand.scheduled_for, hand.schedule_id.as_deref()), (None, Some(row.schedule_id.as_str())));
    let mut tx = w.begin().await;
    tx.job_succeed(&hand.token(), None).await.unwrap();
    tx.commit().await.unwrap();
    at(w, 30);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1);
    assert_eq!(lines(w, &row.schedule_id).await, ["10:00 enqueued on time"]);
}

async fn start_deadline_is_recorded(w: &World) {
    let row = put(w, &ScheduleSpec { start_deadline_s: Some(600), ..hourly() }).await;
    at(w, 41);
    assert_eq!(scheduler(w).tick().await.unwrap(), 0);
    assert_eq!(lines(w, &row.schedule_id).await, ["10:00 skipped deadline"]);
    at(w, 99);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1, "9 minutes late is allowed");
}

async fn pause_misses_nothing_and_change_keeps_the_next_slot(w: &World) {
    let row = put(w, &hourly()).await;
    at(w, 100);
    // A deployment repeats the same schedule while 10:00 and 11:00 are still undecided.
    let same = put(w, &ScheduleSpec { priority: 3, ..hourly() }).await;
    assert_eq!((same.next_slot, same.schedule_id.as_str()), (row.next_slot, row.schedule_id.as_str()));
    let other = put(w, &ScheduleSpec { expr: "15 * * * *".into(), ..hourly() }).await;
    assert_eq!(other.next_slot, Some(start() + TimeDelta::minutes(105)));
    let mut tx = w.begin().await;
    schedule_pause(&mut tx, &w.app, "refresh").await.unwrap();
    tx.commit().await.unwrap();
    at(w, 1000);
    assert_eq!(scheduler(w).tick().await.unwrap(), 0);
    let mut tx = w.begin().await;
    schedule_resume(&mut tx, &w.app, "refresh").await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(scheduler(w).tick().await.unwrap(), 0, "what passed in the pause is not missed");
    assert!(runs(w, &row.schedule_id).await.is_empty());
    let row = w.store().schedule_get(&w.app, "refresh").await.unwrap().unwrap();
    assert!(row.next_slot.unwrap() > w.clock.now());
    assert_eq!(w.store().schedule_list(&w.app).await.unwrap().len(), 1);
}

async fn jitter_delays_but_does_not_move_the_slot(w: &World) {
    let row = put(w, &ScheduleSpec { jitter_s: 1800, ..hourly() }).await;
    let slot = row.next_slot.unwrap();
    let delay = row.due_at.unwrap() - slot;
    assert!(delay >= TimeDelta::zero() && delay <= TimeDelta::seconds(1800));
    w.clock.advance_to(slot + delay - TimeDelta::microseconds(1));
    let early = scheduler(w).tick().await.unwrap();
    assert_eq!(early, 0);
    w.clock.advance_to(slot + delay);
    assert_eq!(scheduler(w).tick().await.unwrap(), 1);
    assert_eq!(lines(w, &row.schedule_id).await, ["10:00 enqueued on time"]);
}

async fn what_cannot_work_is_refused(w: &World) {
    let mut tx = w.begin().await;
    let mut refused = async |spec: ScheduleSpec| schedule_put(&mut tx, &w.app, &spec).await.unwrap_err();
    let never = refused(ScheduleSpec { expr: "0 0 30 2 *".into(), ..hourly() }).await;
    assert!(matches!(never, ScheduleError::NeverFires(_)));
    let zone = refused(ScheduleSpec { zone: "Nowhere".into(), ..hourly() }).await;
    assert!(matches!(zone, ScheduleError::Zone(_)));
    let limit = refused(ScheduleSpec { concurrency: Some(("x".into(), 2)), ..hourly() }).await;
    assert!(matches!(limit, ScheduleError::Field { .. }));
    drop(tx);
    assert!(w.store().schedule_list(&w.app).await.unwrap().is_empty());
}
