//! Where the lake is and how it commits.

use flywheel_telemetry::Settings;
use flywheel_telemetry::wal::LogConfig;
use object_store::ObjectStore;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

use crate::error::LakeError;

/// Configuration of [`crate::Lake`].
#[derive(Clone)]
pub struct LakeConfig {
    /// Folder of the tables; each table is one folder below it.
    pub root: Url,
    /// Object store whose `/` is the root of `root`'s host or bucket; `None` opens `root` itself (local folders).
    pub store: Option<Arc<dyn ObjectStore>>,
    pub log: LogConfig,
    /// Name of this ingest node in Delta's transaction ids. Never reuse a name with another log folder.
    pub writer_id: String,
    pub ingest: Settings,
    /// Longest time acknowledged rows wait before they are committed.
    pub commit_interval: Duration,
    /// Acknowledged rows above this are committed at once, and no commit takes much more, log bytes.
    pub commit_bytes: u64,
    /// A server that starts with more than this in its log answers no queries until less is left, log bytes.
    pub replay_bytes: u64,
    /// Memory all queries may use together, bytes.
    pub query_memory_bytes: usize,
}

impl LakeConfig {
    /// Tables in `folder/tables`, the log in `folder/log`, on the local disk.
    ///
    /// # Errors
    /// When the folder cannot be made or its path is not UTF-8.
    pub fn local(folder: &Path) -> Result<Self, LakeError> {
        let tables = folder.join("tables");
        let io = |source| LakeError::Io { what: format!("cannot create {}", tables.display()), source };
        std::fs::create_dir_all(&tables).map_err(io)?;
        let absolute = std::fs::canonicalize(&tables).map_err(io)?;
        let root = Url::from_directory_path(&absolute)
            .map_err(|()| LakeError::Unexpected(format!("{} cannot be written as a URL", absolute.display())))?;
        Ok(Self {
            root,
            store: None,
            log: LogConfig::new(folder.join("log")),
            writer_id: "ingest-0".to_owned(),
            ingest: Settings::default(),
            commit_interval: Duration::from_secs(10),
            commit_bytes: 512 << 20,
            replay_bytes: 512 << 20,
            query_memory_bytes: 256 << 20,
        })
    }
}
