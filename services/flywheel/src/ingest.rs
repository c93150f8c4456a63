//! The intake as the HTTP layer uses it: the telemetry crate's ingestor with our configuration.

use crate::config::Config;
use crate::metrics::Gauge;
use anyhow::Result;
use chrono::{DateTime, Utc};
use flywheel_attribution::refusal;
use flywheel_lake::LakeConfig;
use flywheel_telemetry::{Endpoint, IngestOutcome, IngestRequest, Ingestor, Masks, Slot, UserKeys};
use flywheel_types::{AppId, Error, LabelKind};
use std::sync::Arc;

/// The intake.
pub struct Ingest {
    inner: Arc<Ingestor>,
    masks: Masks,
}

impl Ingest {
    #[must_use]
    pub fn new(inner: Arc<Ingestor>, masks: Masks) -> Self {
        Self { inner, masks }
    }

    /// Room for a body of `size` bytes, before it is read.
    ///
    /// # Errors
    /// `TooLarge`, or `Unavailable` when overloaded or when the disk is almost full.
    pub fn admit(&self, size: usize) -> Result<Slot, Error> {
        self.inner.admit(size)
    }

    /// Takes one body; returns only after its rows are durable.
    ///
    /// # Errors
    /// The public error of what was wrong with the request, or `Unavailable` when the disk refuses.
    pub async fn take(&self, request: IngestRequest, slot: Slot) -> Result<IngestOutcome, Error> {
        self.inner.ingest_admitted(request, slot).await
    }

    /// Counts a request whose body was not looked at.
    pub fn refused(&self, app: &AppId, endpoint: Endpoint, reason: &'static str, at: DateTime<Utc>) {
        self.inner.refused(app, endpoint.source(), reason, at);
    }

    /// The log accepts writes.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.inner.status().healthy
    }

    /// State of the intake for `/metrics`.
    #[must_use]
    pub fn gauges(&self) -> [Gauge; 4] {
        let status = self.inner.status();
        let gauge = |name, help, value| Gauge { name, help, value };
        [
            gauge("flywheel_ingest_log_bytes", "Bytes of the write-ahead log on disk.", status.log_bytes as f64),
            gauge(
                "flywheel_ingest_backlog_bytes",
                "Log bytes of acknowledged rows that are not in the tables yet.",
                status.backlog_bytes as f64,
            ),
            gauge("flywheel_ingest_in_flight_bytes", "Requests being read, bytes.", status.in_flight_bytes as f64),
            gauge("flywheel_ingest_installs", "Installs whose batches are counted.", status.installs as f64),
        ]
    }

    /// Replaces the personal data that the configuration names.
    #[must_use]
    pub fn mask(&self, text: &str) -> String {
        self.masks.apply(text.into()).into_owned()
    }
}

/// Configuration of log and tables.
///
/// # Errors
/// When a folder cannot be made.
pub fn lake_config(config: &Config, users: UserKeys) -> Result<LakeConfig> {
    let mut lake = LakeConfig::local(&config.lake_dir())?;
    lake.writer_id.clone_from(&config.writer_id);
    lake.commit_interval = std::time::Duration::from_secs(config.ingest.flush_s);
    lake.commit_bytes = config.ingest.flush_bytes;
    lake.log.segment_bytes = config.ingest.segment_bytes;
    lake.ingest.limits.encoded_bytes = config.ingest.max_body_bytes;
    lake.ingest.limits.decoded_bytes = config.ingest.max_body_bytes;
    lake.ingest.backlog_bytes = config.ingest.max_backlog_bytes;
    lake.ingest.in_flight_bytes = config.ingest.max_in_flight_bytes;
    lake.ingest.min_free_bytes = config.ingest.min_free_bytes;
    lake.ingest.masks = config.ingest.masks;
    lake.ingest.users = users;
    lake.ingest.classifier = Some(Arc::new(classify));
    Ok(lake)
}

/// Detected labels of an answer: a refusal or an abstention; everything else has none.
fn classify(answer: &str) -> Option<LabelKind> {
    refusal::detect(answer).kind.label()
}
