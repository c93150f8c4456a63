//! OTLP decoding against bodies made by the official `opentelemetry-proto` types, in both encodings.

use super::*;
use crate::limits::Limits;
use crate::mask::Masks;
use crate::trust::Sender;
use crate::user::UserKeys;
use flywheel_types::AppId;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as V;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue, KeyValueList};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, span::Event};
use prost::Message;

fn any(v: V) -> AnyValue {
    AnyValue { value: Some(v) }
}
fn s(v: &str) -> V {
    V::StringValue(v.to_owned())
}
fn list(items: Vec<V>) -> V {
    V::ArrayValue(ArrayValue { values: items.into_iter().map(any).collect() })
}
fn kv(key: &str, v: V) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(any(v)), ..KeyValue::default() }
}

fn answer(id: &str) -> Vec<KeyValue> {
    vec![
        kv("gen_ai.operation.name", s("chat")),
        kv("gen_ai.response.id", s(id)),
        kv("gen_ai.response.time_to_first_chunk", V::DoubleValue(0.8125)),
        kv("gen_ai.usage.input_tokens", V::IntValue(120)),
        kv("gen_ai.usage.completion_tokens", V::IntValue(9)),
        kv("gen_ai.response.finish_reasons", list(vec![s("stop")])),
        kv("gen_ai.prompt.name", s("faq")),
        kv("gen_ai.prompt.version", s("3")),
        kv("fleet.bundle.id", s("assistant/180")),
        kv("fleet.retrieval.chunk_ids", list(vec![s("kb-1@2"), s("kb-9")])),
        kv("fleet.retrieval.scores", list(vec![V::DoubleValue(0.9), V::DoubleValue(0.5)])),
        kv("fleet.energy.millijoules", V::DoubleValue(f64::NAN)),
        kv("fleet.refusal", V::BoolValue(true)),
        kv("fleet.rollout.arm", s("canary")),
        kv("os.name", s("ios")),
        kv("os.version", s("17.4")),
        kv("app.installation.id", s("abc")),
        kv("my.own", s("write to a@b.example")),
    ]
}

fn logs(records: Vec<LogRecord>) -> ExportLogsServiceRequest {
    ExportLogsServiceRequest {
        resource_logs: vec![ResourceLogs {
            resource: Some(Resource {
                attributes: vec![kv("service.name", s("app")), kv("service.version", s("5.2.0"))],
                ..Resource::default()
            }),
            scope_logs: vec![ScopeLogs { log_records: records, ..ScopeLogs::default() }],
            ..ResourceLogs::default()
        }],
    }
}

fn log(attributes: Vec<KeyValue>) -> LogRecord {
    LogRecord {
        time_unix_nano: 1_772_359_200_000_000_000,
        event_name: "gen_ai.client.inference.operation.details".to_owned(),
        attributes,
        ..LogRecord::default()
    }
}

/// Bodies are leaked, so that a test can drop its own and keep the rows.
fn decode_as(endpoint: Endpoint, encoding: Encoding, body: &[u8]) -> Result<Decoded<'static>, Error> {
    let body: &'static [u8] = Box::leak(body.into());
    let ctx = Context {
        app: Box::leak(Box::new(AppId::new("app").unwrap())),
        endpoint,
        sender: Sender::ANONYMOUS,
        now: "2026-03-01T10:00:06Z".parse().unwrap(),
        limits: Box::leak(Box::new(Limits { records: 50, ..Limits::default() })),
        masks: Masks::default(),
        users: Box::leak(Box::new(UserKeys::new(&[0; 32]))),
        otlp_content: false,
        classify: None,
    };
    decode(&ctx, encoding, body)
}

/// Whoever the record names, by whatever name, only a keyed digest of the id is kept.
#[test]
fn a_user_becomes_a_key_and_is_otherwise_dropped() {
    let key = UserKeys::new(&[0; 32]).key(&AppId::new("app").unwrap(), "anna-17");
    for name in ["user.id", "user.hash", "enduser.id", "enduser.pseudo.id"] {
        let mut attributes = answer("r-1");
        let more =
            [(name, "anna-17"), ("user.name", "Anna"), ("user.email", "anna@a.example"), ("user.full_name", "Anna B")];
        attributes.extend(more.map(|(name, value)| kv(name, s(value))));
        let body = logs(vec![log(attributes)]).encode_to_vec();
        let got = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &body).unwrap();
        assert_eq!(got.interactions[0].user_key.as_deref(), key.as_deref(), "{name}");
        let row = format!("{:?}", got.interactions[0]);
        assert!(!row.contains("anna") && !row.contains("Anna"), "{row}");
    }
}

#[test]
fn a_log_record_fills_the_columns_in_both_encodings() {
    let mut request = logs(vec![log(answer("r-1"))]);
    let protobuf = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &request.encode_to_vec()).unwrap();
    // The official serializer writes NaN as null; the walker must cope with the string form of ProtoJSON.
    request.resource_logs[0].scope_logs[0].log_records[0].attributes[11] =
        kv("fleet.energy.millijoules", V::DoubleValue(7.5));
    let text = serde_json::to_string(&request).unwrap().replace("7.5", "\"NaN\"");
    let json = decode_as(Endpoint::OtlpLogs, Encoding::Json, text.as_bytes()).unwrap();
    for got in [&protobuf, &json] {
        assert!(got.quarantined.is_empty(), "{:?}", got.quarantined);
        let r = &got.interactions[0];
        assert_eq!(r.interaction_id, "r-1");
        assert_eq!(r.ttft_ms, Some(812.5));
        assert_eq!((r.input_tokens, r.output_tokens), (Some(120), Some(9)));
        assert_eq!(r.template_id.as_deref(), Some("faq@3"));
        assert_eq!(r.bundle.as_deref(), Some("assistant/180"));
        assert_eq!((&r.chunk_ids, &r.chunk_versions), (&vec!["kb-1".into(), "kb-9".into()], &vec![2, 0]));
        assert_eq!(r.chunk_scores, [0.9, 0.5]);
        assert_eq!((r.energy_mj, r.nonfinite_fields), (None, 1));
        assert_eq!(r.detected.as_deref(), Some("refused"));
        assert_eq!(r.arm.as_deref(), Some("treatment"));
        assert_eq!(r.os.as_deref(), Some("ios 17.4"));
        assert_eq!(r.app_version.as_deref(), Some("5.2.0"));
        assert_eq!(r.install_id.as_deref(), Some("abc"));
        assert_eq!(r.attrs.0, [("my.own".into(), "write to [email]".into())]);
        assert_eq!(r.event_at.unwrap().0, 1_772_359_200_000_000);
    }
    assert_eq!(protobuf.interactions, json.interactions);
}

#[test]
fn spans_join_their_retrieval_and_carry_feedback() {
    let trace = vec![1u8; 16];
    let span = |id: u8, attributes: Vec<KeyValue>, events: Vec<Event>| Span {
        trace_id: trace.clone(),
        span_id: vec![id; 8],
        name: "x".to_owned(),
        start_time_unix_nano: 1_772_359_200_000_000_000,
        attributes,
        events,
        ..Span::default()
    };
    let documents = r#"[{"id":"kb-4","score":0.7},{"id":"kb-5"}]"#;
    let feedback = Event {
        name: "gen_ai.evaluation.result".to_owned(),
        attributes: vec![
            kv("gen_ai.evaluation.name", s("user_feedback")),
            kv("gen_ai.evaluation.score.label", s("regenerated")),
            kv("gen_ai.response.id", s("r-7")),
        ],
        ..Event::default()
    };
    let request = ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            scope_spans: vec![ScopeSpans {
                spans: vec![
                    span(
                        2,
                        vec![
                            kv("gen_ai.operation.name", s("retrieval")),
                            kv("gen_ai.retrieval.documents", s(documents)),
                        ],
                        vec![],
                    ),
                    span(
                        3,
                        vec![kv("gen_ai.operation.name", s("chat")), kv("gen_ai.prompt.name", s("faq"))],
                        vec![feedback],
                    ),
                    span(4, vec![kv("http.method", s("GET"))], vec![]),
                ],
                ..ScopeSpans::default()
            }],
            ..ResourceSpans::default()
        }],
    };
    for (encoding, body) in
        [(Encoding::Protobuf, request.encode_to_vec()), (Encoding::Json, serde_json::to_vec(&request).unwrap())]
    {
        let got = decode_as(Endpoint::OtlpTraces, encoding, &body).unwrap();
        let r = &got.interactions[0];
        assert_eq!(r.interaction_id, format!("{}:{}", "01".repeat(16), "03".repeat(8)));
        assert_eq!(r.chunk_ids, ["kb-4", "kb-5"], "{encoding:?}");
        assert_eq!(got.feedback[0].label, "rejected");
        assert_eq!(got.quarantined.len(), 1);
        assert_eq!(got.quarantined[0].reason, "unsupported_record");
    }
}

#[test]
fn openinference_names_fill_the_same_columns() {
    let attributes = vec![
        kv("openinference.span.kind", s("LLM")),
        kv("llm.model_name", s("m")),
        kv("llm.token_count.prompt", V::IntValue(7)),
        kv("retrieval.documents.1.document.id", s("kb-2")),
        kv("retrieval.documents.0.document.id", s("kb-1@4")),
        kv("retrieval.documents.1.document.score", V::DoubleValue(0.25)),
        kv("retrieval.documents.0.document.content", s("secret")),
    ];
    let span = Span { trace_id: vec![1; 16], span_id: vec![2; 8], attributes, ..Span::default() };
    let scope_spans = vec![ScopeSpans { spans: vec![span.clone()], ..ScopeSpans::default() }];
    let mut request =
        ExportTraceServiceRequest { resource_spans: vec![ResourceSpans { scope_spans, ..ResourceSpans::default() }] };
    for (encoding, body) in
        [(Encoding::Protobuf, request.encode_to_vec()), (Encoding::Json, serde_json::to_vec(&request).unwrap())]
    {
        let got = decode_as(Endpoint::OtlpTraces, encoding, &body).unwrap();
        let row = &got.interactions[0];
        assert_eq!((row.request_model.as_deref(), row.input_tokens), (Some("m"), Some(7)));
        assert_eq!((&row.chunk_ids[..], &row.chunk_versions[..]), (&["kb-1".into(), "kb-2".into()][..], &[4, 0][..]));
        assert_eq!(row.chunk_scores, [0.0, 0.25]);
        assert!(row.attrs.0.is_empty(), "the text of a document is content");
    }
    let spans = &mut request.resource_spans[0].scope_spans[0].spans;
    spans[0].attributes.push(kv("retrieval.documents.128.document.id", s("one too many")));
    let got = decode_as(Endpoint::OtlpTraces, Encoding::Protobuf, &request.encode_to_vec()).unwrap();
    assert_eq!(got.quarantined[0].reason, "too_many_chunks");
}

#[test]
fn what_is_wrong_in_one_json_record_costs_that_record() {
    let record =
        |inner: &str| format!(r#"{{"eventName":"gen_ai.client.inference.operation.details","attributes":[{inner}]}}"#);
    let id = r#"{"key":"gen_ai.response.id","value":{"stringValue":"r"}}"#;
    let body = |records: &[String]| {
        format!(
            r#"{{"resourceLogs":[{{"scopeLogs":[{{"logRecords":[{}]}}],"resource":{{"attributes":[{{"key":"service.version","value":{{"stringValue":"9"}}}}]}}}}]}}"#,
            records.join(",")
        )
    };
    let records = [
        record(id),
        "17".to_owned(),
        record(r#"{"key":3}"#),
        record(r#"{"key":"x","value":{"boolValue":"yes"}}"#),
        r#"{"traceId":"xyz"}"#.to_owned(),
        r#"{"attributes":{}}"#.to_owned(),
        record(id),
    ];
    let got = decode_as(Endpoint::OtlpLogs, Encoding::Json, body(&records).as_bytes()).unwrap();
    assert_eq!(got.interactions.len(), 2);
    assert!(got.interactions.iter().all(|r| r.app_version.as_deref() == Some("9")), "the resource came last");
    let reasons: Vec<_> = got.quarantined.iter().map(|q| q.reason).collect();
    assert_eq!(reasons, ["bad_record", "bad_record", "bad_value", "bad_id", "bad_record"]);
    let whole = body(&records);
    for cut in 0..whole.len() {
        let e = decode_as(Endpoint::OtlpLogs, Encoding::Json, &whole.as_bytes()[..cut]).unwrap_err();
        assert_eq!(e.code, "undecodable_body", "cut at {cut}");
    }
}

#[test]
fn invalid_utf8_in_one_attribute_keeps_every_record() {
    let mut body = logs(vec![log(answer("r-1")), log(answer("r-2"))]).encode_to_vec();
    let at = body.windows(5).position(|w| w == b"abc\x12\x00" || &w[..3] == b"abc").unwrap();
    body[at] = 0xff;
    let got = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &body).unwrap();
    assert_eq!(got.interactions.len(), 2);
    assert_eq!(got.interactions[0].install_id.as_deref(), Some("\u{fffd}bc"));
}

#[test]
fn json_times_and_numbers_of_the_edge_table() {
    let record = |time: &str, extra: &str| {
        format!(
            r#"{{"timeUnixNano":{time},"eventName":"gen_ai.client.inference.operation.details","unknownField":[1],
            "attributes":[{{"key":"gen_ai.response.id","value":{{"stringValue":"r"}}}}{extra}]}}"#
        )
    };
    let body = |records: &[String]| {
        format!(r#"{{"resourceLogs":[{{"scopeLogs":[{{"logRecords":[{}]}}]}}]}}"#, records.join(","))
    };
    let ttft = |v: &str| format!(r#",{{"key":"gen_ai.response.time_to_first_chunk","value":{{"doubleValue":{v}}}}}"#);
    let records = [
        record("1772359200000000000", ""),
        record("\"1772359200000000000\"", ""),
        record("0", ""),
        record("18446744073709551615", ""),
        record("18446744073709551616", ""),
        record("\"-1\"", ""),
        record("0", &ttft("\"NaN\"")),
        record("0", &ttft("\"Infinity\"")),
        record("0", &ttft("1e999")),
        record("0", r#",{"key":"gen_ai.usage.input_tokens","value":{"intValue":"7"}}"#),
        record("0", r#",{"key":"gen_ai.usage.input_tokens","value":{"intValue":7}}"#),
        record("0", r#",{"key":"gen_ai.usage.input_tokens","value":{"intValue":"x"}}"#),
    ];
    let got = decode_as(Endpoint::OtlpLogs, Encoding::Json, body(&records).as_bytes()).unwrap();
    assert_eq!(got.interactions.len(), 9);
    let reasons: Vec<_> = got.quarantined.iter().map(|q| q.reason).collect();
    assert_eq!(reasons, ["bad_time", "bad_time", "bad_value"]);
    assert_eq!(got.interactions[2].event_at, None);
    assert_eq!(got.interactions[3].event_at.unwrap().0, 18_446_744_073_709_551);
    assert_eq!(got.interactions[3].occurred_at, got.interactions[3].received_at);
    for row in &got.interactions[4..7] {
        assert_eq!((row.ttft_ms, row.nonfinite_fields), (None, 1));
    }
    assert_eq!(got.interactions[7].input_tokens, Some(7));
    assert_eq!(got.interactions[8].input_tokens, Some(7));
    let bare = body(&[record("0", &ttft("NaN"))]);
    assert_eq!(decode_as(Endpoint::OtlpLogs, Encoding::Json, bare.as_bytes()).unwrap_err().code, "undecodable_body");
}

#[test]
fn depth_and_counts_are_bounded() {
    let mut deep = s("x");
    for _ in 0..40 {
        deep = list(vec![deep]);
    }
    let many = (0..300).map(|i| kv(&format!("k{i}"), V::IntValue(i))).collect();
    let mut bad = answer("r-1");
    bad.push(kv("deep", deep));
    let request = logs(vec![log(bad), log(many), log(answer("r-3"))]);
    let got = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &request.encode_to_vec()).unwrap();
    assert_eq!(got.interactions.len(), 1);
    let reasons: Vec<_> = got.quarantined.iter().map(|q| q.reason).collect();
    assert_eq!(reasons, ["too_deep", "too_many_attributes"]);
    let too_many = logs((0..51).map(|i| log(answer(&i.to_string()))).collect());
    let e = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &too_many.encode_to_vec()).unwrap_err();
    assert_eq!(e.code, "too_many_records");
}

#[test]
fn nested_values_grow_with_their_size_and_not_with_their_depth() {
    // as text within text, each of the fifteen levels would double the escapes: gigabytes out of 100 kB
    let quotes = "\"".repeat(50_000);
    let (mut lists, mut mixed) = (s(&quotes), s(&quotes));
    for level in 0..14 {
        lists = list(vec![lists]);
        mixed = if level % 2 == 0 {
            V::KvlistValue(KeyValueList { values: vec![kv("k", mixed)] })
        } else {
            list(vec![mixed])
        };
    }
    let mut attributes = answer("r-1");
    attributes.extend([kv("lists", lists), kv("mixed", mixed), kv("small", list(vec![list(vec![s("a\"b")])]))]);
    let got = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &logs(vec![log(attributes)]).encode_to_vec()).unwrap();
    let row = &got.interactions[0];
    assert_eq!(row.dropped_attrs, 2);
    assert_eq!(row.attrs.0[1], ("small".into(), r#"[["a\"b"]]"#.into()));
}

#[test]
fn numbers_that_leave_the_range_of_their_column_are_not_stored() {
    let mut attributes = answer("r-1");
    attributes[2] = kv("gen_ai.response.time_to_first_chunk", V::DoubleValue(1e307));
    attributes[10] = kv("fleet.retrieval.scores", list(vec![V::DoubleValue(1e300), V::DoubleValue(0.5)]));
    let got = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &logs(vec![log(attributes)]).encode_to_vec()).unwrap();
    let row = &got.interactions[0];
    assert_eq!((row.ttft_ms, &*row.chunk_scores), (None, &[0.0, 0.5][..]));
    let mut attributes = answer("r-2");
    attributes.truncate(2);
    let documents = r#"[{"id":"","score":0.9},{"id":"kb-1","score":1e300},{"id":"kb-2","score":0.5}]"#;
    attributes.push(kv("gen_ai.retrieval.documents", s(documents)));
    let got = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &logs(vec![log(attributes)]).encode_to_vec()).unwrap();
    let row = &got.interactions[0];
    assert_eq!((&row.chunk_ids[..], &row.chunk_scores[..]), (&["kb-1".into(), "kb-2".into()][..], &[0.0, 0.5][..]));
}

#[test]
fn the_retrieval_spans_of_a_trace_share_the_chunk_limit() {
    let span = |id: u8, attributes: Vec<KeyValue>| Span {
        trace_id: vec![1; 16],
        span_id: vec![id; 8],
        attributes,
        ..Span::default()
    };
    let chunks = |n: usize| list((0..n).map(|i| s(&format!("kb-{i}"))).collect());
    let retrieval =
        |id, n| span(id, vec![kv("gen_ai.operation.name", s("retrieval")), kv("fleet.retrieval.chunk_ids", chunks(n))]);
    let limit = Limits::default().chunks;
    let chat = span(9, vec![kv("gen_ai.operation.name", s("chat"))]);
    let spans = vec![retrieval(1, limit - 1), retrieval(2, 2), retrieval(3, 1), chat];
    let scope_spans = vec![ScopeSpans { spans, ..ScopeSpans::default() }];
    let resource_spans = vec![ResourceSpans { scope_spans, ..ResourceSpans::default() }];
    let body = ExportTraceServiceRequest { resource_spans }.encode_to_vec();
    let got = decode_as(Endpoint::OtlpTraces, Encoding::Protobuf, &body).unwrap();
    assert_eq!(got.interactions[0].chunk_ids.len(), limit);
    assert_eq!(got.quarantined.iter().map(|q| q.reason).collect::<Vec<_>>(), ["too_many_chunks"]);
}

#[test]
fn more_events_than_a_span_may_have_quarantine_it_in_both_encodings() {
    let span = Span { events: vec![Event::default(); 257], span_id: vec![1; 8], ..Span::default() };
    let scope_spans = vec![ScopeSpans { spans: vec![span], ..ScopeSpans::default() }];
    let request =
        ExportTraceServiceRequest { resource_spans: vec![ResourceSpans { scope_spans, ..ResourceSpans::default() }] };
    for (encoding, body) in
        [(Encoding::Protobuf, request.encode_to_vec()), (Encoding::Json, serde_json::to_vec(&request).unwrap())]
    {
        let got = decode_as(Endpoint::OtlpTraces, encoding, &body).unwrap();
        assert_eq!(
            got.quarantined.iter().map(|q| q.reason).collect::<Vec<_>>(),
            ["too_many_attributes"],
            "{encoding:?}"
        );
    }
}

#[test]
fn every_truncation_ends_without_a_panic_and_never_invents_rows() {
    let whole = logs(vec![log(answer("r-1")), log(answer("r-2"))]).encode_to_vec();
    for cut in 0..whole.len() {
        if let Ok(got) = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &whole[..cut]) {
            assert_eq!(got.items(), 0, "cut at {cut}");
        }
    }
}

proptest::proptest! {
    #[test]
    fn damaged_bodies_never_panic(at in 0usize..2000, byte in proptest::prelude::any::<u8>()) {
        let request = logs(vec![log(answer("r-1")), log(answer("r-2"))]);
        let mut body = request.encode_to_vec();
        let n = body.len();
        body[at % n] = byte;
        let _ = decode_as(Endpoint::OtlpLogs, Encoding::Protobuf, &body);
        let mut text = serde_json::to_vec(&request).unwrap();
        let n = text.len();
        text[at % n] = byte;
        let _ = decode_as(Endpoint::OtlpLogs, Encoding::Json, &text);
    }
}
