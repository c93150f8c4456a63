//! Jobs whose worker stopped answering: again with back-off, or dead. Part of claiming, so that it needs no leader.

use crate::{Backoff, JobEvents};
use flywheel_store::{Error, Result, Tx};

/// How many expired leases one claim clears.
const BATCH: u32 = 32;

/// Clears expired leases inside the claim's transaction; answers how many.
pub(crate) async fn reap(tx: &mut Tx, backoff: &Backoff, events: &dyn JobEvents) -> Result<usize> {
    let expired = tx.job_list_expired(BATCH).await?;
    let found = expired.len();
    for job in expired {
        let token = job.token();
        let done = if job.cancel_requested_at.is_some() {
            let note = "cancelled; its worker had stopped answering";
            tx.job_cancelled_set(&token, note).await.map(|_| ())
        } else if job.is_last_attempt() {
            let error = format!("its worker stopped answering in each of {} attempts", job.counted_attempts());
            match tx.job_bury(&token, &error).await {
                Ok(dead) => events.dead(tx, &dead).await,
                Err(e) => Err(e),
            }
        } else {
            tx.job_requeue(&token, backoff.wait(&job), true, "its worker stopped answering").await
        };
        match done {
            Ok(()) => tracing::warn!(job.id = %job.job_id, job.kind, job.attempt, "lease ran out"),
            // It ended between the look and the write: its own worker was faster.
            Err(Error::Conflict { what: "job", .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(found)
}
