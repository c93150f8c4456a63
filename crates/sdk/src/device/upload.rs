//! Sends queued batches. A batch leaves the queue only after a 2xx; a lost answer leads to the same bytes again.

use super::Device;
use crate::backoff::retry_after_s;
use crate::env::Network;
use crate::error::SdkError;
use crate::policy::Wait;
use crate::queue::{Batch, BatchStamp};
use crate::transport::{HttpRequest, HttpResponse, fetch};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use flate2::Compression;
use flate2::write::GzEncoder;
use flywheel_types::wire::{ErrorBodyV1, INGEST_KEY_HEADER, IngestAckV1, PUBLIC_KEY_HEADER, SIGNATURE_HEADER};
use std::io::Write as _;

/// Bodies below this stay as they are: compression would not save a packet.
const GZIP_FROM_BYTES: usize = 1024;
/// Largest answer that is read.
const MAX_ANSWER_BYTES: u64 = 64 << 10;

/// What one call of [`Device::upload`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UploadOutcome {
    /// Batches and events the server acknowledged.
    pub batches: u64,
    pub events: u64,
    /// What the server said about them, summed up.
    pub ack: IngestAckV1,
    /// Events the server will never take; they are counted and the counts are sent.
    pub refused_events: u64,
    /// Why something is left in the queue.
    pub waiting: Option<Wait>,
}

/// Fate of one batch.
enum Fate {
    Acked(IngestAckV1),
    /// 4xx that repetition cannot change.
    Refused {
        reason: String,
    },
    TooLarge,
    /// Try later.
    Later {
        retry_after_s: Option<u64>,
    },
}

impl Device {
    /// Sends what is queued. Safe to drop at any point and to call again.
    ///
    /// # Errors
    /// File errors only; a network that fails shows as [`UploadOutcome::waiting`].
    pub async fn upload(&mut self) -> Result<UploadOutcome, SdkError> {
        let mut out = UploadOutcome::default();
        for _ in 0..self.config.upload.max_batches_per_call {
            let now = self.now();
            if self.env.host.conditions().network == Network::Offline {
                out.waiting = (self.queue.len() > 0).then_some(Wait::Network);
                break;
            }
            if let Some(until) = self.uploads.wait_until(now) {
                out.waiting = Some(Wait::Until(until));
                break;
            }
            let facts = self.env.host.facts();
            let stamp = BatchStamp { install: self.identity.install_id(), now, facts: &facts };
            let Some(batch) = self.queue.batch(&self.config.upload, self.batch_events, &stamp)? else {
                break;
            };
            let fate = self.send(&batch).await;
            if !self.settle(&batch, fate, &mut out)? {
                break;
            }
        }
        Ok(out)
    }

    /// Writes down what became of a batch; false ends this call.
    fn settle(&mut self, batch: &Batch, fate: Fate, out: &mut UploadOutcome) -> Result<bool, SdkError> {
        match fate {
            Fate::Acked(ack) => {
                self.queue.acked(batch.seq)?;
                self.uploads.succeeded();
                // Grows back slowly, so that a server with a low limit is not asked in vain every time.
                let grown = self.batch_events.saturating_add(self.batch_events / 8 + 1);
                self.batch_events = self.config.upload.max_batch_events.min(grown);
                out.batches += 1;
                out.events += batch.events as u64;
                out.ack.stored += ack.stored;
                out.ack.duplicate += ack.duplicate;
                out.ack.quarantined += ack.quarantined;
                let room = 10usize.saturating_sub(out.ack.reasons.len());
                out.ack.reasons.extend(ack.reasons.into_iter().take(room));
            }
            Fate::TooLarge if batch.events > 1 => {
                self.batch_events = (batch.events / 2).max(1);
                self.queue.split(batch.seq)?;
            }
            Fate::TooLarge => {
                out.refused_events += batch.events as u64;
                self.queue.refused(batch.seq, "too_large")?;
            }
            Fate::Refused { reason } => {
                tracing::warn!(seq = batch.seq, events = batch.events, reason, "the server refused a batch for good");
                out.refused_events += batch.events as u64;
                self.queue.refused(batch.seq, &reason)?;
                // One refusal a call: a server that refuses everything must not be asked in a loop.
                return Ok(false);
            }
            Fate::Later { retry_after_s } => {
                let now = self.now();
                let until = self.uploads.failed(now, retry_after_s, &mut *self.env.rng);
                out.waiting = Some(Wait::Until(until));
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn send(&mut self, batch: &Batch) -> Fate {
        let signature = self.identity.sign_body(&self.config.app, &batch.body);
        let (body, encoded) = self.encode(&batch.body);
        let mut request = HttpRequest::post(format!("{}/v1/events", self.config.base_url), body)
            .header("content-type", "application/json")
            .header(INGEST_KEY_HEADER, self.config.ingest_key.clone())
            .header(SIGNATURE_HEADER, signature)
            .header(PUBLIC_KEY_HEADER, self.identity.public_key_base64());
        if encoded {
            request = request.header("content-encoding", "gzip");
        }
        match fetch(self.env.transport.as_ref(), request, MAX_ANSWER_BYTES).await {
            Ok(answer) => fate(&answer, self.now()),
            Err(e) => {
                tracing::debug!(error = %e, seq = batch.seq, "upload failed");
                Fate::Later { retry_after_s: None }
            }
        }
    }

    fn encode(&self, body: &Bytes) -> (Bytes, bool) {
        if !self.config.upload.gzip || body.len() < GZIP_FROM_BYTES {
            return (body.clone(), false);
        }
        let mut gzip = GzEncoder::new(Vec::with_capacity(body.len() / 4), Compression::fast());
        match gzip.write_all(body).and_then(|()| gzip.finish()) {
            Ok(bytes) => (bytes.into(), true),
            Err(_) => (body.clone(), false),
        }
    }
}

/// Reads an answer. Statuses that another configuration of the server can change (credentials, a proxy that is not
/// there yet) are tried again; the queue's bounds limit what that costs.
fn fate(answer: &HttpResponse, now: DateTime<Utc>) -> Fate {
    let retry = || answer.head.header("retry-after").and_then(|v| retry_after_s(v, now));
    match answer.head.status {
        200..=299 => Fate::Acked(serde_json::from_slice(&answer.body).unwrap_or_default()),
        413 => Fate::TooLarge,
        401 | 403 | 404 | 407 | 408 | 425 | 429 => Fate::Later { retry_after_s: retry() },
        status @ 400..=499 => {
            let body: Option<ErrorBodyV1> = serde_json::from_slice(&answer.body).ok();
            let code = body.map(|b| b.code).filter(|c| c.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'));
            Fate::Refused { reason: code.unwrap_or_else(|| format!("http_{status}")) }
        }
        _ => Fate::Later { retry_after_s: retry() },
    }
}
