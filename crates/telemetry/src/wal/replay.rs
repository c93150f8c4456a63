//! Reading side of the log: where every record lies and which batches it holds. Rows are not read, so a start takes as long
//! for a large log as for a small one. A torn tail (a crash while writing, never acknowledged) is cut off; a damaged record
//! in the middle is skipped and reported, and everything after it is still read. Only the last segment can have a torn tail,
//! so only there every byte is checked; elsewhere rows are checked when they are read.

use super::log::segments;
use super::record::{Group, HEAD, Opened, RECORD_HEADER, SEGMENT_HEADER, open, parse_header};
use super::stored::Segment;
use crate::error::TelemetryError;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Something in the log that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    pub path: PathBuf,
    pub offset: u64,
    pub detail: String,
}

/// The segment that is being read.
struct Reading {
    segment: Arc<Segment>,
    at: u64,
    len: u64,
}

/// Reads a log folder from its oldest record.
pub struct Replay {
    segments: Vec<(u64, PathBuf)>,
    index: usize,
    reading: Option<Reading>,
    damage: Vec<Damage>,
    /// Good length of the last segment once it was read.
    tail: Option<u64>,
}

impl Replay {
    pub(crate) fn open(folder: &Path) -> Result<Self, TelemetryError> {
        Ok(Self { segments: segments(folder)?, index: 0, reading: None, damage: Vec::new(), tail: None })
    }

    /// The next whole record; `None` at the end.
    ///
    /// # Errors
    /// Only when a file cannot be read or cut; damage is skipped and noted.
    pub fn next_group(&mut self) -> Result<Option<Group>, TelemetryError> {
        while let Some((_, path)) = self.segments.get(self.index).cloned() {
            let mut reading = match self.reading.take() {
                Some(open) => open,
                None => open_segment(path)?,
            };
            if reading.at >= reading.len {
                self.end_segment(&reading.segment.path, reading.at.min(reading.len))?;
                continue;
            }
            let last = self.index + 1 == self.segments.len();
            match read_record(&reading, last)? {
                Ok((group, next)) => {
                    reading.at = next;
                    self.reading = Some(reading);
                    return Ok(Some(group));
                }
                Err(Bad::Unread { detail, next }) => {
                    // Whole on disk, so it was acknowledged: never cut, whoever wrote it.
                    self.note(&reading, "a log record cannot be decoded", detail);
                    reading.at = next;
                    self.reading = Some(reading);
                }
                Err(Bad::Torn(detail)) => self.skip_damage(reading, last, detail)?,
            }
        }
        Ok(None)
    }

    fn note(&mut self, reading: &Reading, what: &'static str, detail: String) {
        let (path, offset) = (reading.segment.path.clone(), reading.at);
        tracing::error!(file = %path.display(), offset, %detail, "{what}");
        self.damage.push(Damage { path, offset, detail });
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

    /// Looks for the next whole record after damage. None in the last segment means a torn tail.
    fn skip_damage(&mut self, mut reading: Reading, last: bool, detail: String) -> Result<(), TelemetryError> {
        let path = reading.segment.path.clone();
        let left = usize::try_from(reading.len - reading.at).unwrap_or(usize::MAX);
        let rest = reading.segment.read(reading.at, left)?;
        let next = (1..rest.len().saturating_sub(RECORD_HEADER)).find(|i| whole(&rest[*i..]));
        if next.is_none() && last {
            tracing::warn!(file = %path.display(), offset = reading.at, %detail, "torn tail of the log is cut off");
            let cut = |e| TelemetryError::io("cannot cut", &path, e);
            let file = File::options().write(true).open(&path).map_err(cut)?;
            file.set_len(reading.at).and_then(|()| file.sync_all()).map_err(cut)?;
            return self.end_segment(&path, reading.at);
        }
        self.note(&reading, "a damaged log record is skipped", detail);
        match next {
            Some(i) => {
                reading.at += i as u64;
                self.reading = Some(reading);
                Ok(())
            }
            None => self.end_segment(&path, reading.len),
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

fn open_segment(path: PathBuf) -> Result<Reading, TelemetryError> {
    let file = File::open(&path).map_err(|e| TelemetryError::io("cannot open", &path, e))?;
    let len = file.metadata().map_err(|e| TelemetryError::io("cannot read", &path, e))?.len();
    Ok(Reading { segment: Arc::new(Segment { file, path }), at: SEGMENT_HEADER.min(len), len })
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

/// The record at the reading position, and where the next begins. `check` reads all of it for its checksum.
fn read_record(reading: &Reading, check: bool) -> Result<Result<(Group, u64), Bad>, TelemetryError> {
    let torn = |detail: &str| Ok(Err(Bad::Torn(detail.to_owned())));
    let left = usize::try_from(reading.len - reading.at).unwrap_or(usize::MAX);
    if left < RECORD_HEADER {
        return torn("record header is cut");
    }
    let head = reading.segment.read(reading.at, left.min(HEAD))?;
    let Some(h) = parse_header(&head) else { return torn("record header is damaged") };
    let (len, begin) = (h.len as usize, reading.at + RECORD_HEADER as u64);
    if RECORD_HEADER + len > left {
        return torn("record is cut");
    }
    let next = begin + u64::from(h.len);
    let mut payload = head.get(RECORD_HEADER..).map(|p| p[..p.len().min(len)].to_vec()).unwrap_or_default();
    let read_upto = |payload: &mut Vec<u8>, upto: usize| -> Result<(), TelemetryError> {
        let have = payload.len();
        payload.extend(reading.segment.read(begin + have as u64, upto.min(len).saturating_sub(have))?);
        Ok(())
    };
    if check {
        read_upto(&mut payload, len)?;
        if crc32fast::hash(&payload) != h.crc {
            return torn("payload checksum differs");
        }
    }
    loop {
        match open(&payload, len) {
            Opened::Whole(sections, keys) => {
                let rows = sections.iter().filter_map(|s| s.stored(h.seq, &reading.segment, begin)).collect();
                return Ok(Ok((Group { seq: h.seq, rows, keys }, next)));
            }
            Opened::Needs(upto) if payload.len() < upto.min(len) => read_upto(&mut payload, upto)?,
            Opened::Needs(_) => return Ok(Err(Bad::Unread { detail: "a section is cut".to_owned(), next })),
            Opened::Bad(detail) => return Ok(Err(Bad::Unread { detail, next })),
        }
    }
}
