//! What the holder of a lease may do. Every statement is fenced by job and attempt; zero rows mean the lease is lost.

use super::{COLUMNS, JobRow, JobToken};
use crate::query::{FromRow, Query, Row, json_text, q};
use crate::{Error, Result, Tx};
use serde_json::Value;
use std::time::Duration;

/// Answer to a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobPulse {
    /// Somebody asked to cancel the job.
    pub cancel_requested: bool,
    /// Lease time of the new end of the lease, microseconds.
    pub expires_at_us: i64,
}

impl FromRow for JobPulse {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            cancel_requested: row.opt_int("cancel_requested_at")?.is_some(),
            expires_at_us: row.int("lease_expires_at")?,
        })
    }
}

pub(super) fn lost(token: &JobToken) -> Error {
    Error::conflict("job", &token.job_id, format!("the lease of attempt {} is lost", token.attempt))
}

const MINE: &str = "WHERE job_id = $1 AND attempt = $2 AND state = 'running'";

impl Tx {
    async fn job_fenced(&mut self, token: &JobToken, query: Query) -> Result<()> {
        match self.execute(query).await? {
            0 => Err(lost(token)),
            _ => Ok(()),
        }
    }

    /// The fence of a side effect: call it in the transaction that makes the effect. Until that transaction ends
    /// nobody else can take the job.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease is lost: drop the transaction and stop working.
    pub async fn job_fence(&mut self, token: &JobToken) -> Result<()> {
        // An update that changes nothing takes the row lock on both databases.
        let sql = format!("UPDATE jobs SET attempt = attempt {MINE}");
        self.job_fenced(token, q(sql).bind(&token.job_id).bind(token.attempt)).await
    }

    /// Renews the lease.
    ///
    /// # Errors
    /// [`Error::Conflict`] when it is lost.
    pub async fn job_heartbeat(&mut self, token: &JobToken, ttl: Duration) -> Result<JobPulse> {
        let until = self.lease_now_us().saturating_add(i64::try_from(ttl.as_micros()).unwrap_or(i64::MAX));
        let sql =
            format!("UPDATE jobs SET lease_expires_at = $3 {MINE} RETURNING cancel_requested_at, lease_expires_at");
        let query = q(sql).bind(&token.job_id).bind(token.attempt).bind(until);
        self.fetch_opt(query).await?.ok_or_else(|| lost(token))
    }

    /// Stores what the job wants to show.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease is lost.
    pub async fn job_progress_set(&mut self, token: &JobToken, progress: &Value) -> Result<()> {
        let sql = format!("UPDATE jobs SET progress = $3 {MINE}");
        let text = json_text("progress", progress)?;
        self.job_fenced(token, q(sql).bind(&token.job_id).bind(token.attempt).bind(text)).await
    }

    /// Stores where the next attempt may go on.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease is lost.
    pub async fn job_checkpoint_set(&mut self, token: &JobToken, uri: &str) -> Result<()> {
        let sql = format!("UPDATE jobs SET checkpoint_uri = $3 {MINE}");
        self.job_fenced(token, q(sql).bind(&token.job_id).bind(token.attempt).bind(uri)).await
    }

    /// Running → succeeded.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease is lost.
    pub async fn job_succeed(&mut self, token: &JobToken, result: Option<&Value>) -> Result<()> {
        let now = self.lease_now_us();
        let result = result.map(|r| json_text("result", r)).transpose()?;
        let sql = format!(
            "UPDATE jobs SET state = 'succeeded', result = $3, finished_at = $4, last_error = NULL, \
             lease_owner = NULL, lease_expires_at = NULL {MINE}"
        );
        let query = q(sql).bind(&token.job_id).bind(token.attempt).bind(result).bind(now);
        self.job_fenced(token, query).await
    }

    /// Running → queued again after `wait`. `counted = false` when the attempt must not count (shutdown).
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease is lost.
    pub async fn job_requeue(&mut self, token: &JobToken, wait: Duration, counted: bool, error: &str) -> Result<()> {
        let wait = i64::try_from(wait.as_micros()).unwrap_or(i64::MAX);
        let run_at = self.lease_now_us().saturating_add(wait);
        let sql = format!(
            "UPDATE jobs SET state = 'queued', run_at = $3, uncounted = uncounted + $4, last_error = $5, \
             lease_owner = NULL, lease_expires_at = NULL {MINE}"
        );
        let query = q(sql).bind(&token.job_id).bind(token.attempt).bind(run_at).bind(!counted).bind(error);
        self.wake_on_commit();
        self.job_fenced(token, query).await
    }

    /// Running → dead; answers the row for the alert.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease is lost.
    pub async fn job_bury(&mut self, token: &JobToken, error: &str) -> Result<JobRow> {
        self.job_end(token, "dead", Some(error)).await
    }

    /// Running → cancelled. The note of the cancel request stands, else `note`.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease is lost.
    pub async fn job_cancelled_set(&mut self, token: &JobToken, note: &str) -> Result<JobRow> {
        let sql = format!("UPDATE jobs SET last_error = $3 {MINE} AND cancel_requested_at IS NULL");
        self.execute(q(sql).bind(&token.job_id).bind(token.attempt).bind(note)).await?;
        self.job_end(token, "cancelled", None).await
    }

    async fn job_end(&mut self, token: &JobToken, state: &str, error: Option<&str>) -> Result<JobRow> {
        let now = self.lease_now_us();
        let sql = format!(
            "UPDATE jobs SET state = $3, finished_at = $4, last_error = COALESCE($5, last_error), \
             lease_owner = NULL, lease_expires_at = NULL {MINE} RETURNING {COLUMNS}"
        );
        let query = q(sql).bind(&token.job_id).bind(token.attempt).bind(state).bind(now).bind(error);
        self.fetch_opt(query).await?.ok_or_else(|| lost(token))
    }
}
