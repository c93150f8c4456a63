//! Background jobs as rows under a lease. The attempt number is the fencing token: it rises with each claim, and every
//! write of a worker says `WHERE job_id = ? AND attempt = ? AND state = 'running'`. Policy (back-off, when a job is
//! dead) is in the jobs crate; here is the SQL.
//!
//! All times of a job except `scheduled_for` are lease time (never virtual), not business time.

mod claim;
mod lease;
mod operator;
mod turn;

use crate::query::{FromRow, Row, json_text, q};
use crate::{Error, Result, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, JobId, JobState};
use serde::Serialize;
use serde_json::Value;

pub use claim::JobClaim;
pub use lease::JobPulse;
pub use operator::{JobCancel, JobCount, JobFilter};

/// One job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobRow {
    pub job_id: JobId,
    pub app_id: AppId,
    /// A verb, for example `requantize`.
    pub kind: String,
    pub payload: Value,
    pub state: JobState,
    /// Higher runs first.
    pub priority: i64,
    /// Not before this time.
    pub run_at: DateTime<Utc>,
    /// At most `concurrency_limit` jobs of this key run at a time, over all apps and workers.
    pub concurrency_key: Option<String>,
    pub concurrency_limit: i64,
    pub dedup_key: Option<String>,
    /// How often it was claimed: the fencing token.
    pub attempt: i64,
    /// Claims that do not count against `max_attempts` (the worker was shut down).
    pub uncounted: i64,
    pub max_attempts: i64,
    pub lease_owner: Option<String>,
    pub lease_expires_at: Option<DateTime<Utc>>,
    pub cancel_requested_at: Option<DateTime<Utc>>,
    pub progress: Option<Value>,
    pub checkpoint_uri: Option<String>,
    pub result: Option<Value>,
    pub last_error: Option<String>,
    pub schedule_id: Option<String>,
    /// The slot it fills (business time).
    pub scheduled_for: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub finished_at: Option<DateTime<Utc>>,
}

impl JobRow {
    /// Attempts that count.
    #[must_use]
    pub fn counted_attempts(&self) -> i64 {
        self.attempt - self.uncounted
    }
    /// Whether a failure of the current attempt is the last one allowed.
    #[must_use]
    pub fn is_last_attempt(&self) -> bool {
        self.counted_attempts() >= self.max_attempts
    }
    /// Who may write about it.
    #[must_use]
    pub fn token(&self) -> JobToken {
        JobToken { job_id: self.job_id.clone(), attempt: self.attempt }
    }
}

/// The right to write about a running job: valid until somebody else claims it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobToken {
    pub job_id: JobId,
    pub attempt: i64,
}

impl FromRow for JobRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            job_id: row.parsed("job_id")?,
            app_id: row.parsed("app_id")?,
            kind: row.text("kind")?,
            payload: row.json("payload")?,
            state: row.parsed("state")?,
            priority: row.int("priority")?,
            run_at: row.time("run_at")?,
            concurrency_key: row.opt_text("concurrency_key")?,
            concurrency_limit: row.int("concurrency_limit")?,
            dedup_key: row.opt_text("dedup_key")?,
            attempt: row.int("attempt")?,
            uncounted: row.int("uncounted")?,
            max_attempts: row.int("max_attempts")?,
            lease_owner: row.opt_text("lease_owner")?,
            lease_expires_at: row.opt_time("lease_expires_at")?,
            cancel_requested_at: row.opt_time("cancel_requested_at")?,
            progress: row.opt_json("progress")?,
            checkpoint_uri: row.opt_text("checkpoint_uri")?,
            result: row.opt_json("result")?,
            last_error: row.opt_text("last_error")?,
            schedule_id: row.opt_text("schedule_id")?,
            scheduled_for: row.opt_time("scheduled_for")?,
            created_at: row.time("created_at")?,
            started_at: row.opt_time("started_at")?,
            finished_at: row.opt_time("finished_at")?,
        })
    }
}

const COLUMNS: &str = "job_id, app_id, kind, payload, state, priority, run_at, concurrency_key, concurrency_limit, \
    dedup_key, attempt, uncounted, max_attempts, lease_owner, lease_expires_at, cancel_requested_at, progress, \
    checkpoint_uri, result, last_error, schedule_id, scheduled_for, created_at, started_at, finished_at";

/// A job to enqueue. Payloads carry their own version field (`{"v":1,…}`) and no prompt text.
#[derive(Debug, Clone, PartialEq)]
pub struct NewJob {
    pub kind: String,
    pub payload: Value,
    pub priority: i64,
    /// Lease time; `None`: at once.
    pub run_at: Option<DateTime<Utc>>,
    /// Key and how many jobs of it may run at a time.
    pub concurrency: Option<(String, u32)>,
    /// While a job of this app and kind with this key is queued or running, enqueueing again answers that job.
    pub dedup_key: Option<String>,
    pub max_attempts: u32,
    /// Schedule and, unless it was started by hand, the slot it fills.
    pub schedule: Option<(String, Option<DateTime<Utc>>)>,
}

impl NewJob {
    /// A job with priority 0, three attempts, to be run at once.
    #[must_use]
    pub fn new(kind: impl Into<String>, payload: Value) -> Self {
        Self {
            kind: kind.into(),
            payload,
            priority: 0,
            run_at: None,
            concurrency: None,
            dedup_key: None,
            max_attempts: 3,
            schedule: None,
        }
    }
    #[must_use]
    pub fn dedup(mut self, key: impl Into<String>) -> Self {
        self.dedup_key = Some(key.into());
        self
    }
    #[must_use]
    pub fn concurrency(mut self, key: impl Into<String>, limit: u32) -> Self {
        self.concurrency = Some((key.into(), limit));
        self
    }
    #[must_use]
    pub fn priority(mut self, priority: i64) -> Self {
        self.priority = priority;
        self
    }
    #[must_use]
    pub fn max_attempts(mut self, n: u32) -> Self {
        self.max_attempts = n;
        self
    }
    #[must_use]
    pub fn run_at(mut self, at: DateTime<Utc>) -> Self {
        self.run_at = Some(at);
        self
    }
}

/// Answer to an enqueue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Enqueued {
    New(JobId),
    /// An open job has the same dedup key, or the slot is filled already.
    Existing(JobId),
}

impl Enqueued {
    #[must_use]
    pub fn id(&self) -> &JobId {
        match self {
            Self::New(id) | Self::Existing(id) => id,
        }
    }
}

struct Id(JobId);

impl FromRow for Id {
    fn from_row(row: &Row) -> Result<Self> {
        row.parsed("job_id").map(Self)
    }
}

impl Tx {
    /// Enqueues a job with the rest of the transaction.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an empty kind or a limit of 0.
    pub async fn job_enqueue(&mut self, app: &AppId, new: &NewJob) -> Result<Enqueued> {
        let done = self.job_insert(app, new, JobState::Queued, None).await?;
        if matches!(done, Enqueued::New(_)) {
            self.wake_on_commit();
        }
        Ok(done)
    }

    /// Enqueues a look at what this transaction changes: a job with the same dedup key that waits will see the change,
    /// one that has begun may not, so another waits behind it.
    ///
    /// # Errors
    /// Those of [`Tx::job_enqueue`].
    pub async fn job_enqueue_look(&mut self, app: &AppId, new: &NewJob) -> Result<Enqueued> {
        let done = self.job_enqueue(app, new).await?;
        let (Enqueued::Existing(open), Some(key)) = (&done, &new.dedup_key) else { return Ok(done) };
        // held, so that it cannot begin before this transaction ends
        let hold = self.backend().hold_row();
        let sql = format!("SELECT job_id FROM jobs WHERE job_id = $1 AND state = 'queued'{hold}");
        let waits: Option<Id> = self.fetch_opt(q(&sql).bind(open)).await?;
        if waits.is_some() {
            return Ok(done);
        }
        let behind = format!("{key}/after/{open}");
        self.job_enqueue(app, &NewJob { dedup_key: Some(behind), ..new.clone() }).await
    }

    /// Writes down that a slot of a schedule was not run and why.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn job_skip(&mut self, app: &AppId, new: &NewJob, reason: &str) -> Result<Enqueued> {
        self.job_insert(app, new, JobState::Skipped, Some(reason)).await
    }

    async fn job_insert(
        &mut self,
        app: &AppId,
        new: &NewJob,
        state: JobState,
        error: Option<&str>,
    ) -> Result<Enqueued> {
        check(new)?;
        let now = self.lease_now_us();
        let id = job_id(new)?;
        let slot = new.schedule.as_ref().and_then(|(_, slot)| *slot);
        let sql = "INSERT INTO jobs (job_id, app_id, kind, payload, state, priority, run_at, concurrency_key, \
                   concurrency_limit, dedup_key, attempt, uncounted, max_attempts, last_error, schedule_id, \
                   scheduled_for, created_at, finished_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, 0, 0, $11, $12, $13, $14, $15, $16) \
                   ON CONFLICT DO NOTHING";
        let query = q(sql)
            .bind(&id)
            .bind(app)
            .bind(&new.kind)
            .bind(json_text("payload", &new.payload)?)
            .bind(state)
            .bind(new.priority)
            .bind(new.run_at.map_or(now, |t| t.timestamp_micros()))
            .bind(new.concurrency.as_ref().map(|(key, _)| key.clone()))
            .bind(new.concurrency.as_ref().map_or(1, |(_, limit)| i64::from(*limit)))
            .bind(&new.dedup_key)
            .bind(new.max_attempts.max(1))
            .bind(error)
            .bind(new.schedule.as_ref().map(|(id, _)| id.clone()))
            .bind(slot)
            .bind(now)
            .bind((state == JobState::Skipped).then_some(now));
        if self.execute(query).await? == 1 {
            return Ok(Enqueued::New(id));
        }
        self.job_existing(app, new).await
    }

    async fn job_existing(&mut self, app: &AppId, new: &NewJob) -> Result<Enqueued> {
        let found: Option<Id> = match &new.schedule {
            Some((schedule, Some(slot))) => {
                let sql = "SELECT job_id FROM jobs WHERE schedule_id = $1 AND scheduled_for = $2";
                self.fetch_opt(q(sql).bind(schedule).bind(*slot)).await?
            }
            _ => {
                let sql = "SELECT job_id FROM jobs WHERE app_id = $1 AND kind = $2 AND dedup_key = $3 \
                           AND state IN ('queued', 'running')";
                self.fetch_opt(q(sql).bind(app).bind(&new.kind).bind(&new.dedup_key)).await?
            }
        };
        match found {
            Some(Id(id)) => Ok(Enqueued::Existing(id)),
            // The other job finished between the insert and the look-up.
            None => Err(Error::conflict("job", &new.kind, "an equal job finished just now; try again")),
        }
    }
}

/// Slots get a derived id, everything else a fresh one.
fn job_id(new: &NewJob) -> Result<JobId> {
    let text = match &new.schedule {
        Some((schedule, Some(slot))) => {
            let slot = slot.format("%Y%m%dT%H%M%S%6fZ");
            format!("slot-{slot}-{}", flywheel_types::Digest::of(schedule.as_bytes()).to_hex())
        }
        _ => crate::ids::fresh("job"),
    };
    JobId::new(text).map_err(|e| Error::invalid("job id", e.to_string()))
}

fn check(new: &NewJob) -> Result<()> {
    if new.kind.is_empty() {
        return Err(Error::invalid("job kind", "it is empty"));
    }
    if new.concurrency.as_ref().is_some_and(|(_, limit)| *limit == 0) {
        return Err(Error::invalid("job concurrency", "a limit of 0 would never let it run"));
    }
    Ok(())
}
