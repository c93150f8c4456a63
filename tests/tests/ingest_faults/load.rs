//! Phones for the fault tests: each sends one numbered batch after another over real sockets, and the same batch again until
//! it is acknowledged. What must be stored in the end follows from how many batches each got through.

use flywheel_tests::phone::{Install, answer};
use flywheel_tests::{Server, client};
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as V;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use prost::Message as _;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Pause of a phone that was told to come back.
const PAUSE: Duration = Duration::from_millis(20);
/// Answers of one batch.
const ANSWERS: u64 = 20;

/// How a phone sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// OTLP logs as protobuf, each batch named by an `Idempotency-Key`. One batch in five holds a record that no table takes.
    Otlp,
    /// Signed batches of the SDK: answers, and what happened on the device.
    Sdk,
    /// Feedback lines, each batch named by an `Idempotency-Key`.
    Feedback,
}

/// What all phones saw.
#[derive(Default)]
pub struct Ledger {
    /// Batches that were acknowledged.
    pub batches: AtomicU64,
    /// Items that were acknowledged as stored before.
    pub duplicates: AtomicU64,
    /// Items of requests that were never answered: if they were repeated, nobody knows how each was counted.
    pub unanswered: AtomicU64,
    /// Items of requests that were answered with 503.
    pub refused: AtomicU64,
}

/// Where phones find the server, and what they share.
#[derive(Clone)]
pub struct Network {
    http: reqwest::Client,
    base: String,
    ingest_key: String,
    /// Counts the starts of the server.
    up: watch::Receiver<u64>,
    stop: Arc<AtomicBool>,
    pub ledger: Arc<Ledger>,
}

/// Ends the phones, and tells them of a restart.
pub struct Control {
    up: watch::Sender<u64>,
    stop: Arc<AtomicBool>,
}

impl Control {
    /// The server is back.
    pub fn restarted(&self) {
        self.up.send_modify(|n| *n += 1);
    }
    /// Phones end after the batch that they are at.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Network {
    pub fn of(server: &Server) -> (Self, Control) {
        let (sender, up) = watch::channel(0);
        let stop = Arc::new(AtomicBool::new(false));
        let out = Self {
            http: client().unwrap(),
            base: server.url(""),
            ingest_key: server.ingest_key().unwrap(),
            up,
            stop: Arc::clone(&stop),
            ledger: Arc::default(),
        };
        (out, Control { up: sender, stop })
    }
}

/// A phone.
pub struct Phone {
    pub name: String,
    pub kind: Kind,
    install: Install,
}

/// What a phone got acknowledged.
pub struct Sent {
    pub phone: Phone,
    pub batches: u64,
}

/// One request, as often as it takes.
struct Batch {
    request: reqwest::RequestBuilder,
    items: u64,
}

impl Phone {
    pub fn new(number: u64, kind: Kind) -> Self {
        Self { name: format!("p{number}"), kind, install: Install::new(number) }
    }

    /// Ids that batch `n` carries.
    pub fn ids(&self, n: u64) -> Vec<String> {
        (0..ANSWERS).map(|k| format!("{}-{n:06}-{k:02}", self.name)).collect()
    }

    /// Records of batch `n` that are quarantined.
    pub fn bad(&self, n: u64) -> u64 {
        u64::from(self.kind == Kind::Otlp && n.is_multiple_of(5))
    }

    /// Device events of a batch.
    pub fn device_events(&self) -> u64 {
        u64::from(self.kind == Kind::Sdk)
    }

    fn batch(&self, n: u64, net: &Network) -> Batch {
        let ids = self.ids(n);
        let items = ids.len() as u64 + self.bad(n) + self.device_events();
        let post = |path: &str, kind: &str| {
            let request = net.http.post(format!("{}{path}", net.base)).header("x-fleet-ingest-key", &net.ingest_key);
            request.header("content-type", kind)
        };
        let key = format!("{}-{n}", self.name);
        let request = match self.kind {
            Kind::Otlp => post("/v1/logs", "application/x-protobuf")
                .header("idempotency-key", key)
                .body(otlp(&ids, self.bad(n) > 0)),
            Kind::Sdk => {
                let mut events: Vec<_> = ids.iter().map(|id| answer(id)).collect();
                events.push(json!({ "kind": "device", "at": "2026-03-02T00:00:00Z", "event": "confirmed" }));
                let body = self.install.batch(n, &events);
                let [a, b] = self.install.headers(&body);
                post("/v1/events", "application/json").header(a.0, a.1).header(b.0, b.1).body(body)
            }
            Kind::Feedback => {
                let line = |id: &String| {
                    json!({ "interaction_id": id, "at": "2026-03-02T00:00:00Z", "label": "rejected" }).to_string()
                        + "\n"
                };
                let lines: String = ids.iter().map(line).collect();
                post("/v1/feedback", "application/x-ndjson").header("idempotency-key", key).body(lines)
            }
        };
        Batch { request, items }
    }

    /// Sends until it is told to stop; every batch that it began is acknowledged then.
    pub async fn run(self, mut net: Network) -> Sent {
        let mut batches = 0;
        while !net.stop.load(Ordering::Relaxed) {
            batches += 1;
            let batch = self.batch(batches, &net);
            while !attempt(&batch, &mut net).await {}
            net.ledger.batches.fetch_add(1, Ordering::Relaxed);
        }
        Sent { phone: self, batches }
    }
}

/// Sends a batch once; whether it was acknowledged. Waits for a restart when nobody answered.
async fn attempt(batch: &Batch, net: &mut Network) -> bool {
    let start = *net.up.borrow_and_update();
    let request = batch.request.try_clone().unwrap();
    let answered = async {
        let answer = request.send().await?;
        let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
        answer.bytes().await.map(|body| (status, headers, body))
    };
    match answered.await {
        Ok((200, headers, _)) => {
            if headers.contains_key("x-fleet-duplicate") {
                net.ledger.duplicates.fetch_add(batch.items, Ordering::Relaxed);
            }
            true
        }
        Ok((503, headers, _)) => {
            assert!(headers.contains_key("retry-after"), "a 503 says when to come back");
            net.ledger.refused.fetch_add(batch.items, Ordering::Relaxed);
            tokio::time::sleep(PAUSE).await;
            false
        }
        Ok((status, _, body)) => panic!("{status}: {}", String::from_utf8_lossy(&body)),
        Err(e) => {
            net.ledger.unanswered.fetch_add(batch.items, Ordering::Relaxed);
            let back = net.up.wait_for(|n| *n > start);
            assert!(tokio::time::timeout(Duration::from_secs(120), back).await.is_ok(), "nobody answers: {e}");
            false
        }
    }
}

fn text(key: &str, value: &str) -> KeyValue {
    let value = Some(AnyValue { value: Some(V::StringValue(value.to_owned())) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}

/// Log records of answers; `bad` adds one that is none.
fn otlp(ids: &[String], bad: bool) -> Vec<u8> {
    let record = |name: &str, id: &str| LogRecord {
        event_name: name.to_owned(),
        attributes: vec![
            text("gen_ai.operation.name", "chat"),
            text("gen_ai.request.model", "deepseek-r1-distill-qwen-1.5b"),
            text("gen_ai.prompt.name", "faq"),
            text("gen_ai.response.id", id),
            text("session.id", &format!("s-{id}")),
            text("note", &format!("an attribute without a column of its own, of {id}")),
        ],
        ..LogRecord::default()
    };
    let mut log_records: Vec<_> =
        ids.iter().map(|id| record("gen_ai.client.inference.operation.details", id)).collect();
    if bad {
        log_records.insert(ids.len() / 2, record("app.crash", "none"));
    }
    let scope_logs = vec![ScopeLogs { log_records, ..ScopeLogs::default() }];
    let resource_logs = vec![ResourceLogs { scope_logs, ..ResourceLogs::default() }];
    ExportLogsServiceRequest { resource_logs }.encode_to_vec()
}
