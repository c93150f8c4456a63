//! Upkeep: joining small files, and deleting files no version needs any more. Joining runs beside the committer: neither
//! takes away what the other added, and Delta's conflict check puts their commits in an order. Deleting holds the table's
//! commit lock: a file of a commit that is being made is in no version yet.

use crate::append::properties;
use crate::error::LakeError;
use crate::lake::{Inner, Lake};
use crate::table::View;
use chrono::Duration;
use deltalake::DeltaTable;
use deltalake::operations::optimize::Metrics;
use deltalake::operations::vacuum::VacuumMode;
use flywheel_telemetry::Table;
use flywheel_types::Error;
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;

/// What a compaction did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompactReport {
    pub files_removed: u64,
    pub files_added: u64,
}

/// What a vacuum did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VacuumReport {
    /// Paths inside the table.
    pub files_deleted: Vec<String>,
}

/// Files are joined up to this size, bytes. A commit under load writes files of about this size, which are then left alone.
const TARGET_FILE_BYTES: u64 = 64 << 20;

/// A file that is smaller should be joined with others, bytes.
const SMALL_FILE_BYTES: i64 = 16 << 20;
/// So many small files in one partition are joined without being asked.
const CROWD: usize = 16;

/// Whether a partition has gathered many small files.
fn is_crowded(table: &DeltaTable) -> bool {
    let Ok(state) = table.snapshot() else { return false };
    let mut small: HashMap<String, usize> = HashMap::new();
    for file in state.log_data().iter().filter(|f| f.size() < SMALL_FILE_BYTES) {
        let path = file.path();
        let partition = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *small.entry(partition.to_owned()).or_default() += 1;
    }
    small.values().any(|n| *n >= CROWD)
}

/// Joins the files of crowded partitions, table by table.
pub(crate) async fn tidy_up(inner: &Inner) {
    for table in Table::ALL {
        if !is_crowded(&inner.table(table).view().delta) {
            continue;
        }
        if let Err(e) = compact(inner, table).await {
            tracing::warn!(table = table.name(), error = %e, "small files could not be joined; the next commit tries again");
        }
    }
}

async fn compact(inner: &Inner, table: Table) -> Result<Metrics, LakeError> {
    let handle = inner.table(table);
    let _alone = handle.rewrite.lock().await;
    let before = handle.view().delta;
    let (_, metrics) = before
        .optimize()
        .with_target_size(NonZeroU64::new(TARGET_FILE_BYTES).unwrap_or(NonZeroU64::MIN))
        .with_max_concurrent_tasks(1)
        .with_writer_properties(properties())
        .await?;
    let _one = handle.commit.lock().await;
    let View { mut delta, committed } = handle.view();
    delta.update_state().await?;
    handle.install(delta, committed, &inner.buffers);
    Ok(metrics)
}

impl Lake {
    /// Joins the small files of every partition (Delta `OPTIMIZE`). Rows do not change, and neither does what a
    /// version range yields: the new files are marked as no data change.
    ///
    /// # Errors
    /// When the table cannot be read or written; it is unchanged then.
    pub async fn compact(&self, table: Table) -> Result<CompactReport, Error> {
        let inner = Arc::clone(&self.inner);
        let metrics = self.inner.rewrites.run(async move { compact(&inner, table).await }).await?;
        Ok(CompactReport { files_removed: metrics.num_files_removed, files_added: metrics.num_files_added })
    }

    /// Deletes files that no version younger than `keep` needs (full mode: also files of failed writes). Reads as of
    /// older versions fail afterwards, so `keep` must exceed the longest a pipeline cursor may lag.
    ///
    /// # Errors
    /// When a file cannot be listed or deleted.
    pub async fn vacuum(&self, table: Table, keep: Duration) -> Result<VacuumReport, Error> {
        let handle = self.inner.table(table);
        let _one = handle.commit.lock().await;
        let view = handle.view();
        let (delta, metrics) = view
            .delta
            .vacuum()
            .with_mode(VacuumMode::Full)
            .with_retention_period(keep)
            .with_enforce_retention_duration(false)
            .await
            .map_err(LakeError::from)?;
        handle.install(delta, view.committed, &self.inner.buffers);
        Ok(VacuumReport { files_deleted: metrics.files_deleted })
    }
}
