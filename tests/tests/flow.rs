//! Whole flows against the real binary: the unit's command line, error bodies, intake and SQL, published metadata.

use flywheel_tests::{Server, client};
use serde_json::{Value, json};

/// The arguments of `ExecStart` in the shipped unit, with the configuration of the test.
fn exec_start() -> Vec<String> {
    let unit = include_str!("../../deploy/flywheel.service");
    let line = unit.lines().find_map(|l| l.strip_prefix("ExecStart=")).expect("the unit has an ExecStart");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert!(words[0].ends_with("/flywheel"), "{line}");
    words[1..].iter().map(|w| if w.ends_with(".toml") { "{config}".into() } else { (*w).to_owned() }).collect()
}

fn start() -> Server {
    let words = exec_start();
    Server::start(&words.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
}

#[tokio::test]
async fn the_units_command_line_serves() {
    let server = start();
    let http = client().unwrap();
    let ready = http.get(server.url("/readyz")).send().await.unwrap();
    assert_eq!(ready.status(), 200);
    let body: Value = ready.json().await.unwrap();
    assert_eq!(body["intake"], true);
    let metrics = http.get(server.url("/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("# TYPE flywheel_ingest_events_total counter"), "{metrics}");
}

#[tokio::test]
async fn every_error_has_code_message_and_hint() {
    let server = start();
    let http = client().unwrap();
    let viewer = server.token("viewer").unwrap();
    let cases = [
        (http.get(server.url("/v1/nothing")), 404),
        (http.get(server.url("/v1/chunks")), 401),
        (http.get(server.url("/v1/chunks")).bearer_auth("wrong"), 401),
        (http.put(server.url("/v1/chunks")).bearer_auth(&viewer).json(&json!({ "chunks": [] })), 403),
        (http.put(server.url("/v1/chunks")).bearer_auth(&viewer).body("{"), 400),
        (http.get(server.url("/v1/chunks?limit=x")).bearer_auth(&viewer), 400),
        (http.delete(server.url("/v1/chunks")).bearer_auth(&viewer), 405),
        (http.get(server.url("/v1/rollouts/none")).bearer_auth(&viewer), 404),
        (http.post(server.url("/v1/events")).body("{}"), 401),
        (http.get(server.url("/tuf/shop/metadata/9.root.json")), 404),
        (http.get(server.url("/tuf/shop/%2e%2e/%2e%2e/control.db")), 404),
    ];
    for (i, (request, status)) in cases.into_iter().enumerate() {
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status, "case {i}");
        let body: Value = response.json().await.unwrap_or_else(|e| panic!("case {i}: no JSON body: {e}"));
        for field in ["code", "message", "hint"] {
            assert!(body[field].as_str().is_some_and(|t| !t.is_empty()), "case {i}: {field} in {body}");
        }
    }
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
    let send = || {
        http.post(server.url("/v1/events"))
            .header("x-fleet-ingest-key", &key)
            .header("content-type", "application/x-ndjson")
            .header("idempotency-key", "batch-1")
            .body(event.to_string())
    };
    let first: Value = send().send().await.unwrap().json().await.unwrap();
    assert_eq!(first["stored"], 1, "{first}");
    let again = send().send().await.unwrap();
    assert_eq!(again.headers().get("x-fleet-duplicate").map(|v| v.as_bytes()), Some(&b"true"[..]));
    let query = json!({ "query": "SELECT count(*) AS n, max(trust) AS trust FROM interactions" });
    let rows: Value = http
        .post(server.url("/v1/sql"))
        .bearer_auth(&operator)
        .json(&query)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(rows["rows"][0], json!([1, "anonymous"]), "{rows}");
    server.kill().unwrap();
}

#[tokio::test]
async fn the_first_metadata_is_published_and_signed() {
    let server = start();
    let http = client().unwrap();
    let timestamp: Value =
        http.get(server.url("/tuf/shop/metadata/timestamp.json")).send().await.unwrap().json().await.unwrap();
    assert_eq!(timestamp["signed"]["_type"], "timestamp");
    assert_eq!(timestamp["signatures"].as_array().map(Vec::len), Some(1));
}
