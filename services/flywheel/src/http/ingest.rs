//! The intake: SDK events, feedback, OTLP traces, logs and metrics. A 200 means that every row is on disk.

use super::auth::IngestApp;
use super::error::{ApiError, ApiResult, RawBody, failed};
use super::senders::{Peer, Senders};
use crate::server::Server;
use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use flywheel_telemetry::otlp::{Encoding, respond};
use flywheel_telemetry::{Endpoint, IngestHeaders, IngestOutcome, IngestRequest};
use flywheel_types::wire::{PUBLIC_KEY_HEADER, SIGNATURE_HEADER};
use flywheel_types::{Error, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

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

/// Key first, room second, body last: who has no key, or comes when there is no room, cannot make us read megabytes.
async fn take(server: &Arc<Server>, endpoint: Endpoint, request: Request) -> ApiResult<IngestOutcome> {
    let (mut parts, body) = request.into_parts();
    let app = IngestApp::from_request_parts(&mut parts, server).await?;
    let (h, now) = (parts.headers.clone(), server.now());
    let refused = |e: &Error| server.ingest.refused(&app.app, endpoint, e.code, now);
    let quota = server.quotas.check(&app.key_id, app.events_per_minute, server.store.lease_now());
    quota.inspect_err(refused)?;
    let peer = parts.extensions.get::<Peer>().copied();
    let sender = Senders::of(&h, peer, server.config.ingest.trusted_proxies);
    server.senders.check(&sender, server.store.lease_now()).inspect_err(refused)?;
    let slot = server.ingest.admit(claimed(&h, server)).inspect_err(refused)?;
    let body = RawBody::from_request(Request::from_parts(parts, body), server);
    let limit = Duration::from_secs(server.config.ingest.upload_timeout_s);
    let RawBody(body) = match tokio::time::timeout(limit, body).await {
        Ok(read) => read.inspect_err(|e| refused(&e.0))?,
        Err(_) => {
            let e = too_slow(limit);
            refused(&e);
            return Err(ApiError(e));
        }
    };
    let key = app.key_id.clone();
    let request =
        IngestRequest { app: app.app.clone(), ingest_key: app.key_id, endpoint, headers: headers(&h), body, now };
    let outcome = server.ingest.take(request, slot).await.map_err(ApiError)?;
    let events = outcome.ack.stored + outcome.ack.quarantined;
    server.quotas.spend(&key, events);
    server.senders.spend(&sender, events, server.store.lease_now());
    for (disposition, n) in
        [("stored", outcome.ack.stored), ("duplicate", outcome.ack.duplicate), ("quarantined", outcome.ack.quarantined)]
    {
        if n > 0 {
            server.metrics.add("flywheel_ingest_events_total", &[("disposition", disposition)], n);
        }
    }
    Ok(outcome)
}

/// Bytes that a body may take: what it claims, or the most there is when it claims nothing.
fn claimed(h: &HeaderMap, server: &Server) -> usize {
    let length = h.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok());
    length.unwrap_or(server.config.ingest.max_body_bytes)
}

/// Not a 4xx: the link of a phone may be better the next time, and clients throw away what a 4xx refuses.
fn too_slow(limit: Duration) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "upload_too_slow",
        format!("the body did not arrive within {} s", limit.as_secs()),
        "send it again after the time in Retry-After, in smaller batches",
    )
}

fn mark(mut response: Response, duplicate: bool) -> Response {
    if duplicate {
        response.headers_mut().insert(DUPLICATE_HEADER, header::HeaderValue::from_static("true"));
    }
    response
}

/// `POST /v1/events`.
pub async fn events(State(server): State<Arc<Server>>, request: Request) -> ApiResult<Response> {
    let done = take(&server, Endpoint::Events, request).await?;
    Ok(mark(Json(done.ack).into_response(), done.duplicate_batch))
}

/// `POST /v1/feedback`.
pub async fn feedback(State(server): State<Arc<Server>>, request: Request) -> ApiResult<Response> {
    let done = take(&server, Endpoint::Feedback, request).await?;
    Ok(mark(Json(done.ack).into_response(), done.duplicate_batch))
}

/// `POST /v1/traces`.
pub async fn traces(State(server): State<Arc<Server>>, request: Request) -> Response {
    otlp(&server, Endpoint::OtlpTraces, request).await
}

/// `POST /v1/logs`.
pub async fn logs(State(server): State<Arc<Server>>, request: Request) -> Response {
    otlp(&server, Endpoint::OtlpLogs, request).await
}

/// `POST /v1/metrics`.
pub async fn metrics(State(server): State<Arc<Server>>, request: Request) -> Response {
    otlp(&server, Endpoint::OtlpMetrics, request).await
}

/// One OTLP export, answered in the encoding of the request: the export response with `partial_success` when records
/// were quarantined, or a `google.rpc.Status`. A request in neither encoding gets the error body of the other paths.
async fn otlp(server: &Arc<Server>, endpoint: Endpoint, request: Request) -> Response {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let encoding = Encoding::of(content_type);
    match (take(server, endpoint, request).await, encoding) {
        (Ok(done), encoding) => {
            let encoding = encoding.unwrap_or(Encoding::Json);
            mark(encoded(encoding, respond::success(endpoint, encoding, &done.ack)), done.duplicate_batch)
        }
        (Err(ApiError(e)), Some(encoding)) => failed(&e, encoded(encoding, respond::failure(encoding, &e))),
        (Err(e), None) => e.into_response(),
    }
}

fn encoded(encoding: Encoding, body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, encoding.content_type())], body).into_response()
}

#[cfg(test)]
mod tests {
    use crate::server::testing::TestServer;
    use serde_json::json;

    #[tokio::test]
    async fn otlp_failures_are_a_status_and_the_others_our_error_body() {
        let t = TestServer::start(None).await;
        let client = t.client().await;
        let otlp = client.post("/v1/traces", &json!({})).await;
        assert_eq!((otlp.status, &otlp.json()["code"]), (401, &json!(16)), "{}", otlp.text);
        let message = otlp.json()["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("no_ingest_key: ") && message.contains("x-fleet-ingest-key"), "{message}");
        let ours = client.post("/v1/events", &json!({})).await;
        assert_eq!((ours.status, &ours.json()["code"]), (401, &json!("no_ingest_key")));
        // a form is no OTLP encoding: nothing to answer it in but our own
        let neither = client.form("/v1/logs", "a=b").await;
        assert_eq!((neither.status, &neither.json()["code"]), (401, &json!("no_ingest_key")));
    }
}
