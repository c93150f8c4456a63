//! Encoding of one record: header, checksums, directory, sections.

use super::stored::{Segment, Stored, read_ipc};
use crate::dedup::BatchKey;
use crate::error::TelemetryError;
use crate::rows::{Table, TableRows};
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use std::sync::Arc;

pub(crate) const SEGMENT_MAGIC: &[u8; 8] = b"FLYWAL01";
pub(crate) const SEGMENT_HEADER: u64 = 16;
pub(crate) const RECORD_MAGIC: u32 = 0x3152_5746; // "FWR1"
pub(crate) const RECORD_HEADER: usize = 24;
/// No record is larger; a header that claims more is damage.
pub(crate) const MAX_PAYLOAD: u32 = 1 << 30;
const VERSION_1: u8 = 1;
const VERSION_2: u8 = 2;
const TAG_KEYS: u8 = 16;
/// Tag, rows, length and checksum of a section.
const ENTRY: usize = 13;
/// Version and number of sections.
const DIRECTORY: usize = 2;
/// Bytes from the beginning of a record that hold its header, its directory and the identities of most groups.
pub(crate) const HEAD: usize = 4096;

fn tag(table: Table) -> u8 {
    table as u8 + 1
}

/// One record of the log as replay gives it: where its rows lie, and which batches they came in.
#[derive(Debug, Clone)]
pub struct Group {
    pub seq: u64,
    pub rows: Vec<Stored>,
    pub keys: Vec<BatchKey>,
}

impl Group {
    /// The rows of `table`, if there are any.
    #[must_use]
    pub fn get(&self, table: Table) -> Option<&Stored> {
        self.rows.iter().find(|s| s.table == table)
    }
}

/// What a directory says about one section. Offsets count from the beginning of the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Section {
    tag: u8,
    rows: u32,
    at: u32,
    len: u32,
    crc: u32,
}

impl Section {
    /// The rows of a section whose payload begins at `payload` of a segment; `None` for identities and unknown tags.
    pub(crate) fn stored(self, seq: u64, segment: &Arc<Segment>, payload: u64) -> Option<Stored> {
        let table = Table::INGESTED.into_iter().find(|t| tag(*t) == self.tag)?;
        let (rows, at) = (self.rows as usize, payload + u64::from(self.at));
        Some(Stored { seq, table, rows, len: self.len, crc: self.crc, at, segment: Arc::clone(segment) })
    }
}

/// A record as it is written.
#[derive(Debug)]
pub(crate) struct Encoded {
    pub seq: u64,
    /// Header and payload.
    pub bytes: Vec<u8>,
    pub sections: Vec<Section>,
}

/// Encodes one record. The identities come first and have a checksum of their own, so that a start needs no rows.
pub(crate) fn encode(seq: u64, rows: &TableRows, keys: &[BatchKey]) -> Result<Encoded, TelemetryError> {
    let tables: Vec<Table> = Table::INGESTED.into_iter().filter(|t| rows.get(*t).is_some()).collect();
    let mut bytes = vec![0; RECORD_HEADER];
    bytes.extend([VERSION_2, tables.len() as u8 + 1]);
    bytes.resize(bytes.len() + ENTRY * (tables.len() + 1), 0);
    let begin = bytes.len();
    for key in keys {
        key.encode(&mut bytes);
    }
    let mut sections = vec![section(&bytes, TAG_KEYS, keys.len(), begin)?];
    for table in tables {
        let Some(batch) = rows.get(table) else { continue };
        let begin = bytes.len();
        let mut writer = StreamWriter::try_new(&mut bytes, &batch.schema())?;
        writer.write(batch)?;
        writer.finish()?;
        sections.push(section(&bytes, tag(table), batch.num_rows(), begin)?);
    }
    let directory = sections.iter().flat_map(|s| {
        let mut entry = [0; ENTRY];
        entry[0] = s.tag;
        entry[1..5].copy_from_slice(&s.rows.to_le_bytes());
        entry[5..9].copy_from_slice(&s.len.to_le_bytes());
        entry[9..].copy_from_slice(&s.crc.to_le_bytes());
        entry
    });
    let directory: Vec<u8> = directory.collect();
    let at = RECORD_HEADER + DIRECTORY;
    bytes[at..at + directory.len()].copy_from_slice(&directory);
    seal(seq, &mut bytes)?;
    Ok(Encoded { seq, bytes, sections })
}

fn section(bytes: &[u8], tag: u8, rows: usize, begin: usize) -> Result<Section, TelemetryError> {
    let body = &bytes[begin..];
    let (rows, len) = (u32::try_from(rows), u32::try_from(body.len()));
    let (Ok(rows), Ok(len), Ok(at)) = (rows, len, u32::try_from(begin - RECORD_HEADER)) else {
        return Err(too_large(body.len()));
    };
    Ok(Section { tag, rows, at, len, crc: crc32fast::hash(body) })
}

fn too_large(bytes: usize) -> TelemetryError {
    ArrowError::InvalidArgumentError(format!("a log record of {bytes} bytes is too large")).into()
}

/// Fills the header of a record whose payload is in place.
pub(crate) fn seal(seq: u64, bytes: &mut [u8]) -> Result<(), TelemetryError> {
    let payload = &bytes[RECORD_HEADER..];
    let len = u32::try_from(payload.len()).ok().filter(|n| *n <= MAX_PAYLOAD);
    let (len, crc) = (len.ok_or_else(|| too_large(payload.len()))?, crc32fast::hash(payload));
    bytes[..4].copy_from_slice(&RECORD_MAGIC.to_le_bytes());
    bytes[4..8].copy_from_slice(&len.to_le_bytes());
    bytes[8..16].copy_from_slice(&seq.to_le_bytes());
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    let header_crc = crc32fast::hash(&bytes[..20]);
    bytes[20..RECORD_HEADER].copy_from_slice(&header_crc.to_le_bytes());
    Ok(())
}

/// Sections and identities of a record, read from the first bytes of its payload where those hold enough.
pub(crate) enum Opened {
    Whole(Vec<Section>, Vec<BatchKey>),
    /// The payload must be read up to this length.
    Needs(usize),
    Bad(String),
}

/// Reads what stands before the rows. `payload` is the beginning of it, `len` its whole length. Unknown tags are left out, so
/// that an older program can read a newer log.
pub(crate) fn open(payload: &[u8], len: usize) -> Opened {
    let result = match payload {
        [VERSION_1, ..] if payload.len() < len => return Opened::Needs(len),
        [VERSION_1, rest @ ..] => sections_1(rest),
        [VERSION_2, n, ..] => match directory(payload, usize::from(*n), len) {
            Ok(Ok(sections)) => Ok(sections),
            Ok(Err(needs)) => return Opened::Needs(needs),
            Err(e) => Err(e),
        },
        [other, ..] => Err(format!("payload version {other} is not known")),
        [] => Err("empty payload".to_owned()),
    };
    let sections = match result {
        Ok(sections) => sections,
        Err(detail) => return Opened::Bad(detail.to_owned()),
    };
    let mut keys = Vec::new();
    for s in sections.iter().filter(|s| s.tag == TAG_KEYS) {
        let end = s.at as usize + s.len as usize;
        let Some(body) = payload.get(s.at as usize..end) else { return Opened::Needs(end) };
        if crc32fast::hash(body) != s.crc {
            return Opened::Bad("the checksum of the batch identities differs".to_owned());
        }
        for entry in body.chunks(BatchKey::ENCODED) {
            let Some(key) = BatchKey::decode(entry) else { return Opened::Bad("batch identity is damaged".to_owned()) };
            keys.push(key);
        }
    }
    Opened::Whole(sections, keys)
}

/// Directory of version 2, or the length that it takes.
fn directory(payload: &[u8], n: usize, len: usize) -> Result<Result<Vec<Section>, usize>, String> {
    let end = DIRECTORY + ENTRY * n;
    let Some(entries) = payload.get(DIRECTORY..end) else { return Ok(Err(end)) };
    let word = |e: &[u8], at: usize| e.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
    let mut at = end;
    let mut out = Vec::with_capacity(n);
    for e in entries.chunks_exact(ENTRY) {
        let section = Section { tag: e[0], rows: word(e, 1), at: at as u32, len: word(e, 5), crc: word(e, 9) };
        at += section.len as usize;
        out.push(section);
    }
    if at == len { Ok(Ok(out)) } else { Err("the directory does not fit the payload".to_owned()) }
}

/// Sections of version 1, which had no directory: tag u8, length u32, bytes.
fn sections_1(mut rest: &[u8]) -> Result<Vec<Section>, String> {
    let (mut out, mut at) = (Vec::new(), 1);
    while let Some((tag_byte, after)) = rest.split_first() {
        let (len, after) = after.split_first_chunk::<4>().ok_or("section header is cut")?;
        let len = u32::from_le_bytes(*len);
        let (body, after) = after.split_at_checked(len as usize).ok_or("section is cut")?;
        rest = after;
        at += 5;
        let rows = match Table::INGESTED.into_iter().any(|t| tag(t) == *tag_byte) {
            true => u32::try_from(read_ipc(body.to_vec())?.num_rows()).unwrap_or(u32::MAX),
            false => 0,
        };
        out.push(Section { tag: *tag_byte, rows, at, len, crc: crc32fast::hash(body) });
        at += len;
    }
    Ok(out)
}

/// A header that passed its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub len: u32,
    pub seq: u64,
    pub crc: u32,
}

pub(crate) fn parse_header(bytes: &[u8]) -> Option<Header> {
    let word = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let long = |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    let header = Header { len: word(4)?, seq: long(8)?, crc: word(16)? };
    let good = word(0)? == RECORD_MAGIC && word(20)? == crc32fast::hash(bytes.get(..20)?) && header.len <= MAX_PAYLOAD;
    good.then_some(header)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::column::{Attrs, Micros};
    use crate::rows::{FeedbackRow, InteractionRow};

    fn segment(bytes: &[u8]) -> Arc<Segment> {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, bytes).unwrap();
        Arc::new(Segment { file, path: "test".into() })
    }

    fn example() -> (TableRows, BatchKey) {
        let row = InteractionRow {
            app: "a".into(),
            received_at: Micros(5),
            event_at: Some(Micros(-1)),
            chunk_ids: vec!["x".into(), "y".into()],
            chunk_versions: vec![1, 2],
            chunk_scores: vec![0.5, 0.25],
            chunk_hidden: vec![false, true],
            ttft_ms: Some(1.5),
            attrs: Attrs(vec![("k".into(), "v".into())]),
            ..InteractionRow::default()
        };
        let mut rows = TableRows::default();
        rows.set(Table::Interactions, InteractionRow::encode(&[row, InteractionRow::default()]).unwrap());
        rows.set(Table::Feedback, FeedbackRow::encode(&[FeedbackRow::default()]).unwrap());
        (rows, BatchKey::Seq { scope: [3; 16], seq: 9 })
    }

    #[test]
    fn a_record_round_trips_with_every_column_type() {
        let (rows, key) = example();
        let record = encode(7, &rows, &[key]).unwrap();
        let header = parse_header(&record.bytes).unwrap();
        assert_eq!((header.seq, header.len as usize), (7, record.bytes.len() - RECORD_HEADER));
        let payload = &record.bytes[RECORD_HEADER..];
        let Opened::Whole(sections, keys) = open(&payload[..200], payload.len()) else {
            panic!("200 bytes are enough")
        };
        assert_eq!((&sections, &keys[..]), (&record.sections, &[key][..]));
        assert!(matches!(open(&payload[..10], payload.len()), Opened::Needs(41)));
        let file = segment(&record.bytes);
        let stored: Vec<Stored> = sections.iter().filter_map(|s| s.stored(7, &file, RECORD_HEADER as u64)).collect();
        assert_eq!(
            stored.iter().map(|s| (s.table, s.rows)).collect::<Vec<_>>(),
            [(Table::Interactions, 2), (Table::Feedback, 1)]
        );
        for s in &stored {
            assert_eq!(Some(&s.load().unwrap()), rows.get(s.table));
        }
    }

    /// The first version had no directory; a log that an earlier program wrote is still read.
    #[test]
    fn a_payload_of_version_1_is_read() {
        let (rows, key) = example();
        let mut payload = vec![1];
        let mut add = |tag: u8, body: &[u8]| {
            payload.push(tag);
            payload.extend((body.len() as u32).to_le_bytes());
            payload.extend(body);
        };
        let mut ipc = Vec::new();
        let batch = rows.get(Table::Interactions).unwrap();
        let mut writer = StreamWriter::try_new(&mut ipc, &batch.schema()).unwrap();
        writer.write(batch).unwrap();
        writer.finish().unwrap();
        add(1, &ipc);
        add(77, b"unknown");
        let mut body = Vec::new();
        key.encode(&mut body);
        add(16, &body);
        assert!(matches!(open(&payload[..50], payload.len()), Opened::Needs(n) if n == payload.len()));
        let Opened::Whole(sections, keys) = open(&payload, payload.len()) else { panic!("a whole payload") };
        assert_eq!(keys, [key]);
        let file = segment(&payload);
        let stored: Vec<Stored> = sections.iter().filter_map(|s| s.stored(3, &file, 0)).collect();
        assert_eq!((stored.len(), stored[0].rows), (1, 2));
        assert_eq!(&stored[0].load().unwrap(), batch);
    }

    /// Logs on disk name their tables by these numbers.
    #[test]
    fn the_numbers_of_the_tables_never_change() {
        let numbers = Table::ALL.map(|t| (t.name(), tag(t)));
        let names = ["interactions", "feedback", "device_events", "dispositions", "outcomes", "rejects", "metrics"];
        assert_eq!(numbers.map(|(name, _)| name), names);
        assert_eq!(numbers.map(|(_, tag)| tag), [1, 2, 3, 4, 5, 6, 7]);
        assert!(numbers.iter().all(|(_, tag)| *tag < TAG_KEYS));
    }

    #[test]
    fn rows_of_a_foreign_writer_are_an_error_and_never_a_panic() {
        let (rows, _) = example();
        let record = encode(1, &rows, &[]).unwrap();
        let stored = record.sections[1].stored(1, &segment(&record.bytes), RECORD_HEADER as u64).unwrap();
        let whole = stored.segment.read(stored.at, stored.len as usize).unwrap();
        let refused = (0..whole.len()).step_by(3).filter(|at| {
            let mut bad = whole.clone();
            bad[*at] ^= 0x81;
            read_ipc(bad).is_err()
        });
        assert!(refused.count() > 100, "most of a stream is structure");
        // a body of four gigabytes is claimed, and eight bytes of metadata are there
        assert!(read_ipc([&[0xff; 4][..], &[0xf0, 0xff, 0xff, 0x7f], &[0; 8]].concat()).is_err());
        // and one flipped byte anywhere in a section is damage
        let mut bad = record.bytes.clone();
        bad[stored.at as usize + 40] ^= 1;
        let stored = record.sections[1].stored(1, &segment(&bad), RECORD_HEADER as u64).unwrap();
        assert!(matches!(stored.load(), Err(TelemetryError::Damaged { .. })));
    }

    #[test]
    fn every_flipped_header_byte_is_noticed() {
        let mut record = [&[0; RECORD_HEADER][..], b"payload"].concat();
        seal(7, &mut record).unwrap();
        for i in 0..RECORD_HEADER {
            let mut bad = record.clone();
            bad[i] ^= 0x10;
            assert_eq!(parse_header(&bad), None, "byte {i}");
        }
    }
}
