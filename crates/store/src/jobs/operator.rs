//! What people and reports do with jobs: look, cancel, run a dead one again, clear away old ones.

use super::{COLUMNS, JobRow};
use crate::query::{FromRow, Row, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, JobId, JobState};
use serde::Serialize;

/// Which jobs to list.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct JobFilter {
    pub state: Option<JobState>,
    pub kind: Option<String>,
    pub schedule_id: Option<String>,
}

/// What a cancel request did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum JobCancel {
    /// It was queued and is cancelled.
    Done,
    /// It is running; its worker learns of it with the next heartbeat.
    Requested,
    /// It had ended before.
    TooLate(JobState),
}

/// Number of jobs of a kind in a state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct JobCount {
    pub kind: String,
    pub state: JobState,
    pub count: i64,
}

impl FromRow for JobCount {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self { kind: row.text("kind")?, state: row.parsed("state")?, count: row.int("n")? })
    }
}

impl Store {
    /// The job.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn job_get(&self, app: &AppId, job: &JobId) -> Result<Option<JobRow>> {
        let sql = format!("SELECT {COLUMNS} FROM jobs WHERE app_id = $1 AND job_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(job)).await
    }

    /// Jobs of the app, newest first, at most `limit`.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn job_list(&self, app: &AppId, filter: &JobFilter, limit: u32) -> Result<Vec<JobRow>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM jobs WHERE app_id = $1 AND ($2 = '' OR state = $2) \
             AND ($3 = '' OR kind = $3) AND ($4 = '' OR schedule_id = $4) \
             ORDER BY created_at DESC, job_id DESC LIMIT $5"
        );
        let query = q(sql)
            .bind(app)
            .bind(filter.state.map_or("", JobState::as_str))
            .bind(filter.kind.as_deref().unwrap_or(""))
            .bind(filter.schedule_id.as_deref().unwrap_or(""))
            .bind(limit);
        self.fetch(query).await
    }

    /// Numbers for the dashboard: of one app, or of all for metrics.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn job_counts(&self, app: Option<&AppId>) -> Result<Vec<JobCount>> {
        let sql = "SELECT kind, state, COUNT(*) AS n FROM jobs WHERE ($1 = '' OR app_id = $1) \
                   GROUP BY kind, state ORDER BY kind, state";
        self.fetch(q(sql).bind(app.map_or("", AppId::as_str))).await
    }
}

impl Tx {
    /// The job as this transaction sees it.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn job_get(&mut self, app: &AppId, job: &JobId) -> Result<Option<JobRow>> {
        let sql = format!("SELECT {COLUMNS} FROM jobs WHERE app_id = $1 AND job_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(job)).await
    }

    /// Open jobs (queued or running) of a schedule, oldest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn job_list_open(&mut self, schedule_id: &str) -> Result<Vec<JobRow>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM jobs WHERE schedule_id = $1 AND state IN ('queued', 'running') \
             ORDER BY created_at, job_id"
        );
        self.fetch(q(sql).bind(schedule_id)).await
    }

    /// Cancels a queued job at once, asks the worker of a running one to stop.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn job_cancel(&mut self, app: &AppId, job: &JobId, who: &str) -> Result<JobCancel> {
        let now = self.lease_now_us();
        let note = format!("cancelled by {who}");
        let sql = "UPDATE jobs SET state = 'cancelled', finished_at = $3, cancel_requested_at = $3, last_error = $4 \
                   WHERE app_id = $1 AND job_id = $2 AND state = 'queued'";
        if self.execute(q(sql).bind(app).bind(job).bind(now).bind(&note)).await? == 1 {
            return Ok(JobCancel::Done);
        }
        let sql = "UPDATE jobs SET cancel_requested_at = COALESCE(cancel_requested_at, $3), last_error = $4 \
                   WHERE app_id = $1 AND job_id = $2 AND state = 'running'";
        if self.execute(q(sql).bind(app).bind(job).bind(now).bind(&note)).await? == 1 {
            return Ok(JobCancel::Requested);
        }
        let row = self.job_get(app, job).await?.ok_or_else(|| Error::not_found("job", job))?;
        Ok(JobCancel::TooLate(row.state))
    }

    /// Queues a dead or cancelled job again with all its attempts; the fencing token goes on rising.
    ///
    /// # Errors
    /// [`Error::Conflict`] when it is in another state, or an open job has its dedup key by now.
    pub async fn job_revive(&mut self, app: &AppId, job: &JobId) -> Result<()> {
        let now = self.lease_now_us();
        let sql = "UPDATE jobs SET state = 'queued', uncounted = attempt, run_at = $3, finished_at = NULL, \
                   cancel_requested_at = NULL WHERE app_id = $1 AND job_id = $2 \
                   AND state IN ('dead', 'cancelled') AND NOT EXISTS (SELECT 1 FROM jobs o \
                   WHERE o.app_id = jobs.app_id AND o.kind = jobs.kind AND o.dedup_key = jobs.dedup_key \
                   AND o.state IN ('queued', 'running'))";
        if self.execute(q(sql).bind(app).bind(job).bind(now)).await? == 1 {
            self.wake_on_commit();
            return Ok(());
        }
        let row = self.job_get(app, job).await?.ok_or_else(|| Error::not_found("job", job))?;
        Err(Error::conflict("job", job, format!("it is {}, or an equal job is open already", row.state)))
    }

    /// Deletes ended jobs that finished before `before` (lease time); answers how many.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn job_prune(&mut self, before: DateTime<Utc>) -> Result<u64> {
        let sql = "DELETE FROM jobs WHERE state IN ('succeeded', 'cancelled', 'dead', 'skipped') \
                   AND finished_at < $1";
        self.execute(q(sql).bind(before)).await
    }
}
