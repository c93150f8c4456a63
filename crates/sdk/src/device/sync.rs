//! Keeps the knowledge index up to date.

use super::Device;
use crate::backoff::retry_after_s;
use crate::config::IndexStorage;
use crate::error::SdkError;
use crate::files;
use crate::index::{IndexChangesV1, IndexSnapshot};
use crate::transport::{HttpRequest, fetch};
use flywheel_types::wire::INGEST_KEY_HEADER;
use std::sync::Arc;

/// Largest answer accepted, bytes (40,000 chunks with 384-dimensional embeddings).
const MAX_CHANGES_BYTES: u64 = 128 << 20;

#[derive(serde::Deserialize)]
struct Head {
    index_version: u64,
}

impl Device {
    /// Fetches what changed since the last sync and applies it. Returns whether anything changed.
    ///
    /// # Errors
    /// Network and server errors, or [`SdkError::Malformed`]; the index stays as it was.
    pub async fn sync_index(&mut self) -> Result<bool, SdkError> {
        let mut from = Arc::clone(&self.index);
        let mut answer = self.index_changes(from.version()).await?;
        let mut head = read_head(&answer)?;
        if head.index_version < from.version() {
            // The server began anew (a restored backup): so do we.
            tracing::warn!(ours = from.version(), theirs = head.index_version, "the index is fetched again");
            from = Arc::new(IndexSnapshot::default());
            answer = self.index_changes(0).await?;
            head = read_head(&answer)?;
        }
        if head.index_version == from.version() && Arc::ptr_eq(&from, &self.index) {
            return Ok(false);
        }
        let next = self.env.shared.index_step(&from, &answer)?;
        if self.config.index == IndexStorage::File {
            let bytes = to_bytes(&next.to_answer())?;
            files::replace(&self.config.dir.join("index.json"), &bytes, self.config.durability)?;
        }
        self.index = next;
        Ok(true)
    }

    async fn index_changes(&mut self, since: u64) -> Result<bytes::Bytes, SdkError> {
        let what = || "fetching index changes".to_owned();
        let request = HttpRequest::get(format!("{}/v1/index/changes?since={since}", self.config.base_url))
            .header(INGEST_KEY_HEADER, self.config.ingest_key.clone());
        let answer = fetch(self.env.transport.as_ref(), request, MAX_CHANGES_BYTES)
            .await
            .map_err(|source| SdkError::Transport { what: what(), source })?;
        match answer.head.status {
            200 => Ok(answer.body),
            status => {
                let retry = answer.head.header("retry-after").and_then(|v| retry_after_s(v, self.now()));
                Err(SdkError::Status { what: what(), status, retry_after_s: retry })
            }
        }
    }
}

fn malformed(e: &serde_json::Error) -> SdkError {
    SdkError::Malformed { what: "the index changes".into(), why: e.to_string() }
}

fn read_head(answer: &[u8]) -> Result<Head, SdkError> {
    serde_json::from_slice(answer).map_err(|e| malformed(&e))
}

fn to_bytes(answer: &IndexChangesV1) -> Result<Vec<u8>, SdkError> {
    serde_json::to_vec(answer).map_err(|e| malformed(&e))
}
