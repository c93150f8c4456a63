//! Moves acknowledged rows into Delta: by time, by size, or when somebody asks. The tables commit side by side; the
//! log is freed up to the lowest of them, and small files are joined.

use crate::error::LakeError;
use crate::lake::Inner;
use crate::maintain;
use crate::table::Committed;
use flywheel_telemetry::Table;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
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
    let mut written = Vec::new();
    for table in Table::INGESTED {
        if let Some(commit) = inner.table(table).commit_upto(upto, &inner.buffers).await? {
            written.push((table, commit));
        }
    }
    release(inner, &written).await
}

/// Frees log segments that all tables have. Files of a local lake are forced to disk first: the log must not go
/// before the data that replaces it is durable.
async fn release(inner: &Inner, written: &[(Table, Committed)]) -> Result<(), LakeError> {
    if inner.config.store.is_none()
        && let Ok(root) = inner.config.root.to_file_path()
    {
        for (table, commit) in written {
            let io = |source| LakeError::Io { what: format!("cannot sync {}", table.name()), source };
            sync(&root.join(table.name()), commit).map_err(io)?;
        }
    }
    let covered = Table::INGESTED.into_iter().map(|t| inner.table(t).committed()).min().unwrap_or(0);
    if inner.ingestor.status().log_bytes >= inner.config.log.segment_bytes {
        inner.ingestor.release(covered).await.map_err(|e| LakeError::Unexpected(e.to_string()))?;
    }
    Ok(())
}

/// Forces the files of a commit, its log entry and their folders to disk. Only these: a sync of everything would make
/// acknowledgements wait for it.
fn sync(table: &Path, commit: &Committed) -> std::io::Result<()> {
    let entry = table.join("_delta_log").join(format!("{:020}.json", commit.version));
    let files = commit.files.iter().map(|add| -> std::io::Result<PathBuf> {
        let path = object_store::path::Path::from_url_path(&add.path).map_err(std::io::Error::other)?;
        Ok(table.join(path.as_ref()))
    });
    let mut folders = BTreeSet::new();
    for file in files.chain([Ok(entry)]) {
        let file = file?;
        File::open(&file)?.sync_data()?;
        folders.extend(file.ancestors().skip(1).take_while(|p| p.starts_with(table)).map(Path::to_owned));
    }
    folders.iter().try_for_each(|folder| File::open(folder)?.sync_all())
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
