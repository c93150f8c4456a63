//! What a finished attempt makes of its job, by the class of its end.

use crate::{Backoff, JobError, JobEvents, Outcome, StopReason};
use flywheel_store::jobs::JobRow;
use flywheel_store::{Result, Tx};
use std::time::Duration;

/// End of an attempt.
pub(crate) type Ended = std::result::Result<Outcome, JobError>;

/// A handler that was asked to stop may fail in its own words (a broken pipe, a time-out); the reason it was asked
/// for decides then. Success stays success: the work is done.
pub(crate) fn classify(ended: Ended, stop: Option<StopReason>) -> Ended {
    match (ended, stop) {
        (Err(JobError::Retryable(_)), Some(reason)) => Err(reason.into()),
        (ended, _) => ended,
    }
}

/// Writes the end down inside `tx`. Every statement is fenced; a conflict means that the lease is lost.
pub(crate) async fn settle(
    tx: &mut Tx,
    job: &JobRow,
    ended: &Ended,
    backoff: &Backoff,
    events: &dyn JobEvents,
) -> Result<()> {
    let token = job.token();
    match ended {
        Ok(Outcome::Done(result)) => tx.job_succeed(&token, result.as_ref()).await,
        Ok(Outcome::Committed) | Err(JobError::LeaseLost) => Ok(()),
        Err(JobError::Cancelled) => tx.job_cancelled_set(&token, "its handler cancelled it").await.map(|_| ()),
        Err(JobError::Interrupted) => tx.job_requeue(&token, Duration::ZERO, false, "its worker was shut down").await,
        Err(JobError::Retryable(error)) if !job.is_last_attempt() => {
            tx.job_requeue(&token, backoff.wait(job), true, error).await
        }
        Err(JobError::Retryable(error) | JobError::Permanent(error)) => {
            let dead = tx.job_bury(&token, error).await?;
            events.dead(tx, &dead).await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_request_explains_a_vague_failure_but_not_a_clear_one() {
        let vague = || Err(JobError::Retryable("broken pipe".into()));
        assert!(matches!(classify(vague(), Some(StopReason::Cancelled)), Err(JobError::Cancelled)));
        assert!(matches!(classify(vague(), Some(StopReason::Interrupted)), Err(JobError::Interrupted)));
        assert!(matches!(classify(vague(), None), Err(JobError::Retryable(_))));
        let clear = Err(JobError::Permanent("bad payload".into()));
        assert!(matches!(classify(clear, Some(StopReason::Cancelled)), Err(JobError::Permanent(_))));
        let done = Ok(Outcome::Done(None));
        assert!(matches!(classify(done, Some(StopReason::Interrupted)), Ok(Outcome::Done(None))));
    }
}
