//! Rows that do not come through the log: history of another system, or what a benchmark makes up. Files are written beside
//! the committer; only their one commit takes its turn with it.

use crate::append::Append;
use crate::error::LakeError;
use crate::lake::Lake;
use crate::table::{LakeTable, View, transaction};
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
        let _one = self.commit.lock().await;
        let View { mut delta, committed } = self.view();
        delta.update_state().await?;
        if transaction(&delta, writer).await? >= seq {
            self.install(delta, committed, buffers);
            return Ok(false);
        }
        match append.commit(delta.clone(), writer, seq).await {
            Ok(new) => self.install(new, committed, buffers),
            // object stores may report a successful write as failed
            Err(e) => {
                delta.update_state().await?;
                let found = transaction(&delta, writer).await?;
                self.install(delta, committed, buffers);
                if found < seq {
                    return Err(e);
                }
            }
        }
        Ok(true)
    }
}
