//! The single writer: owns the log and the duplicate state, forms groups, and answers only after `fdatasync`.
//! A duplicate that shares a group with its original is answered with it; when the group fails, both fail.

use super::prepare::Prepared;
use super::{IngestOutcome, Settings, Shared};
use crate::column::Micros;
use crate::dedup::{BatchKey, DedupState, Seen, Undo};
use crate::disposition::{Disposition, Key, Kind, Tally};
use crate::error::TelemetryError;
use crate::rows::{DispositionRow, Table, TableRows};
use crate::wal::record::encode;
use crate::wal::{Log, snapshot};
use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use flywheel_types::wire::IngestAckV1;
use flywheel_types::{Error, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

type Answer<T> = oneshot::Sender<Result<T, Error>>;

pub(crate) enum Message {
    Batch(Box<Prepared>, Answer<IngestOutcome>),
    Note(Tally),
    Settle(Answer<u64>),
    Seal(oneshot::Sender<Result<(), TelemetryError>>),
    Release(u64, oneshot::Sender<Result<usize, TelemetryError>>),
    Stop,
}

/// How long counts of refused requests wait for a record they can be written with.
const NOTES_WAIT: Duration = Duration::from_secs(1);

type Job = (Box<Prepared>, Answer<IngestOutcome>);

pub(crate) struct Writer {
    log: Log,
    folder: PathBuf,
    dedup: DedupState,
    shared: Arc<Shared>,
    window: Duration,
    group_bytes: usize,
    last: u64,
    /// Counts of refused requests, written with the next record.
    notes: Tally,
    /// Latest business day seen, for expiry of keys.
    today: i32,
}

impl Writer {
    pub fn new(
        log: Log,
        folder: PathBuf,
        dedup: DedupState,
        shared: Arc<Shared>,
        settings: &Settings,
        last: u64,
    ) -> Self {
        Self {
            log,
            folder,
            dedup,
            shared,
            window: settings.group_window,
            group_bytes: settings.group_bytes,
            last,
            notes: Tally::default(),
            today: i32::MIN,
        }
    }

    pub fn run(mut self, rx: &Receiver<Message>) {
        loop {
            // counts of refused requests wait for a record to go with, but not for ever
            let patience = if self.notes.is_empty() { Duration::MAX } else { NOTES_WAIT };
            let mut next = match rx.recv_timeout(patience) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(e) = self.write(TableRows::default(), &[], Tally::default()) {
                        tracing::warn!(error = %e, "refused requests could not be counted yet");
                    }
                    None
                }
            };
            while let Some(message) = next.take() {
                match message {
                    Message::Batch(batch, answer) => {
                        let (group, after) = self.gather(rx, (batch, answer));
                        self.commit(group);
                        next = after;
                    }
                    Message::Note(tally) => self.notes.merge(tally),
                    Message::Settle(answer) => {
                        let result = if self.notes.is_empty() {
                            Ok(self.last)
                        } else {
                            self.write(TableRows::default(), &[], Tally::default())
                        };
                        let _ = answer.send(result.map_err(|e| refused_write(&e)));
                    }
                    Message::Seal(answer) => {
                        let _ = answer.send(self.log.seal(self.last + 1));
                    }
                    Message::Release(seq, answer) => {
                        let _ = answer.send(self.release(seq));
                    }
                    Message::Stop => return,
                }
            }
        }
    }

    /// Collects requests until the first has waited `window`, or the size is reached. Anything but a request ends
    /// the group and is handled after it.
    fn gather(&mut self, rx: &Receiver<Message>, first: Job) -> (Vec<Job>, Option<Message>) {
        let deadline = first.0.enqueued + self.window;
        let mut bytes = first.0.bytes;
        let mut group = vec![first];
        while bytes < self.group_bytes {
            let left = deadline.saturating_duration_since(Instant::now());
            match rx.recv_timeout(left) {
                Ok(Message::Batch(batch, answer)) => {
                    bytes += batch.bytes;
                    group.push((batch, answer));
                }
                Ok(Message::Note(tally)) => self.notes.merge(tally),
                Ok(other) => return (group, Some(other)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        (group, None)
    }

    fn commit(&mut self, group: Vec<Job>) {
        let mut undo = Vec::new();
        let mut tally = Tally::default();
        let mut keys = Vec::new();
        let mut fresh: Vec<&TableRows> = Vec::new();
        let mut verdicts = Vec::with_capacity(group.len());
        for (batch, _) in &group {
            let seen = self.dedup.check(&batch.key);
            if seen == Seen::Fresh {
                undo.push(self.dedup.insert(&batch.key));
                keys.push(batch.key);
                fresh.push(&batch.rows);
            }
            count(&mut tally, batch, seen);
            self.today = self.today.max(batch.at.day().0);
            verdicts.push(seen);
        }
        let written = concat(&fresh).map_err(TelemetryError::from).and_then(|rows| self.write(rows, &keys, tally));
        match written {
            Ok(seq) => {
                for ((batch, answer), seen) in group.into_iter().zip(verdicts) {
                    // A caller that went away will send the batch again and be told it is a duplicate.
                    let _ = answer.send(outcome(&batch, seen, seq));
                }
            }
            Err(e) => self.fail(group, undo, &e),
        }
    }

    /// Nothing of the group was stored: its items are counted as refused, and everybody may retry.
    fn fail(&mut self, group: Vec<Job>, undo: Vec<Undo>, e: &TelemetryError) {
        tracing::error!(error = %e, requests = group.len(), "a group could not be made durable");
        self.dedup.revert(undo);
        for (batch, answer) in group {
            let items = batch.stored.iter().map(|(_, n)| n).sum::<u64>() + batch.quarantined.len() as u64;
            let key = key(&batch, Kind::Unknown, Disposition::RefusedIntake, Some("log_failed"));
            self.notes.add(key, items, batch.at);
            let _ = answer.send(Err(refused_write(e)));
        }
    }

    /// One record: rows, identities, and the counts of the group and of refusals since the last record. Visible to
    /// queries when it returns.
    fn write(&mut self, mut rows: TableRows, keys: &[BatchKey], mut counts: Tally) -> Result<u64, TelemetryError> {
        counts.merge(self.notes.clone());
        rows.set(Table::Dispositions, DispositionRow::encode(&counts.rows())?);
        let seq = self.last + 1;
        let record = encode(seq, &rows, keys)?;
        let result = self.log.append(&record);
        self.shared.healthy.store(result.is_ok(), Ordering::Relaxed);
        let stored = result?;
        self.last = seq;
        self.notes = Tally::default();
        if self.shared.fresh.receiver_count() > 0 {
            for piece in &stored {
                // Only fails when the last watcher left meanwhile.
                let _ = self.shared.fresh.send(piece.clone());
            }
        }
        self.shared.buffers.push(seq, stored);
        self.shared.log_bytes.fetch_add(record.bytes.len() as u64, Ordering::Relaxed);
        self.shared.installs.store(self.dedup.installs(), Ordering::Relaxed);
        Ok(seq)
    }

    fn release(&mut self, seq: u64) -> Result<usize, TelemetryError> {
        if !self.log.can_free(seq) {
            return Ok(0);
        }
        snapshot::save(&self.folder, &mut self.dedup, self.last, self.today)?;
        let freed = self.log.free(seq)?;
        self.shared.log_bytes.store(self.log.bytes(), Ordering::Relaxed);
        Ok(freed)
    }
}

fn key(batch: &Prepared, kind: Kind, disposition: Disposition, reason: Option<&'static str>) -> Key {
    Key { app: batch.app.clone(), source: batch.endpoint.source(), kind, trust: batch.trust, disposition, reason }
}

/// Counts every item of a batch exactly once.
fn count(tally: &mut Tally, batch: &Prepared, seen: Seen) {
    let at: Micros = batch.at;
    let (whole, reason) = match seen {
        Seen::Fresh => (Disposition::Stored, None),
        Seen::Duplicate => (Disposition::Duplicate, None),
        Seen::Conflict => (Disposition::Quarantined, Some("idempotency_key_reused")),
    };
    for (kind, n) in batch.stored {
        tally.add(key(batch, kind, whole, reason), n, at);
    }
    for (kind, why) in &batch.quarantined {
        let k = match seen {
            Seen::Fresh => key(batch, *kind, Disposition::Quarantined, Some(why)),
            Seen::Duplicate | Seen::Conflict => key(batch, *kind, whole, reason),
        };
        tally.add(k, 1, at);
    }
}

fn outcome(batch: &Prepared, seen: Seen, seq: u64) -> Result<IngestOutcome, Error> {
    let stored: u64 = batch.stored.iter().map(|(_, n)| n).sum();
    let bad = batch.quarantined.len() as u64;
    let ack = match seen {
        Seen::Fresh => IngestAckV1 { stored, duplicate: 0, quarantined: bad, reasons: batch.reasons.clone() },
        Seen::Duplicate => IngestAckV1 { duplicate: stored + bad, ..IngestAckV1::default() },
        // OTLP has no conflict: the records are reported as rejected, which clients must not retry.
        Seen::Conflict if batch.endpoint.is_otlp() => IngestAckV1 {
            quarantined: stored + bad,
            reasons: vec!["idempotency_key_reused: the key was used for another body".to_owned()],
            ..IngestAckV1::default()
        },
        Seen::Conflict => {
            return Err(Error::conflict(
                "idempotency_key_reused",
                "this Idempotency-Key was used for another body",
                "use a new key for each batch; nothing of this one was stored",
            ));
        }
    };
    Ok(IngestOutcome { ack, duplicate_batch: seen == Seen::Duplicate, seq })
}

fn concat(parts: &[&TableRows]) -> Result<TableRows, arrow::error::ArrowError> {
    let mut out = TableRows::default();
    for table in Table::INGESTED {
        let batches: Vec<&RecordBatch> = parts.iter().filter_map(|p| p.get(table)).collect();
        match batches.as_slice() {
            [] => {}
            [one] => out.set(table, (*one).clone()),
            many => out.set(table, concat_batches(&table.schema(), many.iter().copied())?),
        }
    }
    Ok(out)
}

fn refused_write(e: &TelemetryError) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "log_failed",
        "the server could not write to its disk",
        "send the batch again after the time in Retry-After; nothing of it was stored",
    )
    .with_inside(e)
}
