//! Devices that sign their batches, and small helpers, for the tests of this crate.
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, Duration, Utc};
use ed25519_dalek::{Signer, SigningKey};
use flywheel_lake::{Lake, LakeConfig, SqlLimits};
use flywheel_telemetry::{Endpoint, IngestHeaders, IngestOutcome, IngestRequest};
use flywheel_types::assign::Arm;
use flywheel_types::wire::{
    AssignedArmV1, ContentV1, DeviceEventKind, DeviceEventV1, DeviceFactsV1, EventBatchV1, EventV1, FeedbackV1,
    InteractionV1, RetrievedV1, signing_bytes,
};
use flywheel_types::{AppId, ChunkId, Digest, Error, InstallId, InteractionId, LabelKind, RolloutId, TemplateId};
use std::path::Path;

pub fn app() -> AppId {
    AppId::new("support-app").unwrap()
}

pub fn at(minutes: i64) -> DateTime<Utc> {
    "2026-03-01T00:00:00Z".parse::<DateTime<Utc>>().unwrap() + Duration::minutes(minutes)
}

pub fn config(dir: &Path) -> LakeConfig {
    LakeConfig { commit_interval: std::time::Duration::from_secs(3600), ..LakeConfig::local(dir).unwrap() }
}

pub async fn open(dir: &Path) -> Lake {
    Lake::open(config(dir)).await.unwrap()
}

pub struct Device {
    key: SigningKey,
    pub install: InstallId,
    pub class: &'static str,
}

impl Device {
    pub fn new(n: u32) -> Self {
        let mut seed = [0u8; 32];
        seed[..4].copy_from_slice(&n.to_le_bytes());
        let key = SigningKey::from_bytes(&seed);
        let install = InstallId::of_public_key(&key.verifying_key().to_bytes());
        Self { key, install, class: "high-8gb" }
    }

    pub fn request(&self, app: &AppId, seq: u64, now: DateTime<Utc>, events: Vec<EventV1>) -> IngestRequest {
        let batch = EventBatchV1 {
            v: 1,
            install_id: self.install,
            seq,
            sent_at: now,
            sdk: "test/1".into(),
            device: DeviceFactsV1 {
                class: Some(self.class.into()),
                locale: Some("en-GB".into()),
                ..DeviceFactsV1::default()
            },
            events,
        };
        let body = serde_json::to_vec(&batch).unwrap();
        let signature = self.key.sign(&signing_bytes(app, &body)).to_bytes();
        let headers = IngestHeaders {
            content_type: Some("application/json".into()),
            signature: Some(STANDARD.encode(signature)),
            public_key: Some(STANDARD.encode(self.key.verifying_key().to_bytes())),
            ..IngestHeaders::default()
        };
        IngestRequest {
            app: app.clone(),
            ingest_key: "key-1".into(),
            endpoint: Endpoint::Events,
            headers,
            body: body.into(),
            now,
        }
    }

    pub async fn send(
        &self,
        lake: &Lake,
        seq: u64,
        now: DateTime<Utc>,
        events: Vec<EventV1>,
    ) -> Result<IngestOutcome, Error> {
        lake.ingestor().ingest(self.request(&app(), seq, now, events)).await
    }
}

/// A batch without a signature: anybody can claim any install.
pub fn forged(install: InstallId, seq: u64, now: DateTime<Utc>, events: Vec<EventV1>) -> IngestRequest {
    let mut request = Device::new(0).request(&app(), seq, now, events);
    let mut batch: EventBatchV1 = serde_json::from_slice(&request.body).unwrap();
    batch.install_id = install;
    request.body = serde_json::to_vec(&batch).unwrap().into();
    request.headers.signature = None;
    request.headers.public_key = None;
    request
}

pub fn bundle(n: u8) -> Digest {
    Digest::of(&[n])
}

pub fn assignment(rollout: &str, arm: Arm) -> Option<AssignedArmV1> {
    Some(AssignedArmV1 { rollout_id: RolloutId::new(rollout).unwrap(), phase: 1, arm })
}

pub fn interaction(id: &str, when: DateTime<Utc>) -> InteractionV1 {
    InteractionV1 {
        interaction_id: InteractionId::new(id).unwrap(),
        at: when,
        template_id: TemplateId::new("faq@3").unwrap(),
        bundle: bundle(1),
        assignment: None,
        retrieval: vec![
            RetrievedV1 { chunk_id: ChunkId::new("kb-1").unwrap(), version: 1, score: 0.9, hidden: false },
            RetrievedV1 { chunk_id: ChunkId::new("kb-2").unwrap(), version: 3, score: 0.5, hidden: true },
        ],
        index_version: Some(1),
        ttft_ms: Some(100.0),
        ttfv_ms: None,
        decode_tokens_per_s: Some(12.5),
        input_tokens: Some(100),
        output_tokens: Some(20),
        peak_memory_bytes: None,
        memory_metric: None,
        energy_mj: None,
        user_id: None,
        content: None,
    }
}

pub fn answer(id: &str, when: DateTime<Utc>) -> EventV1 {
    EventV1::Interaction(interaction(id, when))
}

pub fn with_content(id: &str, when: DateTime<Utc>, question: &str, answer: &str) -> EventV1 {
    let content = Some(ContentV1 { question: question.into(), answer: answer.into() });
    EventV1::Interaction(InteractionV1 { content, ..interaction(id, when) })
}

pub fn feedback(id: &str, label: LabelKind, when: DateTime<Utc>) -> EventV1 {
    let interaction_id = InteractionId::new(id).unwrap();
    EventV1::Feedback(FeedbackV1 { interaction_id, at: when, label, reason: None, user_id: None })
}

pub fn device_event(event: DeviceEventKind, when: DateTime<Utc>, assignment: Option<AssignedArmV1>) -> EventV1 {
    EventV1::Device(DeviceEventV1 {
        at: when,
        event,
        bundle: Some(bundle(2)),
        assignment,
        load_ms: Some(900.0),
        reason: None,
    })
}

/// First column of the first row as a number.
pub async fn number(lake: &Lake, app: &AppId, query: &str) -> i64 {
    let result = lake.sql(app, &format!("SELECT ({query}) AS n"), &SqlLimits::default()).await.unwrap();
    result.to_json().unwrap()[0]["n"].as_i64().unwrap_or(0)
}

pub async fn rows(lake: &Lake, query: &str) -> Vec<serde_json::Value> {
    lake.sql(&app(), query, &SqlLimits::default()).await.unwrap().to_json().unwrap()
}
