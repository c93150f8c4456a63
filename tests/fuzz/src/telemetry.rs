//! Bodies of `/v1/events` and `/v1/feedback`, and their decompression. Every received item ends in exactly one counted
//! disposition (invariant 1 of ARCHITECTURE.md), whatever the body looks like.

use crate::choice;
use chrono::{DateTime, Utc};
use flywheel_telemetry::decode::Context;
use flywheel_telemetry::inflate::inflate;
use flywheel_telemetry::rows::{InteractionRow, MetricRow};
use flywheel_telemetry::trust::Sender;
use flywheel_telemetry::{Decoded, Endpoint, Limits, Masks, Table, UserKeys};
use flywheel_types::{AppId, InstallId, LabelKind, TrustClass};
use std::io::Write as _;
use std::sync::LazyLock;

/// Limits small enough for the fuzzer to reach each of them.
static LIMITS: LazyLock<Limits> = LazyLock::new(|| Limits {
    records: 20,
    attributes: 24,
    attribute_bytes: 64,
    extra_attributes: 4,
    text_bytes: 512,
    chunks: 4,
    buckets: 6,
    ..Limits::default()
});

static USERS: LazyLock<UserKeys> = LazyLock::new(|| UserKeys::new(&[7; 32]));
static APP: LazyLock<AppId> = LazyLock::new(|| AppId::new("app").expect("a valid id"));

fn classify(answer: &str) -> Option<LabelKind> {
    answer.starts_with("Sorry").then_some(LabelKind::Refused)
}

/// Calls `f` with the context of a request; bit 7 of `flags`: the sender is proven.
pub(crate) fn with_context<T>(endpoint: Endpoint, flags: u8, f: impl FnOnce(&Context<'static>) -> T) -> T {
    let install = Some(InstallId::of_public_key(&[7; 32]));
    let sender = if flags & 128 != 0 { Sender { trust: TrustClass::Keyed, install } } else { Sender::ANONYMOUS };
    let now: DateTime<Utc> = "2026-03-01T10:00:06Z".parse().expect("a valid time");
    let masks = Masks::default();
    f(&Context {
        app: &APP,
        endpoint,
        sender,
        now,
        limits: &LIMITS,
        masks,
        users: &USERS,
        otlp_content: true,
        classify: Some(&classify),
    })
}

/// What holds for the rows of any decoder. `items`: how many the body holds, where that can be told.
pub(crate) fn check(decoded: &Decoded<'_>, items: Option<usize>) {
    let stored: u64 = decoded.stored().iter().map(|(_, n)| n).sum();
    assert_eq!(stored as usize + decoded.quarantined.len(), decoded.items(), "stored and quarantined are all items");
    if let Some(items) = items {
        assert_eq!(decoded.items(), items, "every item of the body is counted once");
    }
    assert!(decoded.quarantined.iter().all(|q| !q.reason.is_empty()));
    for row in &decoded.interactions {
        interaction(row);
    }
    for row in &decoded.metrics {
        metric(row);
    }
    let rows = decoded.encode().expect("decoded rows fit their columns");
    assert_eq!(rows.rows() as u64, stored, "every stored item is a row");
    let got = rows.get(Table::Interactions).map_or(0, |batch| batch.num_rows());
    assert_eq!(got, decoded.interactions.len());
}

fn interaction(row: &InteractionRow<'_>) {
    let n = row.chunk_ids.len();
    assert_eq!((row.chunk_versions.len(), row.chunk_scores.len(), row.chunk_hidden.len()), (n, n, n));
    assert!(n <= LIMITS.chunks, "{n} chunks");
    assert!(row.chunk_scores.iter().all(|s| s.is_finite()));
    let numbers =
        [row.ttft_ms, row.ttfv_ms, row.decode_tokens_per_s, row.energy_mj, row.battery_start, row.battery_end];
    assert!(numbers.iter().flatten().all(|v| v.is_finite()), "not a number is stored as no number");
    assert!(row.attrs.0.len() <= LIMITS.extra_attributes);
    let year_2015_us = 1_420_070_400_000_000;
    assert!(row.occurred_at.0 >= year_2015_us, "absurd clocks get the time of receipt");
    let facts = [&row.device_class, &row.device_model, &row.soc, &row.os, &row.locale, &row.app_version, &row.runtime];
    // operating system and its version are two facts of 128 bytes and a space
    assert!(facts.iter().all(|f| f.as_ref().is_none_or(|f| f.len() <= 257)));
}

fn metric(row: &MetricRow<'_>) {
    assert!(!row.name.is_empty() && row.name.len() <= 255, "{} bytes of name", row.name.len());
    assert!(row.value_int.is_none() || row.value_double.is_none(), "one value");
    let numbers = [row.value_double, row.sum, row.min, row.max, row.zero_threshold].into_iter().flatten();
    let mut numbers =
        numbers.chain(row.explicit_bounds.iter().copied()).chain(row.quantile_values.iter().copied().flatten());
    assert!(numbers.all(f64::is_finite), "not a number is stored as no number");
    let counts = [row.count, row.zero_count].into_iter().flatten();
    let lists = row.bucket_counts.iter().chain(&row.positive_counts).chain(&row.negative_counts);
    assert!(counts.chain(lists.copied()).all(|n| n >= 0), "a count is negative");
    let (bounds, buckets) = (row.explicit_bounds.len(), row.bucket_counts.len());
    assert!((bounds, buckets) == (0, 0) || buckets == bounds + 1, "{bounds} bounds, {buckets} buckets");
    assert_eq!(row.quantiles.len(), row.quantile_values.len());
    let longest = [bounds, row.positive_counts.len(), row.negative_counts.len(), row.quantiles.len()];
    assert!(longest.into_iter().all(|n| n <= LIMITS.buckets), "{longest:?}");
    assert!(row.attrs.0.len() <= LIMITS.extra_attributes);
    let year_2015_us = 1_420_070_400_000_000;
    assert!(row.occurred_at.0 >= year_2015_us, "absurd clocks get the time of receipt");
}

/// As much of a batch as the count of its items needs.
#[derive(serde::Deserialize)]
struct Shape {
    seq: u64,
    events: Vec<serde::de::IgnoredAny>,
}

/// `/v1/events`. First byte, bit 0: one event per line instead of a batch.
pub fn events(data: &[u8]) {
    let (flags, body) = choice(data);
    let lines = flags & 1 != 0;
    let decoded = with_context(Endpoint::Events, flags, |c| flywheel_telemetry::events::decode(c, lines, body));
    let Ok(decoded) = decoded else { return };
    let items = if lines {
        non_blank_lines(body)
    } else {
        let shape: Shape = serde_json::from_slice(body).expect("an accepted batch has a number and events");
        assert_eq!(decoded.seq, Some(shape.seq));
        shape.events.len()
    };
    check(&decoded, Some(items));
}

/// `/v1/feedback`. First byte, bit 0: one per line.
pub fn feedback(data: &[u8]) {
    let (flags, body) = choice(data);
    let lines = flags & 1 != 0;
    let decoded = with_context(Endpoint::Feedback, flags, |c| flywheel_telemetry::events::decode(c, lines, body));
    let Ok(decoded) = decoded else { return };
    check(&decoded, Some(if lines { non_blank_lines(body) } else { 1 }));
    assert!(decoded.interactions.is_empty() && decoded.device_events.is_empty(), "feedback is only feedback");
    assert!(decoded.feedback.iter().all(|f| f.reason.as_ref().is_none_or(|r| r.len() <= LIMITS.attribute_bytes)));
}

fn non_blank_lines(body: &[u8]) -> usize {
    let text = std::str::from_utf8(body).expect("an accepted body is UTF-8");
    text.lines().filter(|l| !l.trim().is_empty()).count()
}

/// Compressed; for seeds too.
#[must_use]
pub fn gzip(body: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(body).expect("gzip writes to memory");
    gzip.finish().expect("gzip writes to memory")
}

/// Compressed; for seeds too.
#[must_use]
pub fn zstd(body: &[u8]) -> Vec<u8> {
    zstd::encode_all(body, 1).expect("zstd writes to memory")
}

/// Compressed bodies. First byte: encoding (two bits) and cap. The rest is read as a stream, and also compressed and
/// read back.
pub fn inflate_body(data: &[u8]) {
    let (flags, body) = choice(data);
    let cap = [0usize, 10, 1000, 1 << 18][usize::from(flags >> 2 & 3)];
    let encoding = [None, Some("gzip"), Some("zstd"), Some("x-gzip")][usize::from(flags & 3)];
    if let Ok(out) = inflate(encoding, body, cap) {
        assert!(out.len() <= cap, "{} bytes came out of a cap of {cap}", out.len());
        assert_eq!(inflate(encoding, body, cap).expect("the same body, the same answer"), out);
        assert!(out.is_empty() || inflate(encoding, body, out.len() - 1).is_err(), "one byte less does not fit");
    }
    let packed = match encoding {
        None => body.to_vec(),
        Some("zstd") => zstd(body),
        Some(_) => gzip(body),
    };
    assert_eq!(inflate(encoding, &packed, body.len()).expect("a body that fits exactly"), body);
    if encoding.is_some() && packed.len() > 1 {
        let cut = usize::from(flags >> 4) % packed.len();
        assert!(cut == 0 || inflate(encoding, &packed[..cut], body.len()).is_err(), "a stream that is cut is refused");
    }
}
