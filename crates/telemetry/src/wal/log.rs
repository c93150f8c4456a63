//! Writing side of the log. After a failed write or `fdatasync` the tail is unknown: nothing is appended until the
//! file was cut back to the last good record, so a full disk heals without a restart and never leaves a record that
//! was reported as failed.

use super::record::{Encoded, RECORD_HEADER, SEGMENT_HEADER, SEGMENT_MAGIC};
use super::stored::{Segment, Stored};
use crate::error::TelemetryError;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where and how the log is kept.
#[derive(Debug, Clone)]
pub struct LogConfig {
    pub folder: PathBuf,
    /// A new segment is begun past this size, bytes.
    pub segment_bytes: u64,
}

impl LogConfig {
    /// A log in `folder` with 64 MiB segments.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), segment_bytes: 64 << 20 }
    }
}

/// Takes the folder for this process; released when the file is closed, also by `kill -9`.
pub(crate) fn lock(folder: &Path) -> Result<File, TelemetryError> {
    std::fs::create_dir_all(folder).map_err(|e| TelemetryError::io("cannot create", folder, e))?;
    let path = folder.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| TelemetryError::io("cannot open", &path, e))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(TelemetryError::InUse { path: folder.to_owned() }),
        Err(e) => Err(TelemetryError::io("cannot lock", path, e.into())),
    }
}

pub(crate) fn sync_folder(folder: &Path) -> Result<(), TelemetryError> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| TelemetryError::io("cannot sync", folder, e))
}

/// Segments of a folder with their first sequence numbers, in order.
pub(crate) fn segments(folder: &Path) -> Result<Vec<(u64, PathBuf)>, TelemetryError> {
    let entries = std::fs::read_dir(folder).map_err(|e| TelemetryError::io("cannot list", folder, e))?;
    let mut out = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| TelemetryError::io("cannot list", folder, e))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let first = name.strip_prefix("wal-").and_then(|n| n.strip_suffix(".log")).and_then(|n| n.parse().ok());
        if let Some(first) = first {
            out.push((first, path));
        }
    }
    out.sort();
    Ok(out)
}

struct Active {
    segment: Arc<Segment>,
    first: u64,
    /// Bytes known to be whole and durable.
    good: u64,
}

/// The log, open for appending.
pub struct Log {
    config: LogConfig,
    _lock: File,
    active: Option<Active>,
    /// Finished segments, oldest first.
    closed: Vec<(u64, PathBuf)>,
    broken: bool,
}

impl Log {
    /// Opens for appending after replay. `tail` is the last segment and its good length, if it can be continued.
    pub(crate) fn open(
        config: LogConfig,
        lock: File,
        mut closed: Vec<(u64, PathBuf)>,
        tail: Option<u64>,
    ) -> Result<Self, TelemetryError> {
        let mut active = None;
        if let Some(good) = tail
            && good < config.segment_bytes
            && let Some((first, path)) = closed.pop()
        {
            let opened = OpenOptions::new().read(true).write(true).open(&path);
            let file = opened.map_err(|e| TelemetryError::io("cannot open", &path, e))?;
            active = Some(Active { segment: Arc::new(Segment { file, path }), first, good });
        }
        let mut log = Self { config, _lock: lock, active, closed, broken: false };
        log.repair()?;
        Ok(log)
    }

    /// Appends one record and returns when it is durable, with where its rows lie.
    ///
    /// # Errors
    /// Nothing of the record will ever be replayed after an error.
    pub(crate) fn append(&mut self, record: &Encoded) -> Result<Vec<Stored>, TelemetryError> {
        let len = record.bytes.len() as u64;
        if self.broken {
            self.repair()?;
        }
        let full =
            self.active.as_ref().is_none_or(|a| a.good > SEGMENT_HEADER && a.good + len > self.config.segment_bytes);
        if full {
            self.rotate(record.seq)?;
        }
        let Some(active) = self.active.as_mut() else {
            return Err(TelemetryError::Stopped);
        };
        let mut file = &active.segment.file;
        match file.write_all(&record.bytes).and_then(|()| file.sync_data()) {
            Ok(()) => {
                let payload = active.good + RECORD_HEADER as u64;
                active.good += len;
                let stored = record.sections.iter().filter_map(|s| s.stored(record.seq, &active.segment, payload));
                Ok(stored.collect())
            }
            Err(e) => {
                let path = active.segment.path.clone();
                self.broken = true;
                // Best effort now, so that the space is free again; the next append insists on it.
                if let Err(e) = self.repair() {
                    tracing::error!(error = %e, "the log tail could not be cut back; intake stays closed");
                }
                Err(TelemetryError::io("cannot append to", path, e))
            }
        }
    }

    /// Cuts the active segment back to its last good record, durably.
    fn repair(&mut self) -> Result<(), TelemetryError> {
        if let Some(active) = self.active.as_mut() {
            let mut file = &active.segment.file;
            let fix = file
                .set_len(active.good)
                .and_then(|()| file.sync_all())
                .and_then(|()| file.seek(SeekFrom::Start(active.good)).map(|_| ()));
            fix.map_err(|e| TelemetryError::io("cannot repair", &active.segment.path, e))?;
        }
        self.broken = false;
        Ok(())
    }

    fn rotate(&mut self, first: u64) -> Result<(), TelemetryError> {
        let path = self.config.folder.join(format!("wal-{first:020}.log"));
        let create = || {
            let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
            file.write_all(SEGMENT_MAGIC)?;
            file.write_all(&first.to_le_bytes())?;
            file.sync_all()?;
            Ok(file)
        };
        let file = create().map_err(|e| TelemetryError::io("cannot create", &path, e))?;
        sync_folder(&self.config.folder)?;
        if let Some(old) = self.active.take() {
            self.closed.push((old.first, old.segment.path.clone()));
        }
        self.active = Some(Active { segment: Arc::new(Segment { file, path }), first, good: SEGMENT_HEADER });
        Ok(())
    }

    /// Closes the segment that is being written, unless it is empty; the next record is `next`.
    ///
    /// # Errors
    /// When the new segment cannot be made; the log goes on in the old one.
    pub fn seal(&mut self, next: u64) -> Result<(), TelemetryError> {
        if self.broken {
            self.repair()?;
        }
        if self.active.as_ref().is_some_and(|a| a.good > SEGMENT_HEADER) {
            self.rotate(next)?;
        }
        Ok(())
    }

    /// Whether [`Self::free`] up to `seq` would delete a segment.
    #[must_use]
    pub fn can_free(&self, seq: u64) -> bool {
        self.freeable(seq) > 0
    }

    fn freeable(&self, seq: u64) -> usize {
        let next_firsts = self.closed.iter().skip(1).map(|(f, _)| *f).chain(self.active.as_ref().map(|a| a.first));
        next_firsts.take_while(|next| next.saturating_sub(1) <= seq).count().min(self.closed.len())
    }

    /// Deletes the segments whose records are all `<= seq`; returns how many.
    ///
    /// # Errors
    /// When a segment cannot be deleted; the call can be repeated.
    pub fn free(&mut self, seq: u64) -> Result<usize, TelemetryError> {
        let n = self.freeable(seq);
        for (_, path) in self.closed.drain(..n) {
            std::fs::remove_file(&path).map_err(|e| TelemetryError::io("cannot delete", &path, e))?;
        }
        if n > 0 {
            sync_folder(&self.config.folder)?;
        }
        Ok(n)
    }

    /// Bytes in all segments.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let closed: u64 = self.closed.iter().filter_map(|(_, p)| std::fs::metadata(p).ok()).map(|m| m.len()).sum();
        closed + self.active.as_ref().map_or(0, |a| a.good)
    }
}
