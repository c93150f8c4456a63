//! Crashes and damage, made by hand: a log cut at every byte, flipped bytes in the middle, an empty new segment.

use super::log::{lock, segments};
use super::record::{Encoded, RECORD_HEADER, encode, seal};
use super::{Group, Log, LogConfig, Replay};
use crate::dedup::BatchKey;
use crate::rows::{DispositionRow, Table, TableRows};
use std::path::Path;

fn record(seq: u64) -> Encoded {
    let n = seq as usize;
    let mut rows = TableRows::default();
    rows.set(Table::Dispositions, DispositionRow::encode(&vec![DispositionRow::default(); n]).unwrap());
    encode(seq, &rows, &[BatchKey::Seq { scope: [n as u8; 16], seq }]).unwrap()
}

fn write(folder: &Path, segment_bytes: u64, seqs: std::ops::RangeInclusive<u64>) {
    let config = LogConfig { folder: folder.to_owned(), segment_bytes };
    let mut replay = Replay::open(folder).unwrap();
    while replay.next_group().unwrap().is_some() {}
    let (closed, tail) = replay.finish();
    let mut log = Log::open(config, lock(folder).unwrap(), closed, tail).unwrap();
    for seq in seqs {
        let stored = log.append(&record(seq)).unwrap();
        assert_eq!(stored[0].load().unwrap().num_rows() as u64, seq);
    }
}

fn read(folder: &Path) -> (Vec<u64>, usize) {
    let mut replay = Replay::open(folder).unwrap();
    let mut seqs = Vec::new();
    while let Some(Group { seq, rows, keys }) = replay.next_group().unwrap() {
        assert_eq!((rows.len(), rows[0].table, rows[0].rows as u64), (1, Table::Dispositions, seq));
        assert_eq!(rows[0].load().unwrap().num_rows() as u64, seq);
        assert_eq!(keys.len(), 1);
        seqs.push(seq);
    }
    (seqs, replay.damage().len())
}

#[test]
fn a_log_cut_at_any_byte_keeps_its_whole_records_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 1 << 20, 1..=2);
    let path = segments(dir.path()).unwrap().remove(0).1;
    let two = std::fs::read(&path).unwrap();
    write(dir.path(), 1 << 20, 3..=3);
    let three = std::fs::read(&path).unwrap();
    assert_eq!(three[..two.len()], two[..]);
    for cut in (two.len()..three.len()).step_by(37) {
        std::fs::write(&path, &three[..cut]).unwrap();
        assert_eq!(read(dir.path()), (vec![1, 2], 0), "cut at {cut}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), two.len() as u64, "the torn tail is gone");
        write(dir.path(), 1 << 20, 3..=4);
        assert_eq!(read(dir.path()), (vec![1, 2, 3, 4], 0), "after a cut at {cut}");
    }
}

#[test]
fn a_damaged_record_in_the_middle_costs_only_itself() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 1 << 20, 1..=1);
    let path = segments(dir.path()).unwrap().remove(0).1;
    let end_of_first = std::fs::metadata(&path).unwrap().len() as usize;
    write(dir.path(), 1 << 20, 2..=4);
    let whole = std::fs::read(&path).unwrap();
    // In the magic, the length, the checksums and the payload of record 2.
    for at in [0, 4, 8, 16, 20, 24, 300] {
        let mut bad = whole.clone();
        bad[end_of_first + at] ^= 0x40;
        std::fs::write(&path, &bad).unwrap();
        assert_eq!(read(dir.path()), (vec![1, 3, 4], 1), "damage at {at}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), whole.len() as u64, "nothing is cut");
    }
}

#[test]
fn rows_of_a_full_segment_are_checked_when_they_are_read() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 3000, 1..=3);
    let first = segments(dir.path()).unwrap().remove(0).1;
    let mut bytes = std::fs::read(&first).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&first, &bytes).unwrap();
    let mut replay = Replay::open(dir.path()).unwrap();
    let group = replay.next_group().unwrap().unwrap();
    assert_eq!((group.seq, group.keys.len()), (1, 1), "the identities are whole: a retry is still known");
    let e = group.rows[0].load().unwrap_err().to_string();
    assert!(e.contains("checksum of 1 rows of dispositions differs"), "{e}");
    assert_eq!(replay.next_group().unwrap().unwrap().rows[0].load().unwrap().num_rows(), 2);
}

#[test]
fn a_record_of_a_later_version_is_reported_and_never_cut() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 1 << 20, 1..=1);
    let mut replay = Replay::open(dir.path()).unwrap();
    while replay.next_group().unwrap().is_some() {}
    let (closed, tail) = replay.finish();
    let path = closed[0].1.clone();
    let config = LogConfig { folder: dir.path().to_owned(), segment_bytes: 1 << 20 };
    let mut log = Log::open(config, lock(dir.path()).unwrap(), closed, tail).unwrap();
    let mut bytes = [&[0; RECORD_HEADER][..], &[99, 1, 2, 3]].concat();
    seal(2, &mut bytes).unwrap();
    log.append(&Encoded { seq: 2, bytes, sections: Vec::new() }).unwrap();
    drop(log);
    let size = std::fs::metadata(&path).unwrap().len();
    assert_eq!(read(dir.path()), (vec![1], 1));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
}

#[test]
fn segments_rotate_and_only_covered_ones_are_freed() {
    let dir = tempfile::tempdir().unwrap();
    let config = LogConfig { folder: dir.path().to_owned(), segment_bytes: 4000 };
    let mut log = Log::open(config.clone(), lock(dir.path()).unwrap(), Vec::new(), None).unwrap();
    for seq in 1..=12 {
        let stored = log.append(&record(seq)).unwrap();
        assert_eq!(stored[0].load().unwrap().num_rows() as u64, seq);
    }
    let firsts: Vec<u64> = segments(dir.path()).unwrap().into_iter().map(|s| s.0).collect();
    assert!(firsts.len() > 3, "{firsts:?}");
    assert_eq!(log.free(firsts[1] - 2).unwrap(), 0);
    assert_eq!(log.free(firsts[2] - 1).unwrap(), 2);
    assert_eq!(read(dir.path()).0, (firsts[2]..=12).collect::<Vec<_>>());
    assert_eq!(log.free(1000).unwrap(), firsts.len() - 3, "the active segment stays");
    drop(log);
    // A crash between creating a segment and writing its header.
    std::fs::write(dir.path().join(format!("wal-{:020}.log", 13)), b"FLY").unwrap();
    write(dir.path(), 4000, 13..=13);
    assert_eq!(read(dir.path()).0.last(), Some(&13));
}

#[test]
fn one_process_owns_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let first = lock(dir.path()).unwrap();
    assert!(lock(dir.path()).is_err());
    drop(first);
    assert!(lock(dir.path()).is_ok());
}
