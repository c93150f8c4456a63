//! What our own programs leave on disk: the server's write-ahead log, the queue and state of a device.

use super::{BATCH, Corpus};
use flywheel_fuzz::bundle::repository::app;
use flywheel_fuzz::join_pieces;
use flywheel_telemetry::ingest::Recovery;
use flywheel_telemetry::wal::LogConfig;
use flywheel_telemetry::{Endpoint, IngestHeaders, IngestRequest, Settings};
use serde_json::json;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Runs a future that another thread completes.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return out;
        }
        std::thread::yield_now();
    }
}

const GAUGE: &str =
    r#"{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"m","gauge":{"dataPoints":[{"asInt":"7"}]}}]}]}]}"#;

pub fn wal(out: &Corpus) {
    let folder = std::env::temp_dir().join(format!("flywheel-seeds-{}", std::process::id()));
    let recovery = Recovery::open(LogConfig::new(&folder)).expect("an empty log opens");
    let ingest = recovery.start(Settings::default(), 0).expect("the log starts");
    let events: Vec<String> = {
        let value: serde_json::Value = serde_json::from_str(BATCH).expect("the golden batch is JSON");
        value["events"].as_array().expect("it has events").iter().map(ToString::to_string).collect()
    };
    // one request a record, and a gauge as the last
    let events = events.into_iter().map(|body| (Endpoint::Events, "application/x-ndjson", body));
    let gauge = (Endpoint::OtlpMetrics, "application/json", GAUGE.to_owned());
    for (i, (endpoint, content_type, body)) in events.chain([gauge]).enumerate() {
        let headers = IngestHeaders {
            content_type: Some(content_type.into()),
            idempotency_key: Some(format!("k{i}")),
            ..IngestHeaders::default()
        };
        let now = "2026-03-01T10:00:06Z".parse().expect("a valid time");
        let request = IngestRequest { app: app(), ingest_key: "key".into(), endpoint, headers, body: body.into(), now };
        wait(ingest.ingest(request)).expect("the event is stored");
    }
    drop(ingest);
    let segment = std::fs::read_dir(&folder)
        .expect("the log folder is there")
        .filter_map(|e| e.ok().map(|e| e.path()))
        .find(|p| p.extension().is_some_and(|e| e == "log"))
        .and_then(|p| std::fs::read(p).ok())
        .expect("the log has a segment");
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
    let payloads = payloads(&segment);
    // `payload_0` to `_2`, `segment` and `torn` were left by a program that wrote version 1, and stay as they are
    for (i, payload) in payloads.iter().enumerate() {
        out.add_with(1, &format!("v2_payload_{i}"), join_pieces([payload.as_slice()]));
    }
    out.add_with(1, "v1_metrics", join_pieces([version_1(payloads.last().expect("there are records")).as_slice()]));
    out.add_with(1, "both_versions", join_pieces([&version_1(&payloads[1])[..], &payloads[1]]));
    // the smallest record once more as a whole segment, and one cut short
    let smallest = payloads.iter().min_by_key(|p| p.len()).expect("there are records");
    let (whole, _) = flywheel_fuzz::wal::framed(&join_pieces([smallest.as_slice()]));
    out.add_with(0, "v2_segment", &whole);
    out.add_with(2, "v2_torn", &whole[..whole.len() - 9]);
    // a directory that claims more than there is, and less
    let mut bent = smallest.clone();
    bent[7] ^= 0x40;
    out.add_with(1, "v2_bent_directory", join_pieces([bent.as_slice()]));
    out.add_with(1, "v2_many_sections", join_pieces([&[2, 255, 16][..], &[2, 0], &[2]]));
    out.add_with(1, "keys_only", join_pieces([&keys(&[(3, 1), (3, 2), (3, 9)])[..], &[1], &[99, 1, 2]]));
    let install = [
        &7u64.to_le_bytes()[..],
        &1u64.to_le_bytes(),
        &[3; 16],
        &5u64.to_le_bytes(),
        &[1],
        &8u64.to_le_bytes(),
        &9u64.to_le_bytes(),
    ];
    out.add_with(4, "duplicates", install.concat());
}

/// The payload of version 2 as version 1 wrote it: no directory, a tag and a length before each section.
fn version_1(payload: &[u8]) -> Vec<u8> {
    let (entries, n) = (&payload[2..], usize::from(payload[1]));
    let (mut at, mut out) = (2 + 13 * n, vec![1]);
    for entry in entries.chunks(13).take(n) {
        let len = u32::from_le_bytes([entry[5], entry[6], entry[7], entry[8]]);
        out.push(entry[0]);
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(&payload[at..at + len as usize]);
        at += len as usize;
    }
    out
}

/// A payload with batch identities only.
fn keys(of: &[(u8, u64)]) -> Vec<u8> {
    let entry = |(scope, seq): &(u8, u64)| [&[1][..], &[*scope; 16], &seq.to_le_bytes(), &[0; 4]].concat();
    let all: Vec<u8> = of.iter().flat_map(entry).collect();
    [&[1, 16][..], &(all.len() as u32).to_le_bytes(), &all].concat()
}

/// Payloads of a segment, in order.
fn payloads(segment: &[u8]) -> Vec<Vec<u8>> {
    let (mut rest, mut out) = (&segment[16..], Vec::new());
    while rest.len() > 24 {
        let len = u32::from_le_bytes([rest[4], rest[5], rest[6], rest[7]]) as usize;
        out.push(rest[24..24 + len].to_vec());
        rest = &rest[24 + len..];
    }
    out
}

/// A record of the SDK's queue: tag, numbers, rest.
fn record(tag: u8, numbers: &[u64], rest: &[u8]) -> Vec<u8> {
    let numbers: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    [&[tag], &numbers[..], rest].concat()
}

pub fn sdk(queue: &Corpus, index: &Corpus) {
    let value: serde_json::Value = serde_json::from_str(BATCH).expect("the golden batch is JSON");
    let event = |i: usize| value["events"][i].to_string();
    let base = record(1, &[], br#"{"next_seq":4,"next_event":9,"last_report":2,"dropped":{}}"#);
    let interaction = record(2, &[9, 0], &[&[1], event(0).as_bytes()].concat());
    let device = record(2, &[10, 3], &[&[0], event(2).as_bytes()].concat());
    let list = |numbers: &[u64], rest: &[u8]| {
        let all: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        [&(numbers.len() as u32).to_le_bytes()[..], &all, rest].concat()
    };
    let batch = record(3, &[4], &list(&[9], value.to_string().as_bytes()));
    let acked = record(4, &[4], &[]);
    let refused = record(5, &[4], br#"{"http_400":1}"#);
    let split = record(6, &[4], &[]);
    let dropped = record(7, &[], &list(&[10], br#"{"queue_full":1}"#));
    let pieces = |all: &[&Vec<u8>]| join_pieces(all.iter().map(|r| r.as_slice()));
    let queued = pieces(&[&base, &interaction, &device]);
    queue.add_with(1, "queued", &queued);
    queue.add_with(0, "raw", flywheel_fuzz::sdk::framed(&queued));
    queue.add_with(1 | 2, "acked", pieces(&[&base, &interaction, &batch, &acked, &device]));
    queue.add_with(1 | 8, "split", pieces(&[&base, &interaction, &device, &batch, &split]));
    queue.add_with(1 | 16, "refused", pieces(&[&base, &interaction, &batch, &refused]));
    queue.add_with(1 | 24, "in_flight", pieces(&[&base, &interaction, &batch, &dropped]));
    let state = json!({ "v": 1, "active": null, "previous": null, "off": false, "loading": null, "failures_in_a_row": 0,
        "verdicts": [], "arm": null, "exposures": [], "joined": [], "next_install_no": 1, "next_report": 5,
        "reports": [{ "no": 4, "event": { "at": "2026-03-01T10:00:01Z", "event": "confirmed" } }],
        "next_poll_at": "2026-03-01T11:00:00Z", "epoch_floor": 1, "last_refusal": null });
    queue.add_with(4, "state", state.to_string());
    let chunk = |id: &str, state: &str| {
        json!({ "chunk_id": id, "version": 1, "state": state, "text": "24 months", "embedding": "AACAPwAAAAA=",
            "hide": { "salt": "s", "share_ppm": 500_000, "shown": true } })
    };
    let first = json!({ "index_version": 2, "changes": [chunk("a", "active"), chunk("b", "frozen")] }).to_string();
    let second = json!({ "index_version": 3, "changes": [chunk("a", "retired")] }).to_string();
    index.add("two_answers", join_pieces([first.as_bytes(), second.as_bytes()]));
}
