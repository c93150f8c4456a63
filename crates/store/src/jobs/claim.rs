//! Claiming: the one place where a job becomes running.

use super::{COLUMNS, JobRow};
use crate::dialect::{Backend, placeholders};
use crate::query::{Count, FromRow, Row, q};
use crate::{Result, Tx};
use flywheel_types::Digest;
use std::time::Duration;

/// How many busy concurrency keys one claim steps over before it gives up until the next poll.
const KEY_TRIES: usize = 8;

/// Who claims, what, and for how long.
#[derive(Debug, Clone)]
pub struct JobClaim<'a> {
    /// Unique per process start and worker slot.
    pub owner: &'a str,
    pub kinds: &'a [String],
    pub ttl: Duration,
}

impl JobClaim<'_> {
    /// End of a lease that begins at `now`, microseconds.
    pub(super) fn until_us(&self, now: i64) -> i64 {
        now.saturating_add(i64::try_from(self.ttl.as_micros()).unwrap_or(i64::MAX))
    }
}

/// Selects the next due job whose concurrency key, if any, has room: highest priority, then earliest `run_at`. `$1` is
/// lease time now, `kinds` the placeholders of the kinds, `and` a further condition on `j`. The row is held.
pub(super) fn due(columns: &str, kinds: &str, and: &str, backend: Backend) -> String {
    format!(
        "SELECT {columns} FROM jobs j WHERE j.state = 'queued' AND j.run_at <= $1 AND j.kind IN ({kinds}) {and} \
         AND (j.concurrency_key IS NULL OR (SELECT COUNT(*) FROM jobs r WHERE r.state = 'running' \
         AND r.concurrency_key = j.concurrency_key) < j.concurrency_limit) \
         ORDER BY j.priority DESC, j.run_at, j.job_id LIMIT 1{}",
        backend.skip_locked()
    )
}

struct Locked(bool);

impl FromRow for Locked {
    fn from_row(row: &Row) -> Result<Self> {
        row.int("ok").map(|v| Self(v == 1))
    }
}

impl Tx {
    /// Claims the next due job of the given kinds: highest priority, then earliest `run_at`. Its attempt is one higher
    /// than before. Concurrency keys are checked here, inside the claim.
    ///
    /// # Errors
    /// Those of the statements.
    pub async fn job_claim(&mut self, claim: &JobClaim<'_>) -> Result<Option<JobRow>> {
        if claim.kinds.is_empty() {
            return Ok(None);
        }
        let mut busy: Vec<String> = Vec::new();
        for _ in 0..KEY_TRIES {
            let Some(job) = self.job_claim_next(claim, &busy).await? else {
                return Ok(None);
            };
            let Some(key) = job.concurrency_key.clone() else {
                return Ok(Some(job));
            };
            if self.job_key_free(&key, job.concurrency_limit).await? {
                return Ok(Some(job));
            }
            self.job_unclaim(&job).await?;
            busy.push(key);
        }
        Ok(None)
    }

    async fn job_claim_next(&mut self, claim: &JobClaim<'_>, busy: &[String]) -> Result<Option<JobRow>> {
        let now = self.lease_now_us();
        let not_busy = if busy.is_empty() {
            String::new()
        } else {
            let keys = placeholders(4 + claim.kinds.len(), busy.len());
            format!("AND (j.concurrency_key IS NULL OR j.concurrency_key NOT IN ({keys}))")
        };
        let due = due("j.job_id", &placeholders(4, claim.kinds.len()), &not_busy, self.backend());
        let sql = format!(
            "UPDATE jobs SET state = 'running', attempt = attempt + 1, lease_owner = $2, lease_expires_at = $3, \
             started_at = $1 WHERE job_id = ({due}) RETURNING {COLUMNS}"
        );
        let mut query = q(sql).bind(now).bind(claim.owner).bind(claim.until_us(now));
        for kind in claim.kinds {
            query = query.bind(kind);
        }
        for key in busy {
            query = query.bind(key);
        }
        self.fetch_opt(query).await
    }

    /// Whether the key is within its limit with the job just claimed. On PostgreSQL two claims could each take a job
    /// of one key without seeing the other's, so the count is taken under a lock on the key.
    async fn job_key_free(&mut self, key: &str, limit: i64) -> Result<bool> {
        let Some(lock) = self.backend().try_lock() else {
            return Ok(true);
        };
        let mut first = [0u8; 8];
        first.copy_from_slice(&Digest::of(key.as_bytes()).0[..8]);
        let got: Option<Locked> = self.fetch_opt(q(lock).bind(i64::from_be_bytes(first))).await?;
        if !got.is_some_and(|l| l.0) {
            return Ok(false);
        }
        let sql = "SELECT COUNT(*) AS n FROM jobs WHERE state = 'running' AND concurrency_key = $1";
        let count: Option<Count> = self.fetch_opt(q(sql).bind(key)).await?;
        Ok(count.is_some_and(|c| c.0 <= limit))
    }

    /// Takes back a claim that nobody has seen yet.
    async fn job_unclaim(&mut self, job: &JobRow) -> Result<()> {
        let sql = "UPDATE jobs SET state = 'queued', attempt = attempt - 1, lease_owner = NULL, \
                   lease_expires_at = NULL, started_at = NULL WHERE job_id = $1 AND attempt = $2";
        self.execute(q(sql).bind(&job.job_id).bind(job.attempt)).await.map(|_| ())
    }

    /// Running jobs whose lease ran out, oldest first, locked for this transaction so that two reapers share them.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn job_list_expired(&mut self, limit: u32) -> Result<Vec<JobRow>> {
        let now = self.lease_now_us();
        let sql = format!(
            "SELECT {COLUMNS} FROM jobs WHERE state = 'running' AND lease_expires_at <= $1 \
             ORDER BY lease_expires_at LIMIT $2{}",
            self.backend().skip_locked()
        );
        self.fetch(q(sql).bind(now).bind(limit)).await
    }
}
