//! Stopping: cancel, shut-down, a lost lease, a handler that does not listen, a reaper in a race.

use crate::{World, on_both, quick};
use async_trait::async_trait;
use flywheel_jobs::{Handlers, JobContext, JobError, JobHandler, NewJob, Outcome, StopReason, Worker, WorkerOptions};
use flywheel_store::jobs::{JobCancel, JobClaim};
use flywheel_types::JobState;
use serde_json::json;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};

on_both!(
    a_cancel_reaches_the_running_handler,
    a_shut_down_is_no_attempt,
    a_deaf_handler_is_dropped_after_the_grace_time,
    a_lost_lease_stops_the_work,
    an_idle_worker_wakes_for_a_new_job,
    a_finished_job_is_not_reaped,
);

/// Waits until it is asked to stop and notes why; `deaf` never looks.
struct Waits {
    begun: Arc<Notify>,
    why: Arc<Mutex<Option<StopReason>>>,
    deaf: bool,
}

#[async_trait]
impl JobHandler for Waits {
    async fn run(&self, ctx: &JobContext) -> Result<Outcome, JobError> {
        self.begun.notify_one();
        if self.deaf {
            std::future::pending::<()>().await;
        }
        let why = ctx.stopped().await;
        *self.why.lock().unwrap() = Some(why);
        // In its own words: the worker knows the reason.
        Err(JobError::retryable("stopped half-way"))
    }
}

struct Running {
    begun: Arc<Notify>,
    why: Arc<Mutex<Option<StopReason>>>,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

fn run(w: &World, deaf: bool, options: WorkerOptions) -> Running {
    let (begun, why) = (Arc::new(Notify::new()), Arc::default());
    let handler = Waits { begun: begun.clone(), why: Arc::clone(&why), deaf };
    let worker = Worker::new(w.store(), Handlers::new().with("a", handler), options);
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(async move {
        worker
            .run(async {
                let _ = stopped.await;
            })
            .await;
    });
    Running { begun, why, stop, task }
}

async fn until(w: &World, id: &flywheel_types::JobId, state: JobState) {
    while w.job(id).await.state != state {
        tokio::task::yield_now().await;
    }
}

async fn a_cancel_reaches_the_running_handler(w: &World) {
    let id = w.enqueue(&NewJob::new("a", json!({}))).await;
    let running = run(w, false, quick());
    running.begun.notified().await;
    let mut tx = w.begin().await;
    assert_eq!(tx.job_cancel(&w.app, &id, "ann").await.unwrap(), JobCancel::Requested);
    tx.commit().await.unwrap();
    until(w, &id, JobState::Cancelled).await;
    assert_eq!(w.job(&id).await.last_error.as_deref(), Some("cancelled by ann"));
    assert_eq!(*running.why.lock().unwrap(), Some(StopReason::Cancelled));
    running.stop.send(()).unwrap();
    running.task.await.unwrap();
}

async fn a_shut_down_is_no_attempt(w: &World) {
    let id = w.enqueue(&NewJob::new("a", json!({})).max_attempts(1)).await;
    for round in 1..=3 {
        let running = run(w, false, quick());
        running.begun.notified().await;
        running.stop.send(()).unwrap();
        running.task.await.unwrap();
        let row = w.job(&id).await;
        assert_eq!((row.state, row.attempt, row.counted_attempts()), (JobState::Queued, round, 0));
        assert_eq!(*running.why.lock().unwrap(), Some(StopReason::Interrupted));
    }
}

async fn a_deaf_handler_is_dropped_after_the_grace_time(w: &World) {
    let id = w.enqueue(&NewJob::new("a", json!({}))).await;
    let running = run(w, true, quick());
    running.begun.notified().await;
    running.stop.send(()).unwrap();
    running.task.await.unwrap();
    let row = w.job(&id).await;
    assert_eq!((row.state, row.counted_attempts()), (JobState::Queued, 0));
}

async fn a_lost_lease_stops_the_work(w: &World) {
    let id = w.enqueue(&NewJob::new("a", json!({}))).await;
    let running = run(w, false, quick());
    running.begun.notified().await;
    // Somebody else holds the job now: attempt 2.
    let first = w.job(&id).await;
    let mut tx = w.begin().await;
    tx.job_requeue(&first.token(), Duration::ZERO, true, "taken away").await.unwrap();
    let kinds = ["a".to_owned()];
    let claim = JobClaim { owner: "other", kinds: &kinds, ttl: Duration::from_secs(60) };
    let second = tx.job_claim(&claim).await.unwrap().unwrap();
    tx.commit().await.unwrap();
    while running.why.lock().unwrap().is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!(*running.why.lock().unwrap(), Some(StopReason::LeaseLost));
    running.stop.send(()).unwrap();
    running.task.await.unwrap();
    let row = w.job(&id).await;
    assert_eq!((row.state, row.attempt), (JobState::Running, second.attempt), "the stale end changed nothing");
}

async fn an_idle_worker_wakes_for_a_new_job(w: &World) {
    // It would poll in an hour; the hint of this process's commit wakes it at once.
    let options = WorkerOptions { poll: Duration::from_secs(3600), ..quick() };
    let running = run(w, false, options);
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
    w.enqueue(&NewJob::new("a", json!({}))).await;
    running.begun.notified().await;
    running.stop.send(()).unwrap();
    running.task.await.unwrap();
}

async fn a_finished_job_is_not_reaped(w: &World) {
    let id = w.enqueue(&NewJob::new("a", json!({}))).await;
    let kinds = ["a".to_owned()];
    let mut tx = w.begin().await;
    let claim = JobClaim { owner: "w", kinds: &kinds, ttl: Duration::from_secs(60) };
    let row = tx.job_claim(&claim).await.unwrap().unwrap();
    tx.commit().await.unwrap();
    w.pass(61);
    // Its lease is over but nobody took it: the late completion still counts, and a reaper that comes at the same
    // time either waits (SQLite) or passes over the locked row (PostgreSQL).
    let mut tx = w.begin().await;
    tx.job_succeed(&row.token(), None).await.unwrap();
    let worker = Worker::new(w.store(), Handlers::new(), quick());
    let reaper = tokio::spawn(async move { worker.reap().await.unwrap() });
    tokio::task::yield_now().await;
    tx.commit().await.unwrap();
    assert_eq!(reaper.await.unwrap(), 0);
    assert_eq!(w.job(&id).await.state, JobState::Succeeded);
}
