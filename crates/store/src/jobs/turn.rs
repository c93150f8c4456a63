//! The turn of a busy worker: one job ends and the next is claimed, in one statement.

use super::claim::due;
use super::lease::lost;
use super::{COLUMNS, JobClaim, JobRow, JobToken};
use crate::dialect::{Backend, placeholders};
use crate::query::{json_text, q};
use crate::{Error, Result, Store};
use serde_json::Value;

/// One UPDATE of two rows. `$2` is the job that ended, `$3` its attempt: the fence. The innermost select finds and
/// holds that row before any other is looked at, so that locks are always taken in this order; without it nothing is due
/// and nothing changes. A due job with a concurrency key is left alone: only [`crate::Tx::job_claim`] may decide on it,
/// under the key's lock.
fn turn(kinds: &str, backend: Backend) -> String {
    let fence = format!(
        "AND (SELECT m.job_id FROM jobs m WHERE m.job_id = $2 AND m.attempt = $3 AND m.state = 'running'{}) IS NOT NULL",
        backend.hold_row()
    );
    let due = due("j.job_id, j.concurrency_key", kinds, &fence, backend);
    let own = |ended: &str, next: &str| format!("CASE WHEN job_id = $2 THEN {ended} ELSE {next} END");
    format!(
        "UPDATE jobs SET state = {}, attempt = attempt + {}, result = {}, last_error = {}, finished_at = {}, \
         started_at = {}, lease_owner = {}, lease_expires_at = {} \
         WHERE job_id IN ($2, (SELECT d.job_id FROM ({due}) d WHERE d.concurrency_key IS NULL)) \
         AND (job_id <> $2 OR (attempt = $3 AND state = 'running')) RETURNING {COLUMNS}",
        own("'succeeded'", "'running'"),
        own("0", "1"),
        own("$4", "result"),
        own("NULL", "last_error"),
        own("$1", "finished_at"),
        own("started_at", "$1"),
        own("NULL", "$5"),
        own("NULL", "$6"),
    )
}

impl Store {
    /// Running → succeeded, and the claim of the next due job if it has no concurrency key, in one transaction of one
    /// statement. `None`: no job was claimed; [`crate::Tx::job_claim`] knows whether one is due.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease is lost: nothing was changed and nothing claimed. [`Error::Invalid`] for a
    /// claim without kinds.
    pub async fn job_succeed_and_claim(
        &self,
        token: &JobToken,
        result: Option<&Value>,
        claim: &JobClaim<'_>,
    ) -> Result<Option<JobRow>> {
        if claim.kinds.is_empty() {
            return Err(Error::invalid("job claim", "it names no kinds"));
        }
        let now = self.lease_now_us();
        let result = result.map(|r| json_text("result", r)).transpose()?;
        let mut query = q(turn(&placeholders(7, claim.kinds.len()), self.backend()))
            .bind(now)
            .bind(&token.job_id)
            .bind(token.attempt)
            .bind(result)
            .bind(claim.owner)
            .bind(claim.until_us(now));
        for kind in claim.kinds {
            query = query.bind(kind);
        }
        let rows: Vec<JobRow> = self.write_one(query).await?;
        let (ended, mut next): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| row.job_id == token.job_id);
        if ended.is_empty() {
            return Err(lost(token));
        }
        Ok(next.pop())
    }
}
