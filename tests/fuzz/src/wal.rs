//! The write-ahead log as start-up finds it. Damage is skipped and reported, a torn tail is cut, whole records are
//! never lost, and what was read once is read again the same.

use crate::scratch::Scratch;
use crate::{choice, pieces};
use flywheel_telemetry::ingest::Recovery;
use flywheel_telemetry::wal::{Group, LogConfig};
use std::path::Path;
use std::sync::Once;

/// Name of the one segment.
const SEGMENT: &str = "wal-00000000000000000001.log";

/// First byte, bit 0: the rest are payloads ([`pieces`]), framed here with good checksums; else the rest is the
/// segment as it is. Bit 1: a second, empty segment follows. Bit 2: the bytes are the duplicate state instead.
pub fn run(data: &[u8]) {
    let (flags, rest) = choice(data);
    let_arrow_panic();
    let scratch = Scratch::empty();
    let folder = scratch.path();
    if flags & 4 != 0 {
        duplicates(folder, rest);
        return;
    }
    let (segment, whole) = if flags & 1 != 0 { framed(rest) } else { (rest.to_vec(), 0) };
    std::fs::write(folder.join(SEGMENT), &segment).expect("the scratch folder takes files");
    if flags & 2 != 0 {
        std::fs::write(folder.join("wal-00000000000000001000.log"), header(1000)).expect("the same");
    }
    let (first, damage) = replay(folder);
    assert!(first.len() + damage >= whole, "{whole} whole records, {} read, {damage} reported", first.len());
    let (second, _) = replay(folder);
    assert_eq!(seen(&first), seen(&second), "a second start reads the same");
}

/// The log catches what Arrow panics on, but libFuzzer's hook would end the process before that.
fn let_arrow_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let strict = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info.location().is_some_and(|l| l.file().contains("/arrow-")) {
                strict(info);
            }
        }));
    });
}

/// Sequence number, rows and keys of each group.
fn seen(groups: &[Group]) -> Vec<(u64, usize, usize)> {
    let rows = |g: &Group| g.rows.iter().map(|s| s.load().map_or(0, |batch| batch.num_rows())).sum();
    groups.iter().map(|g| (g.seq, rows(g), g.keys.len())).collect()
}

fn replay(folder: &Path) -> (Vec<Group>, usize) {
    let mut recovery = Recovery::open(LogConfig::new(folder)).expect("the log opens whatever it holds");
    let mut groups = Vec::new();
    while let Some(group) = recovery.next_group().expect("damage is no error") {
        groups.push(group);
    }
    (groups, recovery.damage().len())
}

fn header(first: u64) -> Vec<u8> {
    [&b"FLYWAL01"[..], &first.to_le_bytes()].concat()
}

/// A segment of whole records (form: `crates/telemetry/src/wal/mod.rs`), and how many.
#[must_use]
pub fn framed(payloads: &[u8]) -> (Vec<u8>, usize) {
    let mut out = header(1);
    let mut n = 0;
    for payload in pieces(payloads).take(16) {
        n += 1;
        let mut record = 0x3152_5746u32.to_le_bytes().to_vec();
        record.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        record.extend_from_slice(&(n as u64).to_le_bytes());
        record.extend_from_slice(&crc32fast::hash(payload).to_le_bytes());
        record.extend_from_slice(&crc32fast::hash(&record).to_le_bytes());
        out.extend_from_slice(&record);
        out.extend_from_slice(payload);
    }
    (out, n)
}

/// `dedup.snap` with a good checksum, and the same bytes as keys of a day: read or refused, never a panic.
fn duplicates(folder: &Path, body: &[u8]) {
    let mut snap = b"FLYDUP01".to_vec();
    snap.extend_from_slice(body);
    snap.extend_from_slice(&crc32fast::hash(&snap).to_le_bytes());
    std::fs::write(folder.join("dedup.snap"), snap).expect("the scratch folder takes files");
    std::fs::write(folder.join("keys-20000.bin"), body).expect("the same");
    if let Ok(mut recovery) = Recovery::open(LogConfig::new(folder)) {
        assert!(recovery.next_group().expect("an empty log").is_none());
    }
}
