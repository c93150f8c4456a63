//! Rows that are acknowledged (durable in the log) but not yet in a Delta table, per table in log order. Queries
//! read them beside the tables; the committer drops them when a commit covers their sequence number.

use crate::rows::{Table, TableRows};
use arrow::array::RecordBatch;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct Inner {
    tables: [VecDeque<(u64, RecordBatch)>; Table::INGESTED.len()],
    bytes: usize,
    last: u64,
}

/// Acknowledged, not yet committed rows.
#[derive(Default)]
pub struct Buffers {
    inner: Mutex<Inner>,
}

impl Buffers {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every critical section leaves the state whole, so a panic elsewhere does not spoil it.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the rows of log record `seq`; sequence numbers only rise.
    pub fn push(&self, seq: u64, rows: &TableRows) {
        let mut inner = self.lock();
        for (i, table) in Table::INGESTED.into_iter().enumerate() {
            if let Some(batch) = rows.get(table) {
                inner.bytes += batch.get_array_memory_size();
                inner.tables[i].push_back((seq, batch.clone()));
            }
        }
        inner.last = inner.last.max(seq);
    }

    /// Rows of `table` from records `after < seq <= upto`, in log order.
    #[must_use]
    pub fn range(&self, table: Table, after: u64, upto: u64) -> Vec<RecordBatch> {
        let inner = self.lock();
        let Some(queue) = inner.tables.get(table as usize) else {
            return Vec::new();
        };
        queue.iter().filter(|(seq, _)| *seq > after && *seq <= upto).map(|(_, b)| b.clone()).collect()
    }

    /// Forgets the rows of `table` up to and including record `seq`.
    pub fn drop_upto(&self, table: Table, seq: u64) {
        let mut inner = self.lock();
        let mut freed = 0;
        if let Some(queue) = inner.tables.get_mut(table as usize) {
            while queue.front().is_some_and(|(s, _)| *s <= seq) {
                if let Some((_, batch)) = queue.pop_front() {
                    freed += batch.get_array_memory_size();
                }
            }
        }
        inner.bytes = inner.bytes.saturating_sub(freed);
    }

    /// Memory of all waiting rows, bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Sequence number of the latest durable record; 0 before the first.
    #[must_use]
    pub fn last_seq(&self) -> u64 {
        self.lock().last
    }

    /// Notes a record without rows, or the position reached by replay.
    pub fn advance(&self, seq: u64) {
        let mut inner = self.lock();
        inner.last = inner.last.max(seq);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::DispositionRow;

    fn rows(n: usize) -> TableRows {
        let mut out = TableRows::default();
        out.set(Table::Dispositions, DispositionRow::encode(&vec![DispositionRow::default(); n]).unwrap());
        out
    }

    #[test]
    fn ranges_follow_the_watermark_and_bytes_return_to_zero() {
        let b = Buffers::default();
        for seq in 1..=5 {
            b.push(seq, &rows(seq as usize));
        }
        let count = |after, upto| -> usize {
            b.range(Table::Dispositions, after, upto).iter().map(RecordBatch::num_rows).sum()
        };
        assert_eq!(count(0, 5), 15);
        assert_eq!(count(2, 4), 7);
        b.drop_upto(Table::Dispositions, 3);
        assert_eq!(count(0, 5), 9);
        b.drop_upto(Table::Dispositions, 5);
        assert_eq!((b.bytes(), b.last_seq()), (0, 5));
        assert!(b.range(Table::Outcomes, 0, 9).is_empty());
    }
}
