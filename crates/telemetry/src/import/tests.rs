//! What a row of history becomes: casts, attributes, times, quarantine.

use super::columns::Mapping;
use super::lines::{Compression, Lines};
use super::{Fates, lines, rows};
use crate::column::Micros;
use crate::decode::{Context, Decoded, Endpoint};
use crate::limits::Limits;
use crate::mask::Masks;
use crate::rows::Table;
use crate::trust::Sender;
use arrow::array::{
    ArrayRef, AsArray as _, BooleanArray, DictionaryArray, Float64Array, Int8Array, Int32Array, LargeStringArray,
    ListArray, NullArray, RecordBatch, StringArray, StringViewArray, StructArray, TimestampNanosecondArray,
    TimestampSecondArray, UInt64Array,
};
use arrow::datatypes::{DataType, Field, Float64Type, Int32Type, Int64Type};
use flywheel_types::{AppId, LabelKind};
use std::io::Write as _;
use std::sync::Arc;

fn classify(answer: &str) -> Option<LabelKind> {
    answer.starts_with("Sorry").then_some(LabelKind::Refused)
}

fn context<'a>(app: &'a AppId, limits: &'a Limits) -> Context<'a> {
    Context {
        app,
        endpoint: Endpoint::Import,
        sender: Sender::ANONYMOUS,
        now: "2026-03-01T10:00:00Z".parse().unwrap(),
        limits,
        masks: Masks::default(),
        users: Box::leak(Box::new(crate::user::UserKeys::new(&[0; 32]))),
        otlp_content: false,
        classify: Some(&classify),
    }
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, a)| (name, a, true))).unwrap()
}

/// Rows of `table` from `file`, looked at by `f`.
fn with<T>(table: Table, file: &RecordBatch, f: impl FnOnce(&Decoded<'_>) -> T) -> T {
    let (app, limits) = (AppId::new("shop").unwrap(), Limits::default());
    let mapping = Mapping::new(table, &file.schema()).unwrap();
    let mapped = mapping.apply(file).unwrap();
    f(&rows::decode(&context(&app, &limits), &mapping, &mapped, 1))
}

fn texts(values: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

/// 2025-06-01 12:00 UTC, seconds.
const NOON: i64 = 1_748_779_200;

#[test]
fn columns_are_found_by_name_and_cast() {
    let model: DictionaryArray<Int32Type> = vec![Some("pixel"), None].into_iter().collect();
    let ids: ListArray = {
        let mut b = arrow::array::ListBuilder::new(arrow::array::LargeStringBuilder::new());
        b.values().append_value("kb-1");
        b.values().append_value("kb-2");
        b.append(true);
        b.append(false);
        b.finish()
    };
    let file = batch(vec![
        ("interaction_id", Arc::new(StringViewArray::from(vec!["a", "b"]))),
        ("app", texts(&["other", "other"])),
        ("trust", texts(&["attested", "keyed"])),
        ("source", texts(&["events", "events"])),
        (
            "event_at",
            Arc::new(
                TimestampNanosecondArray::from(vec![NOON * 1_000_000_000 + 1_234_567_890; 2])
                    .with_timezone("Europe/Berlin"),
            ),
        ),
        ("received_at", Arc::new(TimestampSecondArray::from(vec![Some(NOON + 60), None]))),
        ("template_id", Arc::new(LargeStringArray::from(vec![Some("faq@3"), None]))),
        ("device_model", Arc::new(model)),
        ("input_tokens", Arc::new(Int8Array::from(vec![Some(7), None]))),
        ("output_tokens", Arc::new(Float64Array::from(vec![20.0, f64::NAN]))),
        ("ram_bytes", Arc::new(UInt64Array::from(vec![8 << 30; 2]))),
        ("ttft_ms", Arc::new(Int32Array::from(vec![120, 130]))),
        ("cold_start", Arc::new(BooleanArray::from(vec![true, false]))),
        ("os", Arc::new(NullArray::new(2))),
        ("chunk_ids", Arc::new(ids)),
    ]);
    with(Table::Interactions, &file, |got| {
        assert_eq!(got.quarantined, []);
        let [a, b] = &got.interactions[..] else { panic!("{got:?}") };
        assert_eq!((a.app.as_ref(), a.trust.as_ref(), a.source.as_ref()), ("shop", "anonymous", "import"));
        assert_eq!(a.received_at, Micros((NOON + 60) * 1_000_000));
        assert_eq!(a.received_date, a.received_at.day());
        assert_eq!(a.event_at, Some(Micros(NOON * 1_000_000 + 1_234_567)));
        assert_eq!((a.occurred_at, b.received_at), (a.event_at.unwrap(), b.event_at.unwrap()));
        assert_eq!((a.template_id.as_deref(), b.template_id.as_deref()), (Some("faq@3"), None));
        assert_eq!((a.device_model.as_deref(), b.device_model.as_deref()), (Some("pixel"), None));
        assert_eq!((a.input_tokens, b.input_tokens), (Some(7), None));
        assert_eq!((a.output_tokens, b.output_tokens), (Some(20), None));
        assert_eq!((a.ram_bytes, a.ttft_ms, a.cold_start), (Some(8 << 30), Some(120.0), Some(true)));
        assert_eq!((a.os.as_deref(), a.bundle.as_deref()), (None, None));
        assert_eq!((&a.chunk_ids[..], &a.chunk_versions[..]), (&["kb-1".into(), "kb-2".into()][..], &[0, 0][..]));
        assert_eq!((&a.chunk_hidden[..], b.chunk_ids.len()), (&[false, false][..], 0));
    });
}

#[test]
fn what_is_no_column_becomes_an_attribute_within_the_limits() {
    let mut columns = vec![
        ("interaction_id", texts(&["a"])),
        ("battery", Arc::new(Int32Array::from(vec![83])) as ArrayRef),
        ("contact", texts(&["write to a.b@example.com"])),
        ("long", texts(&[&"x".repeat(2000)])),
    ];
    let names: Vec<String> = (0..40).map(|i| format!("extra_{i}")).collect();
    columns.extend(names.iter().map(|n| (n.as_str(), texts(&["v"]))));
    with(Table::Interactions, &batch(columns), |got| {
        let row = &got.interactions[0];
        assert_eq!(row.attrs.0[0], ("battery".into(), "83".into()));
        assert_eq!(row.attrs.0[1], ("contact".into(), "write to [email]".into()));
        assert_eq!((row.attrs.0.len(), row.dropped_attrs), (32, 11));
    });
    let feedback =
        batch(vec![("interaction_id", texts(&["a"])), ("label", texts(&["rejected"])), ("mood", texts(&["x"]))]);
    assert_eq!(Mapping::new(Table::Feedback, &feedback.schema()).unwrap().ignored, ["mood"]);
}

#[test]
fn a_bad_row_is_set_aside_with_its_reason_and_number() {
    let long = "x".repeat((64 << 10) + 1);
    let file = batch(vec![
        (
            "interaction_id",
            Arc::new(StringArray::from(vec![Some("a"), None, Some("c d"), Some("d"), Some("e"), Some("f")])),
        ),
        ("phase", Arc::new(UInt64Array::from(vec![1, 1, 1, 1 << 40, 1, 1]))),
        ("answer_text", Arc::new(StringArray::from(vec!["Sorry, no.", "", "", "", &long, "call +1 212 555 0123"]))),
        ("received_at", Arc::new(TimestampSecondArray::from(vec![NOON; 6]))),
        ("ttft_ms", Arc::new(Float64Array::from(vec![f64::NAN, 1.0, 1.0, 1.0, 1.0, f64::INFINITY]))),
    ]);
    with(Table::Interactions, &file, |got| {
        let [a, f] = &got.interactions[..] else { panic!("{got:?}") };
        assert_eq!((a.detected.as_deref(), a.ttft_ms, a.nonfinite_fields), (Some("refused"), None, 1));
        assert_eq!((f.answer_text.as_deref(), f.nonfinite_fields), (Some("call [phone]"), 1));
        let found: Vec<_> = got.quarantined.iter().map(|q| (q.reason, q.detail.split(':').next().unwrap())).collect();
        assert_eq!(
            found,
            [
                ("no_interaction_id", "row 2"),
                ("bad_interaction_id", "row 3"),
                ("bad_value", "row 4"),
                ("text_too_long", "row 5")
            ]
        );
    });
    let ages = batch(vec![
        ("interaction_id", texts(&["a", "b", "c"])),
        ("label", texts(&["rejected", "hated", "accepted"])),
        ("received_at", Arc::new(TimestampSecondArray::from(vec![NOON, NOON, 4_000_000_000]))),
        ("reason", texts(&["mail me at a@b.example", "", ""])),
    ]);
    with(Table::Feedback, &ages, |got| {
        assert_eq!((got.feedback.len(), got.feedback[0].reason.as_deref()), (1, Some("mail me at [email]")));
        let found: Vec<_> = got.quarantined.iter().map(|q| q.reason).collect();
        assert_eq!(found, ["unknown_label", "bad_received_at"]);
    });
    let events =
        batch(vec![("event", texts(&["crashed", "exploded"])), ("load_ms", Arc::new(Int32Array::from(vec![9, 9])))]);
    with(Table::DeviceEvents, &events, |got| {
        let row = &got.device_events[0];
        assert_eq!(
            (row.event.as_ref(), row.load_ms, row.received_at),
            ("crashed", Some(9.0), "2026-03-01T10:00:00Z".parse::<chrono::DateTime<chrono::Utc>>().unwrap().into())
        );
        assert_eq!(got.quarantined[0].reason, "unknown_device_event");
    });
}

#[test]
fn a_column_of_another_meaning_refuses_the_file() {
    let nested = StructArray::from(vec![(
        Arc::new(Field::new("x", DataType::Int32, true)),
        Arc::new(Int32Array::from(vec![1])) as ArrayRef,
    )]);
    for (column, array) in [
        ("ttft_ms", Arc::new(nested) as ArrayRef),
        ("input_tokens", texts(&["7"])),
        ("received_at", Arc::new(Int32Array::from(vec![1]))),
        ("chunk_ids", texts(&["kb-1"])),
    ] {
        let file = batch(vec![("interaction_id", texts(&["a"])), (column, array)]);
        let e = Mapping::new(Table::Interactions, &file.schema()).err().unwrap();
        assert!(e.contains(column), "{e}");
    }
}

#[test]
fn lists_of_different_lengths_are_no_retrieval() {
    let one = |n: i32| ListArray::from_iter_primitive::<Int32Type, _, _>([Some((0..n).map(Some))]);
    let scores = ListArray::from_iter_primitive::<Float64Type, _, _>([Some([Some(0.5), Some(f64::NAN)])]);
    let mut ids = arrow::array::ListBuilder::new(arrow::array::StringBuilder::new());
    ids.append_value([Some("kb-1"), Some("kb-2")]);
    let ids: ArrayRef = Arc::new(ids.finish());
    let file = |n| {
        batch(vec![
            ("interaction_id", texts(&["a"])),
            ("chunk_ids", Arc::clone(&ids)),
            ("chunk_versions", Arc::new(one(n))),
            ("chunk_scores", Arc::new(scores.clone())),
        ])
    };
    with(Table::Interactions, &file(2), |got| {
        assert_eq!(
            (&got.interactions[0].chunk_versions[..], &got.interactions[0].chunk_scores[..]),
            (&[0, 1][..], &[0.5, 0.0][..])
        );
    });
    with(Table::Interactions, &file(1), |got| assert_eq!(got.quarantined[0].reason, "chunk_lists_differ"));
}

fn file(text: &[u8]) -> std::fs::File {
    use std::io::Seek as _;
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text).unwrap();
    file.rewind().unwrap();
    file
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(text).unwrap();
    out.finish().unwrap()
}

#[test]
fn lines_are_events_with_what_an_upload_says_beside_them() {
    let zero = "0".repeat(64);
    let text = format!(
        "{{\"kind\":\"interaction\",\"interaction_id\":\"a\",\"at\":\"2025-06-01T12:00:00Z\",\"template_id\":\"faq\",\"bundle\":\"{zero}\",\
         \"received_at\":\"2025-06-02T00:00:00Z\",\"install_id\":\"i-1\",\"sdk\":\"x/1\",\"device\":{{\"class\":\"high\"}}}}\n\
         \n\
         {{\"kind\":\"feedback\",\"interaction_id\":\"a\",\"at\":\"2025-06-01T12:01:00Z\",\"label\":\"rejected\"}}\r\n\
         not json\n\
         {{\"kind\":\"device\",\"at\":\"2025-06-01T12:02:00Z\",\"event\":\"crashed\",\"received_at\":\"2031-01-01T00:00:00Z\"}}\n\
         {}\n\
         {{\"kind\":\"device\",\"at\":\"1970-01-01T00:00:00Z\",\"event\":\"confirmed\"}}",
        "x".repeat((1 << 20) + 1),
    );
    let packed = [
        (Compression::None, text.clone().into_bytes()),
        (Compression::Gzip, [gzip(&text.as_bytes()[..300]), gzip(&text.as_bytes()[300..])].concat()),
        (Compression::Zstd, zstd::encode_all(text.as_bytes(), 1).unwrap()),
    ];
    for (compression, bytes) in packed {
        let (app, limits) = (AppId::new("shop").unwrap(), Limits::default());
        let ctx = context(&app, &limits);
        let mut lines = Lines::open(file(&bytes), compression).unwrap();
        let taken = lines.batch(100).unwrap();
        assert_eq!((taken.taken, lines.at_end().unwrap()), (7, true));
        let got = lines::decode(&ctx, &taken);
        let a = &got.interactions[0];
        assert_eq!(
            (a.install_id.as_deref(), a.sdk.as_deref(), a.device_class.as_deref()),
            (Some("i-1"), Some("x/1"), Some("high"))
        );
        assert_eq!(a.received_at, "2025-06-02T00:00:00Z".parse::<chrono::DateTime<chrono::Utc>>().unwrap().into());
        assert_eq!(a.occurred_at.0, NOON * 1_000_000);
        assert_eq!((a.source.as_ref(), a.trust.as_ref()), ("import", "anonymous"));
        assert_eq!(got.feedback[0].received_at.0, (NOON + 60) * 1_000_000);
        // a clock that was never set: the start of the import
        assert_eq!(got.device_events[0].received_at, ctx.now.into());
        let found: Vec<_> = got.quarantined.iter().map(|q| q.reason).collect();
        assert_eq!(found, ["bad_event", "bad_received_at", "line_too_long"]);
        assert!(got.quarantined[1].detail.starts_with("line 5: "), "{:?}", got.quarantined);
        let mut fates = Fates::default();
        let tables = fates.encode(&ctx, "old.jsonl", &got).unwrap();
        let details = tables.get(Table::Rejects).unwrap().column_by_name("detail").unwrap().as_string::<i32>().clone();
        assert!(details.value(2).starts_with("old.jsonl: line 6: "), "{details:?}");
        let items = fates.dispositions().unwrap();
        let sum: i64 = items.column_by_name("items").unwrap().as_primitive::<Int64Type>().iter().flatten().sum();
        assert_eq!(sum, 6, "every line that is not blank is counted once");
    }
}

#[test]
fn lines_go_on_where_they_were_left() {
    let text: String = (0..100).map(|i| format!("{i}\n")).collect();
    let mut lines = Lines::open(file(text.as_bytes()), Compression::None).unwrap();
    lines.skip(90).unwrap();
    let (app, limits) = (AppId::new("shop").unwrap(), Limits::default());
    let ctx = context(&app, &limits);
    let first = lines.batch(4).unwrap();
    assert_eq!(first.taken, 4);
    assert!(lines::decode(&ctx, &first).quarantined[0].detail.contains("line 91"));
    assert_eq!((lines.batch(100).unwrap().taken, lines.batch(100).unwrap().taken), (6, 0));
    lines.skip(5).unwrap();
}
