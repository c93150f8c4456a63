//! The body of a request: log records with about thirty attributes each, encoded once by the official types. Ids stand in it
//! at known places and with a fixed length, so that a new request only writes new digits.

use anyhow::{Result, bail};
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as V;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;
use std::fmt;

/// Encoding of the bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Protobuf,
    Json,
}

impl std::str::FromStr for Format {
    type Err = anyhow::Error;
    fn from_str(word: &str) -> Result<Self> {
        match word {
            "protobuf" => Ok(Self::Protobuf),
            "json" => Ok(Self::Json),
            other => bail!("unknown format {other}: protobuf or json"),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Json { "json" } else { "protobuf" })
    }
}

impl Format {
    pub fn content_type(self) -> &'static str {
        if self == Self::Json { "application/json" } else { "application/x-protobuf" }
    }
}

/// What an id begins with while the body is encoded; the digits after it are written anew for each request.
const MARKS: [&str; 3] = ["aaaaaaaa", "bbbbbbbb", "cccccccc"];
/// Hex digits of an id that are rewritten.
const DIGITS: usize = 16;
const TIME_NS: u64 = 1_772_359_200_000_000_000;

/// An encoded request.
pub struct Body {
    bytes: Vec<u8>,
    /// Where the digits of the ids begin.
    ids: Vec<usize>,
}

impl Body {
    pub fn new(format: Format, records: usize) -> Result<Self> {
        let request = request(records);
        let bytes = match format {
            Format::Protobuf => request.encode_to_vec(),
            Format::Json => serde_json::to_vec(&request)?,
        };
        let mut ids = Vec::new();
        for at in 0..bytes.len() {
            if MARKS.iter().any(|m| bytes.get(at..).is_some_and(|rest| rest.starts_with(m.as_bytes()))) {
                ids.push(at + MARKS[0].len());
            }
        }
        if ids.len() != records * MARKS.len() {
            bail!("{} ids were found in {records} records", ids.len());
        }
        Ok(Self { bytes, ids })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes the ids of request `number`: unlike those of any other.
    pub fn number(&mut self, number: u64) {
        let mut digits = [0; DIGITS];
        for (i, at) in self.ids.iter().enumerate() {
            let id = mixed(number << 16 | i as u64);
            for (k, digit) in digits.iter_mut().enumerate() {
                *digit = b"0123456789abcdef"[(id >> (4 * k) & 15) as usize];
            }
            if let Some(place) = self.bytes.get_mut(*at..*at + DIGITS) {
                place.copy_from_slice(&digits);
            }
        }
    }
}

/// SplitMix64's finaliser: one to one, and the digits look as random as real ones to dictionaries and codecs.
fn mixed(mut n: u64) -> u64 {
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

fn request(records: usize) -> ExportLogsServiceRequest {
    let log_records = (0..records).map(|i| record(i as u64)).collect();
    let resource = Resource {
        attributes: vec![text("service.name", "assistant-app"), text("service.version", "5.2.0")],
        ..Resource::default()
    };
    ExportLogsServiceRequest {
        resource_logs: vec![ResourceLogs {
            resource: Some(resource),
            scope_logs: vec![ScopeLogs { log_records, ..ScopeLogs::default() }],
            ..ResourceLogs::default()
        }],
    }
}

fn record(i: u64) -> LogRecord {
    // any spread of values will do; a fixed one makes every run send the same
    let mut state = i.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1;
    let mut below = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % n
    };
    let rest = "0".repeat(DIGITS);
    let name = ["faq", "summarise", "rewrite"][below(3) as usize];
    let model = ["iPhone16,1", "Pixel 8", "23117RA68G"][below(3) as usize];
    let soc = ["a17-pro", "tensor-g3", "dimensity-7200"][below(3) as usize];
    let quantization = ["q4_k_m", "q8_0"][below(2) as usize];
    let (os, arm) = (["ios", "android"][below(2) as usize], ["control", "canary"][below(2) as usize]);
    let attributes = vec![
        text("gen_ai.operation.name", "chat"),
        text("gen_ai.provider.name", "on_device"),
        text("gen_ai.request.model", "deepseek-r1-distill-qwen-1.5b"),
        text("gen_ai.response.id", &format!("{}{rest}", MARKS[0])),
        double("gen_ai.response.time_to_first_chunk", 0.3 + below(2700) as f64 / 1000.0),
        int("gen_ai.usage.input_tokens", 40 + below(860)),
        int("gen_ai.usage.output_tokens", 5 + below(215)),
        list("gen_ai.response.finish_reasons", vec![V::StringValue("stop".to_owned())]),
        text("gen_ai.prompt.name", name),
        text("fleet.prompt.hash", &format!("{:016x}", below(u64::MAX))),
        text("fleet.bundle.id", &format!("assistant/{}", 178 + below(5))),
        text("fleet.model.quantization", quantization),
        list("fleet.retrieval.chunk_ids", (0..3).map(|_| V::StringValue(format!("kb-{}", 1 + below(5000)))).collect()),
        list("fleet.retrieval.scores", (0..3).map(|_| V::DoubleValue(below(10_000) as f64 / 10_000.0)).collect()),
        double("fleet.decode.tokens_per_second", 5.0 + below(3500) as f64 / 100.0),
        int("fleet.memory.peak_bytes", (300 + below(600)) << 20),
        int("fleet.model.load_ms", 700 + below(12_300)),
        flag("fleet.cold_start", below(10) == 0),
        double("fleet.battery.level_start", below(100) as f64 / 100.0),
        flag("fleet.battery.charging", below(10) < 3),
        int("fleet.thermal.state_end", below(4)),
        int("fleet.energy.millijoules", 500 + below(89_500)),
        flag("fleet.refusal", below(50) == 0),
        text("device.model.identifier", model),
        text("fleet.device.soc", soc),
        text("os.name", os),
        text("os.version", "17.4"),
        text("session.id", &format!("{}{rest}", MARKS[1])),
        text("app.installation.id", &format!("{}{rest}00000000", MARKS[2])),
        text("fleet.rollout.arm", arm),
    ];
    LogRecord {
        time_unix_nano: TIME_NS + i * 1000,
        event_name: "gen_ai.client.inference.operation.details".to_owned(),
        attributes,
        ..LogRecord::default()
    }
}

fn pair(key: &str, value: V) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}
fn text(key: &str, value: &str) -> KeyValue {
    pair(key, V::StringValue(value.to_owned()))
}
fn int(key: &str, value: u64) -> KeyValue {
    pair(key, V::IntValue(value as i64))
}
fn double(key: &str, value: f64) -> KeyValue {
    pair(key, V::DoubleValue(value))
}
fn flag(key: &str, value: bool) -> KeyValue {
    pair(key, V::BoolValue(value))
}
fn list(key: &str, values: Vec<V>) -> KeyValue {
    let values = values.into_iter().map(|v| AnyValue { value: Some(v) }).collect();
    pair(key, V::ArrayValue(ArrayValue { values }))
}
