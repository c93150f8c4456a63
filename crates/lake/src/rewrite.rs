//! Taking rows out of a table: the files that hold some are written again without them, a day at a time, and the log of the
//! table says no more than that. Delta's own delete would write its condition into the log, and the condition names the person
//! who asked to be forgotten (ADR 011).

use crate::append::Append;
use crate::error::LakeError;
use crate::lake::Inner;
use crate::provider::session_over;
use crate::read::{Take, drain};
use crate::table::{LakeTable, View};
use arrow::array::{BooleanArray, RecordBatch};
use arrow::compute::{cast, filter_record_batch};
use datafusion::execution::session_state::SessionState;
use datafusion::prelude::SessionContext;
use deltalake::DeltaTable;
use deltalake::kernel::{Add, Remove};
use flywheel_telemetry::Table;
use flywheel_types::AppId;
use futures::StreamExt as _;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Which rows of a batch go.
pub(crate) struct Picked {
    pub go: BooleanArray,
    /// Rows that would go if nobody had put a hold on them.
    pub held: u64,
}

/// Decides on the rows of a batch, which has the columns that were asked for, or all.
pub(crate) type Pick<'a> = dyn Fn(&RecordBatch) -> Result<Picked, LakeError> + Send + Sync + 'a;

/// What became of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    pub rows: u64,
    /// Rows that a hold keeps.
    pub held: u64,
    /// Files that were written again or dropped.
    pub files: u64,
}

/// A file with its action to remove it.
type Old = (Add, Remove);

/// Takes the picked rows of `app` out of the files that `table` has now; `columns` are those that the choice needs, and
/// `is_of` says of which days of receipt. Rows that arrive meanwhile are not looked at.
pub(crate) async fn remove_rows(
    inner: &Inner,
    app: &AppId,
    table: Table,
    columns: &str,
    pick: &Pick<'_>,
    is_of: &(dyn Fn(&str) -> bool + Send + Sync),
) -> Result<Removed, LakeError> {
    let handle = inner.table(table);
    let _alone = handle.rewrite.lock().await;
    let delta = handle.view().delta;
    refuse_unknown_columns(&delta, table)?;
    let mut removed = Removed::default();
    for (_, files) in by_day(&delta, app)?.into_iter().filter(|(day, _)| is_of(day)) {
        let day = Day { inner, app, table, handle, delta: &delta };
        let of_day = day.remove(files, columns, pick).await?;
        removed.rows += of_day.rows;
        removed.held += of_day.held;
        removed.files += of_day.files;
    }
    Ok(removed)
}

/// A newer program may have added columns; rows written again by this one would lose them.
fn refuse_unknown_columns(delta: &DeltaTable, table: Table) -> Result<(), LakeError> {
    let known = table.schema();
    let stored = delta.snapshot()?.schema();
    match stored.fields().find(|f| known.field_with_name(f.name()).is_err()) {
        None => Ok(()),
        Some(f) => Err(LakeError::Unexpected(format!(
            "`{}` has the column `{}` of a newer version: erase with that version",
            table.name(),
            f.name()
        ))),
    }
}

/// Files of one app by day of receipt.
fn by_day(delta: &DeltaTable, app: &AppId) -> Result<BTreeMap<String, Vec<Old>>, LakeError> {
    let mut days: BTreeMap<String, Vec<Old>> = BTreeMap::new();
    for view in delta.snapshot()?.log_data().iter() {
        let remove = view.remove_action(true);
        let values = remove.partition_values.clone().unwrap_or_default();
        let value = |name: &str| values.get(name).cloned().flatten();
        if value("app").is_none_or(|a| a != app.as_str()) {
            continue;
        }
        let day = value("received_date").unwrap_or_default();
        let add = Add {
            path: view.path().to_string(),
            partition_values: values,
            size: view.size(),
            modification_time: view.modification_time(),
            data_change: true,
            stats: view.stats(),
            ..Add::default()
        };
        days.entry(day).or_default().push((add, remove));
    }
    Ok(days)
}

/// The files of one day.
struct Day<'a> {
    inner: &'a Inner,
    app: &'a AppId,
    table: Table,
    handle: &'a LakeTable,
    delta: &'a DeltaTable,
}

impl Day<'_> {
    async fn remove(&self, files: Vec<Old>, columns: &str, pick: &Pick<'_>) -> Result<Removed, LakeError> {
        let mut removed = Removed::default();
        let mut append = Append::begin(self.delta)?;
        let mut gone = Vec::new();
        for (add, remove) in files {
            let (rows, went, held) = self.count(&add, columns, pick).await?;
            removed.held += held;
            if went == 0 {
                continue;
            }
            if went < rows {
                self.copy_others(&add, pick, &mut append).await?;
            }
            removed.rows += went;
            gone.push(remove);
        }
        removed.files = gone.len() as u64;
        if !gone.is_empty() {
            let _one = self.handle.commit.lock().await;
            let View { mut delta, committed } = self.handle.view();
            delta.update_state().await?;
            let new = append.replace(delta, gone).await?;
            self.handle.install(new, committed, &self.inner.buffers);
        }
        Ok(removed)
    }

    fn session(&self, add: &Add) -> Result<SessionState, LakeError> {
        session_over(self.inner, self.app, self.table, self.delta, Some(vec![add.clone()]))
    }

    /// Rows of a file, how many of them go, and how many a hold keeps.
    async fn count(&self, add: &Add, columns: &str, pick: &Pick<'_>) -> Result<(u64, u64, u64), LakeError> {
        let (mut rows, mut went, mut held) = (0, 0, 0);
        let take: &mut Take<'_> = &mut |batch: RecordBatch| {
            let picked = pick(&batch)?;
            rows += batch.num_rows() as u64;
            went += picked.go.true_count() as u64;
            held += picked.held;
            Ok(())
        };
        drain(self.session(add)?, &format!("SELECT {columns} FROM {}", self.table.name()), take).await?;
        Ok((rows, went, held))
    }

    /// Writes the rows of a file that stay.
    async fn copy_others(&self, add: &Add, pick: &Pick<'_>, append: &mut Append) -> Result<(), LakeError> {
        let query = format!("SELECT * FROM {}", self.table.name());
        let context = SessionContext::new_with_state(self.session(add)?);
        let mut rows = context.sql(&query).await?.execute_stream().await?;
        while let Some(batch) = rows.next().await {
            let batch = plain(&batch?, self.table)?;
            let stays = arrow::compute::not(&pick(&batch)?.go)?;
            append.write(&filter_record_batch(&batch, &stays)?).await?;
        }
        Ok(())
    }
}

/// The batch with the types of the table, however the engine read it.
fn plain(batch: &RecordBatch, table: Table) -> Result<RecordBatch, LakeError> {
    let schema = table.schema();
    let columns: Result<Vec<_>, LakeError> = schema
        .fields()
        .iter()
        .map(|f| {
            let column = batch.column_by_name(f.name());
            let column =
                column.ok_or_else(|| LakeError::Unexpected(format!("{} without `{}`", table.name(), f.name())))?;
            Ok(if column.data_type() == f.data_type() { Arc::clone(column) } else { cast(column, f.data_type())? })
        })
        .collect();
    Ok(RecordBatch::try_new(schema, columns?)?)
}
