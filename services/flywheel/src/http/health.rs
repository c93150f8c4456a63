//! Liveness, readiness and metrics. Readiness tells intake and query apart: a server that replays its log can
//! already take telemetry.

use super::error::failed;
use crate::metrics::Gauge;
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use flywheel_lake::{QueryLoad, ReplayProgress};
use flywheel_types::{Error, ErrorKind};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /healthz`: the process answers.
pub async fn healthz() -> &'static str {
    "ok\n"
}

/// `GET /readyz`: 200 when both intake and control database work, else 503 with what does not.
pub async fn readyz(State(server): State<Arc<Server>>) -> Response {
    let database = server.store.ping().await.is_ok();
    readiness(server.ingest.is_ready(), database, server.lake.replaying())
}

fn readiness(intake: bool, database: bool, replay: Option<ReplayProgress>) -> Response {
    let mut body = json!({ "intake": intake, "query": database && replay.is_none(), "database": database });
    if let Some(p) = replay {
        body["replay"] = json!({ "total_bytes": p.total_bytes, "left_bytes": p.left_bytes });
    }
    let Some(e) = problem(intake, database, replay.is_some()) else { return Json(body).into_response() };
    body["code"] = Value::from(e.code);
    body["message"] = Value::from(e.message.as_str());
    body["hint"] = Value::from(e.hint.as_str());
    failed(&e, Json(body).into_response())
}

/// What keeps the server from its whole work.
fn problem(intake: bool, database: bool, replaying: bool) -> Option<Error> {
    let what = match (intake, database) {
        (true, true) if replaying => "the log of an earlier run is being committed; telemetry is taken, queries wait",
        (true, true) => return None,
        (false, true) => "the telemetry log takes no writes",
        (true, false) => "the control database does not answer",
        (false, false) => "neither the telemetry log nor the control database works",
    };
    Some(Error::new(ErrorKind::Unavailable, "not_ready", what, "look into the server's log and at its disk"))
}

/// `GET /metrics`: Prometheus text.
pub async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let gauges = [&server.ingest.gauges()[..], &query_gauges(server.lake.query_load())].concat();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], server.metrics.render(&gauges)).into_response()
}

fn query_gauges(load: QueryLoad) -> [Gauge; 3] {
    let gauge = |name, help, value: usize| Gauge { name, help, value: value as f64 };
    [
        gauge("flywheel_queries_running", "Queries of people that run, over HTTP and Flight SQL.", load.running),
        gauge("flywheel_query_tasks", "Tasks of queries; cancelled ones count until they stopped.", load.tasks),
        gauge(
            "flywheel_query_memory_bytes",
            "Memory that queries and pipeline steps have reserved.",
            load.memory_bytes,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_unready_server_says_what_works() {
        assert_eq!(readiness(true, true, None).status(), 200);
        let response = readiness(true, false, None);
        assert_eq!(response.status(), 503);
        assert!(response.headers().contains_key(header::RETRY_AFTER));
        let body = axum::body::to_bytes(response.into_body(), 1 << 16).await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (&body["intake"], &body["database"], &body["code"]),
            (&json!(true), &json!(false), &json!("not_ready"))
        );
        assert_eq!(body["message"], "the control database does not answer");
        let response = readiness(true, true, Some(ReplayProgress { total_bytes: 9, left_bytes: 5 }));
        assert_eq!(response.status(), 503);
        let body = axum::body::to_bytes(response.into_body(), 1 << 16).await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((&body["intake"], &body["query"]), (&json!(true), &json!(false)));
        assert_eq!(body["replay"], json!({ "total_bytes": 9, "left_bytes": 5 }));
    }
}
