//! Settings of the app. How much the controller may do alone is an admin's decision; the rest is an operator's.

use super::auth::Principal;
use super::error::{ApiError, ApiResult, JsonBody};
use crate::models::training::Recipe;
use crate::pipeline::build_dataset::Trigger;
use crate::pipeline::compact::Retention;
use crate::pipeline::publish::BundleSettings;
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_attribution::culprit::AttributionPolicyV1;
use flywheel_attribution::dataset::DatasetPolicyV1;
use flywheel_experiment::offline::OfflineSpecV1;
use flywheel_experiment::planner::RolloutPolicyV1;
use flywheel_store::apps::{AppRow, AppSettings};
use flywheel_types::{Error, Role};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most people that get mail.
const MAX_RECIPIENTS: usize = 50;
/// Fields whose change needs an admin.
const ADMIN_FIELDS: [&str; 3] = ["automation", "approval", "retention"];
/// Fields whose values stay out of the audit log, which is kept for ever: addresses of people, ids of devices.
const PRIVATE_FIELDS: [&str; 2] = ["alert_recipients", "ring"];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Put {
    /// Version that the caller read; another one is refused.
    version: i64,
    settings: AppSettings,
}

/// `GET /v1/settings`.
pub async fn get(State(server): State<Arc<Server>>, who: Principal) -> ApiResult<Json<AppRow>> {
    who.require(Role::Viewer)?;
    Ok(Json(crate::pipeline::app(&server, &who.app).await?))
}

/// `PUT /v1/settings`: replaces all settings.
pub async fn put(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<Put>,
) -> ApiResult<Json<AppRow>> {
    who.require(Role::Operator)?;
    check(&body.settings)?;
    let old = crate::pipeline::app(&server, &who.app).await?;
    if old.version != body.version {
        return Err(ApiError(Error::conflict(
            "settings_changed",
            format!("the settings are at version {}, not {}", old.version, body.version),
            "read them again and decide again",
        )));
    }
    let changes = changes(&old.settings, &body.settings)?;
    if changes.is_empty() {
        return Ok(Json(old));
    }
    if ADMIN_FIELDS.iter().any(|f| changes.contains_key(*f)) {
        who.require(Role::Admin)?;
    }
    let mut tx = server.begin().await?;
    let version = tx.app_settings_set(&who.app, body.version, &body.settings).await?;
    let detail = json!({ "version": version, "changes": changes });
    tx.audit_append(&who.app, &who.name, "settings.put", who.app.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(Json(crate::pipeline::app(&server, &who.app).await?))
}

/// Refuses what would only show when a step runs.
fn check(s: &AppSettings) -> Result<(), Error> {
    if s.v != 1 {
        return Err(Error::invalid("unknown_version", format!("version {} of the settings", s.v), "send `\"v\": 1`"));
    }
    if s.alert_recipients.len() > MAX_RECIPIENTS {
        return Err(Error::invalid(
            "too_many_recipients",
            format!("{} alert_recipients", s.alert_recipients.len()),
            format!("name up to {MAX_RECIPIENTS}; use a mailing list for more"),
        ));
    }
    for address in &s.alert_recipients {
        address.parse::<lettre::message::Mailbox>().map_err(|e| {
            let message = format!("alert_recipients: `{address}` is not a mail address: {e}");
            Error::invalid("bad_recipient", message, "correct it")
        })?;
    }
    let policy: Option<RolloutPolicyV1> = part(s, "rollout_policy")?;
    if let Some(p) = policy {
        p.check().map_err(|e| Error::invalid("bad_rollout_policy", e.to_string(), "correct `rollout_policy`"))?;
    }
    Retention::of(s)?;
    part::<AttributionPolicyV1>(s, "attribution_policy")?;
    part::<OfflineSpecV1>(s, "offline_gate")?;
    part::<DatasetPolicyV1>(s, "dataset_policy")?;
    part::<Trigger>(s, "dataset_trigger")?;
    part::<Recipe>(s, "lora")?;
    part::<BundleSettings>(s, "bundle").map(|_| ())
}

fn part<T: DeserializeOwned>(s: &AppSettings, name: &str) -> Result<Option<T>, Error> {
    let Some(value) = s.extra.get(name) else { return Ok(None) };
    serde_json::from_value(value.clone())
        .map(Some)
        .map_err(|e| Error::invalid("bad_settings", format!("`{name}`: {e}"), format!("correct or remove `{name}`")))
}

/// Changed fields with old and new value.
fn changes(old: &AppSettings, new: &AppSettings) -> Result<BTreeMap<String, Value>, Error> {
    let fields = |s: &AppSettings| match serde_json::to_value(s) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::internal("settings are no object")),
        Err(e) => Err(Error::internal(e)),
    };
    let (old, new) = (fields(old)?, fields(new)?);
    let mut out = BTreeMap::new();
    for name in old.keys().chain(new.keys()) {
        let (from, to) = (old.get(name), new.get(name));
        if from == to {
            continue;
        }
        let private = PRIVATE_FIELDS.contains(&name.as_str());
        let shown = if private { json!("changed") } else { json!({ "from": from, "to": to }) };
        out.insert(name.clone(), shown);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::testing::TestServer;
    use flywheel_types::Automation;

    #[test]
    fn changes_are_named_and_addresses_stay_out() {
        let old = AppSettings::default();
        let mut new = old.clone();
        assert!(changes(&old, &new).unwrap().is_empty());
        new.automation = Automation::Act;
        new.alert_recipients = vec!["ops@example.com".into()];
        new.extra.insert("later".into(), json!(7));
        let got = changes(&old, &new).unwrap();
        assert_eq!(got["automation"], json!({ "from": "recommend", "to": "act" }));
        assert_eq!(got["later"], json!({ "from": null, "to": 7 }));
        assert_eq!(got["alert_recipients"], json!("changed"));
        assert_eq!(got.len(), 3);
    }

    #[test]
    fn what_no_step_could_use_is_refused() {
        let with = |name: &str, value: Value| {
            let mut s = AppSettings::default();
            s.extra.insert(name.into(), value);
            check(&s)
        };
        assert!(check(&AppSettings::default()).is_ok());
        assert!(with("rollout_policy", json!({ "steps": "many" })).unwrap_err().message.contains("rollout_policy"));
        for name in
            ["retention", "attribution_policy", "offline_gate", "dataset_policy", "dataset_trigger", "lora", "bundle"]
        {
            assert!(with(name, json!("strict")).unwrap_err().message.contains(name));
        }
        let s = AppSettings { alert_recipients: vec!["nobody".into()], ..AppSettings::default() };
        assert_eq!(check(&s).unwrap_err().code, "bad_recipient");
    }

    #[tokio::test]
    async fn the_version_guards_and_automation_needs_an_admin() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        let read = client.get("/v1/settings").await.json();
        let body = |version: i64, change: Value| {
            let mut settings = read["settings"].clone();
            settings.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            json!({ "version": version, "settings": settings })
        };
        let done = client.put("/v1/settings", &body(1, json!({ "alert_recipients": ["ops@example.com"] }))).await;
        assert_eq!((done.status, &done.json()["version"]), (200, &json!(2)), "{}", done.text);
        let stale = client.put("/v1/settings", &body(1, json!({ "freeze_kill_switch": true }))).await;
        assert_eq!((stale.status, stale.json()["code"].as_str()), (409, Some("settings_changed")));
        let act = body(2, json!({ "automation": "act" }));
        assert_eq!(client.put("/v1/settings", &act).await.status, 403);
        let admin = client.with(&t.token(Some("shop"), Role::Admin).await);
        assert_eq!(admin.put("/v1/settings", &act).await.json()["settings"]["automation"], "act");
        let entry = t.server.store.audit_list(&t.app, None, 1).await.unwrap().remove(0);
        assert_eq!((entry.action.as_str(), entry.actor.as_str()), ("settings.put", "test-admin"));
        assert_eq!(entry.detail["changes"]["automation"]["to"], "act");
        assert!(!entry.detail.to_string().contains("example.com"), "{}", entry.detail);
    }
}
