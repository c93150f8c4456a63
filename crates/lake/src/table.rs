//! One Delta table with the watermark of this writer: opening, creating, appending exactly once.

use crate::config::LakeConfig;
use crate::error::LakeError;
use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use deltalake::kernel::engine::arrow_conversion::TryIntoKernel;
use deltalake::kernel::transaction::CommitProperties;
use deltalake::kernel::{StructType, Transaction};
use deltalake::operations::write::SchemaMode;
use deltalake::protocol::SaveMode;
use deltalake::{DeltaTable, DeltaTableBuilder, TableProperty};
use flywheel_telemetry::{Buffers, Table};
use std::sync::{PoisonError, RwLock};
use tokio::sync::Mutex;

/// What queries see of a table, changed as a whole.
#[derive(Clone)]
pub(crate) struct View {
    pub delta: DeltaTable,
    /// Log records up to here are in `delta`; later ones are in the buffers.
    pub committed: u64,
}

/// One table of the lake.
pub(crate) struct LakeTable {
    pub table: Table,
    writer_id: String,
    view: RwLock<View>,
    /// Held while a commit, a compaction or a vacuum changes the table: one committer per table.
    pub(crate) commit: Mutex<()>,
    /// The last older version that was read, so that a step's reads load it once.
    older: Mutex<Option<DeltaTable>>,
}

impl LakeTable {
    /// Opens the table, creating it when it is not there.
    pub async fn open(config: &LakeConfig, table: Table) -> Result<Self, LakeError> {
        let url = config
            .root
            .join(&format!("{}/", table.name()))
            .map_err(|e| LakeError::Unexpected(format!("{}: {e}", config.root)))?;
        if config.store.is_none()
            && let Ok(path) = url.to_file_path()
        {
            std::fs::create_dir_all(&path)
                .map_err(|source| LakeError::Io { what: format!("cannot create {}", path.display()), source })?;
        }
        let mut builder = DeltaTableBuilder::from_url(url.clone())?;
        if let Some(store) = &config.store {
            builder = builder.with_storage_backend(std::sync::Arc::clone(store), url);
        }
        let mut delta = builder.build()?;
        if delta.verify_deltatable_existence().await? {
            delta.load().await?;
        } else {
            delta = create(&delta, table).await?;
        }
        let committed = transaction(&delta, &config.writer_id).await?;
        Ok(Self {
            table,
            writer_id: config.writer_id.clone(),
            view: RwLock::new(View { delta, committed }),
            commit: Mutex::new(()),
            older: Mutex::new(None),
        })
    }

    /// The current view.
    pub fn view(&self) -> View {
        self.view.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The current view with the rows that are acknowledged but not in it, at one moment.
    pub fn view_with_rows(&self, buffers: &Buffers) -> (View, Vec<RecordBatch>) {
        let view = self.view.read().unwrap_or_else(PoisonError::into_inner);
        let rows = buffers.range(self.table, view.committed, u64::MAX);
        (view.clone(), rows)
    }

    /// Replaces the view and drops the rows it now contains, at one moment.
    pub fn install(&self, delta: DeltaTable, committed: u64, buffers: &Buffers) {
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        *view = View { delta, committed };
        buffers.drop_upto(self.table, committed);
    }

    /// The table as of `version`, no newer than the current view.
    pub async fn at(&self, version: u64) -> Result<DeltaTable, LakeError> {
        let current = self.view().delta;
        if current.version() == Some(version) {
            return Ok(current);
        }
        let mut older = self.older.lock().await;
        if let Some(t) = older.as_ref()
            && t.version() == Some(version)
        {
            return Ok(t.clone());
        }
        let mut table = current;
        table.load_version(version).await?;
        *older = Some(table.clone());
        Ok(table)
    }

    /// Commits the rows of log records up to `target`. After an error the transaction id in the table decides
    /// whether the commit happened: object stores may report a successful write as failed.
    pub async fn commit_upto(&self, target: u64, buffers: &Buffers) -> Result<(), LakeError> {
        let _one = self.commit.lock().await;
        let View { delta, committed } = self.view();
        if target <= committed {
            return Ok(());
        }
        let rows = buffers.range(self.table, committed, target);
        if rows.is_empty() {
            self.install(delta, target, buffers);
            return Ok(());
        }
        match append(delta.clone(), self.table, &self.writer_id, target, &rows).await {
            Ok(new) => self.install(new, target, buffers),
            Err(e) => {
                let mut fresh = delta;
                fresh.update_state().await?;
                let found = transaction(&fresh, &self.writer_id).await?;
                if found > committed {
                    tracing::warn!(table = self.table.name(), error = %e, "a commit reported an error but is in the table");
                }
                self.install(fresh, found.max(committed), buffers);
                if found < target {
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Highest sequence number that `writer_id` has in the table now, also from another process; 0 for none.
    pub async fn sequence(&self, writer_id: &str, buffers: &Buffers) -> Result<u64, LakeError> {
        let _one = self.commit.lock().await;
        let View { mut delta, committed } = self.view();
        delta.update_state().await?;
        let found = transaction(&delta, writer_id).await?;
        self.install(delta, committed, buffers);
        Ok(found)
    }

    /// Appends rows of a derived table as `(writer_id, seq)` if the writer's last number is still `after`; otherwise
    /// `false`: somebody else went on from there. Delta itself refuses the slower of two processes.
    pub async fn append_after(
        &self,
        writer_id: &str,
        after: u64,
        seq: u64,
        rows: &RecordBatch,
        buffers: &Buffers,
    ) -> Result<bool, LakeError> {
        let _one = self.commit.lock().await;
        let View { mut delta, committed } = self.view();
        delta.update_state().await?;
        if transaction(&delta, writer_id).await? != after {
            self.install(delta, committed, buffers);
            return Ok(false);
        }
        match append(delta.clone(), self.table, writer_id, seq, std::slice::from_ref(rows)).await {
            Ok(new) => self.install(new, committed, buffers),
            Err(e) => {
                delta.update_state().await?;
                let found = transaction(&delta, writer_id).await?;
                self.install(delta, committed, buffers);
                if found < seq {
                    return Err(e);
                }
            }
        }
        Ok(true)
    }

    /// Log records this writer has in the table.
    pub fn committed(&self) -> u64 {
        self.view.read().unwrap_or_else(PoisonError::into_inner).committed
    }

    /// Delta version of the current view.
    pub fn version(&self) -> u64 {
        self.view.read().unwrap_or_else(PoisonError::into_inner).delta.version().unwrap_or(0)
    }
}

/// Highest sequence number `writer_id` has committed; 0 for none.
async fn transaction(delta: &DeltaTable, writer_id: &str) -> Result<u64, LakeError> {
    let log_store = delta.log_store();
    let found = delta.snapshot()?.transaction_version(log_store.as_ref(), writer_id).await?;
    Ok(found.and_then(|v| u64::try_from(v).ok()).unwrap_or(0))
}

async fn create(delta: &DeltaTable, table: Table) -> Result<DeltaTable, LakeError> {
    let schema: StructType = table.schema().as_ref().try_into_kernel()?;
    let created = delta
        .create()
        .with_table_name(table.name())
        .with_columns(schema.fields().cloned())
        .with_partition_columns(["app", "received_date"])
        .with_configuration_property(TableProperty::CheckpointInterval, Some("50"))
        .with_save_mode(SaveMode::Ignore)
        .await?;
    Ok(created)
}

async fn append(
    delta: DeltaTable,
    table: Table,
    writer_id: &str,
    seq: u64,
    rows: &[RecordBatch],
) -> Result<DeltaTable, LakeError> {
    let version = i64::try_from(seq).map_err(|_| LakeError::Unexpected(format!("sequence number {seq}")))?;
    let batch = concat_batches(&table.schema(), rows)?;
    let written = delta
        .write([batch])
        .with_save_mode(SaveMode::Append)
        .with_schema_mode(SchemaMode::Merge)
        .with_commit_properties(
            CommitProperties::default().with_application_transaction(Transaction::new(writer_id, version)),
        )
        .await?;
    Ok(written)
}
