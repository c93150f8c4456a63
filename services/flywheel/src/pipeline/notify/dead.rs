//! What is told about a job that died: an audit entry and a mail. The worker buries jobs in a transaction without
//! business time, so that transaction only queues a run of this step, and the run writes both.

use super::{KIND, enqueue, text};
use crate::server::Server;
use async_trait::async_trait;
use flywheel_jobs::{JobContext, JobEvents};
use flywheel_store::Tx;
use flywheel_store::jobs::{JobRow, NewJob};
use flywheel_types::{Error, JobId};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Names the death: a revived job can die again.
#[derive(Debug, Serialize, Deserialize)]
pub struct Dead {
    job: JobId,
    attempt: i64,
}

/// Queues the alert in the transaction that buries a job.
pub struct DeadJobs;

#[async_trait]
impl JobEvents for DeadJobs {
    async fn dead(&self, tx: &mut Tx, job: &JobRow) -> flywheel_store::Result<()> {
        tracing::error!(job.id = %job.job_id, job.kind, job.attempt, error = job.last_error, "job is dead");
        if job.kind == KIND {
            // mail that does not work cannot be told by mail
            return Ok(());
        }
        let dead = Dead { job: job.job_id.clone(), attempt: job.attempt };
        let new = NewJob::new(KIND, json!({ "v": 1, "dead": dead }))
            .dedup(format!("dead/{}/{}", dead.job, dead.attempt))
            .concurrency("notify", 1);
        tx.job_enqueue(&job.app_id, &new).await?;
        Ok(())
    }
}

/// Writes audit entry and mail; a job that was deleted meanwhile is told by its id alone.
///
/// # Errors
/// Those of the database.
pub async fn tell(server: &Server, ctx: &JobContext, dead: &Dead) -> Result<(), Error> {
    let id = ctx.app();
    let job = server.store.job_get(id, &dead.job).await?;
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::super::lost)?;
    let kind = job.as_ref().map_or("unknown", |j| j.kind.as_str());
    let error = job.as_ref().and_then(|j| j.last_error.as_deref()).unwrap_or("no error is known");
    let (subject, body) = text::dead_job(id, kind, dead.job.as_str(), error, &server.config.public_url());
    let cause = format!("job/{}/dead/{}", dead.job, dead.attempt);
    enqueue(&mut tx, server, id, cause, subject, body).await?;
    let detail = json!({ "kind": kind, "attempt": dead.attempt, "error": error });
    tx.audit_append(id, "controller", "job.dead", dead.job.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(())
}
