//! OTLP/HTTP bodies: traces, logs and metrics, protobuf and JSON.

use crate::choice;
use crate::telemetry::{check, with_context};
use flywheel_telemetry::Endpoint;
use flywheel_telemetry::otlp::wire::Fields;
use flywheel_telemetry::otlp::{Encoding, decode, respond};
use flywheel_types::wire::IngestAckV1;

/// `/v1/traces` as protobuf.
pub fn traces_proto(data: &[u8]) {
    fields(data, 8);
    request(Endpoint::OtlpTraces, Encoding::Protobuf, data);
}

/// `/v1/traces` as JSON.
pub fn traces_json(data: &[u8]) {
    request(Endpoint::OtlpTraces, Encoding::Json, data);
}

/// `/v1/logs`. First byte, bit 0: JSON instead of protobuf.
pub fn logs(data: &[u8]) {
    let (flags, body) = choice(data);
    let encoding = if flags & 1 != 0 { Encoding::Json } else { Encoding::Protobuf };
    request(Endpoint::OtlpLogs, encoding, body);
}

/// `/v1/metrics` as protobuf.
pub fn metrics_proto(data: &[u8]) {
    request(Endpoint::OtlpMetrics, Encoding::Protobuf, data);
}

/// `/v1/metrics` as JSON.
pub fn metrics_json(data: &[u8]) {
    request(Endpoint::OtlpMetrics, Encoding::Json, data);
}

fn request(endpoint: Endpoint, encoding: Encoding, body: &[u8]) {
    match with_context(endpoint, 0, |c| decode(c, encoding, body)) {
        Ok(decoded) => {
            check(&decoded, None);
            let reasons = decoded.quarantined.iter().map(|q| q.detail.clone()).collect();
            let quarantined = decoded.quarantined.len() as u64;
            let ack = IngestAckV1 { stored: 0, duplicate: 0, quarantined, reasons };
            answer(encoding, &respond::success(endpoint, encoding, &ack));
        }
        Err(e) => answer(encoding, &respond::failure(encoding, &e)),
    }
}

/// Answers are readable in the encoding of the request.
fn answer(encoding: Encoding, bytes: &[u8]) {
    match encoding {
        Encoding::Json => assert!(serde_json::from_slice::<serde_json::Value>(bytes).is_ok()),
        Encoding::Protobuf => assert!(Fields(bytes).all(|f| f.is_ok())),
    }
}

/// The wire reader alone: it always ends, and its values lie inside the message.
fn fields(message: &[u8], depth: usize) {
    let mut seen = 0;
    for field in Fields(message) {
        let Ok((number, value)) = field else { break };
        assert!(number > 0);
        if let Ok(inner) = value.bytes(number) {
            assert!(inner.len() < message.len());
            seen += inner.len();
            if depth > 0 && seen <= message.len() {
                fields(inner, depth - 1);
            }
        }
        assert!(seen <= message.len());
    }
}
