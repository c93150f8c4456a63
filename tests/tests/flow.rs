//! Whole flows against the real binary: the unit's command line, intake and SQL over a crash, published metadata.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too"
)]

use flywheel_tests::{Server, client, unit_arguments};
use serde_json::{Value, json};

fn start() -> Server {
    Server::start(&unit_arguments().unwrap()).unwrap()
}

#[tokio::test]
async fn the_units_command_line_serves() {
    let server = start();
    let http = client().unwrap();
    let ready = http.get(server.url("/readyz")).send().await.unwrap();
    assert_eq!(ready.status(), 200);
    let body: Value = ready.json().await.unwrap();
    assert_eq!(body, json!({ "intake": true, "query": true, "database": true }));
    let metrics = http.get(server.url("/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("# TYPE flywheel_ingest_events_total counter"), "{metrics}");
}

/// One SELECT; the rows.
async fn rows(server: &Server, http: &reqwest::Client, token: &str, query: &str) -> Value {
    let request = http.post(server.url("/v1/sql")).bearer_auth(token).json(&json!({ "query": query }));
    let answer: Value = request.send().await.unwrap().json().await.unwrap();
    assert!(answer["rows"].is_array(), "{answer}");
    answer["rows"].clone()
}

#[tokio::test]
async fn acknowledged_events_survive_a_kill_and_are_queried_once() {
    let mut server = start();
    let http = client().unwrap();
    let (key, operator) = (server.ingest_key().unwrap(), server.token("operator").unwrap());
    let event = json!({
        "kind": "interaction", "interaction_id": "i-1", "at": "2026-03-02T00:00:00Z", "template_id": "faq",
        "bundle": "0".repeat(64), "ttft_ms": 700.0,
    });
    let send = async |server: &Server| {
        let request = http
            .post(server.url("/v1/events"))
            .header("x-fleet-ingest-key", &key)
            .header("content-type", "application/x-ndjson")
            .header("idempotency-key", "batch-1")
            .body(event.to_string());
        request.send().await.unwrap()
    };
    let count = "SELECT count(*) AS n, max(trust) AS trust FROM interactions";
    let first: Value = send(&server).await.json().await.unwrap();
    assert_eq!(first, json!({ "stored": 1, "duplicate": 0, "quarantined": 0 }));
    assert_eq!(rows(&server, &http, &operator, count).await, json!([[1, "anonymous"]]));
    server.kill_and_restart().unwrap();
    assert_eq!(rows(&server, &http, &operator, count).await, json!([[1, "anonymous"]]));
    let again = send(&server).await;
    assert_eq!(again.headers()["x-fleet-duplicate"], "true");
    let again: Value = again.json().await.unwrap();
    assert_eq!(again, json!({ "stored": 0, "duplicate": 1, "quarantined": 0 }));
    assert_eq!(rows(&server, &http, &operator, count).await, json!([[1, "anonymous"]]));
}

#[tokio::test]
async fn the_first_metadata_is_published_and_signed() {
    let server = start();
    let http = client().unwrap();
    let response = http.get(server.url("/tuf/shop/metadata/timestamp.json")).send().await.unwrap();
    let etag = response.headers()["etag"].clone();
    let timestamp: Value = response.json().await.unwrap();
    assert_eq!(timestamp["signed"]["_type"], "timestamp");
    assert_eq!(timestamp["signatures"].as_array().map(Vec::len), Some(1));
    let known = http.get(server.url("/tuf/shop/metadata/timestamp.json")).header("if-none-match", etag);
    assert_eq!(known.send().await.unwrap().status(), 304);
}
