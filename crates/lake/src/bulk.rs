//! Rows that do not come through the log: history of another system, or what a benchmark makes up. Files are written beside
//! the committer; only their one commit takes its turn with it.

use crate::append::Append;
use crate::error::LakeError;
use crate::lake::Lake;
use crate::table::{Appended, LakeTable};
use arrow::array::RecordBatch;
use flywheel_telemetry::{Buffers, Table};
use flywheel_types::Error;
use futures::{Stream, StreamExt as _};

impl Lake {
    /// Appends `rows` of the table's schema in one commit as `(writer, seq)`; `false` when the table has this number of the
    /// writer already, whatever the rows are. Memory is that of one row group per partition.
    ///
    /// # Errors
    /// When the table cannot be written; the call can be repeated.
    pub async fn append_bulk(
        &self,
        table: Table,
        writer: &str,
        seq: u64,
        rows: impl Stream<Item = RecordBatch> + Send,
    ) -> Result<bool, Error> {
        Ok(self.inner.table(table).append_bulk(writer, seq, rows, &self.inner.buffers).await?)
    }
}

impl LakeTable {
    async fn append_bulk(
        &self,
        writer: &str,
        seq: u64,
        rows: impl Stream<Item = RecordBatch> + Send,
        buffers: &Buffers,
    ) -> Result<bool, LakeError> {
        if self.sequence(writer, buffers).await? >= seq {
            return Ok(false);
        }
        let mut append = Append::begin(&self.view().delta)?;
        let mut rows = std::pin::pin!(rows);
        while let Some(batch) = rows.next().await {
            append.write(&batch).await?;
        }
        match self.append_files(append.finish().await?, &[(writer, seq)], buffers).await? {
            Appended::Now => Ok(true),
            Appended::Already => Ok(false),
            Appended::Gone => {
                Err(LakeError::Unexpected("a vacuum took the files before their commit: repeat it".to_owned()))
            }
        }
    }
}
