//! Upkeep: joining small files, and deleting files no version needs any more. Both hold the table's commit lock, so
//! they never race with the committer of this process; other writers are handled by Delta's conflict check.

use crate::error::LakeError;
use crate::lake::Lake;
use chrono::Duration;
use deltalake::operations::vacuum::VacuumMode;
use flywheel_telemetry::Table;
use flywheel_types::Error;
use std::num::NonZeroU64;

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

/// Files are joined up to this size, bytes.
const TARGET_FILE_BYTES: u64 = 128 << 20;

impl Lake {
    /// Joins the small files of every partition (Delta `OPTIMIZE`). Rows do not change, and neither does what a
    /// version range yields: the new files are marked as no data change.
    ///
    /// # Errors
    /// When the table cannot be read or written; it is unchanged then.
    pub async fn compact(&self, table: Table) -> Result<CompactReport, Error> {
        let handle = self.inner.table(table);
        let _one = handle.commit.lock().await;
        let view = handle.view();
        let (delta, metrics) = view
            .delta
            .optimize()
            .with_target_size(NonZeroU64::new(TARGET_FILE_BYTES).unwrap_or(NonZeroU64::MIN))
            .with_max_concurrent_tasks(1)
            .await
            .map_err(LakeError::from)?;
        handle.install(delta, view.committed, &self.inner.buffers);
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
