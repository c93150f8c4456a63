//! What a device or SDK sends to `/v1/events`, version 1. Unknown fields are ignored, missing optional fields
//! are `None`; a new version gets a new type, and a golden sample of every old one must still load.

use crate::assign::Arm;
use crate::id::{AppId, ChunkId, Digest, InstallId, InteractionId, RolloutId, TemplateId};
use crate::state::LabelKind;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// HTTP header with the base64 of the 64-byte Ed25519 signature over [`signing_bytes`].
pub const SIGNATURE_HEADER: &str = "x-fleet-signature";
/// HTTP header with the base64 of the device's 32-byte Ed25519 public key.
pub const PUBLIC_KEY_HEADER: &str = "x-fleet-public-key";
/// HTTP header of the per-app ingest key (it ships inside the app, so it proves nothing about the device).
pub const INGEST_KEY_HEADER: &str = "x-fleet-ingest-key";

/// What a device signs: a domain tag, the app, and the uncompressed request body.
#[must_use]
pub fn signing_bytes(app: &AppId, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len() + app.as_str().len() + 24);
    out.extend_from_slice(b"flywheel-events-v1\0");
    out.extend_from_slice(app.as_str().as_bytes());
    out.push(0);
    out.extend_from_slice(body);
    out
}

/// One upload of an SDK: events in order, with a per-install sequence number that never repeats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventBatchV1 {
    /// Format version, 1.
    pub v: u8,
    pub install_id: InstallId,
    /// 1, 2, 3, … per install. The same `seq` is always the same batch.
    pub seq: u64,
    /// Device clock at sending.
    pub sent_at: DateTime<Utc>,
    /// SDK name and version.
    pub sdk: String,
    pub device: DeviceFactsV1,
    pub events: Vec<EventV1>,
}

/// What the app tells about the device. All optional: a platform that cannot tell says nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceFactsV1 {
    /// Class used in slices and latency thresholds, for example `high-8gb`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soc: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locale: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app_version: Option<String>,
    /// Engine that runs the model, for example `llama.cpp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
}

/// One event. The `kind` field selects the form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "nearly every event is an interaction; boxing would cost each of them")]
pub enum EventV1 {
    Interaction(InteractionV1),
    Feedback(FeedbackV1),
    Device(DeviceEventV1),
}

/// One answer of a model on the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InteractionV1 {
    pub interaction_id: InteractionId,
    /// Device clock.
    pub at: DateTime<Utc>,
    pub template_id: TemplateId,
    /// Manifest digest of the bundle that answered.
    pub bundle: Digest,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assignment: Option<AssignedArmV1>,
    /// Retrieved chunks in rank order (rank 1 first), including hits that were hidden.
    #[serde(default)]
    pub retrieval: Vec<RetrievedV1>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index_version: Option<u64>,
    /// Time to first token, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Time to first visible token (after a `<think>` span), ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttfv_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_tokens_per_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
    /// Which memory metric: `rss`, `pss` or `phys_footprint`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_metric: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_mj: Option<f64>,
    /// The app's own id of its user, so that what belongs to a person can be erased. Only a keyed digest of it is stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
    /// Question and answer text; only when the user agreed to send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<ContentV1>,
}

/// Opt-in content of an interaction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContentV1 {
    pub question: String,
    /// Visible answer, without a `<think>` span.
    pub answer: String,
}

/// The arm a device was in when something happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedArmV1 {
    pub rollout_id: RolloutId,
    pub phase: u32,
    pub arm: Arm,
}

/// One retrieved chunk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RetrievedV1 {
    pub chunk_id: ChunkId,
    pub version: u32,
    pub score: f32,
    /// The chunk would have been used but is frozen for this device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hidden: bool,
}

/// A person's judgement about one interaction. It names the interaction only, never a chunk to punish.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FeedbackV1 {
    pub interaction_id: InteractionId,
    pub at: DateTime<Utc>,
    pub label: LabelKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// As in [`InteractionV1`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
}

/// What happened to a model on the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceEventV1 {
    pub at: DateTime<Utc>,
    pub event: DeviceEventKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assignment: Option<AssignedArmV1>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_ms: Option<f64>,
    /// Short machine-readable reason, for example `chunk_hash_mismatch`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Kinds of device events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceEventKind {
    /// First poll that saw an arm.
    Exposed,
    Downloaded,
    /// Download or verification refused; nothing was installed.
    Refused,
    Installed,
    /// Model loaded and probe passed inside the load window.
    Confirmed,
    LoadFailed,
    /// Crash during use.
    Crashed,
    OutOfMemory,
    /// The device went back to its previous slot by itself.
    FellBack,
    /// The device followed a server rollback.
    RolledBack,
    /// The SDK dropped queued events; `reason` is `<cause>=<count>`, for example `queue_full=12`.
    EventsDropped,
}

impl DeviceEventKind {
    /// The word on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exposed => "exposed",
            Self::Downloaded => "downloaded",
            Self::Refused => "refused",
            Self::Installed => "installed",
            Self::Confirmed => "confirmed",
            Self::LoadFailed => "load_failed",
            Self::Crashed => "crashed",
            Self::OutOfMemory => "out_of_memory",
            Self::FellBack => "fell_back",
            Self::RolledBack => "rolled_back",
            Self::EventsDropped => "events_dropped",
        }
    }
    /// Counts for the load-failure / crash gate.
    #[must_use]
    pub fn is_failure(self) -> bool {
        matches!(self, Self::LoadFailed | Self::Crashed | Self::OutOfMemory | Self::FellBack)
    }
}

/// Answer to an upload: the fate of every event is counted (invariant 1).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IngestAckV1 {
    pub stored: u64,
    pub duplicate: u64,
    pub quarantined: u64,
    /// Human-readable reasons of quarantined events, at most 10.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
}

/// Body of every 4xx and 5xx.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBodyV1 {
    pub code: String,
    pub message: String,
    pub hint: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Golden sample of version 1; must load for ever.
    const GOLDEN: &str = include_str!("../golden/event_batch_v1.json");

    #[test]
    fn golden_event_batch_v1_loads_and_round_trips() {
        let batch: EventBatchV1 = serde_json::from_str(GOLDEN).unwrap();
        assert_eq!(batch.seq, 7);
        assert_eq!(batch.events.len(), 3);
        let EventV1::Interaction(i) = &batch.events[0] else { panic!("first is an interaction") };
        assert!(i.retrieval[1].hidden);
        assert_eq!(i.assignment.as_ref().unwrap().arm, Arm::Treatment);
        let again: EventBatchV1 = serde_json::from_str(&serde_json::to_string(&batch).unwrap()).unwrap();
        assert_eq!(again, batch);
    }

    #[test]
    fn signing_bytes_separate_app_and_body() {
        let a = signing_bytes(&AppId::new("a").unwrap(), b"bc");
        let b = signing_bytes(&AppId::new("ab").unwrap(), b"c");
        assert_ne!(a, b);
    }
}
