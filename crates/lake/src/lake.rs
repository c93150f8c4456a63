//! The lake as the program holds it: opening with replay, ingest, flush, watermark.

use crate::committer;
use crate::config::LakeConfig;
use crate::error::LakeError;
use crate::query::Active;
use crate::replay::{ReplayProgress, ReplayState};
use crate::table::LakeTable;
use crate::threads::{Priority, Threads};
use crate::versions::Versions;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use flywheel_telemetry::{Buffers, Ingestor, Recovery, Table};
use flywheel_types::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(crate) struct Inner {
    pub config: LakeConfig,
    pub tables: [LakeTable; Table::ALL.len()],
    pub ingestor: Arc<Ingestor>,
    pub buffers: Arc<Buffers>,
    pub runtime: Arc<RuntimeEnv>,
    pub queries: Threads,
    pub active: Active,
    /// Commits.
    pub upkeep: Threads,
    /// Files that are written again, joined or without somebody's rows: commits do not wait for them.
    pub rewrites: Threads,
    /// Imports: they take what the others leave.
    pub imports: Threads,
    /// Small files are being joined.
    pub tidying: AtomicBool,
    pub replay: ReplayState,
}

impl Inner {
    pub fn table(&self, table: Table) -> &LakeTable {
        &self.tables[table as usize]
    }
}

/// Queries of people that run at the same time.
pub(crate) const QUERIES_AT_ONCE: usize = 4;

/// Bytes on disk that sorts of all queries together may use, for each byte of memory: a folder for temporary files may be memory
/// itself, and on a disk it may be that of the log.
const SPILL_PER_MEMORY: u64 = 4;

/// The telemetry lake. Cheap to share; dropping it stops the committer (rows stay in the log).
pub struct Lake {
    pub(crate) inner: Arc<Inner>,
    committer: tokio::task::JoinHandle<()>,
}

impl Drop for Lake {
    fn drop(&mut self) {
        self.committer.abort();
    }
}

impl Lake {
    /// Opens the tables, finds what the log holds beyond them, and starts intake and the committer. Rows of the log are not
    /// read for it: while many are left, queries are refused and say how far it is. Needs a tokio runtime.
    ///
    /// # Errors
    /// When another process owns the log, a file cannot be read, or a table cannot be opened.
    pub async fn open(config: LakeConfig) -> Result<Self, LakeError> {
        let open = futures::future::try_join_all(Table::ALL.map(|t| LakeTable::open(&config, t))).await?;
        let tables: [LakeTable; Table::ALL.len()] =
            open.try_into().map_err(|_| LakeError::Unexpected("wrong number of tables".to_owned()))?;
        let mut recovery = Recovery::open(config.log.clone())?;
        let buffers = recovery.buffers();
        let committed = Table::ALL.map(|t| tables[t as usize].committed());
        let highest = committed.into_iter().max().unwrap_or(0);
        let mut rows = 0;
        while let Some(group) = recovery.next_group()? {
            let left = group.rows.into_iter().filter(|s| s.seq > committed[s.table as usize]);
            buffers.push(group.seq, left.inspect(|s| rows += s.rows));
        }
        for d in recovery.damage() {
            tracing::error!(file = %d.path.display(), offset = d.offset, detail = %d.detail, "part of the log is lost");
        }
        let bytes = buffers.bytes();
        tracing::info!(rows, bytes, "the log holds rows that are not in the tables");
        let ingestor = Arc::new(recovery.start(config.ingest.clone(), highest)?);
        let runtime = RuntimeEnvBuilder::new()
            .with_memory_limit(config.query_memory_bytes, 1.0)
            .with_max_temp_directory_size(SPILL_PER_MEMORY * config.query_memory_bytes as u64)
            .build_arc()?;
        let interval = config.commit_interval;
        let queries = Threads::start("query", QUERIES_AT_ONCE, Priority::BehindIntake)?;
        let upkeep = Threads::start("upkeep", 1, Priority::Normal)?;
        let rewrites = Threads::start("rewrite", 1, Priority::Normal)?;
        let imports = Threads::start("import", 1, Priority::BehindIntake)?;
        let active = Active::default();
        let tidying = AtomicBool::new(false);
        let replay = ReplayState::new(bytes, config.replay_bytes);
        let inner = Inner {
            config,
            tables,
            ingestor,
            buffers,
            runtime,
            queries,
            active,
            upkeep,
            rewrites,
            imports,
            tidying,
            replay,
        };
        let inner = Arc::new(inner);
        let committer = tokio::spawn(committer::run(Arc::downgrade(&inner), interval));
        Ok(Self { inner, committer })
    }

    /// Intake.
    #[must_use]
    pub fn ingestor(&self) -> Arc<Ingestor> {
        Arc::clone(&self.inner.ingestor)
    }

    /// Commits every row acknowledged before the call and frees the log where it can.
    ///
    /// # Errors
    /// When a table cannot be written; nothing is lost, and the call can be repeated.
    pub async fn flush(&self) -> Result<(), Error> {
        let target = self.inner.ingestor.settle().await?;
        committer::commit(&self.inner, target).await?;
        Ok(())
    }

    /// [`Self::flush`], then the versions that hold all of it: what a pipeline step reads up to.
    ///
    /// # Errors
    /// As [`Self::flush`].
    pub async fn flush_and_watermark(&self) -> Result<Versions, Error> {
        self.flush().await?;
        Ok(self.versions())
    }

    /// How much of the log of an earlier run is still to be committed; `None` when queries are answered.
    #[must_use]
    pub fn replaying(&self) -> Option<ReplayProgress> {
        self.inner.replay.progress(self.inner.buffers.bytes())
    }

    /// Current Delta version of a table.
    #[must_use]
    pub fn version(&self, table: Table) -> u64 {
        self.inner.table(table).version()
    }

    /// Current Delta versions of all tables.
    #[must_use]
    pub fn versions(&self) -> Versions {
        let mut out = Versions::default();
        for t in Table::ALL {
            out.set(t, self.version(t));
        }
        out
    }
}
