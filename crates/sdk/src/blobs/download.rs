//! Resumable, verified download of one blob. Each rule answers a reported bug: append only what a 206 with exactly our
//! range brings, take a 200 from its beginning, treat 416 as "verify what we have", refuse excess bytes before
//! writing, count a chunk only after its digest matched.

use super::partial::{Partial, data_path};
use super::{Blob, BlobControl};
use crate::config::Durability;
use crate::error::SdkError;
use crate::files;
use crate::policy::Wait;
use crate::transport::{BodySink, Flow, HttpRequest, HttpTransport, ResponseHead, TransportError};
use flywheel_bundle::ChunkVerifier;
use flywheel_types::Digest;
use sha2::{Digest as _, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// One download.
pub(super) struct Download<'a> {
    pub(super) transport: &'a dyn HttpTransport,
    pub(super) url: String,
    pub(super) blob: &'a Blob,
    /// Final name of the file.
    pub(super) path: &'a Path,
    pub(super) durability: Durability,
    pub(super) tries: u32,
    pub(super) control: &'a dyn BlobControl,
    pub(super) fetched_bytes: &'a AtomicU64,
}

/// Why a transfer ended before its range was complete.
#[derive(Debug)]
enum Stop {
    /// A status that brings no bytes.
    Status(u16, Option<u64>),
    /// 206, but not the range that was asked for, or another entity tag.
    NotOurRange(String),
    /// 416: the server does not have the range.
    NoRange,
    Corrupt(usize),
    Wait(Wait),
    Failed(SdkError),
}

impl Download<'_> {
    /// Runs until the file has its final name (`None`) or must wait.
    pub(super) async fn run(&self) -> Result<Option<Wait>, SdkError> {
        let stored = Partial::load(self.path, self.blob);
        let mut resumed = stored.is_some();
        let mut partial = stored.unwrap_or_else(|| Partial::new(self.blob));
        let mut failures = 0;
        let mut plain = false;
        loop {
            if let Err(wait) = self.control.may_continue(partial.missing_bytes(self.blob)) {
                return Ok(Some(wait));
            }
            let Some(gap) = partial.next_gap(self.blob.chunks.len()) else {
                if self.finish(&mut partial, resumed)? {
                    return Ok(None);
                }
                resumed = false;
                continue;
            };
            let before = partial.missing_bytes(self.blob);
            let error = match self.transfer(&mut partial, gap, plain).await? {
                None => continue,
                Some(Ok(wait)) => return Ok(Some(wait)),
                Some(Err((error, go_plain))) => {
                    plain |= go_plain;
                    error
                }
            };
            failures = if partial.missing_bytes(self.blob) < before { 1 } else { failures + 1 };
            // Wrong bytes once may be a bad link; twice is a bad file, and each try costs a chunk.
            let corrupt_again = matches!(error, SdkError::Refused { .. }) && failures > 1;
            if failures >= self.tries || corrupt_again || !worth_repeating(&error) {
                return Err(error);
            }
        }
    }

    /// One request. `None`: the range arrived; otherwise a wait, or an error and whether to ask without a range.
    async fn transfer(
        &self,
        partial: &mut Partial,
        gap: (usize, usize),
        plain: bool,
    ) -> Result<Option<Result<Wait, (SdkError, bool)>>, SdkError> {
        let (from, _) = self.blob.chunk_range(gap.0).unwrap_or((0, 0));
        let (_, to) = self.blob.chunk_range(gap.1 - 1).unwrap_or((0, self.blob.length));
        let mut request = HttpRequest::get(self.url.clone());
        if !plain {
            request = request.header("range", format!("bytes={from}-{}", to - 1));
            if let Some(etag) = &partial.etag {
                request = request.header("if-range", etag.clone());
            }
        }
        let mut sink = Receiver::open(self, partial, from, to)?;
        let sent = self.transport.send(request, &mut sink).await;
        let (stop, complete, saw_no_range) = (sink.stop.take(), sink.at >= to, sink.saw_no_range);
        drop(sink);
        if saw_no_range {
            partial.etag = None;
        }
        Ok(match (stop, sent) {
            (None, Ok(())) if complete => None,
            (None, Ok(())) => Some(Err((self.broken("the answer was shorter than announced"), false))),
            (None, Err(e)) => Some(Err((self.transport_error(e), false))),
            (Some(Stop::Wait(wait)), _) => Some(Ok(wait)),
            (Some(Stop::Failed(e)), _) => return Err(e),
            (Some(Stop::Status(status, retry_after_s)), _) => {
                Some(Err((SdkError::Status { what: self.what(), status, retry_after_s }, false)))
            }
            (Some(Stop::NotOurRange(why)), _) => Some(Err((self.broken(&why), true))),
            (Some(Stop::NoRange), _) => Some(Err((self.broken("the server does not have this range"), true))),
            (Some(Stop::Corrupt(chunk)), _) => {
                let why = format!("chunk {chunk} does not have its signed digest");
                Some(Err((SdkError::refused(self.what(), "chunk_hash_mismatch", why), false)))
            }
        })
    }

    fn what(&self) -> String {
        format!("downloading {}", self.blob.path)
    }

    fn broken(&self, why: &str) -> SdkError {
        self.transport_error(TransportError::Broken(why.to_owned()))
    }

    fn transport_error(&self, source: TransportError) -> SdkError {
        SdkError::Transport { what: self.what(), source }
    }

    /// All chunks are there. Bytes that an earlier run stored are checked once more as a whole; a bad chunk is marked
    /// missing again (`false`). Then the file gets its final name.
    fn finish(&self, partial: &mut Partial, resumed: bool) -> Result<bool, SdkError> {
        let data = data_path(self.path);
        let fail = |e| SdkError::io("finishing a download", &data, e);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&data).map_err(fail)?;
        file.set_len(self.blob.length).map_err(fail)?;
        if self.durability == Durability::Full {
            file.sync_all().map_err(fail)?;
        }
        if resumed && file_digest(&data)? != self.blob.sha256 {
            self.unmark_bad_chunks(partial, &data)?;
            return Ok(false);
        }
        std::fs::rename(&data, self.path).map_err(fail)?;
        files::sync_parent(self.path, self.durability)?;
        Partial::remove(self.path)?;
        Ok(true)
    }

    fn unmark_bad_chunks(&self, partial: &mut Partial, data: &Path) -> Result<(), SdkError> {
        let fail = |e| SdkError::io("checking a download", data, e);
        let mut file = File::open(data).map_err(fail)?;
        let mut bad = 0;
        for chunk in 0..self.blob.chunks.len() {
            let Some((from, to)) = self.blob.chunk_range(chunk) else {
                break;
            };
            let mut bytes = vec![0; usize::try_from(to - from).unwrap_or(0)];
            file.read_exact(&mut bytes).map_err(fail)?;
            if ChunkVerifier::check_chunk(self.blob, chunk, &bytes).is_err() {
                partial.set(chunk, false);
                bad += 1;
            }
        }
        if bad == 0 {
            // Every chunk is as signed but the whole is not: the manifest contradicts itself.
            let why = "its chunk digests and its file digest do not belong together";
            return Err(SdkError::refused(self.what(), "artefact_inconsistent", why));
        }
        tracing::warn!(bad, blob = %self.blob.sha256, "stored chunks were damaged; they are fetched again");
        partial.save(self.path, self.durability)
    }
}

fn worth_repeating(error: &SdkError) -> bool {
    match error {
        SdkError::Refused { code, .. } => *code == "chunk_hash_mismatch",
        // Overload answers name their own time; the caller's back-off obeys it.
        SdkError::Status { status, .. } => *status >= 500 && *status != 503,
        SdkError::Transport { source, .. } => !matches!(source, TransportError::Unreachable(_)),
        _ => false,
    }
}

/// SHA-256 of a file.
pub(super) fn file_digest(path: &Path) -> Result<Digest, SdkError> {
    let fail = |e| SdkError::io("reading back", path, e);
    let mut file = File::open(path).map_err(fail)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(fail)? {
            0 => return Ok(Digest(hash.finalize().into())),
            n => hash.update(&buffer[..n]),
        }
    }
}

/// Takes the body of one answer: collects a chunk in memory, verifies it, writes it, marks it.
struct Receiver<'a, 'b> {
    job: &'a Download<'b>,
    partial: &'a mut Partial,
    file: File,
    /// Absolute offset of the next body byte, and where the answer must end.
    at: u64,
    end: u64,
    asked: (u64, u64),
    buffer: Vec<u8>,
    stop: Option<Stop>,
    saw_no_range: bool,
}

impl<'a, 'b> Receiver<'a, 'b> {
    fn open(job: &'a Download<'b>, partial: &'a mut Partial, from: u64, to: u64) -> Result<Self, SdkError> {
        let path = data_path(job.path);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|e| SdkError::io("opening a download", &path, e))?;
        Ok(Self {
            job,
            partial,
            file,
            at: from,
            end: to,
            asked: (from, to),
            buffer: Vec::new(),
            stop: None,
            saw_no_range: false,
        })
    }

    fn stop(&mut self, stop: Stop) -> Flow {
        self.stop = Some(stop);
        Flow::Stop
    }

    /// Checks a 206 against what was asked for.
    fn check_range(&self, head: &ResponseHead) -> Result<(), String> {
        let (from, to) = self.asked;
        let want = format!("bytes {from}-{}/{}", to - 1, self.job.blob.length);
        match head.header("content-range") {
            Some(got) if got.trim() == want => {}
            got => {
                return Err(format!("asked for `{want}`, got `{}`", got.unwrap_or("nothing")));
            }
        }
        match (&self.partial.etag, head.header("etag")) {
            (Some(ours), Some(theirs)) if ours != theirs => {
                Err("the file changed on the server during the download".into())
            }
            _ => Ok(()),
        }
    }

    fn chunk_complete(&mut self, chunk: usize, from: u64) -> Flow {
        let bytes = std::mem::take(&mut self.buffer);
        if self.partial.is_done(chunk) {
            return Flow::More;
        }
        if ChunkVerifier::check_chunk(self.job.blob, chunk, &bytes).is_err() {
            return self.stop(Stop::Corrupt(chunk));
        }
        if let Err(e) = self.store(chunk, from, &bytes) {
            return self.stop(Stop::Failed(e));
        }
        self.buffer = bytes;
        self.buffer.clear();
        let missing = self.partial.missing_bytes(self.job.blob);
        match self.job.control.may_continue(missing) {
            Err(wait) if missing > 0 => self.stop(Stop::Wait(wait)),
            _ => Flow::More,
        }
    }

    fn store(&mut self, chunk: usize, from: u64, bytes: &[u8]) -> Result<(), SdkError> {
        let mut write = || -> std::io::Result<()> {
            self.job.control.before_write(bytes.len() as u64)?;
            self.file.seek(SeekFrom::Start(from))?;
            self.file.write_all(bytes)?;
            match self.job.durability {
                Durability::Full => self.file.sync_data(),
                Durability::Relaxed => Ok(()),
            }
        };
        write().map_err(|e| SdkError::io("storing a chunk", self.job.path, e))?;
        self.partial.set(chunk, true);
        self.partial.save(self.job.path, self.job.durability)
    }
}

impl BodySink for Receiver<'_, '_> {
    fn head(&mut self, head: &ResponseHead) -> Flow {
        match head.status {
            206 => {
                if let Err(why) = self.check_range(head) {
                    self.saw_no_range = true;
                    return self.stop(Stop::NotOurRange(why));
                }
            }
            200 => {
                self.at = 0;
                self.end = self.job.blob.length;
            }
            416 => {
                self.saw_no_range = true;
                return self.stop(Stop::NoRange);
            }
            status => {
                let retry = head.header("retry-after").and_then(|v| v.trim().parse().ok());
                return self.stop(Stop::Status(status, retry));
            }
        }
        if let Some(etag) = head.header("etag").filter(|e| !e.starts_with("W/")) {
            self.partial.etag = Some(etag.to_owned());
        }
        Flow::More
    }

    fn data(&mut self, mut block: &[u8]) -> Flow {
        self.job.fetched_bytes.fetch_add(block.len() as u64, Ordering::Relaxed);
        while !block.is_empty() {
            if self.at >= self.end {
                // Excess bytes: everything asked for is there, the rest is never written.
                return Flow::Stop;
            }
            let chunk = usize::try_from(self.at / self.job.blob.chunk_size).unwrap_or(usize::MAX);
            let Some((from, to)) = self.job.blob.chunk_range(chunk) else {
                return Flow::Stop;
            };
            let room = usize::try_from(to.min(self.end) - self.at).unwrap_or(usize::MAX);
            let (now, later) = block.split_at(block.len().min(room));
            self.buffer.extend_from_slice(now);
            self.at += now.len() as u64;
            block = later;
            if self.at == to && self.chunk_complete(chunk, from) == Flow::Stop {
                return Flow::Stop;
            }
        }
        Flow::More
    }
}
