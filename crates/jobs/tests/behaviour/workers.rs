//! Success, retry classes, dead letter, fencing of a stale attempt, checkpoints.

use crate::{World, on_both, quick};
use async_trait::async_trait;
use chrono::DateTime;
use flywheel_jobs::{Handlers, JobContext, JobError, JobEvents, JobHandler, JobRow, NewJob, Outcome, Worker};
use flywheel_store::Tx;
use flywheel_store::jobs::JobClaim;
use flywheel_store::mail_outbox::NewMail;
use flywheel_types::JobState;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

on_both!(
    results_are_kept_and_kinds_without_handler_wait,
    retries_wait_and_end_dead_with_one_alert,
    permanent_failures_and_bad_payloads_are_dead_at_once,
    a_panic_is_one_failed_attempt,
    a_poison_job_stops_after_its_attempts_and_the_queue_goes_on,
    a_stale_attempt_makes_no_effect,
    effect_and_completion_are_one_commit,
    the_next_attempt_finds_the_checkpoint,
    jobs_of_one_key_run_one_after_another,
);

/// A closure that answers at once; handlers that wait have types of their own below.
struct Run<F>(F);

#[async_trait]
impl<F> JobHandler for Run<F>
where
    F: Fn(&JobContext) -> Result<Outcome, JobError> + Send + Sync + 'static,
{
    async fn run(&self, ctx: &JobContext) -> Result<Outcome, JobError> {
        (self.0)(ctx)
    }
}

fn job(kind: &str) -> NewJob {
    NewJob::new(kind, json!({"v": 1}))
}

async fn results_are_kept_and_kinds_without_handler_wait(w: &World) {
    let id = w.enqueue(&job("a")).await;
    let other = w.enqueue(&job("b")).await;
    let handlers = Handlers::new().with("a", Run(|_: &JobContext| Ok(Outcome::with(json!({"ok": 1})))));
    let worker = Worker::new(w.store(), handlers, quick());
    assert_eq!(worker.drain().await.unwrap(), 1);
    let row = w.job(&id).await;
    assert_eq!((row.state, row.result), (JobState::Succeeded, Some(json!({"ok": 1}))));
    assert_eq!(w.job(&other).await.state, JobState::Queued);
}

struct AlertMail;

#[async_trait]
impl JobEvents for AlertMail {
    async fn dead(&self, tx: &mut Tx, job: &JobRow) -> flywheel_store::Result<()> {
        let mail = NewMail {
            dedup_key: format!("dead/{}", job.job_id),
            recipients: vec!["ops@example.org".into()],
            subject: format!("job {} is dead", job.kind),
            body_text: job.last_error.clone().unwrap_or_default(),
            body_html: None,
            max_attempts: 5,
        };
        tx.mail_enqueue(&job.app_id, &mail).await.map(|_| ())
    }
}

async fn retries_wait_and_end_dead_with_one_alert(w: &World) {
    let id = w.enqueue(&job("a").max_attempts(3)).await;
    let runs = Arc::new(AtomicUsize::new(0));
    let seen = runs.clone();
    let fail = Run(move |_: &JobContext| {
        seen.fetch_add(1, Ordering::SeqCst);
        Err(JobError::retryable("disk full"))
    });
    let worker = Worker::with_events(w.store(), Handlers::new().with("a", fail), quick(), Arc::new(AlertMail));
    for attempt in 1..=3 {
        assert_eq!(worker.drain().await.unwrap(), 1, "attempt {attempt}");
        assert_eq!(worker.drain().await.unwrap(), 0, "not again before its time");
        let row = w.job(&id).await;
        assert_eq!(row.last_error.as_deref(), Some("disk full"));
        assert_eq!(row.state, if attempt < 3 { JobState::Queued } else { JobState::Dead });
        if attempt < 3 {
            assert!(row.run_at > w.store().lease_now());
        }
        w.pass(60);
    }
    assert_eq!(worker.drain().await.unwrap(), 0);
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    let mails = w.store().mail_list(&w.app, 9).await.unwrap();
    assert_eq!((mails.len(), mails[0].body_text.as_str()), (1, "disk full"));
}

async fn permanent_failures_and_bad_payloads_are_dead_at_once(w: &World) {
    let a = w.enqueue(&job("a")).await;
    let b = w.enqueue(&job("b")).await;
    let handlers = Handlers::new()
        .with("a", Run(|_: &JobContext| Err(JobError::permanent("vocabulary differs"))))
        .with("b", Run(|ctx: &JobContext| ctx.payload::<Vec<u8>>().map(|_| Outcome::Done(None))));
    assert_eq!(Worker::new(w.store(), handlers, quick()).drain().await.unwrap(), 2);
    assert_eq!(w.job(&a).await.state, JobState::Dead);
    let row = w.job(&b).await;
    assert_eq!(row.state, JobState::Dead);
    assert!(row.last_error.unwrap().starts_with("payload of `b`"));
}

async fn a_panic_is_one_failed_attempt(w: &World) {
    let id = w.enqueue(&job("a").max_attempts(2)).await;
    let handlers =
        Handlers::new().with("a", Run(|ctx: &JobContext| Ok(Outcome::Done(Some(ctx.job().result.clone().unwrap())))));
    let worker = Worker::new(w.store(), handlers, quick());
    worker.drain().await.unwrap();
    assert_eq!(w.job(&id).await.state, JobState::Queued);
    w.pass(60);
    worker.drain().await.unwrap();
    let row = w.job(&id).await;
    assert_eq!((row.state, row.attempt), (JobState::Dead, 2));
}

/// A worker process that was killed: it claimed and was never heard of again.
async fn claim_and_die(w: &World) -> Option<JobRow> {
    let kinds = ["a".to_owned()];
    let mut tx = w.begin().await;
    let claim = JobClaim { owner: "pod-0", kinds: &kinds, ttl: Duration::from_secs(60) };
    let row = tx.job_claim(&claim).await.unwrap();
    tx.commit().await.unwrap();
    row
}

async fn a_poison_job_stops_after_its_attempts_and_the_queue_goes_on(w: &World) {
    let poison = w.enqueue(&job("a").priority(9).max_attempts(3)).await;
    let good = w.enqueue(&job("a")).await;
    let handlers = || Handlers::new().with("a", Run(|_: &JobContext| Ok(Outcome::Done(None))));
    let worker = Worker::with_events(w.store(), handlers(), quick(), Arc::new(AlertMail));
    for attempt in 1..=3 {
        let row = claim_and_die(w).await.unwrap();
        assert_eq!((row.job_id, row.attempt), (poison.clone(), attempt));
        assert_eq!(worker.reap().await.unwrap(), 0, "its lease still runs");
        w.pass(61);
        assert_eq!(worker.reap().await.unwrap(), 1);
        w.pass(30);
    }
    let row = w.job(&poison).await;
    assert_eq!(row.state, JobState::Dead);
    assert!(row.last_error.unwrap().contains("each of 3 attempts"));
    assert_eq!(worker.drain().await.unwrap(), 1);
    assert_eq!(w.job(&good).await.state, JobState::Succeeded);
    assert_eq!(w.store().mail_list(&w.app, 9).await.unwrap().len(), 1);
}

/// Waits for `go` in its first attempt, then makes an effect and completes in one commit.
struct Slow {
    begun: Arc<Notify>,
    go: Arc<Notify>,
    lost: Arc<AtomicUsize>,
}

#[async_trait]
impl JobHandler for Slow {
    async fn run(&self, ctx: &JobContext) -> Result<Outcome, JobError> {
        if ctx.job().attempt == 1 {
            self.begun.notify_one();
            self.go.notified().await;
        }
        let mut tx = ctx.begin(DateTime::default()).await?;
        if let Err(e) = ctx.fence(&mut tx).await {
            self.lost.fetch_add(1, Ordering::SeqCst);
            return Err(e);
        }
        tx.audit_append(ctx.app(), "system", "publish", "model/1", &json!({"attempt": ctx.job().attempt})).await?;
        ctx.succeed(&mut tx, None).await?;
        tx.commit().await?;
        Ok(Outcome::Committed)
    }
}

async fn a_stale_attempt_makes_no_effect(w: &World) {
    let id = w.enqueue(&job("a")).await;
    let (begun, go, lost) = (Arc::new(Notify::new()), Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
    let slow = || Slow { begun: begun.clone(), go: go.clone(), lost: lost.clone() };
    // The first worker stalls: its heartbeat does not come through.
    let options = flywheel_jobs::WorkerOptions { heartbeat: Duration::from_secs(3600), ..quick() };
    let stalled = Worker::new(w.store(), Handlers::new().with("a", slow()), options);
    let stale = tokio::spawn(async move { stalled.run_one().await.unwrap() });
    begun.notified().await;
    w.pass(61);
    let fresh = Worker::new(w.store(), Handlers::new().with("a", slow()), quick());
    assert_eq!(fresh.reap().await.unwrap(), 1);
    w.pass(60);
    assert_eq!(fresh.run_one().await.unwrap(), Some(id.clone()));
    go.notify_one();
    stale.await.unwrap();
    assert_eq!(lost.load(Ordering::SeqCst), 1);
    assert_eq!(w.effects("model/1").await, 1);
    let row = w.job(&id).await;
    assert_eq!((row.state, row.attempt), (JobState::Succeeded, 2));
}

async fn effect_and_completion_are_one_commit(w: &World) {
    let id = w.enqueue(&job("a")).await;
    let go = Arc::new(Notify::new());
    go.notify_one();
    let slow = Slow { begun: Arc::default(), go, lost: Arc::default() };
    let worker = Worker::new(w.store(), Handlers::new().with("a", slow), quick());
    assert_eq!(worker.drain().await.unwrap(), 1);
    assert_eq!((w.effects("model/1").await, w.job(&id).await.state), (1, JobState::Succeeded));
}

struct Resumes;

#[async_trait]
impl JobHandler for Resumes {
    async fn run(&self, ctx: &JobContext) -> Result<Outcome, JobError> {
        match &ctx.job().checkpoint_uri {
            None => {
                ctx.checkpoint("objects/step-20").await?;
                ctx.progress(&json!({"done": 20, "of": 40})).await?;
                Err(JobError::retryable("out of memory"))
            }
            Some(uri) => Ok(Outcome::with(json!({"from": uri}))),
        }
    }
}

async fn the_next_attempt_finds_the_checkpoint(w: &World) {
    let id = w.enqueue(&job("lora")).await;
    let worker = Worker::new(w.store(), Handlers::new().with("lora", Resumes), quick());
    worker.drain().await.unwrap();
    assert_eq!(w.job(&id).await.progress, Some(json!({"done": 20, "of": 40})));
    w.pass(60);
    worker.drain().await.unwrap();
    assert_eq!(w.job(&id).await.result, Some(json!({"from": "objects/step-20"})));
}

/// Counts how many run at a time.
struct Gauge {
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

#[async_trait]
impl JobHandler for Gauge {
    async fn run(&self, _: &JobContext) -> Result<Outcome, JobError> {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        self.now.fetch_sub(1, Ordering::SeqCst);
        Ok(Outcome::Done(None))
    }
}

async fn jobs_of_one_key_run_one_after_another(w: &World) {
    for _ in 0..12 {
        w.enqueue(&job("a").concurrency("train:shop", 1)).await;
    }
    let (now, most) = (Arc::default(), Arc::new(AtomicUsize::new(0)));
    let gauge = Gauge { now, most: most.clone() };
    let options = flywheel_jobs::WorkerOptions { slots: 4, ..quick() };
    let worker = Worker::new(w.store(), Handlers::new().with("a", gauge), options);
    let store = w.store();
    let app = w.app.clone();
    worker
        .run(async move {
            while store.job_counts(Some(&app)).await.unwrap().iter().any(|c| c.state != JobState::Succeeded) {
                tokio::task::yield_now().await;
            }
        })
        .await;
    assert_eq!(most.load(Ordering::SeqCst), 1);
    assert_eq!(w.in_state(JobState::Succeeded).await.len(), 12);
}
