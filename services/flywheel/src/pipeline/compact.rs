//! Housekeeping of the telemetry tables: merges small files, removes files that no snapshot names any more, and
//! prunes finished jobs.

use crate::server::Server;
use chrono::TimeDelta;
use flywheel_jobs::JobContext;
use flywheel_lake::Table;
use flywheel_types::Error;
use serde_json::{Value, json};

pub const KIND: &str = "compact";
/// Finished jobs are kept this long, days.
const JOB_DAYS: i64 = 90;
/// Files that no snapshot names any more stay this long, for readers that still have them open.
const KEEP: chrono::Duration = chrono::Duration::days(7);

/// The step.
///
/// # Errors
/// Of the lake and the database.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let mut tables = serde_json::Map::new();
    for table in Table::ALL {
        let compacted = server.lake.compact(table).await?;
        let vacuumed = server.lake.vacuum(table, KEEP).await?;
        tables.insert(table.name().to_owned(), json!(format!("{compacted:?} {vacuumed:?}")));
    }
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    let pruned = tx.job_prune(server.store.lease_now() - TimeDelta::days(JOB_DAYS)).await?;
    tx.commit().await?;
    Ok(json!({ "tables": tables, "jobs_pruned": pruned }))
}
