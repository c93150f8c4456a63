//! Every route of the reference (docs/api.md) with requests that must fail: the status, and a body with code, message
//! and hint. A route that is added there is tried here without a line of its own, as far as that is possible.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too"
)]

use flywheel_tests::{MAX_UPLOAD, Server, client, unit_arguments};
use reqwest::RequestBuilder;
use reqwest::header::HeaderMap;
use serde_json::{Value, json};
use std::collections::HashMap;

const REFERENCE: &str = include_str!("../../docs/api.md");
const ROLES: [&str; 5] = ["viewer", "annotator", "operator", "signer", "admin"];
const ZERO: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// Largest JSON body of the admin API, bytes.
const ADMIN_BODY: usize = 8 << 20;

/// `METHOD path` of every route, as the reference heads its sections.
fn routes() -> Vec<&'static str> {
    let found: Vec<&str> = REFERENCE.lines().filter_map(|l| l.strip_prefix("### ")).collect();
    assert!(found.len() >= 50, "{found:?}");
    found
}

/// A route with every parameter of its path replaced; the verb of a rollout stays one that exists.
fn filled(route: &str, with: &str) -> String {
    let mut parts = route.split('{');
    let mut out = parts.next().unwrap().to_owned();
    for part in parts {
        let (name, rest) = part.split_once('}').unwrap();
        out += if name == "verb" && with == "x" { "pause" } else { with };
        out += rest;
    }
    out
}

/// Routes that ask for no credential.
fn is_open(route: &str) -> bool {
    ["/tuf/", "/healthz", "/readyz", "GET /metrics"].iter().any(|p| route.contains(p))
}

/// Routes that devices call with the ingest key.
fn is_device(route: &str) -> bool {
    let paths = ["/v1/events", "/v1/feedback", "/v1/traces", "/v1/logs", "/v1/metrics", "/v1/index/changes"];
    paths.iter().any(|p| route.ends_with(p))
}

/// A body that can be read, for the routes that take JSON.
fn readable(route: &str) -> Option<Value> {
    Some(match route {
        "PUT /v1/chunks" => json!({ "chunks": [] }),
        "POST /v1/chunks/state" => json!({ "chunk_id": "c", "to": "frozen", "reason": "r" }),
        "POST /v1/corrections" => {
            json!({ "interaction_id": "i", "prompt": "p", "wrong_answer": "w", "corrected_answer": "c" })
        }
        "PUT /v1/eval-sets/{name}" => json!({ "items": [] }),
        "POST /v1/candidates" => json!({ "kind": "weights", "artefact": ZERO }),
        "POST /v1/rollouts" => json!({ "bundle": ZERO }),
        "POST /v1/findings/{id}/dismiss" | "POST /v1/candidates/{id}/override" | "POST /v1/rollouts/{id}/{verb}" => {
            json!({ "reason": "r" })
        }
        "PUT /v1/settings" => json!({ "version": 1, "settings": {} }),
        "PUT /v1/schedules" => json!({ "name": "n", "kind": "compact", "expr": "0 3 * * *" }),
        "POST /v1/erasures" | "PUT /v1/holds/{name}" => json!({ "user_id": "anna", "reason": "r" }),
        "POST /v1/imports" => json!({ "source": "file:///srv/history/" }),
        "POST /v1/sql" => json!({ "query": "SELECT 1" }),
        "PUT /v1/views/{name}" => json!({ "query": "SELECT 1 AS one" }),
        "POST /v1/clock" => json!({ "now": "2026-03-02T00:00:00Z" }),
        "POST /v1/signer/decisions" => json!({ "manifest": ZERO, "by": "b", "reason": "r", "catalog": null }),
        _ => return None,
    })
}

/// A server with a token of each role.
struct Api {
    server: Server,
    http: reqwest::Client,
    tokens: HashMap<&'static str, String>,
    key: String,
}

impl Api {
    fn start() -> Self {
        let server = Server::start(&unit_arguments().unwrap()).unwrap();
        let tokens = ROLES.map(|r| (r, server.token(r).unwrap())).into();
        let key = server.ingest_key().unwrap();
        Self { server, http: client().unwrap(), tokens, key }
    }

    /// A request by nobody (``), a device (`key`) or the token of a role; `line` is `METHOD path`.
    fn ask(&self, who: &str, line: &str) -> RequestBuilder {
        let (method, path) = line.split_once(' ').unwrap();
        let request = self.http.request(method.parse().unwrap(), self.server.url(path));
        match who {
            "" => request,
            "key" => request.header("x-fleet-ingest-key", &self.key),
            role => request.bearer_auth(&self.tokens[role]),
        }
    }

    /// As [`Self::ask`] with a JSON body where there is one.
    fn send(&self, who: &str, line: &str, body: &Value) -> RequestBuilder {
        let request = self.ask(who, line);
        if body.is_null() { request } else { request.json(body) }
    }
}

/// Sends a request and holds the answer against status and code and the form of every error body.
async fn expect(case: &str, request: RequestBuilder, status: u16, code: &str) -> HeaderMap {
    let response = request.send().await.unwrap_or_else(|e| panic!("{case}: no answer: {e:?}"));
    let (got, headers) = (response.status().as_u16(), response.headers().clone());
    let text = response.text().await.unwrap();
    assert_eq!(got, status, "{case}: {text}");
    let body: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{case}: {e}: {text}"));
    for field in ["code", "message", "hint"] {
        assert!(body[field].as_str().is_some_and(|t| !t.trim().is_empty()), "{case}: {field} in {text}");
    }
    assert_eq!(body["code"], code, "{case}: {text}");
    assert_eq!(headers["content-type"], "application/json", "{case}");
    headers
}

#[tokio::test]
async fn every_route_refuses_methods_credentials_and_ids() {
    let api = Api::start();
    for route in routes() {
        let line = filled(route, "x");
        let path = line.split_once(' ').unwrap().1;
        for method in ["PATCH", "OPTIONS"] {
            let case = format!("{method} {path}");
            let headers = expect(&case, api.ask("", &case), 405, "method_not_allowed").await;
            let allowed = headers["allow"].to_str().unwrap();
            assert!(allowed.split(',').any(|m| line.starts_with(m)), "{case}: allow is {allowed}");
        }
        if !is_open(route) {
            let code = if is_device(route) { "no_ingest_key" } else { "no_valid_token" };
            expect(&line, api.ask("", &line), 401, code).await;
            let code = if is_device(route) { "unknown_ingest_key" } else { "no_valid_token" };
            expect(&line, api.ask("", &line).bearer_auth("wrong"), 401, code).await;
        }
        if route.contains('{') {
            let line = filled(route, "%ff");
            let who = if is_open(route) { "" } else { "admin" };
            expect(&line, api.ask(who, &line), 400, "bad_path").await;
        }
    }
}

#[tokio::test]
async fn every_route_refuses_roles_and_bodies() {
    let api = Api::start();
    for route in routes().into_iter().filter(|r| !is_open(r) && !is_device(r)) {
        let line = filled(route, "x");
        let body = readable(route);
        let asked = if route.ends_with("/schedules/next") { format!("{line}?expr=*+*+*+*+*") } else { line.clone() };
        // a signer may read nothing, a viewer may change nothing, and only a signer may do the signer's work
        let who = if route.starts_with("GET") && !route.contains("/signer/") { "signer" } else { "viewer" };
        let denied = api.send(who, &asked, &body.clone().unwrap_or_default());
        expect(&format!("{asked} as {who}"), denied, 403, "role_too_low").await;
        if body.is_none() {
            continue;
        }
        let with = |text: &'static str| api.ask("admin", &line).header("content-type", "application/json").body(text);
        expect(&line, with("{"), 400, "bad_json").await;
        expect(&line, with("\"text\""), 400, "bad_json").await;
        expect(&line, with("\u{0}\u{1}"), 400, "bad_json").await;
        expect(&line, api.ask("admin", &line).body("{}"), 415, "unsupported_content_type").await;
    }
    let large = api.ask("admin", "PUT /v1/chunks").header("content-type", "application/json");
    expect("a large body", large.body(vec![b' '; ADMIN_BODY + 1]), 413, "body_too_large").await;
    let foreign = api.ask("admin", "GET /v1/chunks").header("x-fleet-app", "other");
    expect("another app", foreign, 404, "app_not_found").await;
    let higher = [
        ("viewer", "GET /v1/audit/verify", Value::Null),
        ("operator", "GET /v1/interactions/rejected", Value::Null),
        ("operator", "POST /v1/candidates/x/override", json!({ "reason": "r" })),
        ("operator", "POST /v1/rollouts/x/approve", json!({ "reason": "r" })),
        ("operator", "POST /v1/clock", json!({ "now": "2026-03-02T00:00:00Z" })),
        ("operator", "PUT /v1/settings", json!({ "version": 1, "settings": { "automation": "act" } })),
    ];
    for (who, line, body) in higher {
        expect(&format!("{line} as {who}"), api.send(who, line, &body), 403, "role_too_low").await;
    }
}

/// What is not there.
fn unknown() -> Vec<(&'static str, Value, &'static str)> {
    let why = || json!({ "reason": "r" });
    vec![
        ("GET /v1/nothing", Value::Null, "no_such_path"),
        ("GET /v1/candidates/none", Value::Null, "candidate_not_found"),
        ("POST /v1/candidates/none/override", why(), "candidate_not_found"),
        ("POST /v1/candidates", json!({ "kind": "weights", "artefact": ZERO }), "artefact_not_found"),
        ("POST /v1/chunks/state", json!({ "chunk_id": "c", "to": "frozen", "reason": "r" }), "chunk_not_found"),
        ("POST /v1/findings/none/dismiss", why(), "finding_not_found"),
        ("GET /v1/eval-sets/none", Value::Null, "eval_set_not_found"),
        ("GET /v1/rollouts/none", Value::Null, "rollout_not_found"),
        ("POST /v1/rollouts/none/pause", why(), "rollout_not_found"),
        ("POST /v1/rollouts/none/dance", why(), "no_such_verb"),
        ("POST /v1/rollouts", json!({ "bundle": ZERO }), "release_not_approved"),
        ("GET /v1/jobs/none", Value::Null, "job_not_found"),
        ("POST /v1/jobs/none/cancel", Value::Null, "job_not_found"),
        ("POST /v1/jobs/none/retry", Value::Null, "job_not_found"),
        ("POST /v1/schedules/none/run", Value::Null, "schedule_not_found"),
        ("POST /v1/schedules/none/pause", Value::Null, "schedule_not_found"),
        ("POST /v1/schedules/none/resume", Value::Null, "schedule_not_found"),
        ("POST /v1/signer/decisions", json!({ "manifest": ZERO, "by": "b", "reason": "r" }), "release_not_found"),
        ("DELETE /v1/views/none", Value::Null, "view_not_found"),
        ("GET /tuf/shop/metadata/9.root.json", Value::Null, "no_such_file"),
        ("GET /tuf/shop/..%2f..%2fcontrol.db", Value::Null, "no_such_file"),
        ("GET /tuf/other/metadata/timestamp.json", Value::Null, "no_such_file"),
        ("GET /tuf/a%20b/metadata/timestamp.json", Value::Null, "no_such_file"),
    ]
}

/// What is asked for in a wrong way.
fn invalid() -> Vec<(&'static str, Value, &'static str)> {
    let correction =
        |answer: &str| json!({ "interaction_id": "i", "prompt": "p", "wrong_answer": "w", "corrected_answer": answer });
    let schedule = |name: &str, kind: &str, expr: &str| json!({ "name": name, "kind": kind, "expr": expr });
    let chunk = |text: &str| json!({ "chunks": [{ "chunk_id": "c", "text": text }] });
    vec![
        ("GET /v1/jobs/a%20b", Value::Null, "bad_path"),
        ("GET /v1/chunks?limit=x", Value::Null, "bad_query"),
        ("GET /v1/chunks?state=asleep", Value::Null, "bad_query"),
        ("GET /v1/chunks?after=%ff", Value::Null, "bad_query"),
        ("GET /v1/findings?state=asleep", Value::Null, "bad_query"),
        ("GET /v1/interactions/rejected?since=yesterday", Value::Null, "bad_query"),
        ("GET /v1/interactions/rejected?limit=0", Value::Null, "bad_limit"),
        ("GET /v1/corrections?state=asleep", Value::Null, "bad_query"),
        ("GET /v1/datasets?limit=x", Value::Null, "bad_query"),
        ("GET /v1/candidates?state=asleep", Value::Null, "bad_query"),
        ("GET /v1/releases?state=asleep", Value::Null, "bad_query"),
        ("GET /v1/rollouts?open=maybe", Value::Null, "bad_query"),
        ("GET /v1/jobs?limit=-1", Value::Null, "bad_query"),
        ("GET /v1/schedules/next", Value::Null, "bad_query"),
        ("GET /v1/schedules/next?expr=noon", Value::Null, "bad_cron"),
        ("GET /v1/schedules/next?expr=*+*+*+*+*&zone=Mars", Value::Null, "bad_zone"),
        ("GET /v1/schedules/next?expr=0+0+30+2+*", Value::Null, "never_fires"),
        ("GET /v1/audit?before=x", Value::Null, "bad_query"),
        ("PUT /v1/chunks", json!({ "chunks": [] }), "bad_chunk_count"),
        ("PUT /v1/chunks", chunk(" "), "empty_chunk"),
        ("PUT /v1/chunks", chunk(&"x".repeat((64 << 10) + 1)), "chunk_too_long"),
        ("POST /v1/corrections", correction(" "), "empty_field"),
        ("POST /v1/corrections", correction(&"x".repeat((32 << 10) + 1)), "field_too_long"),
        ("PUT /v1/eval-sets/heldout", json!({ "items": [] }), "bad_item_count"),
        ("PUT /v1/eval-sets/a%20b", json!({ "items": [] }), "bad_eval_set_name"),
        ("PUT /v1/settings", json!({ "version": 1, "settings": { "v": 2 } }), "unknown_version"),
        ("PUT /v1/settings", json!({ "version": 1, "settings": { "alert_recipients": ["nobody"] } }), "bad_recipient"),
        ("PUT /v1/schedules", schedule("a/b", "compact", "0 3 * * *"), "bad_schedule_name"),
        ("PUT /v1/schedules", schedule("n", "compakt", "0 3 * * *"), "unknown_job_kind"),
        ("PUT /v1/schedules", schedule("n", "compact", "0 25 * * *"), "bad_cron"),
        ("POST /v1/imports", json!({ "source": "history" }), "bad_import_source"),
        ("POST /v1/imports", json!({ "source": "https://example.com/x" }), "bad_import_source"),
        ("POST /v1/imports", json!({ "source": "file:///srv/history", "table": "outcomes" }), "bad_import_table"),
        ("POST /v1/imports", json!({ "source": "file:///srv/history", "format": "csv" }), "bad_json"),
        ("POST /v1/sql", json!({ "query": "DROP TABLE interactions" }), "bad_query"),
        ("PUT /v1/views/Mine", json!({ "query": "SELECT 1 AS one" }), "bad_view_name"),
        ("PUT /v1/views/interactions", json!({ "query": "SELECT 1 AS one" }), "bad_view_name"),
        ("PUT /v1/views/unnest", json!({ "query": "SELECT 1 AS one" }), "bad_view_name"),
        ("PUT /v1/views/mine", json!({ "query": "DROP TABLE interactions" }), "bad_query"),
        ("PUT /v1/views/mine", json!({ "query": "SELECT * FROM mine" }), "bad_query"),
        ("PUT /v1/views/mine", json!({ "query": "SELECT 1 AS a, 2 AS b, 3 AS \"a\"" }), "bad_query"),
        ("PUT /v1/views/mine", json!({ "query": "x".repeat((8 << 10) + 1) }), "bad_view"),
        ("DELETE /v1/views/intake_24h", Value::Null, "built_in_view"),
        ("POST /v1/clock", json!({ "now": "2000-01-01T00:00:00Z" }), "time_goes_forward"),
    ]
}

#[tokio::test]
async fn what_is_unknown_or_wrong_is_named() {
    let api = Api::start();
    for (line, body, code) in unknown() {
        expect(line, api.send("admin", line, &body), 404, code).await;
    }
    for (line, body, code) in invalid() {
        expect(line, api.send("admin", line, &body), 400, code).await;
    }
    let elsewhere = json!({ "source": "file:///etc/" });
    expect("a foreign folder", api.send("admin", "POST /v1/imports", &elsewhere), 403, "import_source_not_allowed")
        .await;
    let stale = json!({ "version": 99, "settings": {} });
    expect("stale settings", api.send("admin", "PUT /v1/settings", &stale), 409, "settings_changed").await;
    let range = api.ask("", "GET /tuf/shop/metadata/timestamp.json").header("range", "bytes=999999-");
    let headers = expect("a range past the end", range, 416, "range_not_satisfiable").await;
    assert!(headers["content-range"].to_str().unwrap().starts_with("bytes */"), "{headers:?}");
    let head = api.ask("admin", "HEAD /v1/nothing").send().await.unwrap();
    assert_eq!((head.status().as_u16(), head.headers()["content-type"].as_bytes()), (404, &b"application/json"[..]));
    let cookie = format!("flywheel_token={}", api.tokens["viewer"]);
    let page = api.ask("", "GET /rollouts/%ff").header("cookie", cookie).send().await.unwrap();
    assert_eq!(page.status(), 400);
    let text = page.text().await.unwrap();
    assert!(text.contains("<h1>") && text.contains("bad_path") && text.contains("What to do"), "{text}");
}

#[tokio::test]
async fn uploads_that_cannot_be_taken_are_explained() {
    let api = Api::start();
    for line in ["POST /v1/events", "POST /v1/feedback"] {
        let ask = |kind: &'static str| api.ask("key", line).header("content-type", kind);
        expect(line, ask("application/json").body("{"), 400, "undecodable_body").await;
        expect(line, ask("application/json").body(vec![b'"', 0xff, b'"']), 400, "undecodable_body").await;
        expect(line, ask("text/plain").body("x"), 415, "unsupported_content_type").await;
        let encoded = ask("application/json").header("content-encoding", "br").body("{}");
        expect(line, encoded, 415, "unsupported_encoding").await;
        let cut = ask("application/json").header("content-encoding", "gzip").body(vec![0x1f, 0x8b]);
        expect(line, cut, 400, "bad_compression").await;
        let unsigned = ask("application/json").header("x-fleet-signature", "AAAA").body("{}");
        expect(line, unsigned, 401, "bad_signature").await;
        expect(line, ask("application/json").body(vec![b' '; MAX_UPLOAD + 1]), 413, "body_too_large").await;
    }
    expect("the feed", api.ask("key", "GET /v1/index/changes?since=x"), 400, "bad_query").await;
    let event = |id: &str| {
        let body = json!({ "interaction_id": id, "at": "2026-03-02T00:00:00Z", "label": "rejected" });
        api.send("key", "POST /v1/feedback", &body).header("idempotency-key", "one")
    };
    assert_eq!(event("i-1").send().await.unwrap().status(), 200);
    expect("a key used twice", event("i-2"), 409, "idempotency_key_reused").await;
}

#[tokio::test]
async fn otlp_failures_are_a_status_in_the_encoding_of_the_request() {
    let api = Api::start();
    for line in ["POST /v1/traces", "POST /v1/logs", "POST /v1/metrics"] {
        // field 1 of google.rpc.Status is the gRPC code as a varint, field 2 the message
        for (who, body, status, code, word) in [
            ("", vec![], 401, 16, "no_ingest_key"),
            ("key", vec![0xffu8; 4], 400, 3, "undecodable_body"),
            ("key", vec![0u8; MAX_UPLOAD + 1], 413, 11, "body_too_large"),
        ] {
            let request = api.ask(who, line).header("content-type", "application/x-protobuf").body(body);
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status().as_u16(), status, "{line}");
            assert_eq!(answer.headers()["content-type"], "application/x-protobuf");
            let bytes = answer.bytes().await.unwrap();
            assert_eq!(bytes[..3], [0x08, code, 0x12], "{line}: {bytes:?}");
            assert!(String::from_utf8_lossy(&bytes).contains(&format!("{word}: ")), "{line}: {bytes:?}");
        }
        let answer = api.ask("key", line).header("content-type", "application/json").body("[").send().await.unwrap();
        assert_eq!(
            (answer.status().as_u16(), answer.headers()["content-type"].clone()),
            (400, "application/json".parse().unwrap())
        );
        let status: Value = answer.json().await.unwrap();
        assert_eq!(status["code"], 3, "{status}");
        assert!(status["message"].as_str().is_some_and(|m| m.starts_with("undecodable_body: ")), "{status}");
        // neither encoding: the error body of the other paths
        let neither = api.ask("key", line).header("content-type", "text/plain").body("x");
        expect(line, neither, 415, "unsupported_content_type").await;
    }
}
