//! What every decoder produces, and the steps they share: clock correction, limits on text, quarantine. One bad
//! record never costs its batch: it becomes one [`Quarantined`] entry with a stable reason.

use crate::column::{Day, Micros, Text};
use crate::disposition::Kind;
use crate::limits::Limits;
use crate::mask::Masks;
use crate::rows::{DeviceEventRow, FeedbackRow, InteractionRow, MetricRow, Table, TableRows};
use crate::trust::Sender;
use crate::user::UserKeys;
use arrow::error::ArrowError;
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Error, LabelKind};

/// Where a request came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/events`: one `EventBatchV1` (JSON), or one event per line (NDJSON).
    Events,
    /// `/v1/feedback`: one feedback event (JSON) or several (NDJSON).
    Feedback,
    /// `/v1/traces`.
    OtlpTraces,
    /// `/v1/logs`.
    OtlpLogs,
    /// `/v1/metrics`.
    OtlpMetrics,
    /// Files of history (`/v1/imports`).
    Import,
}

impl Endpoint {
    /// The word in the `source` column.
    #[must_use]
    pub fn source(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::Feedback => "feedback",
            Self::OtlpTraces => "otlp_traces",
            Self::OtlpLogs => "otlp_logs",
            Self::OtlpMetrics => "otlp_metrics",
            Self::Import => "import",
        }
    }
    /// Whether answers follow the OTLP/HTTP rules.
    #[must_use]
    pub fn is_otlp(self) -> bool {
        matches!(self, Self::OtlpTraces | Self::OtlpLogs | Self::OtlpMetrics)
    }
}

/// Finds refusals and abstentions in an answer; given by the program, because detection is a pure crate's work.
pub type ClassifyFn = dyn Fn(&str) -> Option<LabelKind> + Send + Sync;

/// Everything a decoder needs to know about a request.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    pub app: &'a AppId,
    pub endpoint: Endpoint,
    pub sender: Sender,
    pub now: DateTime<Utc>,
    pub limits: &'a Limits,
    pub masks: Masks,
    pub users: &'a UserKeys,
    /// Keep content of OTLP records (`gen_ai.input.messages`, `gen_ai.output.messages`).
    pub otlp_content: bool,
    pub classify: Option<&'a ClassifyFn>,
}

/// One record that was not stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    pub kind: Kind,
    /// Stable word.
    pub reason: &'static str,
    /// For the sender: what was wrong and where.
    pub detail: String,
}

/// Rows of one request.
#[derive(Debug, Default, Clone)]
pub struct Decoded<'a> {
    pub interactions: Vec<InteractionRow<'a>>,
    pub feedback: Vec<FeedbackRow<'a>>,
    pub device_events: Vec<DeviceEventRow<'a>>,
    pub metrics: Vec<MetricRow<'a>>,
    pub quarantined: Vec<Quarantined>,
    /// Sequence number of an SDK batch.
    pub seq: Option<u64>,
    /// Batch id an OTLP client gave as the resource attribute `fleet.batch.id`.
    pub batch_id: Option<String>,
}

impl Decoded<'_> {
    /// Notes a record that cannot be stored.
    pub fn quarantine(&mut self, kind: Kind, reason: &'static str, detail: impl Into<String>) {
        self.quarantined.push(Quarantined { kind, reason, detail: detail.into() });
    }
    /// Items of the request, kept or not.
    #[must_use]
    pub fn items(&self) -> usize {
        let kept = self.interactions.len() + self.feedback.len() + self.device_events.len() + self.metrics.len();
        kept + self.quarantined.len()
    }
    /// Items that will be stored, per kind.
    #[must_use]
    pub fn stored(&self) -> [(Kind, u64); 4] {
        [
            (Kind::Interaction, self.interactions.len() as u64),
            (Kind::Feedback, self.feedback.len() as u64),
            (Kind::Device, self.device_events.len() as u64),
            (Kind::Metric, self.metrics.len() as u64),
        ]
    }
    /// The rows as Arrow batches.
    ///
    /// # Errors
    /// When Arrow refuses the columns (a bug).
    pub fn encode(&self) -> Result<TableRows, ArrowError> {
        let mut rows = TableRows::default();
        if !self.interactions.is_empty() {
            rows.set(Table::Interactions, InteractionRow::encode(&self.interactions)?);
        }
        if !self.feedback.is_empty() {
            rows.set(Table::Feedback, FeedbackRow::encode(&self.feedback)?);
        }
        if !self.device_events.is_empty() {
            rows.set(Table::DeviceEvents, DeviceEventRow::encode(&self.device_events)?);
        }
        if !self.metrics.is_empty() {
            rows.set(Table::Metrics, MetricRow::encode(&self.metrics)?);
        }
        Ok(rows)
    }
}

/// Drift below this is left alone: correcting small drifts makes data worse (the 55-minute minimum of Sentry Relay).
const MIN_DRIFT_US: i64 = 55 * 60 * 1_000_000;
/// Device times before this are a phone whose clock was never set (2015-01-01).
pub(crate) const SANE_FROM_US: i64 = 1_420_070_400_000_000;
pub(crate) const DAY_US: i64 = 86_400_000_000;

/// The stamps of one record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stamps {
    pub received_at: Micros,
    pub received_date: Day,
    pub event_at: Option<Micros>,
    pub occurred_at: Micros,
    pub sent_at: Option<Micros>,
}

/// Corrects the device clock where it is clearly wrong. With `sent_at` the drift is known and the event moves with
/// it; without it an absurd time (before 2015, or more than a day ahead) becomes the receipt.
pub(crate) fn stamps(now: DateTime<Utc>, event_at: Option<Micros>, sent_at: Option<Micros>) -> Stamps {
    let received = Micros::from(now);
    let drift = sent_at.map_or(0, |s| received.0.saturating_sub(s.0));
    let mut at = event_at.unwrap_or(received).0;
    if drift.saturating_abs() > MIN_DRIFT_US {
        at = at.saturating_add(drift);
    }
    if at < SANE_FROM_US || at > received.0.saturating_add(DAY_US) {
        at = received.0;
    }
    Stamps { received_at: received, received_date: received.day(), event_at, occurred_at: Micros(at), sent_at }
}

/// Key of the user that a record names.
pub(crate) fn user_key<'a>(ctx: &Context<'_>, user: Option<&str>) -> Option<Text<'a>> {
    user.and_then(|u| ctx.users.key(ctx.app, u)).map(Into::into)
}

/// Masked text within the limit, or the reason why not.
pub(crate) fn content<'a>(text: Text<'a>, what: &str, ctx: &Context<'_>) -> Result<Text<'a>, String> {
    let limit = ctx.limits.text_bytes;
    if text.len() > limit {
        return Err(format!("{what} is {} bytes long, {limit} is the limit", text.len()));
    }
    Ok(ctx.masks.apply(text))
}

/// Bytes of a short field.
const SHORT: usize = 128;

/// Text of a short field: control characters out, cut at 128 bytes on a character boundary.
pub(crate) fn short(text: Text<'_>) -> Option<Text<'_>> {
    bounded(text, SHORT)
}

/// Text without control characters, cut at `max` bytes on a character boundary.
pub(crate) fn bounded(text: Text<'_>, max: usize) -> Option<Text<'_>> {
    // every control character is below 0x20, 0x7f, or begins with the byte 0xc2 (C1)
    let clean = text.len() <= max && !text.bytes().any(|b| b < 0x20 || b == 0x7f || b == 0xc2);
    if clean {
        return (!text.is_empty()).then_some(text);
    }
    let mut out: String = text.chars().filter(|c| !c.is_control()).collect();
    if out.len() > max {
        let cut = (0..=max).rev().find(|i| out.is_char_boundary(*i)).unwrap_or(0);
        out.truncate(cut);
    }
    (!out.is_empty()).then_some(out.into())
}

/// Error for a body that cannot be decoded at all (400, the client must not retry).
pub(crate) fn undecodable(what: impl std::fmt::Display) -> Error {
    Error::invalid(
        "undecodable_body",
        format!("the body cannot be decoded: {what}"),
        "check Content-Type and the format version; sending the same body again will not help",
    )
}

pub(crate) fn too_many(records: usize, limit: usize) -> Error {
    Error::new(
        flywheel_types::ErrorKind::TooLarge,
        "too_many_records",
        format!("the request holds {records} records, {limit} is the limit"),
        "split the batch",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(s: &str) -> DateTime<Utc> {
        s.parse().unwrap()
    }

    #[test]
    fn small_drift_is_left_alone_and_large_drift_moves_the_event() {
        let now = t("2026-03-01T12:00:00Z");
        let event = Micros::from(t("2026-03-01T11:00:00Z"));
        let near = stamps(now, Some(event), Some(Micros::from(t("2026-03-01T11:30:00Z"))));
        assert_eq!(near.occurred_at, event);
        // The device believes it is 1970; the event was 10 minutes before sending.
        let off =
            stamps(now, Some(Micros::from(t("1970-01-02T00:00:00Z"))), Some(Micros::from(t("1970-01-02T00:10:00Z"))));
        assert_eq!(off.occurred_at, Micros::from(t("2026-03-01T11:50:00Z")));
        assert_eq!(off.event_at, Some(Micros::from(t("1970-01-02T00:00:00Z"))));
    }

    #[test]
    fn late_phones_keep_their_time_and_absurd_clocks_get_the_receipt() {
        let now = t("2026-03-10T12:00:00Z");
        let three_days = Micros::from(t("2026-03-07T12:00:00Z"));
        assert_eq!(stamps(now, Some(three_days), None).occurred_at, three_days);
        for absurd in [Micros(0), Micros(i64::MAX), Micros(i64::MIN), Micros((u64::MAX / 1000) as i64)] {
            let got = stamps(now, Some(absurd), None);
            assert_eq!(got.occurred_at, Micros::from(now));
            assert_eq!(got.event_at, Some(absurd));
            assert_eq!(got.received_date, Micros::from(now).day());
        }
    }

    #[test]
    fn short_text_is_cut_on_a_character() {
        let long = "é".repeat(100);
        assert_eq!(short(long.into()).unwrap().len(), 128);
        assert_eq!(short("a\nb\u{0}".into()), Some("ab".into()));
        assert_eq!(short("a\u{85}é".into()), Some("aé".into()));
        assert_eq!(short("\n".into()), None);
        assert!(matches!(short("é".into()), Some(std::borrow::Cow::Borrowed("é"))));
    }
}
