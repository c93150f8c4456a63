//! Thousands of phones that come back at once: every one has a connection of its own and a queue of batches, the first of which
//! was stored before the server went away, but the phone never heard of it.

use crate::line::{Answer, Line};
use crate::phone::{Install, answer};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Barrier, Semaphore};
use tokio::task::JoinSet;

/// Phones that send at the same time before the server goes away.
const AT_ONCE: usize = 32;
/// A phone that cannot connect tries again after this.
const AFTER_REFUSAL: Duration = Duration::from_millis(200);
/// Times that a phone tries one batch.
const TRIES: u32 = 100;

/// Who comes back, and where.
#[derive(Debug, Clone)]
pub struct Fleet {
    pub address: String,
    pub ingest_key: String,
    pub devices: u64,
    /// Batches in the queue of each.
    pub batches: u64,
    /// Answers in a batch.
    pub events: u64,
}

/// What the phones saw.
#[derive(Default)]
struct Seen {
    connected: AtomicU64,
    acknowledged: AtomicU64,
    duplicates: AtomicU64,
    /// Answers with 503.
    refused: AtomicU64,
    /// Connections that could not be made, or ended before an answer.
    broken: AtomicU64,
}

impl Fleet {
    /// Rows that must be there in the end.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.devices * self.batches * self.events
    }

    /// Every phone's first batch is stored, in an orderly way. Nobody remembers.
    ///
    /// # Errors
    /// When a phone does not get its batch through.
    pub async fn before(&self) -> Result<()> {
        let seen = Arc::new(Seen::default());
        let room = Arc::new(Semaphore::new(AT_ONCE));
        let mut phones = JoinSet::new();
        for device in 0..self.devices {
            let (fleet, seen) = (self.clone(), Arc::clone(&seen));
            let slot = Arc::clone(&room).acquire_owned().await?;
            phones.spawn(async move {
                let _slot = slot;
                let mut line = None;
                fleet.deliver(&mut line, device, 1, &seen).await
            });
        }
        while let Some(done) = phones.join_next().await {
            done??;
        }
        Ok(())
    }

    /// All phones connect at once and send what they have queued. When `all_open`, they send when the last one has connected,
    /// and keep their connections until everybody is done.
    ///
    /// # Errors
    /// When a phone does not get a batch through.
    pub async fn reconnect(&self, all_open: bool) -> Result<Value> {
        let seen = Arc::new(Seen::default());
        let wait_for = if all_open { usize::try_from(self.devices)? } else { 1 };
        let (connected, finished) = (Arc::new(Barrier::new(wait_for)), Arc::new(Barrier::new(wait_for)));
        let began = Instant::now();
        let mut phones = JoinSet::new();
        for device in 0..self.devices {
            let (fleet, seen) = (self.clone(), Arc::clone(&seen));
            let (connected, finished) = (Arc::clone(&connected), Arc::clone(&finished));
            phones.spawn(async move {
                let mut line = Some(fleet.connect(&seen).await?);
                let connected_ms = began.elapsed().as_secs_f64() * 1000.0;
                connected.wait().await;
                let begin = Instant::now();
                for seq in 1..=fleet.batches {
                    fleet.deliver(&mut line, device, seq, &seen).await?;
                }
                let done_ms = begin.elapsed().as_secs_f64() * 1000.0;
                finished.wait().await;
                anyhow::Ok((connected_ms, done_ms))
            });
        }
        let (mut connect_ms, mut done_ms) = (Vec::new(), Vec::new());
        while let Some(done) = phones.join_next().await {
            let (connect, done) = done??;
            connect_ms.push(connect);
            done_ms.push(done);
        }
        let n = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Ok(json!({
            "devices": self.devices, "batches_each": self.batches, "events_each": self.events,
            "connections": n(&seen.connected), "acknowledged": n(&seen.acknowledged),
            "duplicate_batches": n(&seen.duplicates), "refused_503": n(&seen.refused), "broken_connections": n(&seen.broken),
            "seconds": began.elapsed().as_secs_f64(),
            "connected_p50_ms": quantile(&mut connect_ms, 0.5), "connected_max_ms": quantile(&mut connect_ms, 1.0),
            "queue_sent_p50_ms": quantile(&mut done_ms, 0.5), "queue_sent_p99_ms": quantile(&mut done_ms, 0.99),
            "queue_sent_max_ms": quantile(&mut done_ms, 1.0),
        }))
    }

    async fn connect(&self, seen: &Seen) -> Result<Line> {
        let mut tries = 0;
        loop {
            match Line::open(&self.address).await {
                Ok(line) => {
                    seen.connected.fetch_add(1, Ordering::Relaxed);
                    return Ok(line);
                }
                Err(e) if tries == TRIES => return Err(e),
                Err(_) => {
                    seen.broken.fetch_add(1, Ordering::Relaxed);
                    tries += 1;
                    tokio::time::sleep(AFTER_REFUSAL).await;
                }
            }
        }
    }

    /// Sends a batch until it is acknowledged, as a phone does: again after `Retry-After`, again on a new connection.
    async fn deliver(&self, line: &mut Option<Line>, device: u64, seq: u64, seen: &Seen) -> Result<()> {
        let (path, headers, body) = self.request(device, seq);
        for _ in 0..TRIES {
            let open = match line.as_mut() {
                Some(open) => open,
                None => line.insert(self.connect(seen).await?),
            };
            match open.post(path, &headers, body.as_bytes()).await {
                Ok(Answer { status: 200, duplicate, .. }) => {
                    seen.acknowledged.fetch_add(1, Ordering::Relaxed);
                    seen.duplicates.fetch_add(u64::from(duplicate), Ordering::Relaxed);
                    return Ok(());
                }
                Ok(Answer { status: 503, retry_after_s: Some(seconds), .. }) => {
                    seen.refused.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                }
                Ok(other) => bail!("status {}: {}", other.status, other.body),
                Err(_) => {
                    seen.broken.fetch_add(1, Ordering::Relaxed);
                    *line = None;
                }
            }
        }
        bail!("batch {seq} of device {device} was not taken in {TRIES} tries")
    }

    /// Every second phone signs its batches; the others name theirs.
    fn request(&self, device: u64, seq: u64) -> (&'static str, String, String) {
        let events: Vec<Value> = (0..self.events).map(|k| answer(&format!("d{device:06}-{seq:03}-{k:03}"))).collect();
        let key = &self.ingest_key;
        if device.is_multiple_of(2) {
            let install = Install::new(device);
            let body = install.batch(seq, &events);
            let [a, b] = install.headers(&body);
            let headers = format!(
                "x-fleet-ingest-key: {key}\r\ncontent-type: application/json\r\n{}: {}\r\n{}: {}\r\n",
                a.0, a.1, b.0, b.1
            );
            return ("/v1/events", headers, body);
        }
        let headers = format!(
            "x-fleet-ingest-key: {key}\r\ncontent-type: application/x-ndjson\r\nidempotency-key: d{device}-{seq}\r\n"
        );
        let lines: String = events.iter().map(|e| e.to_string() + "\n").collect();
        ("/v1/events", headers, lines)
    }
}

fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = ((values.len() as f64 * q) as usize).min(values.len().saturating_sub(1));
    values.get(at).copied().unwrap_or_default()
}
