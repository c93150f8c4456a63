//! Moves acknowledged rows into Delta: by time, by size, or when somebody asks. The tables commit side by side; the
//! log is freed up to the lowest of them.

use crate::error::LakeError;
use crate::lake::Inner;
use flywheel_telemetry::Table;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Commits everything up to `target` in every table, then frees the log.
pub(crate) async fn commit(inner: &Inner, target: u64) -> Result<(), LakeError> {
    let jobs = Table::INGESTED.map(|t| inner.table(t).commit_upto(target, &inner.buffers));
    let results = futures::future::join_all(jobs).await;
    for result in results {
        result?;
    }
    Ok(())
}

/// Frees log segments that all tables have. Files of a local lake are forced to disk first: the log must not go
/// before the data that replaces it is durable.
pub(crate) async fn release(inner: &Inner) -> Result<(), LakeError> {
    let covered = Table::INGESTED.into_iter().map(|t| inner.table(t).committed()).min().unwrap_or(0);
    if inner.ingestor.status().log_bytes < inner.config.log.segment_bytes {
        return Ok(());
    }
    if inner.config.store.is_none()
        && let Ok(path) = inner.config.root.to_file_path()
    {
        tokio::task::spawn_blocking(move || sync_files(&path))
            .await
            .map_err(|e| LakeError::Unexpected(e.to_string()))?
            .map_err(|source| LakeError::Io { what: "cannot sync the table folder".to_owned(), source })?;
    }
    inner.ingestor.release(covered).await.map_err(|e| LakeError::Unexpected(e.to_string()))?;
    Ok(())
}

#[cfg(target_os = "linux")]
fn sync_files(folder: &std::path::Path) -> std::io::Result<()> {
    Ok(rustix::fs::syncfs(std::fs::File::open(folder)?)?)
}

#[cfg(not(target_os = "linux"))]
fn sync_files(_folder: &std::path::Path) -> std::io::Result<()> {
    rustix::fs::sync();
    Ok(())
}

/// Runs until the lake is dropped.
pub(crate) async fn run(inner: Weak<Inner>, interval: Duration) {
    let step = (interval / 10).clamp(Duration::from_millis(20), Duration::from_secs(1));
    let mut waited = Duration::ZERO;
    loop {
        tokio::time::sleep(step).await;
        waited += step;
        let Some(inner): Option<Arc<Inner>> = inner.upgrade() else {
            return;
        };
        let bytes = inner.buffers.bytes();
        if bytes == 0 || (waited < interval && bytes < inner.config.commit_bytes) {
            continue;
        }
        waited = Duration::ZERO;
        let target = inner.buffers.last_seq();
        let done = async {
            commit(&inner, target).await?;
            release(&inner).await
        };
        if let Err(e) = done.await {
            tracing::error!(error = %e, "acknowledged rows could not be committed; they stay in the log");
        }
    }
}
