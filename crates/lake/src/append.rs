//! Appending rows to a Delta table exactly once: Parquet files are streamed out batch by batch, and one commit with
//! `txn(writer_id, seq)` makes them visible. Memory is that of one row group per partition, whatever the size of the commit.

use crate::error::LakeError;
use arrow::array::{ArrayRef, RecordBatch, new_null_array};
use arrow::datatypes::SchemaRef;
use deltalake::DeltaTable;
use deltalake::kernel::scalars::ScalarExt;
use deltalake::kernel::transaction::{CommitBuilder, CommitProperties};
use deltalake::kernel::{Action, Add, Remove, Transaction};
use deltalake::parquet::basic::{Compression, ZstdLevel};
use deltalake::parquet::file::properties::{EnabledStatistics, WriterProperties};
use deltalake::protocol::{DeltaOperation, SaveMode};
use deltalake::writer::{DeltaWriter as _, RecordBatchWriter, WriteMode};
use indexmap::IndexMap;
use std::sync::Arc;

/// Partition columns of every table, in order.
pub(crate) const PARTITIONS: [&str; 2] = ["app", "received_date"];
/// Rows of one Parquet row group: what a query reads at least, and what is held while a file is written.
const ROW_GROUP: usize = 128 << 10;
/// A row group ends at this size too: rows with long texts would otherwise be held by the hundred megabytes.
const ROW_GROUP_BYTES: usize = 32 << 20;
/// A file is closed at this size, bytes.
const FILE_BYTES: u64 = 128 << 20;
/// Columns whose values hardly repeat: a dictionary of them is built in vain.
pub(crate) const UNIQUE: [&str; 4] = ["interaction_id", "install_id", "session_id", "conversation_id"];

/// How the tables are written as Parquet.
pub(crate) fn properties() -> WriterProperties {
    let mut builder = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_max_row_group_row_count(Some(ROW_GROUP))
        .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
        .set_statistics_enabled(EnabledStatistics::Chunk);
    for column in UNIQUE {
        builder = builder.set_column_dictionary_enabled(column.into(), false);
    }
    builder.build()
}

/// Rows on their way into one commit.
pub(crate) struct Append {
    writer: RecordBatchWriter,
    /// Columns of a file, which are those of the table without the partitions.
    file_schema: SchemaRef,
    /// Files that are closed already.
    closed: Vec<Add>,
}

impl Append {
    /// Begins a commit to `delta`.
    pub fn begin(delta: &DeltaTable) -> Result<Self, LakeError> {
        let writer =
            RecordBatchWriter::for_table(delta)?.with_writer_properties(properties()).with_target_file_size(FILE_BYTES);
        let schema = writer.arrow_schema();
        let fields = schema.fields().iter().filter(|f| !PARTITIONS.contains(&f.name().as_str())).cloned();
        let file_schema = Arc::new(arrow::datatypes::Schema::new(fields.collect::<Vec<_>>()));
        Ok(Self { writer, file_schema, closed: Vec::new() })
    }

    /// Writes rows of the table's schema.
    pub async fn write(&mut self, rows: &RecordBatch) -> Result<(), LakeError> {
        for part in parts(rows) {
            let mut values = IndexMap::new();
            for name in PARTITIONS {
                let column = column(&part, name)?;
                let value = ScalarExt::from_array(column.as_ref(), 0)
                    .ok_or_else(|| LakeError::Unexpected(format!("`{name}` cannot partition a table")))?;
                values.insert(name.to_owned(), value);
            }
            // columns that a record of an earlier program does not have are NULL
            let columns = self.file_schema.fields().iter().map(|f| {
                let found = part.column_by_name(f.name()).cloned();
                found.unwrap_or_else(|| new_null_array(f.data_type(), part.num_rows()))
            });
            let file = RecordBatch::try_new(Arc::clone(&self.file_schema), columns.collect())?;
            self.writer.write_partition(file, &values, WriteMode::Default).await?;
        }
        Ok(())
    }

    /// Closes the files and commits them in place of those that are gone. The log tells no reason: readers of a version range
    /// see that nothing was appended, and nobody sees what was looked for. Answers the new state of the table.
    pub async fn replace(self, mut delta: DeltaTable, gone: Vec<Remove>) -> Result<DeltaTable, LakeError> {
        let files = self.finish().await?;
        let actions = gone.into_iter().map(Action::Remove).chain(files.into_iter().map(Action::Add));
        let finalized = CommitBuilder::default()
            .with_actions(actions.collect())
            .build(Some(delta.snapshot()?), delta.log_store(), DeltaOperation::Delete { predicate: None })
            .await?;
        delta.state = Some(finalized.snapshot());
        Ok(delta)
    }

    /// Closes the files that are open: what they hold in memory is free afterwards.
    pub async fn close(&mut self) -> Result<(), LakeError> {
        self.closed.extend(self.writer.flush().await?);
        Ok(())
    }

    /// Closes the files; [`commit`] makes them part of the table.
    pub async fn finish(mut self) -> Result<Vec<Add>, LakeError> {
        self.close().await?;
        Ok(self.closed)
    }

    /// Closes the files and commits them. Answers the new state of the table.
    pub async fn commit(self, delta: DeltaTable, writer_id: &str, seq: u64) -> Result<DeltaTable, LakeError> {
        commit(delta, self.finish().await?, &[(writer_id, seq)]).await
    }
}

/// Adds `files` to the table together with transactions `(writer_id, seq)`. Answers the new state of the table.
pub(crate) async fn commit(
    mut delta: DeltaTable,
    files: Vec<Add>,
    marks: &[(&str, u64)],
) -> Result<DeltaTable, LakeError> {
    let transaction = |(writer_id, seq): &(&str, u64)| {
        let version = i64::try_from(*seq).map_err(|_| LakeError::Unexpected(format!("sequence number {seq}")))?;
        Ok(Transaction::new(*writer_id, version))
    };
    let marks = marks.iter().map(transaction).collect::<Result<Vec<_>, LakeError>>()?;
    let properties = CommitProperties::default().with_application_transactions(marks);
    let operation = DeltaOperation::Write {
        mode: SaveMode::Append,
        partition_by: Some(PARTITIONS.map(str::to_owned).to_vec()),
        predicate: None,
    };
    let finalized = CommitBuilder::from(properties)
        .with_actions(files.into_iter().map(Action::Add).collect())
        .build(Some(delta.snapshot()?), delta.log_store(), operation)
        .await?;
    delta.state = Some(finalized.snapshot());
    Ok(delta)
}

fn column<'a>(rows: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, LakeError> {
    rows.column_by_name(name).ok_or_else(|| LakeError::Unexpected(format!("rows without `{name}`")))
}

/// `rows` cut where a partition column changes: most records of the log hold one app and one day.
fn parts(rows: &RecordBatch) -> Vec<RecordBatch> {
    let columns: Vec<&ArrayRef> = PARTITIONS.iter().filter_map(|name| rows.column_by_name(name)).collect();
    let mut out = Vec::new();
    let mut begin = 0;
    for end in 1..=rows.num_rows() {
        let same = end < rows.num_rows() && columns.iter().all(|c| equal(c, begin, end));
        if !same {
            out.push(rows.slice(begin, end - begin));
            begin = end;
        }
    }
    out
}

fn equal(column: &ArrayRef, a: usize, b: usize) -> bool {
    use arrow::array::AsArray as _;
    use arrow::datatypes::Date32Type;
    if let Some(text) = column.as_string_opt::<i32>() {
        return text.value(a) == text.value(b);
    }
    column.as_primitive_opt::<Date32Type>().is_some_and(|days| days.value(a) == days.value(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flywheel_telemetry::column::{Day, Micros};
    use flywheel_telemetry::rows::DispositionRow;

    #[test]
    fn rows_are_cut_where_app_or_day_changes() {
        let row = |app: &str, day: i32| DispositionRow {
            app: app.into(),
            received_date: Day(day),
            received_at: Micros(1),
            ..DispositionRow::default()
        };
        let rows = [row("a", 1), row("a", 1), row("a", 2), row("b", 2), row("a", 2)];
        let cut = parts(&DispositionRow::encode(&rows).unwrap());
        assert_eq!(cut.iter().map(RecordBatch::num_rows).collect::<Vec<_>>(), [2, 1, 1, 1]);
        assert!(parts(&DispositionRow::encode(&[]).unwrap()).is_empty());
    }
}
