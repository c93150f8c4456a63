//! Counts of identical situations: the sufficient statistics of the model. Rows that agree in week, template,
//! bundle, device class, locale, user bucket and retrieved list share one entry `(n, failures)`. Integers only,
//! so counts of shards add up exactly and a replay gives the same bits.

use crate::hash::{IdMap, mix};
use serde::{Deserialize, Serialize};

/// Hours per epoch of the pattern key; the window drops whole epochs.
const EPOCH_HOURS: u32 = 7 * 24;

/// Everything about a situation except its retrieved list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub epoch: u32,
    pub template: u32,
    pub bundle: u32,
    pub device_class: u32,
    pub locale: u32,
    pub bucket: u8,
}

impl Cell {
    pub(crate) fn epoch_of(hour: u32) -> u32 {
        hour / EPOCH_HOURS
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Row {
    cell: Cell,
    start: u32,
    len: u32,
    n: u32,
    failures: u32,
}

/// One pattern as seen by the model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PatternRef<'a> {
    pub cell: Cell,
    /// Shown chunks in rank order.
    pub chunks: &'a [u32],
    pub n: u32,
    pub failures: u32,
}

/// The table.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct PatternTable {
    rows: Vec<Row>,
    arena: Vec<u32>,
    #[serde(skip)]
    index: IdMap<u64, u32>,
    forgotten: u64,
}

impl PartialEq for PatternTable {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows && self.arena == other.arena && self.forgotten == other.forgotten
    }
}

fn key(cell: &Cell, chunks: &[u32]) -> u64 {
    let mut h = mix(u64::from(cell.epoch) << 32 | u64::from(cell.template));
    h = mix(h ^ (u64::from(cell.bundle) << 32 | u64::from(cell.device_class)));
    h = mix(h ^ (u64::from(cell.locale) << 8 | u64::from(cell.bucket)));
    for c in chunks {
        h = mix(h ^ u64::from(*c));
    }
    h
}

impl PatternTable {
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = PatternRef<'_>> {
        self.rows.iter().map(|r| PatternRef { cell: r.cell, chunks: self.chunks_of(r), n: r.n, failures: r.failures })
    }

    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    fn chunks_of(&self, r: &Row) -> &[u32] {
        &self.arena[r.start as usize..(r.start + r.len) as usize]
    }

    /// Adds `n` rows with `failures` failures; makes room first when the table is full.
    pub(crate) fn add(&mut self, cell: Cell, chunks: &[u32], n: u32, failures: u32, max_rows: usize) {
        if self.index.is_empty() && !self.rows.is_empty() {
            self.rebuild_index();
        }
        let mut k = key(&cell, chunks);
        while let Some(&at) = self.index.get(&k) {
            let r = &self.rows[at as usize];
            if r.cell == cell && self.chunks_of(r) == chunks {
                let r = &mut self.rows[at as usize];
                r.n = r.n.saturating_add(n);
                r.failures = r.failures.saturating_add(failures);
                return;
            }
            k = mix(k); // another situation with the same 64-bit key: probe on
        }
        if self.rows.len() >= max_rows.max(4) {
            self.forget(self.rows.len() / 4);
        }
        self.index.insert(k, self.rows.len() as u32);
        self.rows.push(Row { cell, start: self.arena.len() as u32, len: chunks.len() as u32, n, failures });
        self.arena.extend_from_slice(chunks);
    }

    /// Drops epochs that ended before `hour - window_days`.
    pub(crate) fn drop_before(&mut self, hour: u32, window_days: u32) {
        let first = hour.saturating_sub(window_days.saturating_mul(24)) / EPOCH_HOURS;
        if self.rows.iter().any(|r| r.cell.epoch < first) {
            self.retain(|_, r| r.cell.epoch >= first);
        }
    }

    fn forget(&mut self, oldest: usize) {
        self.forgotten += oldest as u64;
        self.retain(|i, _| i >= oldest);
    }

    fn retain(&mut self, keep: impl Fn(usize, &Row) -> bool) {
        let rows = std::mem::take(&mut self.rows);
        let arena = std::mem::take(&mut self.arena);
        for (i, mut r) in rows.into_iter().enumerate() {
            if keep(i, &r) {
                let list = &arena[r.start as usize..(r.start + r.len) as usize];
                r.start = self.arena.len() as u32;
                self.arena.extend_from_slice(list);
                self.rows.push(r);
            }
        }
        self.rebuild_index();
    }

    fn rebuild_index(&mut self) {
        self.index.clear();
        for (i, r) in self.rows.iter().enumerate() {
            let list = &self.arena[r.start as usize..(r.start + r.len) as usize];
            let mut k = key(&r.cell, list);
            while self.index.contains_key(&k) {
                k = mix(k);
            }
            self.index.insert(k, i as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(epoch: u32) -> Cell {
        Cell { epoch, template: 1, bundle: 2, device_class: 3, locale: 4, bucket: 5 }
    }

    #[test]
    fn equal_situations_share_one_entry_and_order_of_ranks_matters() {
        let mut t = PatternTable::default();
        t.add(cell(0), &[1, 2], 1, 1, 100);
        t.add(cell(0), &[1, 2], 1, 0, 100);
        t.add(cell(0), &[2, 1], 1, 0, 100);
        t.add(cell(1), &[1, 2], 1, 0, 100);
        let got: Vec<_> = t.iter().map(|p| (p.chunks.to_vec(), p.n, p.failures)).collect();
        assert_eq!(got, vec![(vec![1, 2], 2, 1), (vec![2, 1], 1, 0), (vec![1, 2], 1, 0)]);
    }

    #[test]
    fn memory_is_bounded_and_the_loss_is_counted() {
        let mut t = PatternTable::default();
        for i in 0..100 {
            t.add(cell(0), &[i], 1, 0, 16);
        }
        assert!(t.len() <= 16);
        assert_eq!(t.forgotten() + t.len() as u64, 100);
    }

    #[test]
    fn survives_serialisation_and_the_window() {
        let mut t = PatternTable::default();
        t.add(cell(0), &[1], 1, 1, 100);
        t.add(cell(5), &[1, 7], 2, 1, 100);
        let mut again: PatternTable = serde_json::from_str(&serde_json::to_string(&t).unwrap()).unwrap();
        again.add(cell(5), &[1, 7], 1, 0, 100);
        again.drop_before(5 * EPOCH_HOURS, 14);
        let got: Vec<_> = again.iter().map(|p| (p.chunks.to_vec(), p.n, p.failures)).collect();
        assert_eq!(got, vec![(vec![1, 7], 3, 1)]);
    }
}
