//! Metrics against bodies made by the official `opentelemetry-proto` types, in both encodings.

use crate::column::Micros;
use crate::decode::{Context, Decoded, Endpoint};
use crate::limits::Limits;
use crate::mask::Masks;
use crate::otlp::{Encoding, decode};
use crate::rows::{MetricRow, Table};
use crate::trust::Sender;
use flywheel_types::{AppId, Error};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as V;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::exponential_histogram_data_point::Buckets;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::summary_data_point::ValueAtQuantile;
use opentelemetry_proto::tonic::metrics::v1::{
    ExponentialHistogram, ExponentialHistogramDataPoint, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum, Summary, SummaryDataPoint,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;

const TIME: u64 = 1_772_359_200_000_000_000;

fn kv(key: &str, v: V) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(v) }), ..KeyValue::default() }
}
fn s(v: &str) -> V {
    V::StringValue(v.to_owned())
}

fn request(metrics: Vec<Metric>) -> ExportMetricsServiceRequest {
    let attributes = vec![
        kv("service.version", s("5.2.0")),
        kv("fleet.device.class", s("high-8gb")),
        kv("os.name", s("ios")),
        kv("os.version", s("17.4")),
        kv("app.installation.id", s("abc")),
    ];
    ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(Resource { attributes, ..Resource::default() }),
            scope_metrics: vec![ScopeMetrics { metrics, ..ScopeMetrics::default() }],
            ..ResourceMetrics::default()
        }],
    }
}

fn metric(name: &str, unit: &str, data: Data) -> Metric {
    Metric { name: name.to_owned(), unit: unit.to_owned(), data: Some(data), ..Metric::default() }
}

fn number(value: Number) -> NumberDataPoint {
    NumberDataPoint { time_unix_nano: TIME, value: Some(value), ..NumberDataPoint::default() }
}

fn gauge(points: Vec<NumberDataPoint>) -> Metric {
    metric("fleet.battery.level", "1", Data::Gauge(Gauge { data_points: points }))
}

fn duration(point: HistogramDataPoint) -> Metric {
    let data = Histogram { data_points: vec![point], aggregation_temporality: 1 };
    metric("gen_ai.client.operation.duration", "s", Data::Histogram(data))
}

fn histogram() -> HistogramDataPoint {
    HistogramDataPoint {
        start_time_unix_nano: TIME - 60_000_000_000,
        time_unix_nano: TIME,
        count: 7,
        sum: Some(12.5),
        min: Some(0.25),
        max: Some(4.0),
        explicit_bounds: vec![0.5, 1.0, 2.0],
        bucket_counts: vec![1, 2, 3, 1],
        attributes: vec![
            kv("gen_ai.operation.name", s("chat")),
            kv("gen_ai.provider.name", s("llama.cpp")),
            kv("gen_ai.request.model", s("smol")),
            kv("gen_ai.response.model", s("smol-q4")),
            kv("error.type", s("timeout")),
            kv("server.port", V::IntValue(443)),
            kv("gen_ai.usage.input_tokens", V::IntValue(9)),
            kv("my.own", s("write to a@b.example")),
        ],
        ..HistogramDataPoint::default()
    }
}

fn exponential() -> Metric {
    let point = ExponentialHistogramDataPoint {
        time_unix_nano: TIME,
        count: 10,
        sum: Some(3.5),
        scale: -2,
        zero_count: 2,
        zero_threshold: 0.5,
        positive: Some(Buckets { offset: -3, bucket_counts: vec![1, 300, 0] }),
        negative: Some(Buckets { offset: 4, bucket_counts: vec![5] }),
        attributes: vec![kv("gen_ai.token.type", s("input")), kv("fleet.bundle.digest", s("9f2c"))],
        ..ExponentialHistogramDataPoint::default()
    };
    let data = ExponentialHistogram { data_points: vec![point], aggregation_temporality: 2 };
    metric("gen_ai.client.token.usage", "{token}", Data::ExponentialHistogram(data))
}

fn summary() -> Metric {
    let quantile_values =
        vec![ValueAtQuantile { quantile: 0.5, value: 3.0 }, ValueAtQuantile { quantile: 0.95, value: f64::NAN }];
    let point =
        SummaryDataPoint { time_unix_nano: TIME, count: 4, sum: 11.0, quantile_values, ..SummaryDataPoint::default() };
    metric("old.latency", "ms", Data::Summary(Summary { data_points: vec![point] }))
}

fn sum() -> Metric {
    let data = Sum { data_points: vec![number(Number::AsInt(-7))], aggregation_temporality: 2, is_monotonic: true };
    metric("fleet.answers", "{answer}", Data::Sum(data))
}

/// Bodies are leaked, so that a test can drop its own and keep the rows.
fn decode_as(encoding: Encoding, body: &[u8]) -> Result<Decoded<'static>, Error> {
    let body: &'static [u8] = Box::leak(body.into());
    let ctx = Context {
        app: Box::leak(Box::new(AppId::new("app").unwrap())),
        endpoint: Endpoint::OtlpMetrics,
        sender: Sender::ANONYMOUS,
        now: "2026-03-01T10:00:06Z".parse().unwrap(),
        limits: Box::leak(Box::new(Limits { records: 50, buckets: 20, ..Limits::default() })),
        masks: Masks::default(),
        users: Box::leak(Box::new(crate::user::UserKeys::new(&[0; 32]))),
        otlp_content: false,
        classify: None,
    };
    decode(&ctx, encoding, body)
}

/// The same rows from both encodings.
fn both(request: &ExportMetricsServiceRequest) -> Decoded<'static> {
    let proto = decode_as(Encoding::Protobuf, &request.encode_to_vec()).unwrap();
    let json = decode_as(Encoding::Json, &serde_json::to_vec(request).unwrap()).unwrap();
    // null is how the official serializer writes NaN, and it is an absent value where one may be absent
    let finite = |d: &Decoded<'static>| -> Vec<MetricRow<'static>> {
        d.metrics.iter().cloned().map(|r| MetricRow { nonfinite_fields: 0, ..r }).collect()
    };
    assert_eq!(finite(&proto), finite(&json));
    assert_eq!(reasons(&proto), reasons(&json));
    proto
}

fn reasons(decoded: &Decoded<'_>) -> Vec<&'static str> {
    decoded.quarantined.iter().map(|q| q.reason).collect()
}

#[test]
fn every_form_fills_its_columns_in_both_encodings() {
    let got = both(&request(vec![
        gauge(vec![number(Number::AsDouble(0.83))]),
        sum(),
        duration(histogram()),
        exponential(),
        summary(),
    ]));
    assert!(got.quarantined.is_empty(), "{:?}", got.quarantined);
    let [gauge, sum, histogram, exponential, summary] = got.metrics.as_slice() else { panic!("five rows") };
    for row in &got.metrics {
        assert_eq!((row.source.as_ref(), row.trust.as_ref()), ("otlp_metrics", "anonymous"));
        assert_eq!((row.app_version.as_deref(), row.device_class.as_deref()), (Some("5.2.0"), Some("high-8gb")));
        assert_eq!((row.os.as_deref(), row.install_id.as_deref()), (Some("ios 17.4"), Some("abc")));
        assert_eq!((row.event_at, row.occurred_at), (Some(Micros(TIME as i64 / 1000)), Micros(TIME as i64 / 1000)));
    }
    assert_eq!((gauge.name.as_ref(), gauge.unit.as_deref()), ("fleet.battery.level", Some("1")));
    assert_eq!((gauge.kind.as_ref(), gauge.value_double, gauge.value_int), ("gauge", Some(0.83), None));
    assert_eq!((gauge.temporality.as_deref(), gauge.is_monotonic, gauge.count), (None, None, None));
    assert_eq!((sum.kind.as_ref(), sum.value_double, sum.value_int), ("sum", None, Some(-7)));
    assert_eq!((sum.temporality.as_deref(), sum.is_monotonic), (Some("cumulative"), Some(true)));
    assert_eq!(histogram.kind, "histogram");
    assert_eq!(histogram.start_at, Some(Micros((TIME as i64 - 60_000_000_000) / 1000)));
    assert_eq!(
        (histogram.count, histogram.sum, histogram.min, histogram.max),
        (Some(7), Some(12.5), Some(0.25), Some(4.0))
    );
    assert_eq!(
        (&histogram.explicit_bounds[..], &histogram.bucket_counts[..]),
        (&[0.5, 1.0, 2.0][..], &[1, 2, 3, 1][..])
    );
    assert_eq!((histogram.operation.as_deref(), histogram.provider.as_deref()), (Some("chat"), Some("llama.cpp")));
    assert_eq!(
        (histogram.request_model.as_deref(), histogram.response_model.as_deref()),
        (Some("smol"), Some("smol-q4"))
    );
    assert_eq!((histogram.error_type.as_deref(), histogram.temporality.as_deref()), (Some("timeout"), Some("delta")));
    // what has no column here stays readable, also when interactions have one for it
    let attrs: Vec<(&str, &str)> = histogram.attrs.0.iter().map(|(k, v)| (k.as_ref(), v.as_ref())).collect();
    assert_eq!(attrs, [("server.port", "443"), ("gen_ai.usage.input_tokens", "9"), ("my.own", "write to [email]")]);
    assert_eq!((exponential.scale, exponential.zero_count, exponential.zero_threshold), (Some(-2), Some(2), Some(0.5)));
    assert_eq!((exponential.positive_offset, &exponential.positive_counts[..]), (Some(-3), &[1, 300, 0][..]));
    assert_eq!((exponential.negative_offset, &exponential.negative_counts[..]), (Some(4), &[5][..]));
    assert_eq!((exponential.token_type.as_deref(), exponential.bundle.as_deref()), (Some("input"), Some("9f2c")));
    assert_eq!((summary.count, summary.sum), (Some(4), Some(11.0)));
    assert_eq!((&summary.quantiles[..], &summary.quantile_values[..]), (&[0.5, 0.95][..], &[Some(3.0), None][..]));
    assert_eq!(summary.nonfinite_fields, 1);
    let encoded = got.encode().unwrap();
    assert_eq!(encoded.get(Table::Metrics).map(arrow::array::RecordBatch::num_rows), Some(5));
}

#[test]
fn what_is_wrong_in_one_point_costs_that_point() {
    let mut deep = s("x");
    for _ in 0..40 {
        deep = V::ArrayValue(opentelemetry_proto::tonic::common::v1::ArrayValue {
            values: vec![AnyValue { value: Some(deep) }],
        });
    }
    let with = |attributes| NumberDataPoint { attributes, ..number(Number::AsInt(1)) };
    let many = (0..300).map(|i| kv(&format!("k{i}"), V::IntValue(i))).collect();
    let wide = HistogramDataPoint { explicit_bounds: vec![1.0; 21], ..histogram() };
    let uneven = HistogramDataPoint { bucket_counts: vec![1, 2], ..histogram() };
    let huge = HistogramDataPoint { count: u64::MAX, ..histogram() };
    let got = both(&request(vec![
        gauge(vec![with(vec![kv("deep", deep)]), number(Number::AsInt(2)), with(many)]),
        duration(wide),
        duration(uneven),
        duration(huge),
        sum(),
    ]));
    assert_eq!(reasons(&got), ["too_deep", "too_many_attributes", "too_many_buckets", "bad_value", "bad_value"]);
    assert_eq!(got.metrics.iter().map(|r| r.value_int).collect::<Vec<_>>(), [Some(2), Some(-7)]);
    assert!(got.quarantined.iter().all(|q| q.kind.as_str() == "metric"));
}

#[test]
fn what_is_wrong_with_a_metric_costs_its_points() {
    let two = vec![number(Number::AsInt(1)), number(Number::AsInt(2))];
    let data = || Some(Data::Gauge(Gauge { data_points: two.clone() }));
    let nameless = Metric { data: data(), ..Metric::default() };
    let long = Metric { name: "n".repeat(256), data: data(), ..Metric::default() };
    let none = Metric { name: "none".to_owned(), ..Metric::default() };
    let got = both(&request(vec![nameless, long, none, sum()]));
    let name = "bad_metric_name";
    assert_eq!(reasons(&got), [name, name, name, name, "unsupported_record"]);
    assert_eq!(got.metrics.len(), 1);
    // two kinds of data in one metric: protobuf keeps the last, which would lose points in silence
    let [gauge, sum] = [gauge(two.clone()), sum()].map(|m| m.encode_to_vec());
    let field = |number: u8, bytes: &[u8]| [&[number << 3 | 2, bytes.len() as u8][..], bytes].concat();
    let mut body = field(1, &field(2, &field(2, &[gauge, sum].concat())));
    assert!(body.len() < 128, "lengths of one byte");
    let got = decode_as(Encoding::Protobuf, &body).unwrap();
    assert_eq!((reasons(&got), got.metrics.len()), (vec!["bad_record"; 2], 0));
    let text = r#"{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"m","gauge":{"dataPoints":[{"asInt":1}]},"sum":{}},
        {"name":"m","sum":null,"gauge":{"dataPoints":[{"asInt":"1"}]}},17,{"name":"m","gauge":[]}]}]}]}"#;
    let got = decode_as(Encoding::Json, text.as_bytes()).unwrap();
    assert_eq!((reasons(&got), got.metrics.len()), (vec!["bad_record"; 3], 1));
    body.truncate(body.len() - 1);
    assert_eq!(decode_as(Encoding::Protobuf, &body).unwrap_err().code, "undecodable_body");
}

/// A gauge with points as JSON text.
fn points(of: &[&str]) -> String {
    format!(
        r#"{{"resourceMetrics":[{{"scopeMetrics":[{{"metrics":[{{"gauge":{{"dataPoints":[{}],"unknown":{{}}}},
           "name":"m","unit":"1"}}]}}],"resource":{{"attributes":[{{"key":"service.version","value":{{"stringValue":"9"}}}}]}}}}]}}"#,
        of.join(",")
    )
}

#[test]
fn json_numbers_and_times_of_the_edge_table() {
    let body = points(&[
        r#"{"asInt":"7"}"#,
        r#"{"asInt":7}"#,
        r#"{"asInt":"-9223372036854775808"}"#,
        r#"{"asDouble":"NaN"}"#,
        r#"{"asDouble":"-Infinity"}"#,
        r#"{"asDouble":1e999}"#,
        r#"{"asDouble":"1.5","flags":1}"#,
        r#"{"asDouble":null,"flags":"1"}"#,
        r#"{"asInt":1,"timeUnixNano":18446744073709551615,"startTimeUnixNano":"1772359200000000000"}"#,
        r#"{"asInt":"seven"}"#,
        r#"{"asInt":7.5}"#,
        r#"{"asInt":1,"timeUnixNano":18446744073709551616}"#,
        r#"{"asInt":1,"timeUnixNano":"-1"}"#,
        r#"{"asInt":1,"flags":-1}"#,
        "null",
        "[]",
    ]);
    let got = decode_as(Encoding::Json, body.as_bytes()).unwrap();
    assert_eq!(reasons(&got), ["bad_value", "bad_value", "bad_time", "bad_time", "bad_value", "bad_record"]);
    let ints: Vec<_> = got.metrics.iter().map(|r| r.value_int).collect();
    assert_eq!(ints, [Some(7), Some(7), Some(i64::MIN), None, None, None, None, None, Some(1), None]);
    for row in &got.metrics[3..6] {
        assert_eq!((row.value_double, row.nonfinite_fields), (None, 1));
    }
    assert_eq!((got.metrics[6].value_double, got.metrics[6].flags), (Some(1.5), 1));
    assert_eq!((got.metrics[7].value_double, got.metrics[7].nonfinite_fields, got.metrics[7].flags), (None, 0, 1));
    let max = &got.metrics[8];
    assert_eq!((max.event_at, max.occurred_at), (Some(Micros(18_446_744_073_709_551)), max.received_at));
    assert_eq!(max.start_at, Some(Micros(TIME as i64 / 1000)));
    assert!(got.metrics.iter().all(|r| r.name == "m" && r.app_version.as_deref() == Some("9")), "they came last");
    let bare = points(&[r#"{"asDouble":NaN}"#]);
    assert_eq!(decode_as(Encoding::Json, bare.as_bytes()).unwrap_err().code, "undecodable_body");
    for cut in 0..body.len() {
        let e = decode_as(Encoding::Json, &body.as_bytes()[..cut]).unwrap_err();
        assert_eq!(e.code, "undecodable_body", "cut at {cut}");
    }
}

#[test]
fn histograms_in_json_take_numbers_as_text() {
    let text = r#"{"resourceMetrics":[{"scopeMetrics":[{"metrics":[
        {"name":"h","histogram":{"dataPoints":[
            {"count":"3","sum":"Infinity","explicitBounds":[1,"2.5"],"bucketCounts":["1",2,"0"],"exemplars":[{"asInt":"1"}]},
            {"count":1,"explicitBounds":[null],"bucketCounts":[0,1]},
            {"count":1,"explicitBounds":["NaN"],"bucketCounts":[0,1]},
            {"count":"-1"}],"aggregationTemporality":"2"}},
        {"name":"e","exponentialHistogram":{"dataPoints":[
            {"count":"3","scale":-1,"zeroCount":"1","positive":{"offset":"-2","bucketCounts":["2"]},"zeroThreshold":0.25}],
            "aggregationTemporality":1}},
        {"name":"h","histogram":{"dataPoints":[{"count":1}],"aggregationTemporality":"DELTA"}},
        {"name":"s","summary":{"dataPoints":[{"count":"2","quantileValues":[{"quantile":0.5,"value":"NaN"},{"quantile":1,"value":null}]},
            {"quantileValues":[{"quantile":1.5,"value":1}]}]}}]}]}]}"#;
    let got = decode_as(Encoding::Json, text.as_bytes()).unwrap();
    assert_eq!(reasons(&got), ["bad_value"; 5]);
    let [h, e, s] = got.metrics.as_slice() else { panic!("three rows: {:?}", got.quarantined) };
    assert_eq!((h.count, h.sum, h.nonfinite_fields, h.temporality.as_deref()), (Some(3), None, 1, Some("cumulative")));
    assert_eq!((&h.explicit_bounds[..], &h.bucket_counts[..]), (&[1.0, 2.5][..], &[1, 2, 0][..]));
    assert_eq!((e.scale, e.positive_offset, &e.positive_counts[..]), (Some(-1), Some(-2), &[2][..]));
    assert_eq!((e.zero_count, e.zero_threshold, e.negative_offset), (Some(1), Some(0.25), Some(0)));
    assert_eq!((s.count, s.sum, &s.quantile_values[..]), (Some(2), Some(0.0), &[None, None][..]));
    assert_eq!(s.nonfinite_fields, 2);
}

#[test]
fn invalid_utf8_in_one_name_keeps_every_point() {
    let mut body = request(vec![gauge(vec![number(Number::AsInt(1))]), sum()]).encode_to_vec();
    let at = body.windows(13).position(|w| w == b"fleet.battery").unwrap();
    body[at] = 0xff;
    let got = decode_as(Encoding::Protobuf, &body).unwrap();
    assert_eq!(
        got.metrics.iter().map(|r| r.name.as_ref()).collect::<Vec<_>>(),
        ["\u{fffd}leet.battery.level", "fleet.answers"]
    );
}

#[test]
fn points_are_counted_against_the_limit_of_records() {
    let many = |n: i64| request(vec![gauge((0..n).map(|i| number(Number::AsInt(i))).collect())]);
    assert_eq!(both(&many(50)).metrics.len(), 50);
    for (encoding, body) in
        [(Encoding::Protobuf, many(51).encode_to_vec()), (Encoding::Json, serde_json::to_vec(&many(51)).unwrap())]
    {
        assert_eq!(decode_as(encoding, &body).unwrap_err().code, "too_many_records");
    }
    let empty = request((0..51).map(|_| Metric::default()).collect());
    assert_eq!(decode_as(Encoding::Protobuf, &empty.encode_to_vec()).unwrap_err().code, "too_many_records");
}

#[test]
fn every_truncation_ends_without_a_panic_and_never_invents_rows() {
    let whole = request(vec![sum(), exponential(), summary()]).encode_to_vec();
    for cut in 0..whole.len() {
        if let Ok(got) = decode_as(Encoding::Protobuf, &whole[..cut]) {
            assert_eq!(got.items(), 0, "cut at {cut}");
        }
    }
}

proptest::proptest! {
    #[test]
    fn damaged_bodies_never_panic(at in 0usize..4000, byte in proptest::prelude::any::<u8>()) {
        let request = request(vec![gauge(vec![number(Number::AsInt(1))]), sum(), duration(histogram()), exponential(), summary()]);
        let mut body = request.encode_to_vec();
        let n = body.len();
        body[at % n] = byte;
        if let Ok(got) = decode_as(Encoding::Protobuf, &body) {
            got.encode().unwrap();
        }
        let mut text = serde_json::to_vec(&request).unwrap();
        let n = text.len();
        text[at % n] = byte;
        if let Ok(got) = decode_as(Encoding::Json, &text) {
            got.encode().unwrap();
        }
    }

    /// What the official types hold is what is stored, from both encodings.
    #[test]
    fn points_agree_with_the_official_types(
        ints in proptest::collection::vec(proptest::prelude::any::<i64>(), 0..8),
        doubles in proptest::collection::vec(-1e12f64..1e12, 0..8),
        counts in proptest::collection::vec(0u64..1 << 40, 1..8),
        offset in proptest::prelude::any::<i32>(),
        name in "[a-z.]{1,40}",
    ) {
        let mut all: Vec<_> = ints.iter().map(|i| number(Number::AsInt(*i))).collect();
        all.extend(doubles.iter().map(|d| number(Number::AsDouble(*d))));
        let bounds: Vec<f64> = (1..counts.len()).map(|i| i as f64).collect();
        let h = HistogramDataPoint { bucket_counts: counts.clone(), explicit_bounds: bounds.clone(), ..histogram() };
        let e = ExponentialHistogramDataPoint {
            positive: Some(Buckets { offset, bucket_counts: counts.clone() }),
            ..ExponentialHistogramDataPoint::default()
        };
        let e = ExponentialHistogram { data_points: vec![e], aggregation_temporality: 1 };
        let got = both(&request(vec![
            metric(&name, "", Data::Gauge(Gauge { data_points: all })),
            duration(h),
            metric(&name, "", Data::ExponentialHistogram(e)),
        ]));
        proptest::prop_assert!(got.quarantined.is_empty(), "{:?}", got.quarantined);
        let n = ints.len() + doubles.len();
        proptest::prop_assert_eq!(got.metrics.len(), n + 2);
        let stored: Vec<i64> = got.metrics.iter().filter_map(|r| r.value_int).collect();
        proptest::prop_assert_eq!(stored, ints);
        let stored: Vec<f64> = got.metrics.iter().filter_map(|r| r.value_double).collect();
        proptest::prop_assert_eq!(stored, doubles);
        let counts: Vec<i64> = counts.iter().map(|n| *n as i64).collect();
        proptest::prop_assert_eq!((&got.metrics[n].bucket_counts, &got.metrics[n].explicit_bounds), (&counts, &bounds));
        proptest::prop_assert_eq!((&got.metrics[n + 1].positive_counts, got.metrics[n + 1].positive_offset), (&counts, Some(offset)));
        proptest::prop_assert!(got.metrics[..n].iter().all(|r| r.name == name));
    }
}
