//! The tables as two engines that are not ours read them, DuckDB and Polars (`tests/interop/read_table.py`): for every column of
//! every table the same counts, sums, limits and sizes as our own SQL, NULLs, lists and maps included; after commits and
//! checkpoints, and after small files were joined. Left out with a line when `PYTHON` (or `python3`) has not both of them.

use crate::ask::{Operator, wait_for};
use crate::delta::DeltaLog;
use crate::load::{Kind, Network, Phone};
use flywheel_tests::phone::Install;
use flywheel_tests::{Server, unit_arguments};
use serde_json::{Value, json};
use std::process::Command;

const TABLES: [&str; 6] = ["interactions", "feedback", "device_events", "dispositions", "rejects", "outcomes"];
/// Commits without a pause, so that there are many.
const CONFIG: &str = "[ingest]\nflush_s = 0\n";
/// More commits than a checkpoint takes (50).
const COMMITS: usize = 60;

fn python() -> Command {
    Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()))
}

fn engines_are_there() -> bool {
    python().args(["-c", "import duckdb, polars"]).output().is_ok_and(|out| out.status.success())
}

/// What our SQL says of a column, in the order of the script's profile.
fn expressions(column: &str, kind: &str) -> Vec<String> {
    let sum = |what: String| format!("coalesce(sum({what}), 0)");
    let length = sum(format!("coalesce(array_length({column}), 0)"));
    let bytes = |list: &str| sum(format!("octet_length(array_to_string({list}, ''))"));
    let more = match kind {
        "number" => ["sum", "min", "max"].map(|f| format!("{f}({column})")).into(),
        "flag" => vec![sum(format!("CASE WHEN {column} THEN 1 ELSE 0 END"))],
        "time" => ["min", "max"].map(|f| format!("CAST({f}({column}) AS BIGINT)")).into(),
        "day" => ["min", "max"].map(|f| format!("CAST({f}({column}) AS INT)")).into(),
        "text" => vec![sum(format!("octet_length({column})"))],
        "text_list" => vec![length, bytes(column)],
        // their elements are asked apart
        "number_list" => vec![length],
        "map" => {
            let (keys, values) = (bytes(&format!("map_keys({column})")), bytes(&format!("map_values({column})")));
            vec![sum(format!("cardinality({column})")), format!("{keys} + {values}")]
        }
        other => panic!("`{column}` is of an unknown kind {other}"),
    };
    [vec![format!("count({column})")], more].concat()
}

fn ours(server: &Server, operator: &Operator, table: &str, kinds: &Value) -> Vec<(String, Vec<Value>)> {
    let columns: Vec<(&str, Vec<String>)> = kinds
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, kind)| (name.as_str(), expressions(name, kind.as_str().unwrap())))
        .collect();
    let all: Vec<String> = columns.iter().flat_map(|(_, e)| e.clone()).collect();
    let mut row =
        operator.rows(server, &format!("SELECT {} FROM {table}", all.join(", ")))[0].as_array().unwrap().clone();
    let mut out = Vec::new();
    for (name, wanted) in columns {
        let mut values: Vec<Value> = row.drain(..wanted.len()).collect();
        if kinds[name] == "number_list" {
            let elements =
                format!("SELECT coalesce(sum(CAST(x AS DOUBLE)), 0) FROM (SELECT unnest({name}) AS x FROM {table})");
            values.push(operator.rows(server, &elements)[0][0].clone());
        }
        out.push((name.to_owned(), values));
    }
    out
}

/// Whole numbers exactly, others up to the order in which they were added.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_i64(), b.as_i64(), a.as_f64(), b.as_f64()) {
        (Some(a), Some(b), ..) => a == b,
        (_, _, Some(a), Some(b)) => (a - b).abs() <= 1e-9 * a.abs().max(b.abs()),
        _ => a == b,
    }
}

/// Compares every table; its rows.
fn compare(server: &Server, operator: &Operator) -> Vec<u64> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/read_table.py");
    let mut rows = Vec::new();
    for table in TABLES {
        let folder = server.data_dir().join("lake/tables").join(table);
        let out = python().arg(script).arg(&folder).arg("--profile").output().unwrap();
        assert!(out.status.success(), "{table}: {}", String::from_utf8_lossy(&out.stderr));
        let seen: Value = serde_json::from_slice(&out.stdout).unwrap();
        let count = operator.number(server, &format!("SELECT count(*) FROM {table}"));
        rows.push(count);
        if seen["files"] == 0 {
            assert_eq!(count, 0, "{table} has no files");
            continue;
        }
        for (column, ours) in ours(server, operator, table, &seen["kinds"]) {
            for engine in ["duckdb", "polars"] {
                let theirs = seen[engine][&column].as_array().unwrap();
                let equal = ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| same(a, b));
                assert!(equal, "{table}.{column}: SQL says {ours:?}, {engine} {theirs:?}");
            }
        }
        assert_eq!(seen["duckdb"]["received_at"][0], json!(count), "rows of {table}");
    }
    rows
}

/// Values that columns take seldom: not a number, no value, empty and long lists, maps, letters of several bytes, numbers below
/// zero; and feedback that makes an outcome.
fn send_rare_values(operator: &Operator, server: &Server, key: &str) {
    let install = Install::new(99);
    let answer = |id: &str, more: Value| {
        let mut event = flywheel_tests::phone::answer(id);
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        event
    };
    let chunk =
        |id: &str, score: f64, hidden: bool| json!({ "chunk_id": id, "version": 3, "score": score, "hidden": hidden });
    let events = [
        answer("rare-1", json!({ "retrieval": [chunk("a", 0.25, false), chunk("b", -1.5, true)], "index_version": 7 })),
        answer("rare-2", json!({ "ttft_ms": null, "energy_mj": -2.5, "memory_metric": "rss" })),
        answer("rare-3", json!({ "content": { "question": "Wie groß?", "answer": "Größer als 7 – 数" } })),
        json!({ "kind": "feedback", "interaction_id": "rare-1", "at": "2026-03-02T00:00:00Z", "label": "rejected",
                "reason": "falsch: é" }),
        json!({ "kind": "device", "at": "1969-12-31T00:00:00Z", "event": "load_failed", "load_ms": 12.5 }),
    ];
    let body = install.batch(1, &events);
    let headers = install.headers(&body);
    let stored = operator.post(server, "/v1/events", key, &headers, body);
    assert_eq!(stored["stored"], 5, "{stored}");
    let record = |id: &str, more: &str| {
        format!(
            r#"{{"eventName":"gen_ai.client.inference.operation.details","attributes":[
            {{"key":"gen_ai.response.id","value":{{"stringValue":"{id}"}}}}{more}]}}"#
        )
    };
    let records = [
        record("rare-4", r#",{"key":"gen_ai.response.time_to_first_chunk","value":{"doubleValue":"NaN"}}"#),
        record(
            "rare-5",
            r#",{"key":"fleet.cold_start","value":{"boolValue":true}},{"key":"größe","value":{"stringValue":""}}"#,
        ),
        record("rare-6", r#",{"key":"gen_ai.usage.input_tokens","value":{"intValue":"9007199254740993"}}"#),
    ];
    let body = format!(r#"{{"resourceLogs":[{{"scopeLogs":[{{"logRecords":[{}]}}]}}]}}"#, records.join(","));
    let stored = operator.post(server, "/v1/logs", key, &[], body);
    assert!(stored["partialSuccess"]["rejectedLogRecords"].is_null(), "{stored}");
}

#[test]
fn two_foreign_engines_read_what_sql_says() {
    if !engines_are_there() {
        println!("skipped: PYTHON has no duckdb and polars");
        return;
    }
    let server = Server::with_config(&unit_arguments().unwrap(), CONFIG).unwrap();
    let operator = Operator::of(&server);
    let (net, control) = Network::of(&server);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let kinds = [Kind::Otlp, Kind::Sdk, Kind::Feedback];
    let phones: Vec<_> =
        (0..).zip(kinds).map(|(n, kind)| runtime.spawn(Phone::new(n, kind).run(net.clone()))).collect();
    let log = |table: &str| DeltaLog::read(&server.data_dir().join("lake/tables").join(table));
    wait_for("commits and a checkpoint", || {
        let log = log("interactions");
        (log.versions > COMMITS && log.checkpoints > 0).then_some(())
    });
    control.stop();
    runtime.block_on(async { futures::future::try_join_all(phones).await.unwrap() });
    send_rare_values(&operator, &server, &server.ingest_key().unwrap());
    operator.wait_until_committed(&server);
    compare(&server, &operator);
    // the attribution step derives the outcomes; the nightly housekeeping joins what is left of small files
    operator.advance(&server, "2026-03-02T01:00:00Z");
    let before = compare(&server, &operator);
    assert!(before.iter().all(|rows| *rows > 0), "a table was not tried: {before:?}");
    let joins = log("interactions").joins;
    operator.advance(&server, "2026-03-02T04:00:00Z");
    assert!(log("interactions").joins > joins, "nothing was joined");
    let rows = compare(&server, &operator);
    assert_eq!(rows, before);
    println!("rows of {TABLES:?}: {rows:?}, equal in DuckDB and Polars column by column");
}
