//! Durable, bounded queue of events. A batch is formed once with a fixed `seq` and its exact bytes are kept until the
//! server answered, so that a resend is byte-identical and the server can tell it from a new one.

mod log;

use crate::config::{Durability, QueueLimits, UploadPolicy};
use crate::error::SdkError;
use crate::files;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use flywheel_types::InstallId;
use flywheel_types::wire::{DeviceEventKind, DeviceEventV1, DeviceFactsV1, EventV1};
use log::Record;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

/// Sequence numbers are reserved in the side file in steps of this size, so that a damaged log can never lead to a
/// number being used twice.
const SEQ_STEP: u64 = 64;
/// Added to the sequence when both the log and the reservation are damaged.
const SEQ_JUMP: u64 = 1 << 20;
/// The log is rewritten when it is longer than this and mostly dead.
const COMPACT_BYTES: u64 = 16 << 10;

/// Counters at the head of the log. They come from a file, so they are counted on without overflow: at the end of their
/// range they stay (the server refuses such numbers), which no device reaches by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Counters {
    next_seq: u64,
    next_event: u64,
    /// Highest durable report already queued.
    last_report: u64,
    /// Events lost since the last batch told the server, by reason.
    dropped: BTreeMap<String, u64>,
}

#[derive(Debug, Clone)]
struct Queued {
    no: u64,
    interaction: bool,
    json: Box<str>,
}

/// A formed batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) seq: u64,
    /// Uncompressed body, an `EventBatchV1`.
    pub(crate) body: Bytes,
    /// Number of events in it.
    pub(crate) events: usize,
}

/// Facts that go into a new batch.
pub(crate) struct BatchStamp<'a> {
    pub(crate) install: InstallId,
    pub(crate) now: DateTime<Utc>,
    pub(crate) facts: &'a DeviceFactsV1,
}

#[derive(Serialize)]
struct BatchForm<'a> {
    v: u8,
    install_id: InstallId,
    seq: u64,
    sent_at: DateTime<Utc>,
    sdk: &'static str,
    device: &'a DeviceFactsV1,
    events: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct BatchEvents {
    events: Vec<Box<RawValue>>,
}

/// The queue of one device.
pub(crate) struct Queue {
    path: PathBuf,
    seq_path: PathBuf,
    durability: Durability,
    limits: QueueLimits,
    counters: Counters,
    pending: VecDeque<Queued>,
    pending_bytes: u64,
    in_flight: Option<Batch>,
    reserved_seq: u64,
    log_bytes: u64,
}

fn parse_events(body: &[u8]) -> Vec<Box<RawValue>> {
    serde_json::from_slice::<BatchEvents>(body).map(|b| b.events).unwrap_or_default()
}

impl Queue {
    /// Opens the queue stored as `<dir>/queue.log` and `<dir>/queue.seq`.
    pub(crate) fn open(dir: &std::path::Path, durability: Durability, limits: QueueLimits) -> Result<Self, SdkError> {
        let mut queue = Self {
            path: dir.join("queue.log"),
            seq_path: dir.join("queue.seq"),
            durability,
            limits,
            counters: Counters { next_seq: 1, next_event: 1, ..Counters::default() },
            pending: VecDeque::new(),
            pending_bytes: 0,
            in_flight: None,
            reserved_seq: 1,
            log_bytes: 0,
        };
        let stored_seq = files::read(&queue.seq_path)?;
        let bytes = files::read(&queue.path)?.unwrap_or_default();
        let (records, good) = log::replay(&bytes);
        let whole = good == bytes.len() && matches!(records.first(), Some(Record::Base(_)));
        for record in records {
            queue.apply(record)?;
        }
        queue.log_bytes = bytes.len() as u64;
        // A reservation that cannot be read is replaced by a jump no device makes by itself.
        let reserved = stored_seq.map(|b| decode_seq(&b).unwrap_or(queue.counters.next_seq.saturating_add(SEQ_JUMP)));
        queue.reserved_seq = reserved.unwrap_or(queue.counters.next_seq);
        if !whole {
            queue.recover(good < bytes.len(), reserved)?;
        }
        Ok(queue)
    }

    /// After damage: sequence numbers go on above everything ever reserved, and the good part is rewritten.
    fn recover(&mut self, damaged: bool, reserved: Option<u64>) -> Result<(), SdkError> {
        if damaged {
            tracing::warn!(path = %self.path.display(), "the event queue had a damaged tail; its good part is kept");
        }
        if let Some(reserved) = reserved {
            self.counters.next_seq = self.counters.next_seq.max(reserved);
        }
        self.compact()
    }

    fn apply(&mut self, record: Record) -> Result<(), SdkError> {
        match record {
            Record::Base(json) => {
                self.counters = serde_json::from_slice(&json)
                    .map_err(|e| SdkError::Corrupt { path: self.path.clone(), why: e.to_string() })?;
            }
            Record::Event { no, report, interaction, json } => {
                let text = String::from_utf8_lossy(&json).into_owned();
                self.counters.next_event = self.counters.next_event.max(no.saturating_add(1));
                self.counters.last_report = self.counters.last_report.max(report);
                self.push(Queued { no, interaction, json: text.into_boxed_str() });
            }
            Record::Batch { seq, events, body } => {
                self.remove(&events);
                self.counters.next_seq = self.counters.next_seq.max(seq.saturating_add(1));
                self.counters.dropped.clear();
                self.in_flight = Some(Batch { seq, events: parse_events(&body).len(), body: body.into() });
            }
            Record::Acked { .. } => self.in_flight = None,
            Record::Refused { counters, .. } => {
                self.in_flight = None;
                self.set_dropped(&counters);
            }
            Record::Split { .. } => self.requeue_in_flight(),
            Record::Dropped { events, counters } => {
                self.remove(&events);
                self.set_dropped(&counters);
            }
        }
        Ok(())
    }

    fn set_dropped(&mut self, json: &[u8]) {
        self.counters.dropped = serde_json::from_slice(json).unwrap_or_default();
    }

    fn push(&mut self, event: Queued) {
        self.pending_bytes += event.json.len() as u64;
        self.pending.push_back(event);
    }

    /// Removes events by their ascending numbers.
    fn remove(&mut self, numbers: &[u64]) {
        let bytes = &mut self.pending_bytes;
        self.pending.retain(|e| {
            let keep = numbers.binary_search(&e.no).is_err();
            if !keep {
                *bytes -= e.json.len() as u64;
            }
            keep
        });
    }

    fn write(&mut self, records: &[Record]) -> Result<(), SdkError> {
        let bytes: Vec<u8> = records.iter().flat_map(Record::encode).collect();
        self.log_bytes = files::append(&self.path, &bytes, self.durability)?;
        Ok(())
    }

    /// Stores events durably before it returns. `first_report` numbers them as durable reports (0 = they are none);
    /// reports that are in the queue's history already are skipped, which makes a crash between the state file and
    /// the queue harmless.
    pub(crate) fn append(&mut self, events: &[EventV1], first_report: u64) -> Result<(), SdkError> {
        let mut records = Vec::with_capacity(events.len());
        let mut no = self.counters.next_event;
        for (i, event) in events.iter().enumerate() {
            let report = if first_report == 0 { 0 } else { first_report.saturating_add(i as u64) };
            if report != 0 && report <= self.counters.last_report {
                continue;
            }
            let json = serde_json::to_vec(event)
                .map_err(|e| SdkError::Usage(format!("the event cannot be written as JSON: {e}")))?;
            let interaction = matches!(event, EventV1::Interaction(_));
            records.push(Record::Event { no, report, interaction, json });
            no = no.saturating_add(1);
        }
        if records.is_empty() {
            return Ok(());
        }
        self.write(&records)?;
        for record in records {
            self.apply(record)?;
        }
        self.enforce_limits()?;
        self.compact_if_worth_it()
    }

    fn enforce_limits(&mut self) -> Result<(), SdkError> {
        let mut over_events = self.pending.len().saturating_sub(self.limits.max_events);
        let mut over_bytes = self.pending_bytes.saturating_sub(self.limits.max_bytes);
        if over_events == 0 && over_bytes == 0 {
            return Ok(());
        }
        let mut numbers = Vec::new();
        for interactions in [true, false] {
            for e in self.pending.iter().filter(|e| e.interaction == interactions) {
                if over_events == 0 && over_bytes == 0 {
                    break;
                }
                numbers.push(e.no);
                over_events = over_events.saturating_sub(1);
                over_bytes = over_bytes.saturating_sub(e.json.len() as u64);
            }
        }
        numbers.sort_unstable();
        let mut dropped = self.counters.dropped.clone();
        add_loss(&mut dropped, "queue_full".into(), numbers.len() as u64);
        let counters = serde_json::to_vec(&dropped).unwrap_or_default();
        let record = Record::Dropped { events: numbers, counters };
        self.write(std::slice::from_ref(&record))?;
        self.apply(record)
    }

    fn dropped_json(&self) -> Vec<u8> {
        serde_json::to_vec(&self.counters.dropped).unwrap_or_default()
    }

    /// The batch on its way, formed now if none is and there is something to send.
    pub(crate) fn batch(
        &mut self,
        policy: &UploadPolicy,
        max_events: usize,
        stamp: &BatchStamp<'_>,
    ) -> Result<Option<Batch>, SdkError> {
        if self.in_flight.is_none() && !(self.pending.is_empty() && self.counters.dropped.is_empty()) {
            self.form(policy, max_events, stamp)?;
        }
        Ok(self.in_flight.clone())
    }

    fn form(&mut self, policy: &UploadPolicy, max_events: usize, stamp: &BatchStamp<'_>) -> Result<(), SdkError> {
        let seq = self.counters.next_seq;
        self.reserve(seq)?;
        let mut numbers = Vec::new();
        let mut bytes = 0;
        for e in self.pending.iter().take(max_events.min(policy.max_batch_events).max(1)) {
            bytes += e.json.len();
            if !numbers.is_empty() && bytes > policy.max_batch_bytes {
                break;
            }
            numbers.push(e.no);
        }
        let taken = numbers.len();
        // Events of a split batch stand in front with higher numbers.
        numbers.sort_unstable();
        let lost = self.lost_events(stamp.now)?;
        let lost: Vec<&RawValue> = lost.iter().map(AsRef::as_ref).collect();
        let damaged = |e: serde_json::Error| SdkError::Corrupt { path: self.path.clone(), why: e.to_string() };
        let mut events = Vec::with_capacity(taken + lost.len());
        for e in self.pending.iter().take(taken) {
            events.push(serde_json::from_str::<&RawValue>(&e.json).map_err(damaged)?);
        }
        events.extend(lost);
        let count = events.len();
        let form = BatchForm {
            v: 1,
            install_id: stamp.install,
            seq,
            sent_at: stamp.now,
            sdk: crate::SDK_NAME,
            device: stamp.facts,
            events,
        };
        let body = serde_json::to_vec(&form).map_err(damaged)?;
        let record = Record::Batch { seq, events: numbers, body };
        self.write(std::slice::from_ref(&record))?;
        self.apply(record)?;
        debug_assert_eq!(self.in_flight.as_ref().map(|b| b.events), Some(count));
        Ok(())
    }

    /// The counted losses as device events.
    fn lost_events(&self, now: DateTime<Utc>) -> Result<Vec<Box<RawValue>>, SdkError> {
        self.counters
            .dropped
            .iter()
            .map(|(reason, count)| {
                let event = EventV1::Device(DeviceEventV1 {
                    at: now,
                    event: DeviceEventKind::EventsDropped,
                    bundle: None,
                    assignment: None,
                    load_ms: None,
                    reason: Some(format!("{reason}={count}")),
                });
                serde_json::value::to_raw_value(&event).map_err(|e| SdkError::Usage(e.to_string()))
            })
            .collect()
    }

    /// Makes sure that `seq` lies below the stored reservation before it is used.
    fn reserve(&mut self, seq: u64) -> Result<(), SdkError> {
        if seq < self.reserved_seq {
            return Ok(());
        }
        let next = seq.saturating_add(SEQ_STEP);
        files::replace(&self.seq_path, &encode_seq(next), self.durability)?;
        self.reserved_seq = next;
        Ok(())
    }

    /// The server has the batch.
    pub(crate) fn acked(&mut self, seq: u64) -> Result<(), SdkError> {
        self.write(&[Record::Acked { seq }])?;
        self.in_flight = None;
        self.compact_if_worth_it()
    }

    /// The server will never take the batch: its events are counted under `reason`. Losses it reported count again.
    pub(crate) fn refused(&mut self, seq: u64, reason: &str) -> Result<(), SdkError> {
        let Some(batch) = &self.in_flight else {
            return Ok(());
        };
        let mut dropped = self.counters.dropped.clone();
        for raw in parse_events(&batch.body) {
            let (reason, count) = match serde_json::from_str::<EventV1>(raw.get()) {
                Ok(EventV1::Device(d)) if d.event == DeviceEventKind::EventsDropped => split_loss(d.reason),
                _ => (reason.to_owned(), 1),
            };
            add_loss(&mut dropped, reason, count);
        }
        let counters = serde_json::to_vec(&dropped).unwrap_or_default();
        let record = Record::Refused { seq, counters };
        self.write(std::slice::from_ref(&record))?;
        self.apply(record)?;
        self.compact_if_worth_it()
    }

    /// The batch was too large for the server: its events go back to the front of the queue and get a new, smaller
    /// batch with a new number.
    pub(crate) fn split(&mut self, seq: u64) -> Result<(), SdkError> {
        self.write(&[Record::Split { seq }])?;
        self.requeue_in_flight();
        Ok(())
    }

    fn requeue_in_flight(&mut self) {
        let Some(batch) = self.in_flight.take() else {
            return;
        };
        let first_no = self.counters.next_event;
        let mut back = Vec::new();
        self.counters.next_event = first_no.saturating_add(batch.events as u64);
        for (i, raw) in parse_events(&batch.body).into_iter().enumerate() {
            match serde_json::from_str::<EventV1>(raw.get()) {
                Ok(EventV1::Device(d)) if d.event == DeviceEventKind::EventsDropped => {
                    let (reason, count) = split_loss(d.reason);
                    add_loss(&mut self.counters.dropped, reason, count);
                }
                parsed => back.push(Queued {
                    no: first_no.saturating_add(i as u64),
                    interaction: matches!(parsed, Ok(EventV1::Interaction(_))),
                    json: raw.get().into(),
                }),
            }
        }
        for event in back.into_iter().rev() {
            self.pending_bytes += event.json.len() as u64;
            self.pending.push_front(event);
        }
    }

    fn compact_if_worth_it(&mut self) -> Result<(), SdkError> {
        let live = self.pending_bytes + self.in_flight.as_ref().map_or(0, |b| b.body.len() as u64);
        if self.log_bytes > COMPACT_BYTES && self.log_bytes > 2 * live { self.compact() } else { Ok(()) }
    }

    fn compact(&mut self) -> Result<(), SdkError> {
        let dropped = std::mem::take(&mut self.counters.dropped);
        let base = serde_json::to_vec(&self.counters).unwrap_or_default();
        self.counters.dropped = dropped;
        let mut out = Record::Base(base).encode();
        if let Some(b) = &self.in_flight {
            out.extend(Record::Batch { seq: b.seq, events: vec![], body: b.body.to_vec() }.encode());
        }
        // After the batch, because a batch record clears the counters.
        out.extend(Record::Dropped { events: vec![], counters: self.dropped_json() }.encode());
        for e in &self.pending {
            let json = e.json.as_bytes().to_vec();
            out.extend(Record::Event { no: e.no, report: 0, interaction: e.interaction, json }.encode());
        }
        files::replace(&self.path, &out, self.durability)?;
        self.log_bytes = out.len() as u64;
        Ok(())
    }

    /// Highest durable report number that is in the queue or went through it.
    pub(crate) fn last_report(&self) -> u64 {
        self.counters.last_report
    }

    /// Events waiting, those of the batch on its way included.
    pub(crate) fn len(&self) -> usize {
        self.pending.len() + self.in_flight.as_ref().map_or(0, |b| b.events)
    }
}

/// Counts a loss.
fn add_loss(dropped: &mut BTreeMap<String, u64>, reason: String, count: u64) {
    let sum = dropped.entry(reason).or_default();
    *sum = sum.saturating_add(count);
}

fn split_loss(reason: Option<String>) -> (String, u64) {
    let text = reason.unwrap_or_default();
    match text.rsplit_once('=') {
        Some((name, count)) => (name.to_owned(), count.parse().unwrap_or(1)),
        None => (text, 1),
    }
}

fn encode_seq(seq: u64) -> Vec<u8> {
    let mut out = seq.to_le_bytes().to_vec();
    out.extend_from_slice(&crc32fast::hash(&seq.to_le_bytes()).to_le_bytes());
    out
}

fn decode_seq(bytes: &[u8]) -> Option<u64> {
    let (seq, crc) = bytes.split_first_chunk::<8>()?;
    (crc == crc32fast::hash(seq).to_le_bytes()).then(|| u64::from_le_bytes(*seq))
}

#[cfg(test)]
mod tests;
