//! Rows that lie in the log and are read when somebody needs them: what is acknowledged takes no memory while it waits for
//! its table.

use crate::error::TelemetryError;
use crate::rows::Table;
use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::compute::concat_batches;
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamDecoder;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

/// A file of the log, open for as long as somebody may read rows in it.
#[derive(Debug)]
pub struct Segment {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
}

impl Segment {
    /// Bytes at an offset.
    pub(crate) fn read(&self, at: u64, len: usize) -> Result<Vec<u8>, TelemetryError> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, at).map_err(|e| TelemetryError::io("cannot read", &self.path, e))?;
        Ok(bytes)
    }
}

/// The rows of one table in one record of the log.
#[derive(Debug, Clone)]
pub struct Stored {
    pub seq: u64,
    pub table: Table,
    /// How many.
    pub rows: usize,
    /// Bytes in the log.
    pub len: u32,
    pub(crate) crc: u32,
    /// Offset in the segment.
    pub(crate) at: u64,
    pub(crate) segment: Arc<Segment>,
}

impl Stored {
    /// Reads the rows.
    ///
    /// # Errors
    /// `Damaged` when the bytes are not those that were written; `Io` when they cannot be read.
    pub fn load(&self) -> Result<RecordBatch, TelemetryError> {
        let bytes = self.segment.read(self.at, self.len as usize)?;
        let damaged =
            |detail: String| TelemetryError::Damaged { path: self.segment.path.clone(), offset: self.at, detail };
        if crc32fast::hash(&bytes) != self.crc {
            return Err(damaged(format!("the checksum of {} rows of {} differs", self.rows, self.table.name())));
        }
        read_ipc(bytes).map_err(damaged)
    }
}

/// Rows of one section. Arrow answers some damage with a panic. The checksums have passed by then, so it is the record of a
/// broken or foreign writer: it must be reported like any other, and not end every start of the server.
pub(crate) fn read_ipc(body: Vec<u8>) -> Result<RecordBatch, String> {
    match std::panic::catch_unwind(|| decode_ipc(body)) {
        Ok(decoded) => decoded.map_err(|e| e.to_string()),
        Err(_) => Err("Arrow cannot decode the rows".to_owned()),
    }
}

/// The push decoder, because the pulling one allocates the lengths that the stream claims before it has the bytes.
fn decode_ipc(body: Vec<u8>) -> Result<RecordBatch, ArrowError> {
    let mut decoder = StreamDecoder::new();
    let (mut rest, mut batches) = (Buffer::from(body), Vec::new());
    while !rest.is_empty() {
        batches.extend(decoder.decode(&mut rest)?);
    }
    decoder.finish()?;
    let schema = decoder.schema().ok_or_else(|| ArrowError::IpcError("the stream has no schema".to_owned()))?;
    if let [one] = batches.as_slice() {
        return Ok(one.clone());
    }
    concat_batches(&schema, &batches)
}
