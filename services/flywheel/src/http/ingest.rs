//! The intake: SDK events, feedback, OTLP traces and logs. A 200 means that every row is on disk.

use super::auth::IngestApp;
use super::error::{ApiError, ApiResult, RawBody, failed};
use crate::server::Server;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use flywheel_telemetry::otlp::{Encoding, respond};
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
    RawBody(body): RawBody,
) -> ApiResult<Response> {
    let done = take(&server, app, Endpoint::Events, &h, body).await?;
    Ok(mark(Json(done.ack).into_response(), done.duplicate_batch))
}

/// `POST /v1/feedback`.
pub async fn feedback(
    State(server): State<Arc<Server>>,
    app: IngestApp,
    h: HeaderMap,
    RawBody(body): RawBody,
) -> ApiResult<Response> {
    let done = take(&server, app, Endpoint::Feedback, &h, body).await?;
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

/// One OTLP export, answered in the encoding of the request: the export response with `partial_success` when records
/// were quarantined, or a `google.rpc.Status`. A request in neither encoding gets the error body of the other paths.
async fn otlp(server: &Arc<Server>, endpoint: Endpoint, request: Request) -> Response {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let encoding = Encoding::of(content_type);
    match (otlp_take(server, endpoint, request).await, encoding) {
        (Ok(done), encoding) => {
            let encoding = encoding.unwrap_or(Encoding::Json);
            mark(encoded(encoding, respond::success(endpoint, encoding, &done.ack)), done.duplicate_batch)
        }
        (Err(ApiError(e)), Some(encoding)) => failed(&e, encoded(encoding, respond::failure(encoding, &e))),
        (Err(e), None) => e.into_response(),
    }
}

/// Key first, body second: who has no key cannot make us read megabytes.
async fn otlp_take(server: &Arc<Server>, endpoint: Endpoint, request: Request) -> ApiResult<IngestOutcome> {
    let (mut parts, body) = request.into_parts();
    let app = IngestApp::from_request_parts(&mut parts, server).await?;
    let h = parts.headers.clone();
    let RawBody(body) = RawBody::from_request(Request::from_parts(parts, body), server).await?;
    take(server, app, endpoint, &h, body).await
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
