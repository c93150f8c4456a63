//! OTLP metrics in both encodings, written by hand: one point of every form.

use super::Corpus;
use super::otlp::{attribute, pair, proto};
use serde_json::{Value, json};

const TIME: u64 = 1_772_359_200_000_000_000;

fn point_attributes() -> Vec<Value> {
    let text = |s: &str| json!({ "stringValue": s });
    vec![
        attribute("gen_ai.operation.name", text("chat")),
        attribute("gen_ai.token.type", text("input")),
        attribute("fleet.bundle.id", text("assistant/180")),
        attribute("fleet.rollout.phase", json!({ "intValue": "2" })),
        attribute("my.own", json!({ "doubleValue": "NaN" })),
    ]
}

pub fn json_bodies(out: &Corpus) {
    let resource = json!({ "attributes": [attribute("service.version", json!({ "stringValue": "5.2.0" }))] });
    let body = |metric: Value| {
        json!({ "resourceMetrics": [{ "resource": resource, "scopeMetrics": [{ "metrics": [metric] }] }] }).to_string()
    };
    let numbers = json!([
        { "asInt": "7", "timeUnixNano": TIME.to_string(), "attributes": point_attributes() },
        { "asDouble": "NaN", "flags": 1 },
        { "asDouble": 0.83, "startTimeUnixNano": TIME },
    ]);
    out.add("gauge", body(json!({ "name": "fleet.battery.level", "unit": "1", "gauge": { "dataPoints": numbers } })));
    let sum = json!({ "dataPoints": numbers, "aggregationTemporality": 2, "isMonotonic": true });
    out.add("sum", body(json!({ "sum": sum, "name": "fleet.answers", "description": "Answers." })));
    let histogram = json!({ "dataPoints": [{ "count": "7", "sum": 12.5, "min": 0.25, "max": "4", "explicitBounds": [0.5, 1],
        "bucketCounts": ["1", 2, "4"], "attributes": point_attributes(), "exemplars": [{ "asInt": "1" }] }],
        "aggregationTemporality": "1" });
    out.add(
        "histogram",
        body(json!({ "name": "gen_ai.client.operation.duration", "unit": "s", "histogram": histogram })),
    );
    let exponential = json!({ "dataPoints": [{ "count": 9, "scale": -1, "zeroCount": "2", "zeroThreshold": 0.5,
        "positive": { "offset": "-3", "bucketCounts": ["1", 6] }, "negative": { "bucketCounts": [] } }] });
    out.add("exponential", body(json!({ "name": "gen_ai.client.token.usage", "exponentialHistogram": exponential })));
    let summary = json!({ "dataPoints": [{ "count": "4", "sum": "Infinity", "quantileValues": [
        { "quantile": 0.5, "value": 3 }, { "quantile": "0.95", "value": null }] }] });
    out.add("summary", body(json!({ "name": "old.latency", "summary": summary, "gauge": null })));
    out.add("two_forms", body(json!({ "name": "m", "gauge": { "dataPoints": [{}] }, "sum": {} })));
}

fn double(number: u64, v: f64) -> Vec<u8> {
    proto::fixed64(number, v.to_bits())
}

fn packed(number: u64, of: &[u64]) -> Vec<u8> {
    proto::bytes(number, &of.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

/// A metric in its envelope; `form` is the field of its data.
fn envelope(name: &str, form: u64, data: &[u8]) -> Vec<u8> {
    let resource = pair(1, &attribute("service.version", json!({ "stringValue": "5.2.0" })));
    let metric = [proto::bytes(1, name.as_bytes()), proto::bytes(3, b"1"), proto::bytes(form, data)].concat();
    let scope = proto::bytes(2, &proto::bytes(2, &metric));
    proto::bytes(1, &[proto::bytes(1, &resource), scope].concat())
}

pub fn proto_bodies(out: &Corpus) {
    let attributes = |number| point_attributes().iter().flat_map(|p| pair(number, p)).collect::<Vec<u8>>();
    let times = [proto::fixed64(2, TIME - 1), proto::fixed64(3, TIME)].concat();
    let point = |fields: &[Vec<u8>]| proto::bytes(1, &[times.clone(), fields.concat()].concat());
    let kind = [proto::int(2, 2), proto::int(3, 1)].concat();
    let int = point(&[proto::fixed64(6, 7), attributes(7), proto::int(8, 1)]);
    out.add("gauge", envelope("fleet.battery.level", 5, &[int.clone(), point(&[double(4, f64::NAN)])].concat()));
    out.add("sum", envelope("fleet.answers", 7, &[int, kind.clone()].concat()));
    let histogram = point(&[
        proto::fixed64(4, 7),
        double(5, 12.5),
        packed(6, &[1, 2, 4]),
        packed(7, &[0.5f64.to_bits(), 1f64.to_bits()]),
        attributes(9),
        double(11, 0.25),
        double(12, 4.0),
    ]);
    out.add("histogram", envelope("gen_ai.client.operation.duration", 9, &[histogram, kind.clone()].concat()));
    let unpacked = point(&[proto::fixed64(6, 1), proto::fixed64(6, 2), double(7, 0.5)]);
    out.add("unpacked", envelope("h", 9, &unpacked));
    let positive = [proto::int(1, 5), proto::bytes(2, &[1, 0xac, 2])].concat();
    let exponential = point(&[
        attributes(1),
        proto::fixed64(4, 9),
        proto::int(6, 3),
        proto::fixed64(7, 2),
        proto::bytes(8, &positive),
        proto::bytes(9, &proto::int(2, 6)),
        double(14, 0.5),
    ]);
    out.add("exponential", envelope("gen_ai.client.token.usage", 10, &[exponential, kind].concat()));
    let quantile = |q, v| proto::bytes(6, &[double(1, q), double(2, v)].concat());
    let summary = point(&[proto::fixed64(4, 4), double(5, 11.0), quantile(0.5, 3.0), quantile(0.95, f64::INFINITY)]);
    out.add("summary", envelope("old.latency", 11, &summary));
}
