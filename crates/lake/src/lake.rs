//! The lake as the program holds it: opening with replay, ingest, flush, watermark.

use crate::committer;
use crate::config::LakeConfig;
use crate::error::LakeError;
use crate::table::LakeTable;
use crate::versions::Versions;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use flywheel_telemetry::{Buffers, Ingestor, Recovery, Table, TableRows};
use flywheel_types::Error;
use std::sync::Arc;

pub(crate) struct Inner {
    pub config: LakeConfig,
    pub tables: [LakeTable; Table::ALL.len()],
    pub ingestor: Arc<Ingestor>,
    pub buffers: Arc<Buffers>,
    pub runtime: Arc<RuntimeEnv>,
    pub queries: QueryThreads,
}

impl Inner {
    pub fn table(&self, table: Table) -> &LakeTable {
        &self.tables[table as usize]
    }
}

/// Threads for queries people write. A join of large tables computes for seconds between two points where it can be
/// cancelled; on these threads it delays other queries only, never intake or the time-out of its caller.
pub(crate) struct QueryThreads {
    runtime: Option<tokio::runtime::Runtime>,
    /// Queries that may run at once.
    pub slots: Arc<tokio::sync::Semaphore>,
}

impl QueryThreads {
    fn start() -> Result<Self, LakeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(QUERIES_AT_ONCE)
            .thread_name("query")
            .enable_all()
            .build()
            .map_err(|source| LakeError::Io { what: "cannot start query threads".to_owned(), source })?;
        Ok(Self { runtime: Some(runtime), slots: Arc::new(tokio::sync::Semaphore::new(QUERIES_AT_ONCE)) })
    }

    /// Handle to spawn on; `None` only while the lake is dropped.
    pub fn handle(&self) -> Option<&tokio::runtime::Handle> {
        self.runtime.as_ref().map(tokio::runtime::Runtime::handle)
    }
}

impl Drop for QueryThreads {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Queries of people that run at the same time.
const QUERIES_AT_ONCE: usize = 4;

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
    /// Opens the tables, replays what the log holds beyond them (memory bounded by `commit_bytes`), and starts intake
    /// and the committer. Needs a tokio runtime.
    ///
    /// # Errors
    /// When another process owns the log, a file cannot be read, or a table cannot be opened.
    pub async fn open(config: LakeConfig) -> Result<Self, LakeError> {
        let open = futures::future::try_join_all(Table::ALL.map(|t| LakeTable::open(&config, t))).await?;
        let tables: [LakeTable; Table::ALL.len()] =
            open.try_into().map_err(|_| LakeError::Unexpected("wrong number of tables".to_owned()))?;
        let mut recovery = Recovery::open(config.log.clone())?;
        let buffers = recovery.buffers();
        let committed = |t: Table| tables[t as usize].committed();
        let highest = Table::INGESTED.into_iter().map(committed).max().unwrap_or(0);
        let mut replayed = 0usize;
        while let Some(group) = recovery.next_group()? {
            let mut rows = TableRows::default();
            for table in Table::INGESTED {
                if let Some(batch) = group.rows.get(table)
                    && group.seq > tables[table as usize].committed()
                {
                    replayed += batch.num_rows();
                    rows.set(table, batch.clone());
                }
            }
            buffers.push(group.seq, &rows);
            if buffers.bytes() > config.commit_bytes {
                for table in Table::INGESTED {
                    tables[table as usize].commit_upto(group.seq, &buffers).await?;
                }
            }
        }
        for d in recovery.damage() {
            tracing::error!(file = %d.path.display(), offset = d.offset, detail = %d.detail, "part of the log is lost");
        }
        tracing::info!(rows = replayed, "log replayed");
        let ingestor = Arc::new(recovery.start(config.ingest.clone(), highest)?);
        let runtime = RuntimeEnvBuilder::new().with_memory_limit(config.query_memory_bytes, 1.0).build_arc()?;
        let interval = config.commit_interval;
        let queries = QueryThreads::start()?;
        let inner = Arc::new(Inner { config, tables, ingestor, buffers, runtime, queries });
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
        committer::release(&self.inner).await?;
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
