//! A forged fleet: identities made a moment ago and anonymous rows report that the candidate crashes. All of it is
//! taken and shown; none of it may move a gate.

use super::say;
use super::stage::Stage;
use anyhow::{Context, Result, ensure};
use chrono::{DateTime, Utc};
use flywheel_sdk::Identity;
use flywheel_types::assign::{Arm, PpmRange, bucket};
use flywheel_types::wire::{
    AssignedArmV1, DeviceEventKind, DeviceEventV1, DeviceFactsV1, EventBatchV1, EventV1, INGEST_KEY_HEADER,
    PUBLIC_KEY_HEADER, SIGNATURE_HEADER,
};
use flywheel_types::{AppId, Digest, RolloutId};
use reqwest::Client;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// Self-made identities whose bucket lies in the treatment arm.
const IDENTITIES: usize = 300;
/// Anonymous rows; they claim to be real phones of the treatment arm.
const ANONYMOUS: usize = 300;

/// What was sent, and where the failure gate stood before.
pub struct Forged {
    identities: u64,
    before: (u64, u64),
}

/// What a forger knows: everything in it is public or ships inside the app.
struct Forger {
    client: Client,
    server: String,
    app: AppId,
    ingest_key: String,
    now: DateTime<Utc>,
    bundle: Digest,
    arm: AssignedArmV1,
}

/// Sends the forged reports of crashes in the treatment arm of an open rollout.
pub async fn send(stage: &Stage, rollout: &str) -> Result<Forged> {
    let view = stage.operator.get(&format!("/v1/rollouts/{rollout}")).await?;
    let plan = view["plans"].as_array().and_then(|p| p.last()).context("the rollout has no plan")?;
    let key = std::fs::read_to_string(stage.args.dir.join("ingest-key")).context("cannot read ingest-key")?;
    let forger = Forger {
        client: Client::builder().build()?,
        server: stage.args.server.trim_end_matches('/').to_owned(),
        app: AppId::new("support")?,
        ingest_key: key.trim().to_owned(),
        now: stage.now,
        bundle: serde_json::from_value(plan["candidate_bundle"].clone())?,
        arm: AssignedArmV1 {
            rollout_id: RolloutId::new(rollout)?,
            phase: serde_json::from_value(plan["phase"].clone())?,
            arm: Arm::Treatment,
        },
    };
    let salt = plan["salt"].as_str().context("the plan has no salt")?;
    let treatment: PpmRange = serde_json::from_value(plan["treatment"].clone())?;
    let identities = (0u64..)
        .map(|i| Identity::from_seed(&Sha256::digest(format!("forged {} {i}", stage.args.seed)).into()))
        .filter(|id| treatment.contains(bucket(salt, &id.install_id())));
    let mut sent = 0;
    for identity in identities.take(IDENTITIES) {
        forger.signed(&identity).await?;
        sent += 1;
    }
    let claimed: Vec<String> = stage
        .fleet
        .phones()
        .iter()
        .filter_map(|p| p.device())
        .filter(|d| d.arm().is_some_and(|a| a.arm == Arm::Treatment && a.rollout_id.as_str() == rollout))
        .map(|d| d.install_id().to_string())
        .collect();
    forger.anonymous(&claimed).await?;
    say(&format!(
        "         forged fleet: {sent} identities made just now and {ANONYMOUS} anonymous rows report crashes of the candidate"
    ));
    Ok(Forged { identities: sent, before: failures(&view) })
}

impl Forger {
    /// A batch that is signed correctly, by a key nobody has seen before.
    async fn signed(&self, identity: &Identity) -> Result<()> {
        let event = |event| {
            EventV1::Device(DeviceEventV1 {
                at: self.now,
                event,
                bundle: Some(self.bundle),
                assignment: Some(self.arm.clone()),
                load_ms: None,
                reason: None,
            })
        };
        let batch = EventBatchV1 {
            v: 1,
            install_id: identity.install_id(),
            seq: 1,
            sent_at: self.now,
            sdk: "forged/1".into(),
            device: DeviceFactsV1 {
                class: Some("mid-6gb".into()),
                locale: Some("en-US".into()),
                ..DeviceFactsV1::default()
            },
            events: [DeviceEventKind::Exposed, DeviceEventKind::Confirmed, DeviceEventKind::Crashed].map(event).into(),
        };
        let body = serde_json::to_vec(&batch)?;
        let request = self
            .client
            .post(format!("{}/v1/events", self.server))
            .header("content-type", "application/json")
            .header(INGEST_KEY_HEADER, &self.ingest_key)
            .header(SIGNATURE_HEADER, identity.sign_body(&self.app, &body))
            .header(PUBLIC_KEY_HEADER, identity.public_key_base64())
            .body(body);
        let answer: Value = request.send().await?.error_for_status()?.json().await?;
        ensure!(answer["stored"] == json!(3), "the intake did not take a forged batch: {answer}");
        Ok(())
    }

    /// Plain OTLP log records without any identity; `claimed` are ids of real phones.
    async fn anonymous(&self, claimed: &[String]) -> Result<()> {
        let text = |key: &str, value: &str| json!({ "key": key, "value": { "stringValue": value } });
        let record = |i: usize| {
            let install = claimed.get(i % claimed.len().max(1)).map_or("nobody", String::as_str);
            json!({
                "timeUnixNano": (self.now.timestamp_micros() * 1000).to_string(),
                "eventName": "fleet.device",
                "attributes": [
                    text("fleet.device.event", "crashed"),
                    text("fleet.bundle.digest", &self.bundle.to_hex()),
                    text("fleet.rollout.id", self.arm.rollout_id.as_str()),
                    json!({ "key": "fleet.rollout.phase", "value": { "intValue": self.arm.phase.to_string() } }),
                    text("fleet.rollout.arm", "treatment"),
                    text("app.installation.id", install),
                ],
            })
        };
        let records: Vec<Value> = (0..ANONYMOUS).map(record).collect();
        let body =
            json!({ "resourceLogs": [{ "resource": { "attributes": [] }, "scopeLogs": [{ "logRecords": records }] }] });
        let request = self
            .client
            .post(format!("{}/v1/logs", self.server))
            .header(INGEST_KEY_HEADER, &self.ingest_key)
            .json(&body);
        let answer: Value = request.send().await?.error_for_status()?.json().await?;
        ensure!(answer["partialSuccess"].is_null(), "the intake did not take the anonymous rows: {answer}");
        Ok(())
    }
}

/// First failures in (control, treatment) as the newest report counts them.
fn failures(view: &Value) -> (u64, u64) {
    let report = view["verdicts"].as_array().and_then(|v| v.last());
    let gates = report.and_then(|r| r["numbers"]["gates"].as_array());
    let gate = gates.and_then(|g| g.iter().find(|g| g["name"] == "failures"));
    let count = |key: &str| gate.and_then(|g| g[key].as_u64()).unwrap_or(0);
    (count("control_events"), count("treatment_events"))
}

/// Whether the forged rows counted anywhere; `None` while the newest report has not met all of them. What is left out
/// must be seen to be left out: a report that never met the rows proves nothing.
pub fn moved_gate(view: &Value, forged: &Forged) -> Result<Option<bool>> {
    let Some(report) = view["verdicts"].as_array().and_then(|v| v.last()) else { return Ok(None) };
    let report = &report["numbers"];
    let gate = report["gates"].as_array().and_then(|g| g.iter().find(|g| g["name"] == "failures"));
    let gate = gate.context("the report has no failure gate")?;
    let excluded = |why: &str| report["exclusions"][why].as_u64().unwrap_or(0);
    let (new, anonymous) = (excluded("new_identity"), excluded("anonymous"));
    if new < forged.identities || anonymous == 0 {
        return Ok(None);
    }
    let after = failures(view);
    say(&format!(
        "         forged fleet: failure gate {} ({:?} → {after:?} failures in control and treatment); left out: {new} new identities, {anonymous} anonymous",
        gate["word"].as_str().unwrap_or_default(),
        forged.before,
    ));
    Ok(Some(gate["verdict"] == "fail" || after != forged.before))
}
