//! A server that starts with a log several times larger than the memory it may use: telemetry is taken at once, queries are
//! refused and told how far it is until none could be partial, memory stays bounded, and every row is there once.
//! `cargo xtask bench restart` does it with five gigabytes.

use crate::ask::{Operator, wait_for};
use flywheel_tests::line::Line;
use flywheel_tests::{Server, unit_arguments};
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as V;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use prost::Message as _;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Nothing is committed before the kill.
const NO_COMMITS: &str = "[worker]\nembedded = false\n[ingest]\nflush_s = 86400\nflush_bytes = 1000000000000\n\
                          max_backlog_bytes = 1000000000000\nmin_free_bytes = 0\n";
const SHIPPED: &str = "[ingest]\nmin_free_bytes = 0\n";
const LOG_BYTES: f64 = 1.0 * (1 << 30) as f64;
/// Most memory of the server after its start, kB.
const MEMORY_KB: u64 = 300_000;
const RECORDS: u64 = 200;
/// Texts of one record, each shorter than what a table keeps of an attribute.
const TEXTS: usize = 8;
const TEXT_BYTES: usize = 900;

/// Large records with texts that do not repeat.
fn body(number: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut noise = || {
        let mut text = String::with_capacity(TEXT_BYTES);
        while text.len() < TEXT_BYTES {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // letters: a long number would be looked at by the masks
            text.extend((0..8).map(|i| char::from(b'a' + (state >> (8 * i) & 15) as u8)));
        }
        text
    };
    let text = |key: &str, value: String| {
        let value = Some(AnyValue { value: Some(V::StringValue(value)) });
        KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
    };
    let mut record = |k: u64| {
        let mut attributes = vec![text("gen_ai.response.id", format!("i-{number:06}-{k:03}"))];
        attributes.extend((0..TEXTS).map(|i| text(&format!("note.{i}"), noise())));
        let event_name = "gen_ai.client.inference.operation.details".to_owned();
        LogRecord { event_name, attributes, ..LogRecord::default() }
    };
    let log_records = (0..RECORDS).map(&mut record).collect();
    let scope_logs = vec![ScopeLogs { log_records, ..ScopeLogs::default() }];
    let resource_logs = vec![ResourceLogs { scope_logs, ..ResourceLogs::default() }];
    ExportLogsServiceRequest { resource_logs }.encode_to_vec()
}

async fn send(line: &mut Line, key: &str, number: u64) {
    let headers =
        format!("x-fleet-ingest-key: {key}\r\ncontent-type: application/x-protobuf\r\nidempotency-key: b-{number}\r\n");
    let answer = line.post("/v1/logs", &headers, &body(number)).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
}

/// Fills the log over some connections; the batches that were acknowledged.
fn fill(server: &Server, operator: &Operator, runtime: &tokio::runtime::Runtime, key: &str) -> u64 {
    let next = Arc::new(AtomicU64::new(0));
    let address = server.url("").trim_start_matches("http://").to_owned();
    while operator.gauge(server, "flywheel_ingest_backlog_bytes") < LOG_BYTES {
        let lines = (0..4).map(|_| {
            let (next, address, key) = (Arc::clone(&next), address.clone(), key.to_owned());
            runtime.spawn(async move {
                let mut line = Line::open(&address).await.unwrap();
                for _ in 0..10 {
                    send(&mut line, &key, next.fetch_add(1, Ordering::Relaxed)).await;
                }
            })
        });
        runtime.block_on(futures::future::try_join_all(lines)).unwrap();
    }
    next.load(Ordering::Relaxed)
}

#[test]
fn a_log_larger_than_memory_is_replayed_in_pieces() {
    let mut server = Server::with_config(&unit_arguments().unwrap(), NO_COMMITS).unwrap();
    let operator = Operator::of(&server);
    let key = server.ingest_key().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let batches = fill(&server, &operator, &runtime, &key);
    let log_bytes = operator.gauge(&server, "flywheel_ingest_backlog_bytes");
    server.set_config(SHIPPED).unwrap();
    server.kill_and_restart().unwrap();

    let (status, ready) = operator.ready(&server);
    let words = ["intake", "query", "database"].map(|w| ready[w].as_bool());
    assert_eq!((status, words), (503, [Some(true), Some(false), Some(true)]), "{ready}");
    assert_eq!(ready["replay"]["total_bytes"].as_f64(), Some(log_bytes), "{ready}");
    let count = "SELECT count(*), count(DISTINCT interaction_id) FROM interactions";
    let (status, refused) = operator.sql(&server, count);
    assert_eq!((status, refused["code"].as_str()), (503, Some("replaying")), "{refused}");
    // telemetry is taken meanwhile
    let address = server.url("").trim_start_matches("http://").to_owned();
    runtime.block_on(async { send(&mut Line::open(&address).await.unwrap(), &key, batches).await });
    let mut refusals = 0;
    let rows = wait_for("an answer", || {
        let (status, answer) = operator.sql(&server, count);
        if status == 200 {
            return Some(answer["rows"].clone());
        }
        assert_eq!((status, &answer["code"]), (503, &Value::from("replaying")), "{answer}");
        refusals += 1;
        None
    });
    let all = (batches + 1) * RECORDS;
    assert_eq!(rows, serde_json::json!([[all, all]]), "the first answer is whole");
    operator.wait_until_committed(&server);
    assert_eq!(operator.rows(&server, count), rows);
    assert_eq!(operator.ready(&server).0, 200);
    let peak = server.peak_rss_kb();
    println!("{:.0} MB in the log, {all} rows, {refusals} queries refused, {peak} kB at most", log_bytes / 1e6);
    assert!(peak < MEMORY_KB, "{peak} kB for a log of {:.0} MB", log_bytes / 1e6);
}
