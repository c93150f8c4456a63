//! Moves acknowledged rows into Delta: by time, by size, or when somebody asks. The tables commit side by side; the
//! log is freed up to the lowest of them, and small files are joined.

use crate::error::LakeError;
use crate::lake::Inner;
use crate::maintain;
use flywheel_telemetry::Table;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Commits everything up to `target` in every table, in pieces of bounded size, and frees the log behind them.
pub(crate) async fn commit(inner: &Arc<Inner>, target: u64) -> Result<(), LakeError> {
    loop {
        let upto = inner.buffers.upto(inner.config.commit_bytes).min(target);
        let owned = Arc::clone(inner);
        inner.upkeep.run(async move { piece(&owned, upto).await }).await?;
        if upto >= target {
            return Ok(());
        }
    }
}

/// One commit per table, then what it makes possible.
async fn piece(inner: &Inner, upto: u64) -> Result<(), LakeError> {
    for table in Table::INGESTED {
        inner.table(table).commit_upto(upto, &inner.buffers).await?;
    }
    release(inner).await
}

/// Frees log segments that all tables have. A local lake is forced to disk first: the log must not go before the data that
/// replaces it is durable. All of it, because the data may also be of a commit before a crash, of one that was reported as
/// failed, or of a joined file.
async fn release(inner: &Inner) -> Result<(), LakeError> {
    if inner.ingestor.status().log_bytes < inner.config.log.segment_bytes {
        return Ok(());
    }
    // before the sync: a commit that comes in meanwhile is not on disk yet
    let covered = Table::INGESTED.into_iter().map(|t| inner.table(t).committed()).min().unwrap_or(0);
    sync(inner)?;
    inner.ingestor.release(covered).await.map_err(|e| LakeError::Unexpected(e.to_string()))?;
    Ok(())
}

/// Forces a local lake to disk.
pub(crate) fn sync(inner: &Inner) -> Result<(), LakeError> {
    if inner.config.store.is_none()
        && let Ok(path) = inner.config.root.to_file_path()
    {
        sync_files(&path).map_err(|source| LakeError::Io { what: "cannot sync the tables".to_owned(), source })?;
    }
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

/// Joins small files beside the commits to come, once at a time.
fn tidy_up(inner: &Arc<Inner>) {
    let Some(threads) = inner.upkeep.handle() else { return };
    if inner.tidying.swap(true, Ordering::Relaxed) {
        return;
    }
    let inner = Arc::clone(inner);
    threads.spawn(async move {
        maintain::tidy_up(&inner).await;
        inner.tidying.store(false, Ordering::Relaxed);
    });
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
        if let Err(e) = commit(&inner, inner.buffers.last_seq()).await {
            tracing::error!(error = %e, "acknowledged rows could not be committed; they stay in the log");
        }
        tidy_up(&inner);
    }
}
