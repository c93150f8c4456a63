//! The intake: SDK events, feedback, OTLP traces and logs. A 200 means that every row is on disk.

use super::auth::IngestApp;
use super::error::{ApiError, ApiResult};
use crate::server::Server;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use flywheel_telemetry::{Endpoint, IngestHeaders, IngestOutcome, IngestRequest};
use flywheel_types::wire::{PUBLIC_KEY_HEADER, SIGNATURE_HEADER};
use std::sync::Arc;

/// Header that names a retry of the same upload.
const IDEMPOTENCY_HEADER: &str = "idempotency-key";
/// Answer header that says the batch was stored before.
const DUPLICATE_HEADER: &str = "x-fleet-duplicate";

fn headers(h: &HeaderMap) -> IngestHeaders {
    let get = |name: &str| h.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    IngestHeaders {
        content_type: get(header::CONTENT_TYPE.as_str()),
        content_encoding: get(header::CONTENT_ENCODING.as_str()),
        signature: get(SIGNATURE_HEADER),
        public_key: get(PUBLIC_KEY_HEADER),
        idempotency_key: get(IDEMPOTENCY_HEADER),
    }
}

async fn take(
    server: &Server,
    app: IngestApp,
    endpoint: Endpoint,
    h: &HeaderMap,
    body: Bytes,
) -> ApiResult<IngestOutcome> {
    let request =
        IngestRequest { app: app.app, ingest_key: app.key_id, endpoint, headers: headers(h), body, now: server.now() };
    let outcome = server.ingest.take(request).await.map_err(ApiError)?;
    for (disposition, n) in
        [("stored", outcome.ack.stored), ("duplicate", outcome.ack.duplicate), ("quarantined", outcome.ack.quarantined)]
    {
        if n > 0 {
            server.metrics.add("flywheel_ingest_events_total", &[("disposition", disposition)], n);
        }
    }
    Ok(outcome)
}

fn mark(mut response: Response, duplicate: bool) -> Response {
    if duplicate {
        response.headers_mut().insert(DUPLICATE_HEADER, header::HeaderValue::from_static("true"));
    }
    response
}

/// `POST /v1/events`.
pub async fn events(
    State(server): State<Arc<Server>>,
    app: IngestApp,
    h: HeaderMap,
    body: Bytes,
) -> ApiResult<Response> {
    let done = take(&server, app, Endpoint::Events, &h, body).await?;
    Ok(mark(Json(done.ack).into_response(), done.duplicate_batch))
}

/// `POST /v1/feedback`.
pub async fn feedback(
    State(server): State<Arc<Server>>,
    app: IngestApp,
    h: HeaderMap,
    body: Bytes,
) -> ApiResult<Response> {
    let done = take(&server, app, Endpoint::Feedback, &h, body).await?;
    Ok(mark(Json(done.ack).into_response(), done.duplicate_batch))
}

/// `POST /v1/traces`.
pub async fn traces(
    State(server): State<Arc<Server>>,
    app: IngestApp,
    h: HeaderMap,
    body: Bytes,
) -> ApiResult<Response> {
    let done = take(&server, app, Endpoint::OtlpTraces, &h, body).await?;
    Ok(mark(otlp(&h, &done, "rejectedSpans"), done.duplicate_batch))
}

/// `POST /v1/logs`.
pub async fn logs(State(server): State<Arc<Server>>, app: IngestApp, h: HeaderMap, body: Bytes) -> ApiResult<Response> {
    let done = take(&server, app, Endpoint::OtlpLogs, &h, body).await?;
    Ok(mark(otlp(&h, &done, "rejectedLogRecords"), done.duplicate_batch))
}

/// OTLP answer in the request's own encoding, with `partial_success` when records were quarantined.
fn otlp(h: &HeaderMap, done: &IngestOutcome, field: &str) -> Response {
    let json = h.get(header::CONTENT_TYPE).is_some_and(|v| v.as_bytes().starts_with(b"application/json"));
    let (rejected, message) = (done.ack.quarantined, done.ack.reasons.join("; "));
    if json {
        let body = if rejected == 0 {
            serde_json::json!({})
        } else {
            serde_json::json!({ "partialSuccess": { field: rejected.to_string(), "errorMessage": message } })
        };
        return Json(body).into_response();
    }
    ([(header::CONTENT_TYPE, "application/x-protobuf")], partial_success(rejected, &message)).into_response()
}

/// `Export*ServiceResponse { partial_success = 1 { rejected = 1, error_message = 2 } }` in protobuf.
fn partial_success(rejected: u64, message: &str) -> Vec<u8> {
    if rejected == 0 {
        return Vec::new();
    }
    let mut inner = vec![0x08];
    varint(&mut inner, rejected);
    inner.push(0x12);
    varint(&mut inner, message.len() as u64);
    inner.extend_from_slice(message.as_bytes());
    let mut out = vec![0x0a];
    varint(&mut out, inner.len() as u64);
    out.extend(inner);
    out
}

fn varint(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push((v as u8 & 0x7f) | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_success_is_valid_protobuf() {
        assert!(partial_success(0, "x").is_empty());
        assert_eq!(partial_success(300, "ab"), [0x0a, 7, 0x08, 0xac, 0x02, 0x12, 2, b'a', b'b']);
    }
}
