//! Keeps the lease of a running job alive and carries stop requests to it.

use crate::StopReason;
use chrono::DateTime;
use flywheel_store::jobs::{JobPulse, JobToken};
use flywheel_store::{Error, Result, Store};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// One renewal.
pub(crate) async fn beat(store: &Store, token: &JobToken, ttl: Duration) -> Result<JobPulse> {
    let mut tx = store.begin(DateTime::default()).await?;
    let pulse = tx.job_heartbeat(token, ttl).await?;
    tx.commit().await?;
    Ok(pulse)
}

/// Beats until dropped or until the lease is lost. An outage of the database is survived as long as the lease lasts;
/// after that another worker may run the job, so the attempt is told to stop although nobody said so.
pub(crate) async fn run(
    store: Store,
    token: JobToken,
    ttl: Duration,
    every: Duration,
    stop: watch::Sender<Option<StopReason>>,
) {
    let mut safe_until = Instant::now() + ttl;
    let mut wait = every;
    loop {
        sleep(wait).await;
        let began = Instant::now();
        let beat = tokio::time::timeout_at(safe_until, beat(&store, &token, ttl)).await;
        match beat {
            Ok(Ok(pulse)) => {
                (safe_until, wait) = (began + ttl, every);
                if pulse.cancel_requested {
                    set(&stop, StopReason::Cancelled);
                }
            }
            Ok(Err(Error::Conflict { .. })) | Err(_) => {
                set(&stop, StopReason::LeaseLost);
                return;
            }
            Ok(Err(error)) => {
                tracing::warn!(job.id = %token.job_id, %error, "heartbeat failed; trying again");
                wait = every / 4;
            }
        }
    }
}

/// The first reason stands, except that a lost lease overrules: nothing may be written after it.
pub(crate) fn set(stop: &watch::Sender<Option<StopReason>>, reason: StopReason) {
    stop.send_if_modified(|now| {
        let change = now.is_none() || (reason == StopReason::LeaseLost && *now != Some(StopReason::LeaseLost));
        if change {
            *now = Some(reason);
        }
        change
    });
}
