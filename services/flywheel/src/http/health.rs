//! Liveness, readiness and metrics. Readiness tells intake and query apart: a server that replays its log can
//! already take telemetry.

use crate::server::Server;
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::sync::Arc;

/// `GET /healthz`: the process answers.
pub async fn healthz() -> &'static str {
    "ok\n"
}

/// `GET /readyz`: 200 when both intake and control database work, else 503 with what does not.
pub async fn readyz(State(server): State<Arc<Server>>) -> Response {
    let database = server.store.ping().await.is_ok();
    let intake = server.ingest.is_ready();
    let status = if database && intake { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "intake": intake, "query": database, "database": database }))).into_response()
}

/// `GET /metrics`: Prometheus text.
pub async fn metrics(State(server): State<Arc<Server>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], server.metrics.render()).into_response()
}
