//! Reading side of the log: one record at a time, so that memory stays bounded whatever the size of the log. A torn
//! tail (a crash while writing, never acknowledged) is cut off; a damaged record in the middle is skipped and
//! reported, and everything after it is still read.

use super::log::segments;
use super::record::{Group, RECORD_HEADER, SEGMENT_HEADER, decode_payload, parse_header};
use crate::error::TelemetryError;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Something in the log that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    pub path: PathBuf,
    pub offset: u64,
    pub detail: String,
}

/// Reads a log folder from its oldest record.
pub struct Replay {
    segments: Vec<(u64, PathBuf)>,
    index: usize,
    reader: Option<(BufReader<File>, u64, u64)>,
    damage: Vec<Damage>,
    /// Good length of the last segment once it was read.
    tail: Option<u64>,
}

impl Replay {
    pub(crate) fn open(folder: &Path) -> Result<Self, TelemetryError> {
        Ok(Self { segments: segments(folder)?, index: 0, reader: None, damage: Vec::new(), tail: None })
    }

    /// The next whole record; `None` at the end.
    ///
    /// # Errors
    /// Only when a file cannot be read or cut; damage is skipped and noted.
    pub fn next_group(&mut self) -> Result<Option<Group>, TelemetryError> {
        while let Some((_, path)) = self.segments.get(self.index).cloned() {
            let (mut reader, at, len) = match self.reader.take() {
                Some(open) => open,
                None => self.open_segment(&path)?,
            };
            if at >= len {
                self.end_segment(&path, at.min(len))?;
                continue;
            }
            match read_record(&mut reader, at, len).map_err(|e| TelemetryError::io("cannot read", &path, e))? {
                Ok((group, next)) => {
                    self.reader = Some((reader, next, len));
                    return Ok(Some(group));
                }
                Err(Bad::Unread { detail, next }) => {
                    // Whole on disk, so it was acknowledged: never cut, whoever wrote it.
                    tracing::error!(file = %path.display(), offset = at, %detail, "a log record cannot be decoded");
                    self.damage.push(Damage { path: path.clone(), offset: at, detail });
                    self.reader = Some((reader, next, len));
                }
                Err(Bad::Torn(detail)) => self.skip_damage(&path, reader, at, len, detail)?,
            }
        }
        Ok(None)
    }

    fn open_segment(&self, path: &Path) -> Result<(BufReader<File>, u64, u64), TelemetryError> {
        let io = |e| TelemetryError::io("cannot read", path, e);
        let mut file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        let at = SEGMENT_HEADER.min(len);
        file.seek(SeekFrom::Start(at)).map_err(io)?;
        Ok((BufReader::with_capacity(1 << 18, file), at, len))
    }

    fn end_segment(&mut self, path: &Path, good: u64) -> Result<(), TelemetryError> {
        self.index += 1;
        if self.index == self.segments.len() {
            if good < SEGMENT_HEADER {
                // Created, but its header never became durable: it holds nothing.
                std::fs::remove_file(path).map_err(|e| TelemetryError::io("cannot delete", path, e))?;
                self.segments.pop();
                self.index = self.segments.len();
                self.tail = None;
            } else {
                self.tail = Some(good);
            }
        }
        Ok(())
    }

    /// Looks for the next whole record after damage at `at`. None in the last segment means a torn tail.
    fn skip_damage(
        &mut self,
        path: &Path,
        mut reader: BufReader<File>,
        at: u64,
        len: u64,
        detail: String,
    ) -> Result<(), TelemetryError> {
        let io = |e| TelemetryError::io("cannot read", path, e);
        reader.seek(SeekFrom::Start(at)).map_err(io)?;
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).map_err(io)?;
        let next = (1..rest.len().saturating_sub(RECORD_HEADER)).find(|i| whole(&rest[*i..]));
        let last = self.index + 1 == self.segments.len();
        if next.is_none() && last {
            tracing::warn!(file = %path.display(), offset = at, %detail, "torn tail of the log is cut off");
            let file = File::options().write(true).open(path).map_err(io)?;
            file.set_len(at).and_then(|()| file.sync_all()).map_err(|e| TelemetryError::io("cannot cut", path, e))?;
            return self.end_segment(path, at);
        }
        tracing::error!(file = %path.display(), offset = at, %detail, "a damaged log record is skipped");
        self.damage.push(Damage { path: path.to_owned(), offset: at, detail });
        match next {
            Some(i) => {
                let to = at + i as u64;
                reader.seek(SeekFrom::Start(to)).map_err(io)?;
                self.reader = Some((reader, to, len));
                Ok(())
            }
            None => self.end_segment(path, len),
        }
    }

    /// Damage found so far.
    #[must_use]
    pub fn damage(&self) -> &[Damage] {
        &self.damage
    }

    /// Segments and the good length of the last, once everything was read.
    pub(crate) fn finish(self) -> (Vec<(u64, PathBuf)>, Option<u64>) {
        (self.segments, self.tail)
    }
}

fn whole(bytes: &[u8]) -> bool {
    parse_header(bytes).is_some_and(|h| {
        bytes
            .get(RECORD_HEADER..RECORD_HEADER + h.len as usize)
            .is_some_and(|payload| crc32fast::hash(payload) == h.crc)
    })
}

enum Bad {
    /// Not a whole record: a torn tail, or damage.
    Torn(String),
    /// Checksums fit, but the content is not known to this program.
    Unread { detail: String, next: u64 },
}

fn read_record(reader: &mut BufReader<File>, at: u64, len: u64) -> std::io::Result<Result<(Group, u64), Bad>> {
    let mut header = [0u8; RECORD_HEADER];
    if len - at < RECORD_HEADER as u64 {
        return Ok(Err(Bad::Torn("record header is cut".to_owned())));
    }
    reader.read_exact(&mut header)?;
    let Some(h) = parse_header(&header) else {
        return Ok(Err(Bad::Torn("record header is damaged".to_owned())));
    };
    let end = at + RECORD_HEADER as u64 + u64::from(h.len);
    if end > len {
        return Ok(Err(Bad::Torn("record is cut".to_owned())));
    }
    let mut payload = vec![0; h.len as usize];
    reader.read_exact(&mut payload)?;
    if crc32fast::hash(&payload) != h.crc {
        return Ok(Err(Bad::Torn("payload checksum differs".to_owned())));
    }
    Ok(match decode_payload(h.seq, &payload) {
        Ok(group) => Ok((group, end)),
        Err(detail) => Err(Bad::Unread { detail, next: end }),
    })
}
