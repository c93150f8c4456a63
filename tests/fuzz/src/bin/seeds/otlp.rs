//! OTLP bodies in both encodings, written by hand: the wire forms are what the targets read.

use super::Corpus;
use serde_json::json;

pub(super) fn attribute(key: &str, value: serde_json::Value) -> serde_json::Value {
    json!({ "key": key, "value": value })
}

fn answer_attributes() -> Vec<serde_json::Value> {
    let text = |s: &str| json!({ "stringValue": s });
    vec![
        attribute("gen_ai.operation.name", text("chat")),
        attribute("gen_ai.response.id", text("r-1")),
        attribute("gen_ai.response.time_to_first_chunk", json!({ "doubleValue": 0.8125 })),
        attribute("gen_ai.usage.input_tokens", json!({ "intValue": "120" })),
        attribute("gen_ai.prompt.name", text("faq")),
        attribute("gen_ai.prompt.version", text("3")),
        attribute(
            "gen_ai.input.messages",
            text(r#"[{"role":"user","parts":[{"type":"text","content":"How long?"}]}]"#),
        ),
        attribute(
            "gen_ai.output.messages",
            text(r#"[{"role":"assistant","parts":[{"type":"text","content":"Sorry"}]}]"#),
        ),
        attribute("fleet.bundle.id", text("assistant/180")),
        attribute("fleet.retrieval.chunk_ids", json!({ "arrayValue": { "values": [text("kb-1@2"), text("kb-9")] } })),
        attribute(
            "fleet.retrieval.scores",
            json!({ "arrayValue": { "values": [{ "doubleValue": 0.9 }, { "doubleValue": "NaN" }] } }),
        ),
        attribute("fleet.energy.millijoules", json!({ "doubleValue": "NaN" })),
        attribute("fleet.refusal", json!({ "boolValue": true })),
        attribute("fleet.rollout.arm", text("canary")),
        attribute("os.name", text("ios")),
        attribute("my.map", json!({ "kvlistValue": { "values": [attribute("a", text("b"))] } })),
        attribute("my.bytes", json!({ "bytesValue": "AAEC" })),
    ]
}

pub fn json_bodies(traces: &Corpus, logs: &Corpus) {
    let resource = json!({ "attributes": [attribute("service.version", json!({ "stringValue": "5.2.0" }))] });
    let trace_id = "01".repeat(16);
    let documents = r#"[{"id":"kb-4","score":0.7},{"id":"kb-5"}]"#;
    let retrieval = json!({ "traceId": trace_id, "spanId": "0202020202020202", "attributes": [
        attribute("gen_ai.operation.name", json!({ "stringValue": "retrieval" })),
        attribute("gen_ai.retrieval.documents", json!({ "stringValue": documents })),
    ] });
    let feedback = json!({ "name": "gen_ai.evaluation.result", "timeUnixNano": "1772359200000000000", "attributes": [
        attribute("gen_ai.evaluation.name", json!({ "stringValue": "user_feedback" })),
        attribute("gen_ai.evaluation.score.label", json!({ "stringValue": "regenerated" })),
        attribute("gen_ai.response.id", json!({ "stringValue": "r-7" })),
    ] });
    let chat = json!({ "traceId": trace_id, "spanId": "0303030303030303", "name": "chat",
        "startTimeUnixNano": "1772359200000000000", "endTimeUnixNano": 1_772_359_201_000_000_000u64,
        "attributes": [
            attribute("gen_ai.operation.name", json!({ "stringValue": "chat" })),
            attribute("gen_ai.response.id", json!({ "stringValue": "r-7" })),
        ], "events": [feedback.clone()] });
    let spans = json!({ "resourceSpans": [{ "resource": resource, "scopeSpans": [{ "spans": [retrieval, chat] }] }] });
    traces.add("spans", spans.to_string());
    let full = json!({ "traceId": trace_id, "spanId": "0404040404040404", "attributes": answer_attributes() });
    traces.add("answer", json!({ "resourceSpans": [{ "scopeSpans": [{ "spans": [full] }] }] }).to_string());
    let record = |name: &str, attributes: serde_json::Value| {
        let log = json!({ "eventName": name, "timeUnixNano": "1772359200000000000", "attributes": attributes });
        json!({ "resourceLogs": [{ "resource": resource, "scopeLogs": [{ "logRecords": [log] }] }] }).to_string()
    };
    logs.add_with(1, "answer_json", record("gen_ai.client.inference.operation.details", answer_attributes().into()));
    logs.add_with(1, "feedback_json", record("gen_ai.evaluation.result", feedback["attributes"].clone()));
    logs.add_with(
        1,
        "device_json",
        record("fleet.device", json!([attribute("fleet.device.event", json!({ "stringValue": "confirmed" }))])),
    );
}

/// Writers of protobuf fields.
pub(super) mod proto {
    pub fn varint(mut v: u64, out: &mut Vec<u8>) {
        while v >= 0x80 {
            out.push(v as u8 | 0x80);
            v >>= 7;
        }
        out.push(v as u8);
    }
    pub fn bytes(number: u64, content: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        varint(number << 3 | 2, &mut out);
        varint(content.len() as u64, &mut out);
        out.extend_from_slice(content);
        out
    }
    pub fn int(number: u64, v: u64) -> Vec<u8> {
        let mut out = Vec::new();
        varint(number << 3, &mut out);
        varint(v, &mut out);
        out
    }
    pub fn fixed64(number: u64, v: u64) -> Vec<u8> {
        let mut out = Vec::new();
        varint(number << 3 | 1, &mut out);
        out.extend_from_slice(&v.to_le_bytes());
        out
    }
}

/// `AnyValue` of a ProtoJSON value.
fn any(value: &serde_json::Value) -> Vec<u8> {
    let values = |v: &serde_json::Value| v["values"].as_array().cloned().unwrap_or_default();
    let (kind, v) = value.as_object().and_then(|o| o.iter().next()).expect("a value has one kind");
    match kind.as_str() {
        "stringValue" => proto::bytes(1, v.as_str().unwrap_or_default().as_bytes()),
        "boolValue" => proto::int(2, u64::from(v == true)),
        "intValue" => proto::int(3, v.as_str().and_then(|s| s.parse().ok()).unwrap_or(0)),
        "doubleValue" => proto::fixed64(4, v.as_f64().unwrap_or(f64::NAN).to_bits()),
        "arrayValue" => proto::bytes(5, &values(v).iter().flat_map(|i| proto::bytes(1, &any(i))).collect::<Vec<_>>()),
        "kvlistValue" => proto::bytes(6, &values(v).iter().flat_map(|p| pair(1, p)).collect::<Vec<_>>()),
        _ => proto::bytes(7, &[0, 1, 2]),
    }
}

/// `KeyValue` in field `number`.
pub(super) fn pair(number: u64, pair: &serde_json::Value) -> Vec<u8> {
    let key = proto::bytes(1, pair["key"].as_str().unwrap_or_default().as_bytes());
    proto::bytes(number, &[key, proto::bytes(2, &any(&pair["value"]))].concat())
}

pub fn proto_bodies(traces: &Corpus, logs: &Corpus) {
    let all = answer_attributes();
    let pairs = |number, of: &[serde_json::Value]| of.iter().flat_map(|p| pair(number, p)).collect::<Vec<u8>>();
    let wrap = |record: Vec<u8>| {
        let resource = proto::bytes(1, &pairs(1, &[attribute("service.version", json!({ "stringValue": "5.2.0" }))]));
        let scope = proto::bytes(2, &proto::bytes(2, &record));
        proto::bytes(1, &[resource, scope].concat())
    };
    let ids = [proto::bytes(1, &[1; 16]), proto::bytes(2, &[2; 8])].concat();
    let time = proto::fixed64(7, 1_772_359_200_000_000_000);
    let event = proto::bytes(11, &[proto::bytes(2, b"gen_ai.evaluation.result"), pairs(3, &all[..3])].concat());
    let span = [ids, proto::bytes(5, b"chat"), time, pairs(9, &all), event].concat();
    traces.add("span", wrap(span));
    traces.add("bare_span", wrap([proto::bytes(1, &[1; 16]), pairs(9, &all[..2])].concat()));
    let name = proto::bytes(12, b"gen_ai.client.inference.operation.details");
    let log = [proto::fixed64(1, 1_772_359_200_000_000_000), pairs(6, &all), name].concat();
    logs.add_with(0, "log_proto", wrap(log));
}
