//! Cron schedules: write one, pause it, run it by hand, and see when an expression fires before trusting it.

use super::auth::Principal;
use super::error::{ApiError, ApiResult, JsonBody, Params, PathParams};
use crate::pipeline::{self, KINDS};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use flywheel_jobs::cron::NextSlot;
use flywheel_jobs::{Enqueued, ScheduleSpec};
use flywheel_store::schedules::{RunRow, ScheduleRow};
use flywheel_types::{Error, Role};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// Longest name of a schedule.
const MAX_NAME: usize = 64;
/// Decided slots shown per schedule.
const RUNS_SHOWN: u32 = 5;
/// Most slots that `next` computes.
const MAX_NEXT: usize = 100;

/// A schedule and what became of its newest slots.
#[derive(Debug, Serialize)]
pub struct Shown {
    #[serde(flatten)]
    schedule: ScheduleRow,
    last_runs: Vec<RunRow>,
}

/// `GET /v1/schedules`.
pub async fn list(State(server): State<Arc<Server>>, who: Principal) -> ApiResult<Json<Vec<Shown>>> {
    who.require(Role::Viewer)?;
    let mut out = Vec::new();
    for schedule in server.store.schedule_list(&who.app).await? {
        let last_runs = server.store.schedule_run_list(&who.app, &schedule.schedule_id, RUNS_SHOWN).await?;
        out.push(Shown { schedule, last_runs });
    }
    Ok(Json(out))
}

/// `PUT /v1/schedules`: creates a schedule or replaces the one of that name.
pub async fn put(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(spec): JsonBody<ScheduleSpec>,
) -> ApiResult<Json<ScheduleRow>> {
    who.require(Role::Operator)?;
    check(&spec)?;
    let mut tx = server.begin().await?;
    let row = flywheel_jobs::schedule_put(&mut tx, &who.app, &spec).await?;
    let detail = json!({ "kind": row.kind, "expr": row.expr, "zone": row.zone, "enabled": row.enabled,
        "missed": row.missed, "overlap": row.overlap, "next_slot": row.next_slot });
    tx.audit_append(&who.app, &who.name, "schedule.put", &row.name, &detail).await?;
    tx.commit().await?;
    Ok(Json(row))
}

/// The name goes into paths; the kind must be one that a worker knows, or each slot would make a dead job.
fn check(spec: &ScheduleSpec) -> Result<(), Error> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if spec.name.is_empty() || spec.name.len() > MAX_NAME || !spec.name.chars().all(plain) || spec.name == "next" {
        return Err(Error::invalid(
            "bad_schedule_name",
            format!("`{}` cannot be the name of a schedule", spec.name.chars().take(MAX_NAME).collect::<String>()),
            format!("use 1 to {MAX_NAME} letters, digits, `.`, `_` or `-`; `next` is taken"),
        ));
    }
    if !KINDS.contains(&spec.kind.as_str()) {
        return Err(Error::invalid(
            "unknown_job_kind",
            format!("no step is called `{}`", spec.kind),
            format!("use one of {}", KINDS.join(", ")),
        ));
    }
    pipeline::check_scheduled(&spec.kind, &spec.payload)
}

/// `POST /v1/schedules/{name}/run`: runs the job now without using up a slot. While a job started like this is open,
/// asking again (a double click) answers that job; `Idempotency-Key` tells deliberate repetitions apart.
pub async fn run(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
    headers: HeaderMap,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    let key = headers.get("idempotency-key").and_then(|v| v.to_str().ok()).unwrap_or("by-hand");
    if key.len() > 128 {
        let message = format!("the Idempotency-Key has {} characters", key.len());
        return Err(ApiError(Error::invalid("bad_idempotency_key", message, "use up to 128")));
    }
    found(&server, &who, &name).await?;
    let mut tx = server.begin().await?;
    let done = flywheel_jobs::schedule_run_now(&mut tx, &who.app, &name, key).await?;
    let new = matches!(done, Enqueued::New(_));
    if new {
        tx.audit_append(&who.app, &who.name, "schedule.run", &name, &json!({ "job": done.id() })).await?;
    }
    tx.commit().await?;
    Ok(Json(json!({ "job_id": done.id(), "new": new })))
}

/// `POST /v1/schedules/{name}/pause`: slots that pass meanwhile are not missed.
pub async fn pause(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ScheduleRow>> {
    who.require(Role::Operator)?;
    found(&server, &who, &name).await?;
    let mut tx = server.begin().await?;
    flywheel_jobs::schedule_pause(&mut tx, &who.app, &name).await?;
    tx.audit_append(&who.app, &who.name, "schedule.pause", &name, &json!({})).await?;
    tx.commit().await?;
    Ok(Json(found(&server, &who, &name).await?))
}

/// `POST /v1/schedules/{name}/resume`: goes on with the first slot from now.
pub async fn resume(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ScheduleRow>> {
    who.require(Role::Operator)?;
    found(&server, &who, &name).await?;
    let mut tx = server.begin().await?;
    flywheel_jobs::schedule_resume(&mut tx, &who.app, &name).await?;
    tx.audit_append(&who.app, &who.name, "schedule.resume", &name, &json!({})).await?;
    tx.commit().await?;
    Ok(Json(found(&server, &who, &name).await?))
}

async fn found(server: &Server, who: &Principal, name: &str) -> Result<ScheduleRow, Error> {
    let row = server.store.schedule_get(&who.app, name).await?;
    row.ok_or_else(|| Error::not_found("schedule_not_found", format!("there is no schedule `{name}`")))
}

#[derive(Debug, Deserialize)]
pub struct NextQuery {
    expr: String,
    #[serde(default = "utc")]
    zone: String,
    #[serde(default = "five")]
    count: usize,
}

fn utc() -> String {
    "UTC".into()
}
fn five() -> usize {
    5
}

/// `GET /v1/schedules/next`: when an expression fires, with changes of the clock marked.
pub async fn next(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<NextQuery>,
) -> ApiResult<Json<Vec<NextSlot>>> {
    who.require(Role::Viewer)?;
    Ok(Json(flywheel_jobs::schedule_next(&q.expr, &q.zone, server.now(), q.count.clamp(1, MAX_NEXT))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::testing::TestServer;

    #[test]
    fn names_and_kinds_are_checked() {
        assert!(check(&ScheduleSpec::new("nightly", "compact", "0 3 * * *")).is_ok());
        let code = |name: &str, kind: &str| check(&ScheduleSpec::new(name, kind, "0 3 * * *")).unwrap_err().code;
        assert_eq!(code("a/b", "compact"), "bad_schedule_name");
        assert_eq!(code("next", "compact"), "bad_schedule_name");
        assert_eq!(code("nightly", "compakt"), "unknown_job_kind");
        assert_eq!(code("nightly", "lora"), "bad_schedule_payload");
    }

    #[tokio::test]
    async fn a_schedule_is_written_run_paused_and_resumed() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        let spec = json!({ "name": "nightly", "kind": "compact", "expr": "0 3 * * *", "zone": "Europe/Berlin" });
        let put = client.put("/v1/schedules", &spec).await;
        assert_eq!(put.json()["next_slot"], "2026-03-02T02:00:00Z", "{}", put.text);
        let first = client.post("/v1/schedules/nightly/run", &Value::Null).await.json();
        let second = client.post("/v1/schedules/nightly/run", &Value::Null).await.json();
        assert_eq!((&first["new"], &second["new"]), (&json!(true), &json!(false)));
        assert_eq!(first["job_id"], second["job_id"]);
        assert_eq!(client.post("/v1/schedules/nightly/pause", &Value::Null).await.json()["enabled"], false);
        assert_eq!(client.post("/v1/schedules/nightly/resume", &Value::Null).await.json()["enabled"], true);
        assert_eq!(client.get("/v1/schedules").await.json()[0]["name"], "nightly");
        for verb in ["run", "pause", "resume"] {
            let unknown = client.post(&format!("/v1/schedules/weekly/{verb}"), &Value::Null).await;
            assert_eq!((unknown.status, &unknown.json()["code"]), (404, &json!("schedule_not_found")), "{verb}");
        }
        let bad = client.put("/v1/schedules", &json!({ "name": "x", "kind": "compact", "expr": "0 25 * * *" })).await;
        assert_eq!((bad.status, bad.json()["code"].as_str()), (400, Some("bad_cron")));
        let audited = t.server.store.audit_list(&t.app, None, 4).await.unwrap();
        let actions: Vec<String> = audited.into_iter().map(|a| a.action).collect();
        assert_eq!(actions, ["schedule.resume", "schedule.pause", "schedule.run", "schedule.put"]);
    }

    #[tokio::test]
    async fn the_next_slots_show_where_the_clock_changes() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Viewer).await);
        let got = client.get("/v1/schedules/next?expr=0%2012%20*%20*%200&zone=Europe/Berlin&count=5").await.json();
        let slots = got.as_array().unwrap();
        assert_eq!(slots.len(), 5);
        // summer time begins on 2026-03-29
        let changed: Vec<&str> =
            slots.iter().filter(|s| s["clock_changed"] == true).map(|s| s["at"].as_str().unwrap()).collect();
        assert_eq!(changed, ["2026-03-29T10:00:00Z"]);
        assert_eq!(client.get("/v1/schedules/next?expr=*%20*%20*%20*%20*&zone=Mars").await.json()["code"], "bad_zone");
    }
}
