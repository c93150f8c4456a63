//! What is acknowledged (durable in the log) but not yet in a Delta table, per table in log order. Only the places are kept:
//! queries and the committer read the rows from the log when they need them, so a backlog costs disk and not memory.

use crate::rows::Table;
use crate::wal::Stored;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct Inner {
    tables: [VecDeque<Stored>; Table::ALL.len()],
    bytes: u64,
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
    pub fn push(&self, seq: u64, rows: impl IntoIterator<Item = Stored>) {
        let mut inner = self.lock();
        for stored in rows {
            inner.bytes += u64::from(stored.len);
            if let Some(queue) = inner.tables.get_mut(stored.table as usize) {
                queue.push_back(stored);
            }
        }
        inner.last = inner.last.max(seq);
    }

    /// Rows of `table` from records `after < seq <= upto`, in log order.
    #[must_use]
    pub fn range(&self, table: Table, after: u64, upto: u64) -> Vec<Stored> {
        let inner = self.lock();
        let Some(queue) = inner.tables.get(table as usize) else {
            return Vec::new();
        };
        let begin = queue.partition_point(|s| s.seq <= after);
        queue.range(begin..).take_while(|s| s.seq <= upto).cloned().collect()
    }

    /// Forgets the rows of `table` up to and including record `seq`.
    pub fn drop_upto(&self, table: Table, seq: u64) {
        let mut inner = self.lock();
        let mut freed = 0;
        if let Some(queue) = inner.tables.get_mut(table as usize) {
            while queue.front().is_some_and(|s| s.seq <= seq) {
                freed += queue.pop_front().map_or(0, |s| u64::from(s.len));
            }
        }
        inner.bytes = inner.bytes.saturating_sub(freed);
    }

    /// Log bytes of all waiting rows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Sequence number of the latest durable record; 0 before the first.
    #[must_use]
    pub fn last_seq(&self) -> u64 {
        self.lock().last
    }

    /// The last record up to which the rows of all tables take no more than `bytes` of the log, but at least one record.
    #[must_use]
    pub fn upto(&self, bytes: u64) -> u64 {
        let inner = self.lock();
        let mut sizes: Vec<(u64, u64)> = inner.tables.iter().flatten().map(|s| (s.seq, u64::from(s.len))).collect();
        sizes.sort_unstable();
        let Some((first, _)) = sizes.first().copied() else { return inner.last };
        let mut total = 0;
        for (i, (seq, len)) in sizes.iter().enumerate() {
            total += len;
            if total > bytes {
                let before = sizes[..i].iter().rev().map(|(s, _)| *s).find(|s| s < seq);
                return before.unwrap_or(first);
            }
        }
        inner.last
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
    use crate::wal::stored::Segment;
    use std::sync::Arc;

    fn stored(seq: u64, table: Table) -> Stored {
        let segment = Arc::new(Segment { file: tempfile::tempfile().unwrap(), path: "test".into() });
        Stored { seq, table, rows: seq as usize, len: 10 * seq as u32, crc: 0, at: 0, segment }
    }

    #[test]
    fn ranges_follow_the_watermark_and_bytes_return_to_zero() {
        let b = Buffers::default();
        for seq in 1..=5 {
            b.push(seq, [stored(seq, Table::Dispositions)]);
        }
        let count = |after, upto| -> usize { b.range(Table::Dispositions, after, upto).iter().map(|s| s.rows).sum() };
        assert_eq!(count(0, 5), 15);
        assert_eq!(count(2, 4), 7);
        assert_eq!(b.bytes(), 150);
        b.drop_upto(Table::Dispositions, 3);
        assert_eq!(count(0, 5), 9);
        b.drop_upto(Table::Dispositions, 5);
        assert_eq!((b.bytes(), b.last_seq()), (0, 5));
        assert!(b.range(Table::Outcomes, 0, 9).is_empty());
    }

    #[test]
    fn a_piece_of_the_backlog_ends_with_a_whole_record() {
        let b = Buffers::default();
        assert_eq!(b.upto(100), 0);
        for seq in 1..=5 {
            b.push(seq, [stored(seq, Table::Interactions), stored(seq, Table::Dispositions)]);
        }
        // 20, 40, 60, 80, 100 bytes
        assert_eq!([1, 20, 59, 60, 119, 120, 1000].map(|n| b.upto(n)), [1, 1, 1, 2, 2, 3, 5]);
    }
}
