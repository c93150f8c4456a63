//! Edge cases of the intake that were public bug reports of other servers, against the real binary: what is stored is asked
//! with SQL, never concluded from a status.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too"
)]

use flywheel_tests::phone::{Install, answer};
use flywheel_tests::{Server, client, unit_arguments};
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as V;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{Histogram, HistogramDataPoint, Metric, ResourceMetrics, ScopeMetrics};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};
use std::io::Write as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Start of the server's business clock, nanoseconds.
const NOW_NS: u64 = 1_772_409_600_000_000_000;
const DAY_NS: u64 = 86_400_000_000_000;

/// A server, a client, and what both need to talk.
struct Bench {
    server: Server,
    http: reqwest::Client,
    key: String,
    token: String,
}

impl Bench {
    fn start(config: &str) -> Self {
        let server = Server::with_config(&unit_arguments().unwrap(), config).unwrap();
        let (key, token) = (server.ingest_key().unwrap(), server.token("operator").unwrap());
        Self { server, http: client().unwrap(), key, token }
    }

    fn post(&self, path: &str, content_type: &str, body: impl Into<reqwest::Body>) -> RequestBuilder {
        let request = self.http.post(self.server.url(path)).header("x-fleet-ingest-key", &self.key);
        request.header("content-type", content_type).body(body)
    }

    fn logs(&self, content_type: &str, body: impl Into<reqwest::Body>) -> RequestBuilder {
        self.post("/v1/logs", content_type, body)
    }

    async fn json(&self, records: &[String]) -> Response {
        self.logs("application/json", body(records)).send().await.unwrap()
    }

    /// Rows of one SELECT.
    async fn rows(&self, query: &str) -> Value {
        let request = self.http.post(self.server.url("/v1/sql")).bearer_auth(&self.token);
        let answer: Value = request.json(&json!({ "query": query })).send().await.unwrap().json().await.unwrap();
        assert!(answer["rows"].is_array(), "{answer}");
        answer["rows"].clone()
    }

    async fn count(&self) -> i64 {
        self.rows("SELECT count(*) FROM interactions").await[0][0].as_i64().unwrap()
    }
}

fn body(records: &[String]) -> String {
    format!(r#"{{"resourceLogs":[{{"scopeLogs":[{{"logRecords":[{}]}}]}}]}}"#, records.join(","))
}

/// A record with an id, a time as JSON text, and further attributes.
fn record(id: &str, time: &str, attributes: &str) -> String {
    format!(
        r#"{{"timeUnixNano":{time},"eventName":"gen_ai.client.inference.operation.details","attributes":[
           {{"key":"gen_ai.response.id","value":{{"stringValue":"{id}"}}}}{attributes}]}}"#
    )
}

fn attribute(key: &str, value: &str) -> String {
    format!(r#",{{"key":"{key}","value":{{{value}}}}}"#)
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    out.write_all(data).unwrap();
    out.finish().unwrap()
}

#[tokio::test]
async fn a_compressed_body_is_whole_or_nothing() {
    let b = Bench::start("");
    let whole = body(&[record("i-1", "0", ""), record("i-2", "0", "")]);
    let packed = gzip(whole.as_bytes());
    for cut in (0..packed.len()).step_by(7) {
        let request = b.logs("application/json", packed[..cut].to_vec()).header("content-encoding", "gzip");
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 400, "cut at {cut}");
    }
    assert_eq!(b.count().await, 0, "nothing of a cut body is stored");
    // two members, as `cat a.gz b.gz` makes them: a decoder that stops after the first would lose the rest
    let (head, tail) = whole.as_bytes().split_at(whole.len() / 2);
    let two = [gzip(head), gzip(tail)].concat();
    let answer = b.logs("application/json", two).header("content-encoding", "gzip").send().await.unwrap();
    assert_eq!((answer.status().as_u16(), b.count().await), (200, 2));
    // a bomb: small as sent, larger than the limit when inflated
    let bomb = gzip(&vec![b' '; 9 << 20]);
    let answer = b.logs("application/json", bomb).header("content-encoding", "gzip").send().await.unwrap();
    assert_eq!(answer.status(), 413);
    for (encoding, status) in [("br", 415), ("gzip, zstd", 415), ("GZIP", 200)] {
        let request = b.logs("application/json", packed.clone()).header("content-encoding", encoding);
        assert_eq!(request.send().await.unwrap().status(), status, "{encoding}");
    }
    assert_eq!(b.logs("text/csv", "x").send().await.unwrap().status(), 415);
    assert_eq!(b.count().await, 2, "a body is known again however it was compressed");
}

#[tokio::test]
async fn numbers_that_are_none_become_null_and_cost_nothing_else() {
    let b = Bench::start("");
    let ttft = |v: &str| attribute("gen_ai.response.time_to_first_chunk", &format!(r#""doubleValue":{v}"#));
    let tokens = |v: &str| attribute("gen_ai.usage.input_tokens", &format!(r#""intValue":{v}"#));
    let records = [
        record("nan", "0", &ttft("\"NaN\"")),
        record("inf", "0", &ttft("\"-Infinity\"")),
        record("huge", "0", &ttft("1e999")),
        record("null", "0", &ttft("null")),
        record("fine", "0", &ttft("0.5")),
        record("text", "0", &tokens("\"7\"")),
        record("word", "0", &tokens("\"seven\"")),
    ];
    let answer: Value = b.json(&records).await.json().await.unwrap();
    assert_eq!(answer["partialSuccess"]["rejectedLogRecords"], "1", "{answer}");
    let query = "SELECT interaction_id, ttft_ms, nonfinite_fields, input_tokens FROM interactions ORDER BY 1";
    let stored = b.rows(query).await;
    let want = json!([
        ["fine", 500.0, 0, null],
        ["huge", null, 1, null],
        ["inf", null, 1, null],
        ["nan", null, 1, null],
        ["null", null, 0, null],
        ["text", null, 0, 7]
    ]);
    assert_eq!(stored, want);
    // a filter on that column answers the same whether files are pruned by their statistics or not
    assert_eq!(b.rows("SELECT count(*) FROM interactions WHERE ttft_ms > 2").await, json!([[1]]));
    assert_eq!(b.rows("SELECT count(*) FROM interactions WHERE ttft_ms + 0 > 2").await, json!([[1]]));
    let shown = b.rows("SELECT source, kind, reason, detail FROM rejects").await;
    assert_eq!(shown, json!([["otlp_logs", "unknown", "bad_value", "intValue `seven` is not a 64-bit integer"]]));
    let bare = b.json(&[record("bare", "0", &ttft("NaN"))]).await;
    assert_eq!((bare.status().as_u16(), b.count().await), (400, 6));
    assert_eq!(b.json(&[record("next", "0", "")]).await.status(), 200, "refusals are counted with what comes next");
    let why =
        "SELECT kind, reason, sum(items) FROM dispositions WHERE disposition <> 'stored' GROUP BY 1, 2 ORDER BY 1";
    assert_eq!(b.rows(why).await, json!([["request", "undecodable_body", 1], ["unknown", "bad_value", 1]]));
}

#[tokio::test]
async fn clocks_of_phones_are_kept_raw_and_corrected() {
    let b = Bench::start("");
    let late = NOW_NS - 3 * DAY_NS;
    let records = [
        record("number", &late.to_string(), ""),
        record("string", &format!("\"{late}\""), ""),
        record("zero", "0", ""),
        record("max", "18446744073709551615", ""),
        record("ahead", &(NOW_NS + 3650 * DAY_NS).to_string(), ""),
        record("y1970", "5000000000", ""),
        record("over", "18446744073709551616", ""),
        record("minus", "\"-1\"", ""),
    ];
    let answer: Value = b.json(&records).await.json().await.unwrap();
    assert_eq!(answer["partialSuccess"]["rejectedLogRecords"], "2", "{answer}");
    let query = "SELECT interaction_id, event_at IS NULL, CAST(event_at AS BIGINT), CAST(occurred_at AS BIGINT) - \
                 CAST(received_at AS BIGINT), received_date = DATE '2026-03-02' FROM interactions ORDER BY 1";
    let day = DAY_NS as i64 / 1000;
    let us = |ns: u64| (ns / 1000) as i64;
    let want = json!([
        ["ahead", false, us(NOW_NS) + 3650 * day, 0, true],
        ["max", false, us(u64::MAX), 0, true],
        ["number", false, us(late), -3 * day, true],
        ["string", false, us(late), -3 * day, true],
        ["y1970", false, 5_000_000, 0, true],
        ["zero", true, null, 0, true],
    ]);
    assert_eq!(b.rows(query).await, want);
}

fn text(key: &str, value: &str) -> KeyValue {
    let value = Some(AnyValue { value: Some(V::StringValue(value.to_owned())) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}

#[tokio::test]
async fn invalid_utf8_in_one_string_keeps_every_record() {
    let b = Bench::start("");
    let log = |id: &str| LogRecord {
        event_name: "gen_ai.client.inference.operation.details".to_owned(),
        attributes: vec![text("gen_ai.response.id", id), text("session.id", "cut-here")],
        ..LogRecord::default()
    };
    let scope_logs = vec![ScopeLogs { log_records: vec![log("i-1"), log("i-2")], ..ScopeLogs::default() }];
    let request =
        ExportLogsServiceRequest { resource_logs: vec![ResourceLogs { scope_logs, ..ResourceLogs::default() }] };
    let mut body = request.encode_to_vec();
    let at = body.windows(8).position(|w| w == b"cut-here").unwrap();
    body[at + 3] = 0xc3;
    let answer = b.logs("application/x-protobuf", body).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.bytes().await.unwrap().len()), (200, 0), "full success");
    let want = json!([["i-1", "cut\u{fffd}here"], ["i-2", "cut-here"]]);
    assert_eq!(b.rows("SELECT interaction_id, session_id FROM interactions ORDER BY 1").await, want);
}

/// A gauge with data points as JSON text.
fn gauge(name: &str, points: &[&str]) -> String {
    let points = points.join(",");
    format!(
        r#"{{"resourceMetrics":[{{"scopeMetrics":[{{"metrics":[{{"name":"{name}","gauge":{{"dataPoints":[{points}]}}}}]}}]}}]}}"#
    )
}

#[tokio::test]
async fn numbers_and_times_of_data_points_are_those_of_log_records() {
    let b = Bench::start("");
    let late = NOW_NS - 3 * DAY_NS;
    let points = [
        r#"{"asInt":"7"}"#.to_owned(),
        r#"{"asInt":8}"#.to_owned(),
        r#"{"asDouble":"NaN"}"#.to_owned(),
        r#"{"asDouble":"-Infinity"}"#.to_owned(),
        r#"{"asDouble":1e999}"#.to_owned(),
        r#"{"asInt":"seven"}"#.to_owned(),
        format!(r#"{{"asInt":1,"timeUnixNano":{late}}}"#),
        format!(r#"{{"asInt":2,"timeUnixNano":"{late}"}}"#),
        r#"{"asInt":3,"timeUnixNano":0}"#.to_owned(),
        r#"{"asInt":4,"timeUnixNano":18446744073709551615}"#.to_owned(),
        r#"{"asInt":5,"timeUnixNano":18446744073709551616}"#.to_owned(),
        r#"{"asInt":6,"timeUnixNano":"-1"}"#.to_owned(),
    ];
    let body = gauge("fleet.battery.level", &points.each_ref().map(String::as_str));
    let answer: Value = b.post("/v1/metrics", "application/json", body).send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["partialSuccess"]["rejectedDataPoints"], "3", "{answer}");
    let day = DAY_NS as i64 / 1000;
    let us = |ns: u64| (ns / 1000) as i64;
    let query = "SELECT value_int, value_double, nonfinite_fields, CAST(event_at AS BIGINT), CAST(occurred_at AS BIGINT) - \
                 CAST(received_at AS BIGINT), received_date = DATE '2026-03-02' FROM metrics \
                 WHERE name = 'fleet.battery.level' AND kind = 'gauge' ORDER BY 1 NULLS LAST";
    let want = json!([
        [1, null, 0, us(late), -3 * day, true],
        [2, null, 0, us(late), -3 * day, true],
        [3, null, 0, null, 0, true],
        [4, null, 0, us(u64::MAX), 0, true],
        [7, null, 0, null, 0, true],
        [8, null, 0, null, 0, true],
        [null, null, 1, null, 0, true],
        [null, null, 1, null, 0, true],
        [null, null, 1, null, 0, true],
    ]);
    assert_eq!(b.rows(query).await, want);
    let why = "SELECT source, kind, reason, count(*) FROM rejects GROUP BY 1, 2, 3 ORDER BY 3";
    let want = json!([["otlp_metrics", "metric", "bad_time", 2], ["otlp_metrics", "metric", "bad_value", 1]]);
    assert_eq!(b.rows(why).await, want);
    let sums = "SELECT kind, disposition, sum(items) FROM dispositions GROUP BY 1, 2 ORDER BY 2";
    assert_eq!(b.rows(sums).await, json!([["metric", "quarantined", 3], ["metric", "stored", 9]]));
    let bare = b.post("/v1/metrics", "application/json", gauge("m", &[r#"{"asDouble":NaN}"#]));
    assert_eq!(bare.send().await.unwrap().status(), 400);
    assert_eq!(b.rows("SELECT count(*) FROM metrics").await, json!([[9]]));
}

#[tokio::test]
async fn metrics_of_the_convention_can_be_asked_after_a_restart() {
    let mut b = Bench::start("");
    let point = |input: bool| HistogramDataPoint {
        time_unix_nano: NOW_NS,
        count: 3,
        sum: Some(if input { 40.0 } else { 7.0 }),
        explicit_bounds: vec![1.0, 4.0, 16.0],
        bucket_counts: vec![0, 1, 1, 1],
        attributes: vec![
            text("gen_ai.operation.name", "chat"),
            text("gen_ai.token.type", if input { "input" } else { "output" }),
            text("server.address", "cut-here"),
        ],
        ..HistogramDataPoint::default()
    };
    let data = Histogram { data_points: vec![point(true), point(false)], aggregation_temporality: 1 };
    let metric = Metric {
        name: "gen_ai.client.token.usage".to_owned(),
        unit: "{token}".to_owned(),
        data: Some(Data::Histogram(data)),
        ..Metric::default()
    };
    let scope_metrics = vec![ScopeMetrics { metrics: vec![metric], ..ScopeMetrics::default() }];
    let resource = Some(Resource { attributes: vec![text("fleet.device.class", "high-8gb")], ..Resource::default() });
    let resource_metrics = vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
    let mut body = ExportMetricsServiceRequest { resource_metrics }.encode_to_vec();
    let at = body.windows(8).position(|w| w == b"cut-here").unwrap();
    body[at + 3] = 0xc3;
    let answer = b.post("/v1/metrics", "application/x-protobuf", body.clone()).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.bytes().await.unwrap().len()), (200, 0), "full success");
    b.server.kill_and_restart().unwrap();
    let again = b.post("/v1/metrics", "application/x-protobuf", body).send().await.unwrap();
    assert_eq!(again.headers()["x-fleet-duplicate"], "true");
    let query = "SELECT token_type, device_class, operation, temporality, unit, count, sum, explicit_bounds, bucket_counts, \
                 attrs['server.address'] FROM metrics ORDER BY 1";
    let row = |token: &str, sum: f64, address: &str| {
        json!([token, "high-8gb", "chat", "delta", "{token}", 3, sum, [1.0, 4.0, 16.0], [0, 1, 1, 1], address])
    };
    assert_eq!(b.rows(query).await, json!([row("input", 40.0, "cut\u{fffd}here"), row("output", 7.0, "cut-here")]));
}

#[tokio::test]
async fn a_batch_that_is_sent_again_is_stored_once() {
    let mut b = Bench::start("");
    let records = [record("i-1", "0", ""), record("i-2", "0", "")];
    let send = |b: &Bench, records: &[String]| {
        b.logs("application/json", body(records)).header("idempotency-key", "batch-1").send()
    };
    let five = futures::future::join_all((0..5).map(|_| send(&b, &records))).await;
    let fresh = five.iter().flatten().filter(|a| !a.headers().contains_key("x-fleet-duplicate")).count();
    assert_eq!((five.iter().flatten().count(), fresh), (5, 1), "one of five is the first");
    b.server.kill_and_restart().unwrap();
    let again = send(&b, &records).await.unwrap();
    assert_eq!(again.headers()["x-fleet-duplicate"], "true");
    // the same name for something else: nothing of it is stored, and an OTLP client is told not to repeat it
    let other: Value = send(&b, &[record("i-3", "0", "")]).await.unwrap().json().await.unwrap();
    assert_eq!(other["partialSuccess"]["rejectedLogRecords"], "1");
    assert_eq!(b.rows("SELECT interaction_id FROM interactions ORDER BY 1").await, json!([["i-1"], ["i-2"]]));
    let sums = "SELECT disposition, sum(items) FROM dispositions GROUP BY 1 ORDER BY 1";
    assert_eq!(b.rows(sums).await, json!([["duplicate", 10], ["quarantined", 1], ["stored", 2]]));
}

#[tokio::test]
async fn damage_in_the_middle_of_the_log_costs_one_record() {
    let mut b = Bench::start("[ingest]\nflush_s = 3600\n");
    for i in 1..=3 {
        assert_eq!(b.json(&[record(&format!("i-{i}"), "0", "")]).await.status(), 200);
    }
    b.server.kill().unwrap();
    let path = b.server.wal_segments().unwrap().remove(0);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(3).position(|w| w == b"i-2").unwrap();
    bytes[at] ^= 1;
    // a crash while the next record was written
    bytes.extend_from_slice(b"FWR1 torn");
    std::fs::write(&path, &bytes).unwrap();
    b.server.restart().unwrap();
    assert_eq!(b.rows("SELECT interaction_id FROM interactions ORDER BY 1").await, json!([["i-1"], ["i-3"]]));
    assert!(b.server.log().unwrap().contains("a damaged log record is skipped"));
    assert_eq!(b.json(&[record("i-4", "0", "")]).await.status(), 200);
    assert_eq!(b.count().await, 3);
}

#[tokio::test]
async fn a_key_over_its_quota_is_told_to_come_back() {
    let mut b = Bench::start("");
    b.key = b.server.ingest_key_with_quota(2).unwrap();
    let three: Vec<String> = (0..3).map(|i| record(&format!("i-{i}"), "0", "")).collect();
    assert_eq!(b.json(&three).await.status(), 200, "a batch may overdraw");
    let answer = b.json(&[record("more", "0", "")]).await;
    assert_eq!(answer.status(), 429);
    assert!(answer.headers().contains_key("retry-after"));
    b.key = b.server.ingest_key().unwrap();
    assert_eq!(b.json(&[record("other", "0", "")]).await.status(), 200, "another key has its own");
    assert_eq!(b.count().await, 4);
    let why = "SELECT reason, sum(items) FROM dispositions WHERE disposition = 'refused_intake' GROUP BY 1";
    assert_eq!(b.rows(why).await, json!([["quota_used_up", 1]]));
}

#[tokio::test]
async fn one_phone_and_one_network_have_their_own_quotas() {
    let quotas = "[ingest]\ninstall_events_per_minute = 5\nnetwork_events_per_minute = 12\ntrusted_proxies = 1\n";
    let b = Bench::start(quotas);
    let send = async |phone: u64, seq: u64, events: u64, from: &str| {
        let phone = Install::new(phone);
        let events: Vec<Value> = (0..events).map(|i| answer(&format!("{}-{seq}-{i}", &phone.id()[..8]))).collect();
        let body = phone.batch(seq, &events);
        // what the client writes about itself stands before what the proxy saw
        let mut request = b.post("/v1/events", "application/json", body.clone()).header("x-forwarded-for", from);
        for (name, value) in phone.headers(&body) {
            request = request.header(name, value);
        }
        let answer = request.send().await.unwrap();
        let (status, waits) = (answer.status().as_u16(), answer.headers().contains_key("retry-after"));
        let said: Value = answer.json().await.unwrap();
        (status, waits, said["code"].as_str().unwrap_or_default().to_owned())
    };
    let stored = (200, false, String::new());
    let refused = |code: &str| (429, true, code.to_owned());
    assert_eq!(send(1, 1, 6, "198.51.100.9, 203.0.113.7").await, stored, "a batch may overdraw");
    assert_eq!(send(1, 2, 1, "192.0.2.1").await, refused("install_quota_used_up"), "whatever network it comes from");
    assert_eq!(send(2, 1, 12, "203.0.113.8").await, stored, "its neighbour is another phone");
    assert_eq!(send(3, 1, 1, "198.51.100.9, 203.0.113.9").await, refused("network_quota_used_up"));
    assert_eq!(send(3, 1, 1, "203.0.113.9, 198.51.100.9").await, stored, "the same phone from another network");
    assert_eq!(b.count().await, 19);
    let why = "SELECT reason, sum(items) FROM dispositions WHERE disposition = 'refused_intake' GROUP BY 1 ORDER BY 1";
    assert_eq!(b.rows(why).await, json!([["install_quota_used_up", 1], ["network_quota_used_up", 1]]));
}

#[tokio::test]
async fn a_watcher_sees_what_fits_within_two_seconds() {
    let b = Bench::start("");
    let url = b.server.url("/v1/tail?table=interactions&where=ttft_ms%20%3E%20100");
    let mut tail = b.http.get(url).bearer_auth(&b.token).send().await.unwrap();
    assert_eq!(tail.status(), 200);
    let ttft = |v: &str| attribute("gen_ai.response.time_to_first_chunk", &format!(r#""doubleValue":{v}"#));
    b.json(&[record("fast", "0", &ttft("0.05")), record("slow", "0", &ttft("0.5"))]).await;
    let mut seen = String::new();
    let read = async {
        while !seen.contains("\n\n") {
            seen += std::str::from_utf8(&tail.chunk().await.unwrap().unwrap()).unwrap();
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(2), read).await.expect("a row within two seconds of its ack");
    assert!(seen.starts_with("event: row\ndata: {"), "{seen}");
    assert!(seen.contains(r#""interaction_id":"slow""#) && !seen.contains("fast"), "{seen}");
    for (query, code) in [("table=outcomes", "no_such_table"), ("table=feedback&where=1%3D", "bad_query")] {
        let refused =
            b.http.get(b.server.url(&format!("/v1/tail?{query}"))).bearer_auth(&b.token).send().await.unwrap();
        let body: Value = refused.json().await.unwrap();
        assert_eq!(body["code"], code);
    }
}

#[tokio::test]
async fn columns_take_more_distinct_words_than_a_16_bit_dictionary() {
    let b = Bench::start("");
    for batch in 0..8 {
        let records: Vec<String> = (0..10_000)
            .map(|i| {
                record(
                    &format!("i-{batch}-{i}"),
                    "0",
                    &attribute("session.id", &format!(r#""stringValue":"s-{batch}-{i}""#)),
                )
            })
            .collect();
        let packed = gzip(body(&records).as_bytes());
        let answer = b.logs("application/json", packed).header("content-encoding", "gzip").send().await.unwrap();
        assert_eq!(answer.status(), 200);
    }
    assert_eq!(
        b.rows("SELECT count(*), count(DISTINCT session_id) FROM interactions").await,
        json!([[80_000, 80_000]])
    );
    assert_eq!(b.http.get(b.server.url("/readyz")).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_count_under_load_and_commits_only_rises() {
    let b = Bench::start("[ingest]\nflush_s = 1\n");
    let (mut sent, mut last) = (0, 0);
    let writer = async {
        for i in 0..120 {
            let records: Vec<String> = (0..20).map(|k| record(&format!("i-{i}-{k}"), "0", "")).collect();
            assert_eq!(b.json(&records).await.status(), 200);
            sent += 20;
        }
    };
    let reader = async {
        loop {
            let now = b.count().await;
            assert!(now >= last, "{now} rows after {last}");
            last = now;
            if now == 2400 {
                break;
            }
        }
    };
    tokio::join!(writer, reader);
    assert_eq!((sent, last), (2400, 2400));
}

#[tokio::test]
async fn bodies_that_never_end_are_cut_off() {
    let b = Bench::start("[ingest]\nupload_timeout_s = 1\n");
    let address = b.server.url("").trim_start_matches("http://").to_owned();
    let mut slow = tokio::net::TcpStream::connect(&address).await.unwrap();
    let head = format!(
        "POST /v1/logs HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-fleet-ingest-key: {}\r\ncontent-length: 1000\r\n\r\n{{",
        b.key
    );
    slow.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let n = slow.read(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer[..n]).into_owned();
    assert!(answer.starts_with("HTTP/1.1 503") && answer.to_ascii_lowercase().contains("retry-after"), "{answer}");
    assert_eq!(b.count().await, 0);
    assert_eq!(
        b.json(&[record("next", "0", "")]).await.status(),
        200,
        "counts of refusals are written with what comes next"
    );
    let why = "SELECT reason, sum(items) FROM dispositions WHERE disposition <> 'stored' GROUP BY 1";
    assert_eq!(b.rows(why).await, json!([["upload_too_slow", 1]]));
}

#[tokio::test]
async fn a_full_disk_stops_the_intake_and_says_when_to_come_back() {
    let b = Bench::start("[ingest]\nmin_free_bytes = 9000000000000000000\n");
    let answer = b.json(&[record("i-1", "0", "")]).await;
    assert_eq!(answer.status(), 503);
    assert!(answer.headers().contains_key("retry-after"));
    assert!(answer.text().await.unwrap().contains("disk_low"));
    let ready = b.http.get(b.server.url("/readyz")).send().await.unwrap();
    assert_eq!(ready.json::<Value>().await.unwrap()["intake"], false);
}
