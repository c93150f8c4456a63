//! The worker: claims one job per slot, runs it under a heartbeat, settles it and claims the next in one commit.

use crate::handler::LogOnly;
use crate::settle::{Ended, classify, settle};
use crate::{Backoff, Handlers, JobContext, JobError, JobEvents, StopReason, heartbeat, reap};
use chrono::DateTime;
use flywheel_store::jobs::{JobClaim, JobRow};
use flywheel_store::{Error, Result, Store, ids};
use flywheel_types::JobId;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// How often the distance to the database's clock is measured again.
const CLOCK_SYNC_US: i64 = 60_000_000;

/// How a worker works.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// Jobs at a time.
    pub slots: usize,
    /// Length of a lease: a dead worker's job is taken over after at most this time.
    pub lease: Duration,
    /// Time between heartbeats; a quarter of the lease or less.
    pub heartbeat: Duration,
    /// How long an idle slot waits before it looks again, if no hint comes from this process.
    pub poll: Duration,
    /// How long a handler may take to stop after it was asked to.
    pub grace: Duration,
    /// How often a busy worker looks for expired leases; an idle one always does.
    pub reap_every: Duration,
    pub backoff: Backoff,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        Self {
            slots: 1,
            lease: Duration::from_secs(60),
            heartbeat: Duration::from_secs(15),
            poll: Duration::from_secs(1),
            grace: Duration::from_secs(20),
            reap_every: Duration::from_secs(2),
            backoff: Backoff::default(),
        }
    }
}

/// Runs jobs of the registered kinds. Clones share everything.
#[derive(Clone)]
pub struct Worker {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    handlers: Handlers,
    kinds: Vec<String>,
    events: Arc<dyn JobEvents>,
    options: WorkerOptions,
    owner: String,
    reaped_at_us: AtomicI64,
    synced_at_us: AtomicI64,
}

impl Worker {
    /// A worker under a name of its own: a restarted process never inherits the leases of its predecessor.
    #[must_use]
    pub fn new(store: Store, handlers: Handlers, options: WorkerOptions) -> Self {
        Self::with_events(store, handlers, options, Arc::new(LogOnly))
    }

    /// [`Worker::new`] with a part in the transaction that buries a job.
    #[must_use]
    pub fn with_events(store: Store, handlers: Handlers, options: WorkerOptions, events: Arc<dyn JobEvents>) -> Self {
        let kinds = handlers.kinds();
        let inner = Inner {
            store,
            handlers,
            kinds,
            events,
            options,
            owner: ids::fresh("worker"),
            reaped_at_us: AtomicI64::new(i64::MIN),
            synced_at_us: AtomicI64::new(i64::MIN),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Works until `shutdown` resolves. Running jobs are then asked to stop and given the grace time; what has not
    /// ended by then is queued again without counting the attempt.
    pub async fn run(&self, shutdown: impl Future<Output = ()> + Send) {
        let (tell, told) = watch::channel(false);
        let mut slots = JoinSet::new();
        for slot in 0..self.inner.options.slots.max(1) {
            let (inner, told) = (Arc::clone(&self.inner), told.clone());
            slots.spawn(async move { inner.slot(slot, told).await });
        }
        shutdown.await;
        tell.send_replace(true);
        while let Some(ended) = slots.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "worker slot ended abnormally");
            }
        }
    }

    /// Claims and runs one due job to its end in the caller's task; `None` when none is due. For tests, drains and
    /// programs with their own loop.
    ///
    /// # Errors
    /// Those of the claim. What becomes of the job is never an error here.
    pub async fn run_one(&self) -> Result<Option<JobId>> {
        let owner = format!("{}/one", self.inner.owner);
        let (_tell, told) = watch::channel(false);
        let Some(job) = self.inner.claim(&owner).await? else {
            return Ok(None);
        };
        let id = job.job_id.clone();
        self.inner.work(&owner, job, &told, false).await;
        Ok(Some(id))
    }

    /// [`Worker::run_one`] until nothing is due; answers how many ran.
    ///
    /// # Errors
    /// Those of the claim.
    pub async fn drain(&self) -> Result<usize> {
        let mut ran = 0;
        while self.run_one().await?.is_some() {
            ran += 1;
        }
        Ok(ran)
    }

    /// Clears expired leases now instead of with the next claim; answers how many were found.
    ///
    /// # Errors
    /// Those of the transaction.
    pub async fn reap(&self) -> Result<usize> {
        let mut tx = self.inner.store.begin(DateTime::default()).await?;
        let found = reap::reap(&mut tx, &self.inner.options.backoff, self.inner.events.as_ref()).await?;
        tx.commit().await?;
        Ok(found)
    }
}

impl Inner {
    async fn slot(self: Arc<Self>, slot: usize, told: watch::Receiver<bool>) {
        let owner = format!("{}/{slot}", self.owner);
        let mut next = None;
        while !*told.borrow() {
            // Made before the claim, so that a job enqueued while it runs is not overlooked.
            let hint = self.store.job_hint();
            let job = match next.take() {
                Some(job) => Some(job),
                None => self.claim(&owner).await.unwrap_or_else(|error| {
                    tracing::warn!(%error, "claim failed; trying again");
                    None
                }),
            };
            match job {
                Some(job) => next = self.work(&owner, job, &told, true).await,
                None => self.idle(hint, told.clone()).await,
            }
        }
        if let Some(job) = next {
            self.give_back(&job).await;
        }
    }

    async fn idle(&self, hint: impl Future<Output = ()>, mut told: watch::Receiver<bool>) {
        tokio::select! {
            () = sleep(self.options.poll) => {}
            () = hint => {}
            _ = told.wait_for(|stop| *stop) => {}
        }
    }

    async fn claim(&self, owner: &str) -> Result<Option<JobRow>> {
        self.sync_clock().await;
        let mut tx = self.store.begin(DateTime::default()).await?;
        let job = self.claim_in(&mut tx, owner, true).await?;
        tx.commit().await?;
        Ok(job)
    }

    /// Reaps when it is time, claims, and reaps when the claim found nothing: a job whose worker died is then taken
    /// over as soon as its lease ends, also by a worker that has nothing else to do.
    async fn claim_in(&self, tx: &mut flywheel_store::Tx, owner: &str, idle: bool) -> Result<Option<JobRow>> {
        let due = self.reap_is_due();
        if due {
            reap::reap(tx, &self.options.backoff, self.events.as_ref()).await?;
            self.reaped_at_us.store(self.store.lease_now_us(), Ordering::Relaxed);
        }
        let job = tx.job_claim(&self.claim_for(owner)).await?;
        if job.is_none() && idle && !due {
            reap::reap(tx, &self.options.backoff, self.events.as_ref()).await?;
        }
        Ok(job)
    }

    fn reap_is_due(&self) -> bool {
        let every = i64::try_from(self.options.reap_every.as_micros()).unwrap_or(i64::MAX);
        self.store.lease_now_us().saturating_sub(self.reaped_at_us.load(Ordering::Relaxed)) >= every
    }

    fn claim_for<'a>(&'a self, owner: &'a str) -> JobClaim<'a> {
        JobClaim { owner, kinds: &self.kinds, ttl: self.options.lease }
    }

    async fn sync_clock(&self) {
        let now = self.store.lease_now_us();
        if now.saturating_sub(self.synced_at_us.load(Ordering::Relaxed)) < CLOCK_SYNC_US {
            return;
        }
        self.synced_at_us.store(now, Ordering::Relaxed);
        if let Err(error) = self.store.lease_clock_sync().await {
            tracing::warn!(%error, "the database's clock could not be read");
        }
    }

    /// Runs one claimed job to its end; answers the next one, claimed in the commit that settled this one.
    async fn work(&self, owner: &str, job: JobRow, told: &watch::Receiver<bool>, claim_next: bool) -> Option<JobRow> {
        let (stop, stopped) = watch::channel(None);
        let token = job.token();
        let options = &self.options;
        let pulse = heartbeat::run(self.store.clone(), token, options.lease, options.heartbeat, stop.clone());
        let pulse = AbortOnDrop(tokio::spawn(pulse));
        let ctx = JobContext::new(self.store.clone(), job.clone(), stopped.clone());
        let ended = self.attempt(ctx, &stop, told.clone()).await;
        let ended = classify(ended, *stopped.borrow());
        tracing::debug!(job.id = %job.job_id, job.kind, job.attempt, ?ended, "attempt ended");
        // The heartbeat goes on meanwhile: until the end is written down, the job is ours.
        let next = self.finish(owner, &job, &ended, &stopped, claim_next && !*told.borrow()).await;
        drop(pulse);
        next
    }

    /// The handler in a task of its own, so that a panic ends the attempt and not the worker.
    async fn attempt(
        &self,
        ctx: JobContext,
        stop: &watch::Sender<Option<StopReason>>,
        mut told: watch::Receiver<bool>,
    ) -> Ended {
        let Some(handler) = self.handlers.get(&ctx.job().kind) else {
            return Err(JobError::Retryable(format!("no handler for `{}`", ctx.job().kind)));
        };
        let mut stopped = stop.subscribe();
        let mut task = AbortOnDrop(tokio::spawn(async move { handler.run(&ctx).await }));
        loop {
            tokio::select! {
                ended = &mut task.0 => return flatten(ended),
                _ = told.wait_for(|t| *t), if stop.borrow().is_none() => {
                    heartbeat::set(stop, StopReason::Interrupted);
                }
                _ = stopped.wait_for(Option::is_some) => break,
            }
        }
        match tokio::time::timeout(self.options.grace, &mut task.0).await {
            Ok(ended) => flatten(ended),
            Err(_) => {
                task.0.abort();
                Err(stopped.borrow().unwrap_or(StopReason::LeaseLost).into())
            }
        }
    }

    /// Settles `job` and claims the next in one transaction. An outage is waited out as long as the lease may last.
    async fn finish(
        &self,
        owner: &str,
        job: &JobRow,
        ended: &Ended,
        stopped: &watch::Receiver<Option<StopReason>>,
        claim_next: bool,
    ) -> Option<JobRow> {
        let give_up = Instant::now() + self.options.lease;
        loop {
            match self.finish_once(owner, job, ended, claim_next).await {
                Ok(next) => return next,
                Err(Error::Conflict { what: "job", .. }) => {
                    tracing::warn!(job.id = %job.job_id, job.attempt, "lease lost; the attempt counts for nothing");
                    return None;
                }
                Err(error) => {
                    tracing::warn!(job.id = %job.job_id, %error, "end of attempt not written; trying again");
                    let lost = *stopped.borrow() == Some(StopReason::LeaseLost);
                    if lost || Instant::now() >= give_up {
                        return None;
                    }
                    sleep(Duration::from_millis(250)).await;
                }
            }
        }
    }

    async fn finish_once(&self, owner: &str, job: &JobRow, ended: &Ended, claim_next: bool) -> Result<Option<JobRow>> {
        let nothing = matches!(ended, Ok(crate::Outcome::Committed) | Err(JobError::LeaseLost));
        if nothing && !claim_next {
            return Ok(None);
        }
        if let (Ok(crate::Outcome::Done(result)), true, false) = (ended, claim_next, self.reap_is_due()) {
            // The common case in one statement. It claims no job that needs a look at other rows; the slot does that.
            let claim = self.claim_for(owner);
            return self.store.job_succeed_and_claim(&job.token(), result.as_ref(), &claim).await;
        }
        let mut tx = self.store.begin(DateTime::default()).await?;
        settle(&mut tx, job, ended, &self.options.backoff, self.events.as_ref()).await?;
        let next = if claim_next { self.claim_in(&mut tx, owner, false).await? } else { None };
        tx.commit().await?;
        Ok(next)
    }

    /// A job that was claimed with the last settle but not begun before the shut-down.
    async fn give_back(&self, job: &JobRow) {
        let ended = Err(JobError::Interrupted);
        if let Err(error) = self.finish_once("", job, &ended, false).await {
            tracing::warn!(job.id = %job.job_id, %error, "job not given back; its lease will run out");
        }
    }
}

fn flatten(ended: std::result::Result<Ended, tokio::task::JoinError>) -> Ended {
    ended.unwrap_or_else(|e| {
        if e.is_panic() {
            Err(JobError::Retryable("the handler panicked; see the log".into()))
        } else {
            Err(JobError::Interrupted)
        }
    })
}

/// Stops a task with its owner: no heartbeat or handler outlives the attempt.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
