//! One Delta table with the watermark of this writer: opening, creating, appending exactly once.

use crate::append::{self, Append, PARTITIONS};
use crate::config::LakeConfig;
use crate::error::LakeError;
use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, FieldRef};
use deltalake::kernel::engine::arrow_conversion::TryIntoKernel;
use deltalake::kernel::{Add, StructType};
use deltalake::protocol::SaveMode;
use deltalake::{DeltaTable, DeltaTableBuilder, TableProperty};
use flywheel_telemetry::wal::Stored;
use flywheel_telemetry::{Buffers, Table, TelemetryError};
use object_store::ObjectStoreExt as _;
use object_store::path::Path;
use std::sync::{PoisonError, RwLock};
use tokio::sync::Mutex;

/// What queries see of a table, changed as a whole.
#[derive(Clone)]
pub(crate) struct View {
    pub delta: DeltaTable,
    /// Log records up to here are in `delta`; later ones are in the buffers.
    pub committed: u64,
}

/// What became of files that were to be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Appended {
    Now,
    /// The table has the transaction; the files are of no version.
    Already,
    /// A vacuum has deleted one of them: write them again.
    Gone,
}

/// One table of the lake.
pub(crate) struct LakeTable {
    pub table: Table,
    writer_id: String,
    view: RwLock<View>,
    /// Held while a commit, a compaction or a vacuum changes the table: one committer per table.
    pub(crate) commit: Mutex<()>,
    /// Held while files are written again, so that two never replace the same file; taken before `commit`.
    pub(crate) rewrite: Mutex<()>,
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
            delta = widen(delta, table).await?;
            delta = name_nobody(delta, table).await?;
        } else {
            delta = create(&delta, table).await?;
        }
        let committed = transaction(&delta, &config.writer_id).await?;
        Ok(Self {
            table,
            writer_id: config.writer_id.clone(),
            view: RwLock::new(View { delta, committed }),
            commit: Mutex::new(()),
            rewrite: Mutex::new(()),
            older: Mutex::new(None),
        })
    }

    /// The current view.
    pub fn view(&self) -> View {
        self.view.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The current view with the rows that are acknowledged but not in it, at one moment.
    pub fn view_with_rows(&self, buffers: &Buffers) -> (View, Vec<Stored>) {
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

    /// Commits the rows of log records up to `target`. After an error the transaction id in the table
    /// decides whether the commit happened: object stores may report a successful write as failed.
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
        match append_stored(delta.clone(), &self.writer_id, target, &rows).await {
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
        match append_rows(delta.clone(), writer_id, seq, rows).await {
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

    /// Adds files that were written without the lock as the transactions `marks`, unless the table has the first of them
    /// already. Before that it looks whether they still are there: a vacuum meanwhile saw files of no version.
    pub async fn append_files(
        &self,
        files: Vec<Add>,
        marks: &[(&str, u64)],
        buffers: &Buffers,
    ) -> Result<Appended, LakeError> {
        let Some((writer_id, seq)) = marks.first().copied() else { return Ok(Appended::Already) };
        let _one = self.commit.lock().await;
        let View { mut delta, committed } = self.view();
        delta.update_state().await?;
        if transaction(&delta, writer_id).await? >= seq {
            self.install(delta, committed, buffers);
            return Ok(Appended::Already);
        }
        for file in &files {
            let path = Path::from_url_path(&file.path).map_err(|e| LakeError::Unexpected(e.to_string()))?;
            match delta.object_store().head(&path).await {
                Ok(_) => {}
                Err(object_store::Error::NotFound { .. }) => return Ok(Appended::Gone),
                Err(e) => return Err(deltalake::DeltaTableError::from(e).into()),
            }
        }
        match append::commit(delta.clone(), files, marks).await {
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
        Ok(Appended::Now)
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
        .with_partition_columns(PARTITIONS)
        .with_configuration_property(TableProperty::CheckpointInterval, Some("50"))
        .with_configuration_property(TableProperty::DataSkippingStatsColumns, Some(statistics(table)))
        .with_save_mode(SaveMode::Ignore)
        .await?;
    Ok(created)
}

/// Text columns whose values say nothing of a person.
const WORDS: [&str; 10] =
    ["template_id", "bundle", "rollout_id", "arm", "device_class", "trust", "source", "label", "event", "disposition"];

/// Columns of which the log of the table may hold the least and the greatest value of each file. The log outlives the files, so
/// ids and texts must not be there: an erased id would stay.
fn statistics(table: Table) -> String {
    let schema = table.schema();
    let may_be_told = |f: &&FieldRef| {
        let (kind, name) = (f.data_type(), f.name().as_str());
        let plain = !kind.is_nested() && !matches!(kind, DataType::Utf8);
        !PARTITIONS.contains(&name) && (plain || WORDS.contains(&name))
    };
    let names: Vec<&str> = schema.fields().iter().filter(may_be_told).map(|f| f.name().as_str()).collect();
    names.join(",")
}

/// Statistics of an earlier version's table become those of [`statistics`].
async fn name_nobody(delta: DeltaTable, table: Table) -> Result<DeltaTable, LakeError> {
    let (key, wanted) = (TableProperty::DataSkippingStatsColumns.as_ref().to_owned(), statistics(table));
    if delta.snapshot()?.metadata().configuration().get(&key) == Some(&wanted) {
        return Ok(delta);
    }
    Ok(delta.set_tbl_properties().with_properties([(key, wanted)].into()).await?)
}

/// Adds the columns that this program knows and an older one did not.
async fn widen(delta: DeltaTable, table: Table) -> Result<DeltaTable, LakeError> {
    let known: StructType = table.schema().as_ref().try_into_kernel()?;
    let stored = delta.snapshot()?.schema();
    let new: Vec<_> = known.fields().filter(|f| stored.field(f.name()).is_none()).cloned().collect();
    if new.is_empty() {
        return Ok(delta);
    }
    tracing::info!(table = table.name(), columns = new.len(), "a table of an earlier version gets new columns");
    Ok(delta.add_columns().with_fields(new).await?)
}

/// Appends rows of the log as `(writer_id, seq)`. Rows that the log cannot give back any more are reported and passed over:
/// nothing would ever be committed again after one damaged record.
async fn append_stored(delta: DeltaTable, writer_id: &str, seq: u64, rows: &[Stored]) -> Result<DeltaTable, LakeError> {
    let mut append = Append::begin(&delta)?;
    for stored in rows {
        match stored.load() {
            Ok(batch) => append.write(&batch).await?,
            Err(e @ TelemetryError::Damaged { .. }) => {
                tracing::error!(error = %e, rows = stored.rows, "rows of the log are lost");
            }
            Err(e) => return Err(e.into()),
        }
    }
    append.commit(delta, writer_id, seq).await
}

async fn append_rows(
    delta: DeltaTable,
    writer_id: &str,
    seq: u64,
    rows: &RecordBatch,
) -> Result<DeltaTable, LakeError> {
    let mut append = Append::begin(&delta)?;
    append.write(rows).await?;
    append.commit(delta, writer_id, seq).await
}
