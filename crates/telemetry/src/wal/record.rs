//! Encoding of one record: header, checksums, sections.

use crate::dedup::BatchKey;
use crate::error::TelemetryError;
use crate::rows::{Table, TableRows};
use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::compute::concat_batches;
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamDecoder;
use arrow::ipc::writer::StreamWriter;

pub(crate) const SEGMENT_MAGIC: &[u8; 8] = b"FLYWAL01";
pub(crate) const SEGMENT_HEADER: u64 = 16;
pub(crate) const RECORD_MAGIC: u32 = 0x3152_5746; // "FWR1"
pub(crate) const RECORD_HEADER: usize = 24;
/// No record is larger; a header that claims more is damage.
pub(crate) const MAX_PAYLOAD: u32 = 1 << 30;
const PAYLOAD_VERSION: u8 = 1;
const TAG_KEYS: u8 = 16;

fn tag(table: Table) -> u8 {
    table as u8 + 1
}

/// One record of the log as replay gives it.
#[derive(Debug, Clone)]
pub struct Group {
    pub seq: u64,
    pub rows: TableRows,
    pub keys: Vec<BatchKey>,
}

/// Payload of a record.
pub(crate) fn encode_payload(rows: &TableRows, keys: &[BatchKey]) -> Result<Vec<u8>, ArrowError> {
    let mut out = vec![PAYLOAD_VERSION];
    for table in Table::INGESTED {
        if let Some(batch) = rows.get(table) {
            section(&mut out, tag(table), |out| ipc(batch, out))?;
        }
    }
    section(&mut out, TAG_KEYS, |out| {
        for key in keys {
            key.encode(out);
        }
        Ok(())
    })?;
    Ok(out)
}

fn section(
    out: &mut Vec<u8>,
    tag: u8,
    fill: impl FnOnce(&mut Vec<u8>) -> Result<(), ArrowError>,
) -> Result<(), ArrowError> {
    out.push(tag);
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    fill(out)?;
    let len = u32::try_from(out.len() - at - 4)
        .map_err(|_| ArrowError::InvalidArgumentError("a log section is larger than 4 GiB".to_owned()))?;
    out[at..at + 4].copy_from_slice(&len.to_le_bytes());
    Ok(())
}

fn ipc(batch: &RecordBatch, out: &mut Vec<u8>) -> Result<(), ArrowError> {
    let mut writer = StreamWriter::try_new(out, &batch.schema())?;
    writer.write(batch)?;
    writer.finish()
}

/// Reads a payload. Sections of unknown tags are skipped, so that an older program can read a newer log.
pub(crate) fn decode_payload(seq: u64, payload: &[u8]) -> Result<Group, String> {
    let (version, mut rest) = payload.split_first().ok_or("empty payload")?;
    if *version != PAYLOAD_VERSION {
        return Err(format!("payload version {version} is not known"));
    }
    let mut group = Group { seq, rows: TableRows::default(), keys: Vec::new() };
    while let Some((tag_byte, after)) = rest.split_first() {
        let (len, after) = after.split_first_chunk::<4>().ok_or("section header is cut")?;
        let len = u32::from_le_bytes(*len) as usize;
        let (body, after) = after.split_at_checked(len).ok_or("section is cut")?;
        rest = after;
        if *tag_byte == TAG_KEYS {
            for entry in body.chunks(BatchKey::ENCODED) {
                group.keys.push(BatchKey::decode(entry).ok_or("batch identity is damaged")?);
            }
        } else if let Some(table) = Table::INGESTED.into_iter().find(|t| tag(*t) == *tag_byte) {
            group.rows.set(table, read_ipc(body)?);
        }
    }
    Ok(group)
}

/// Rows of one section. Arrow answers some damage with a panic. The checksums have passed by then, so it is the record of a
/// broken or foreign writer: it must be reported like any other, and not end every start of the server.
fn read_ipc(body: &[u8]) -> Result<RecordBatch, String> {
    match std::panic::catch_unwind(|| decode_ipc(body)) {
        Ok(decoded) => decoded.map_err(|e| e.to_string()),
        Err(_) => Err("Arrow cannot decode the rows".to_owned()),
    }
}

/// The push decoder, because the pulling one allocates the lengths that the stream claims before it has the bytes.
fn decode_ipc(body: &[u8]) -> Result<RecordBatch, ArrowError> {
    let mut decoder = StreamDecoder::new();
    let (mut rest, mut batches) = (Buffer::from(body), Vec::new());
    while !rest.is_empty() {
        batches.extend(decoder.decode(&mut rest)?);
    }
    decoder.finish()?;
    let schema = decoder.schema().ok_or_else(|| ArrowError::IpcError("the stream has no schema".to_owned()))?;
    concat_batches(&schema, &batches)
}

/// Header and payload of one record.
pub(crate) fn frame(seq: u64, payload: &[u8]) -> Result<Vec<u8>, TelemetryError> {
    let len = u32::try_from(payload.len()).ok().filter(|n| *n <= MAX_PAYLOAD).ok_or_else(|| {
        ArrowError::InvalidArgumentError(format!("a log record of {} bytes is too large", payload.len()))
    })?;
    let mut out = Vec::with_capacity(RECORD_HEADER + payload.len());
    out.extend_from_slice(&RECORD_MAGIC.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&seq.to_le_bytes());
    out.extend_from_slice(&crc32fast::hash(payload).to_le_bytes());
    let header_crc = crc32fast::hash(&out);
    out.extend_from_slice(&header_crc.to_le_bytes());
    out.extend_from_slice(payload);
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
    use crate::rows::InteractionRow;

    #[test]
    fn a_record_round_trips_with_every_column_type() {
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
        rows.set(Table::Interactions, InteractionRow::encode(&[row.clone(), InteractionRow::default()]).unwrap());
        let key = BatchKey::Seq { scope: [3; 16], seq: 9 };
        let payload = encode_payload(&rows, &[key]).unwrap();
        let framed = frame(7, &payload).unwrap();
        let header = parse_header(&framed).unwrap();
        assert_eq!((header.seq, header.len as usize), (7, payload.len()));
        let got = decode_payload(7, &framed[RECORD_HEADER..]).unwrap();
        assert_eq!(got.rows.get(Table::Interactions), rows.get(Table::Interactions));
        assert_eq!(got.keys, [key]);
        assert!(got.rows.get(Table::Feedback).is_none());
    }

    #[test]
    fn rows_of_a_foreign_writer_are_an_error_and_never_a_panic() {
        let mut rows = TableRows::default();
        rows.set(Table::Interactions, InteractionRow::encode(&[InteractionRow::default()]).unwrap());
        let payload = encode_payload(&rows, &[]).unwrap();
        let refused = (5..payload.len()).step_by(3).filter(|at| {
            let mut bad = payload.clone();
            bad[*at] ^= 0x81;
            decode_payload(1, &bad).is_err()
        });
        assert!(refused.count() > 100, "most of a stream is structure");
        // a body of four gigabytes is claimed, and eight bytes of metadata are there
        let section = [&[PAYLOAD_VERSION, 1, 16, 0, 0, 0][..], &[0xff; 4], &[0xf0, 0xff, 0xff, 0x7f], &[0; 8]].concat();
        assert!(decode_payload(1, &section).is_err());
    }

    #[test]
    fn every_flipped_header_byte_is_noticed() {
        let framed = frame(7, b"payload").unwrap();
        for i in 0..RECORD_HEADER {
            let mut bad = framed.clone();
            bad[i] ^= 0x10;
            assert_eq!(parse_header(&bad), None, "byte {i}");
        }
    }
}
