//! The intake as the HTTP layer uses it: the telemetry crate's ingestor with our configuration.

use crate::config::Config;
use anyhow::Result;
use flywheel_attribution::refusal;
use flywheel_lake::LakeConfig;
use flywheel_telemetry::{IngestOutcome, IngestRequest, Ingestor};
use flywheel_types::{Error, LabelKind};
use std::sync::Arc;

/// The intake.
pub struct Ingest {
    inner: Arc<Ingestor>,
}

impl Ingest {
    #[must_use]
    pub fn new(inner: Arc<Ingestor>) -> Self {
        Self { inner }
    }

    /// Takes one body; returns only after its rows are durable.
    ///
    /// # Errors
    /// The public error of what was wrong with the request, or `Unavailable` when overloaded.
    pub async fn take(&self, request: IngestRequest) -> Result<IngestOutcome, Error> {
        self.inner.ingest(request).await
    }

    /// The log accepts writes.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.inner.status().healthy
    }

    /// Replaces mail addresses, phone, card and id numbers.
    #[must_use]
    pub fn mask(&self, text: &str) -> String {
        flywheel_telemetry::mask::mask(text).into_owned()
    }
}

/// Configuration of log and tables.
///
/// # Errors
/// When a folder cannot be made.
pub fn lake_config(config: &Config) -> Result<LakeConfig> {
    let mut lake = LakeConfig::local(&config.lake_dir())?;
    lake.writer_id.clone_from(&config.writer_id);
    lake.commit_interval = std::time::Duration::from_secs(config.ingest.flush_s);
    lake.ingest.limits.decoded_bytes = config.ingest.max_body_bytes;
    lake.ingest.budget_bytes = usize::try_from(config.ingest.max_backlog_bytes).unwrap_or(usize::MAX);
    lake.ingest.classifier = Some(Arc::new(classify));
    Ok(lake)
}

/// Detected labels of an answer: a refusal or an abstention; everything else has none.
fn classify(answer: &str) -> Option<LabelKind> {
    refusal::detect(answer).kind.label()
}
