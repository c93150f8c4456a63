//! The front door: one call per request, which returns only when what it acknowledges is durable.
//!
//! Caller's task: size limits, inflate, signature, decode, masks, Arrow. Writer thread ([`writer`]): duplicates,
//! group commit, `fdatasync`, then the buffers and the answers.

mod disk;
pub mod prepare;
mod writer;

use disk::DiskMark;

use crate::buffers::Buffers;
use crate::decode::Endpoint;
use crate::dedup::DedupState;
use crate::disposition::{Disposition, Key, Kind, Tally};
use crate::error::TelemetryError;
use crate::limits::Limits;
use crate::mask::Masks;
use crate::user::UserKeys;
use crate::wal::log::lock;
use crate::wal::{Damage, Group, Log, LogConfig, Replay, Stored, snapshot};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use flywheel_types::wire::IngestAckV1;
use flywheel_types::{AppId, Error, ErrorKind, LabelKind, TrustClass};
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;
use tokio::sync::{broadcast, oneshot};

/// Detects refusals and abstentions in the visible answer.
pub type Classifier = Arc<dyn Fn(&str) -> Option<LabelKind> + Send + Sync>;

/// How ingest behaves.
#[derive(Clone)]
pub struct Settings {
    pub limits: Limits,
    /// Personal data that is replaced in free text before anything is stored.
    pub masks: Masks,
    /// Makes the keys under which users are known.
    pub users: UserKeys,
    /// Longest wait of a request for others to share its `fdatasync`.
    pub group_window: Duration,
    /// A group is closed at this size of encoded rows, bytes.
    pub group_bytes: usize,
    /// Bodies that may be in memory at once; above it intake answers `overloaded`, bytes.
    pub in_flight_bytes: usize,
    /// Acknowledged rows that may wait in the log for their tables; above it intake answers `overloaded`, bytes.
    pub backlog_bytes: u64,
    /// Space the disk of the log must keep; with less, intake answers `disk_low` until there is more again, bytes.
    pub min_free_bytes: u64,
    /// Keep (masked) content of OTLP records. SDK events carry content only when the user agreed.
    pub otlp_content: bool,
    pub classifier: Option<Classifier>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            masks: Masks::default(),
            users: UserKeys::new(&[0; 32]),
            group_window: Duration::from_millis(5),
            group_bytes: 1 << 20,
            in_flight_bytes: 64 << 20,
            backlog_bytes: 8 << 30,
            min_free_bytes: 1 << 30,
            otlp_content: false,
            classifier: None,
        }
    }
}

/// Headers that matter to ingest; the HTTP layer looks them up.
#[derive(Debug, Clone, Default)]
pub struct IngestHeaders {
    pub content_type: Option<String>,
    pub content_encoding: Option<String>,
    /// `x-fleet-signature`.
    pub signature: Option<String>,
    /// `x-fleet-public-key`.
    pub public_key: Option<String>,
    pub idempotency_key: Option<String>,
}

/// One upload.
#[derive(Debug, Clone)]
pub struct IngestRequest {
    /// The app of the ingest key.
    pub app: AppId,
    /// Name of the ingest key; the scope of idempotency keys.
    pub ingest_key: String,
    pub endpoint: Endpoint,
    pub headers: IngestHeaders,
    /// As sent, still compressed.
    pub body: Bytes,
    /// Receipt, business clock.
    pub now: DateTime<Utc>,
}

/// What became of an upload. Durable when it is returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IngestOutcome {
    pub ack: IngestAckV1,
    /// The batch was stored before (answer with `x-fleet-duplicate: true`).
    pub duplicate_batch: bool,
    /// Log record that holds it.
    pub seq: u64,
}

pub(crate) struct Shared {
    pub buffers: Arc<Buffers>,
    pub in_flight: AtomicUsize,
    pub healthy: AtomicBool,
    pub disk: DiskMark,
    /// Rows as they become durable, for whoever watches.
    pub fresh: broadcast::Sender<Stored>,
    pub log_bytes: AtomicU64,
    pub installs: AtomicUsize,
}

/// What an operator wants to know about ingest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IngestStatus {
    /// The last append succeeded, and the disk has room.
    pub healthy: bool,
    pub in_flight_bytes: usize,
    /// Log bytes of acknowledged rows not yet in Delta.
    pub backlog_bytes: u64,
    pub log_bytes: u64,
    pub installs: usize,
    pub last_seq: u64,
}

/// The log at start-up: replay first, then [`Recovery::start`].
pub struct Recovery {
    config: LogConfig,
    lock: File,
    replay: Replay,
    dedup: DedupState,
    buffers: Arc<Buffers>,
    last: u64,
}

impl Recovery {
    /// Takes the log folder and loads the duplicate state.
    ///
    /// # Errors
    /// When another process owns the folder or a file cannot be read.
    pub fn open(config: LogConfig) -> Result<Self, TelemetryError> {
        let lock = lock(&config.folder)?;
        let (dedup, covered) = snapshot::load(&config.folder)?;
        let replay = Replay::open(&config.folder)?;
        Ok(Self { config, lock, replay, dedup, buffers: Arc::default(), last: covered })
    }

    /// The buffers of the ingestor to come: replay puts rows here that are not in Delta yet.
    #[must_use]
    pub fn buffers(&self) -> Arc<Buffers> {
        Arc::clone(&self.buffers)
    }

    /// The next durable record, oldest first; `None` when the log is read to its end. Its rows are not read yet.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn next_group(&mut self) -> Result<Option<Group>, TelemetryError> {
        let group = self.replay.next_group()?;
        if let Some(g) = &group {
            for key in &g.keys {
                self.dedup.insert(key);
            }
            self.last = self.last.max(g.seq);
        }
        Ok(group)
    }

    /// Records that could not be read.
    #[must_use]
    pub fn damage(&self) -> &[Damage] {
        self.replay.damage()
    }

    /// Reads what is left of the log, opens it for appending and starts the writer. Sequence numbers continue above
    /// `min_last_seq` (the highest transaction version in Delta) and everything in the log. Groups that were not
    /// taken through [`Self::next_group`] are not in the buffers: take them all first.
    ///
    /// # Errors
    /// When the log cannot be opened.
    pub fn start(mut self, settings: Settings, min_last_seq: u64) -> Result<Ingestor, TelemetryError> {
        while self.next_group()?.is_some() {}
        let last = self.last.max(min_last_seq);
        let (segments, tail) = self.replay.finish();
        let folder = self.config.folder.clone();
        let log = Log::open(self.config, self.lock, segments, tail)?;
        let shared = Arc::new(Shared {
            buffers: self.buffers,
            in_flight: AtomicUsize::new(0),
            healthy: AtomicBool::new(true),
            fresh: broadcast::Sender::new(FRESH),
            disk: DiskMark::new(folder.clone(), settings.min_free_bytes),
            log_bytes: AtomicU64::new(log.bytes()),
            installs: AtomicUsize::new(self.dedup.installs()),
        });
        shared.buffers.advance(last);
        let (tx, rx) = mpsc::channel();
        let writer = writer::Writer::new(log, folder, self.dedup, Arc::clone(&shared), &settings, last);
        let thread = std::thread::Builder::new()
            .name("log-writer".to_owned())
            .spawn(move || writer.run(&rx))
            .map_err(|e| TelemetryError::io("cannot start the writer thread for", "log", e))?;
        Ok(Ingestor { tx, shared, settings: Arc::new(settings), thread: Mutex::new(Some(thread)) })
    }
}

/// Accepts uploads. Shared behind an `Arc`; dropping the last one stops the writer after what it has.
pub struct Ingestor {
    tx: mpsc::Sender<writer::Message>,
    shared: Arc<Shared>,
    settings: Arc<Settings>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

/// Pieces of the log that a slow watcher may be behind.
const FRESH: usize = 4096;

/// What a request takes at least while it is in memory: its rows are columns, and the smallest column has a size, bytes.
const SMALLEST_REQUEST: usize = 16 << 10;

/// Bodies up to this size are decoded on the caller's task, larger ones on a blocking thread, bytes.
const INLINE_DECODE: usize = 64 << 10;

impl Ingestor {
    /// Room for a body of `size` bytes, before it is read: what is in memory stays bounded however many come at once.
    ///
    /// # Errors
    /// `TooLarge` past the limit of one body; `Unavailable` while too many bytes are in flight or wait for the tables, and
    /// while the disk has less space left than it must keep.
    pub fn admit(&self, size: usize) -> Result<Slot, Error> {
        if size > self.settings.limits.encoded_bytes {
            return Err(Error::new(
                ErrorKind::TooLarge,
                "body_too_large",
                format!("the body is {size} bytes long, {} is the limit", self.settings.limits.encoded_bytes),
                "split the batch",
            ));
        }
        let size = size.max(SMALLEST_REQUEST);
        let slot = Slot { shared: Arc::clone(&self.shared), size };
        let in_flight = self.shared.in_flight.fetch_add(size, Ordering::Relaxed) + size;
        let backlog = self.shared.buffers.bytes();
        if in_flight > self.settings.in_flight_bytes || backlog > self.settings.backlog_bytes {
            return Err(unavailable("overloaded", "the server holds as much unwritten data as it may"));
        }
        if self.shared.disk.is_low() {
            return Err(unavailable("disk_low", "the server's disk is almost full"));
        }
        Ok(slot)
    }

    /// [`Self::admit`] and [`Self::ingest_admitted`]; a refusal is counted.
    ///
    /// # Errors
    /// Those of both.
    pub async fn ingest(&self, request: IngestRequest) -> Result<IngestOutcome, Error> {
        let (source, at) = (request.endpoint.source(), request.now);
        let slot = self.admit(request.body.len()).inspect_err(|e| self.refused(&request.app, source, e.code, at))?;
        self.ingest_admitted(request, slot).await
    }

    /// Stores one upload. Returns after `fdatasync`; on `Err` nothing was stored, and that is counted.
    ///
    /// # Errors
    /// `Invalid`, `TooLarge` and `Unauthenticated` for the request itself (do not retry), `Conflict` for a reused
    /// idempotency key on our own endpoints, `Unavailable` when the disk refuses (retry later).
    pub async fn ingest_admitted(&self, request: IngestRequest, slot: Slot) -> Result<IngestOutcome, Error> {
        let size = request.body.len();
        let (app, source, at) = (request.app.clone(), request.endpoint.source(), request.now);
        let settings = Arc::clone(&self.settings);
        let prepared = if size <= INLINE_DECODE {
            prepare::prepare(&settings, &request)
        } else {
            tokio::task::spawn_blocking(move || prepare::prepare(&settings, &request)).await.map_err(Error::internal)?
        };
        let batch = prepared.inspect_err(|e| self.refused(&app, source, e.code, at))?;
        let (reply, answer) = oneshot::channel();
        self.tx.send(writer::Message::Batch(Box::new(batch), reply)).map_err(|_| stopped())?;
        let outcome = answer.await.map_err(|_| stopped())?;
        drop(slot);
        outcome
    }

    /// Counts a request the HTTP layer refused before it came here.
    pub fn refused(&self, app: &AppId, source: &'static str, reason: &'static str, at: DateTime<Utc>) {
        let mut tally = Tally::default();
        let key = Key {
            app: app.clone(),
            source,
            kind: Kind::Request,
            trust: TrustClass::Anonymous,
            disposition: Disposition::RefusedIntake,
            reason: Some(reason),
        };
        tally.add(key, 1, at.into());
        // Only fails when the writer is gone, and then nothing is counted any more.
        let _ = self.tx.send(writer::Message::Note(tally));
    }

    /// Makes counts of refused requests durable and returns the last durable sequence number.
    ///
    /// # Errors
    /// When the log refuses or the writer is gone.
    pub async fn settle(&self) -> Result<u64, Error> {
        let (reply, answer) = oneshot::channel();
        self.tx.send(writer::Message::Settle(reply)).map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    /// Begins a new segment of the log, so that everything durable so far can be freed with [`Self::release`]. Counts of
    /// refused requests are made durable first.
    ///
    /// # Errors
    /// When the log refuses or the writer is gone.
    pub async fn seal(&self) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.tx.send(writer::Message::Seal(reply)).map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?.map_err(Error::from)
    }

    /// Frees log segments that every table has in Delta up to `seq`; saves the duplicate state first.
    ///
    /// # Errors
    /// When a file operation fails; the call can be repeated.
    pub async fn release(&self, seq: u64) -> Result<usize, Error> {
        let (reply, answer) = oneshot::channel();
        self.tx.send(writer::Message::Release(seq, reply)).map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?.map_err(Error::from)
    }

    /// Rows that are durable but not yet in Delta.
    #[must_use]
    pub fn buffers(&self) -> Arc<Buffers> {
        Arc::clone(&self.shared.buffers)
    }

    /// Rows of every table as they become durable. Who is slow misses some and is told.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<Stored> {
        self.shared.fresh.subscribe()
    }

    /// State for `/readyz` and metrics.
    #[must_use]
    pub fn status(&self) -> IngestStatus {
        IngestStatus {
            healthy: self.shared.healthy.load(Ordering::Relaxed) && !self.shared.disk.is_low(),
            in_flight_bytes: self.shared.in_flight.load(Ordering::Relaxed),
            backlog_bytes: self.shared.buffers.bytes(),
            log_bytes: self.shared.log_bytes.load(Ordering::Relaxed),
            installs: self.shared.installs.load(Ordering::Relaxed),
            last_seq: self.shared.buffers.last_seq(),
        }
    }
}

impl Drop for Ingestor {
    fn drop(&mut self) {
        let _ = self.tx.send(writer::Message::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(t) = thread
            && t.join().is_err()
        {
            tracing::error!("the log writer panicked");
        }
    }
}

/// Bytes of a request counted while it is in flight.
pub struct Slot {
    shared: Arc<Shared>,
    size: usize,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.in_flight.fetch_sub(self.size, Ordering::Relaxed);
    }
}

fn unavailable(code: &'static str, message: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, code, message, "send the batch again after the time in Retry-After")
}

fn stopped() -> Error {
    unavailable("intake_stopped", "the server is shutting down")
}
