//! Decoder of `/v1/events` and `/v1/feedback`: an `EventBatchV1`, a single event, or one event per line. The
//! envelope is parsed once with the events left as raw text; each event is then parsed alone, so that a bad one is
//! quarantined and the others are kept.

use crate::column::{Attrs, Micros, Text};
use crate::decode::{Context, Decoded, Endpoint, content, short, stamps, too_many, undecodable, user_key};
use crate::disposition::Kind;
use crate::rows::{DeviceEventRow, FeedbackRow, InteractionRow};
use chrono::{DateTime, Utc};
use flywheel_types::wire::{AssignedArmV1, DeviceEventV1, DeviceFactsV1, EventV1, FeedbackV1, InteractionV1};
use flywheel_types::{Error, InstallId};
use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct Batch<'a> {
    v: u8,
    install_id: InstallId,
    seq: u64,
    sent_at: DateTime<Utc>,
    sdk: String,
    device: DeviceFactsV1,
    #[serde(borrow)]
    events: Vec<&'a RawValue>,
}

/// What all events of one batch share.
struct Shared<'a> {
    install: Option<Text<'static>>,
    seq: Option<i64>,
    sent_at: Option<Micros>,
    sdk: Option<Text<'static>>,
    device: &'a DeviceFactsV1,
}

/// Decodes a body of `/v1/events` or `/v1/feedback`.
///
/// # Errors
/// `undecodable_body` when the envelope is not JSON of version 1, `bad_signature` when a signed batch names another
/// install than its key, `too_many_records` past the limit.
pub fn decode<'a>(ctx: &Context<'a>, lines: bool, body: &'a [u8]) -> Result<Decoded<'a>, Error> {
    let text = std::str::from_utf8(body).map_err(|e| undecodable(format!("not UTF-8: {e}")))?;
    if lines || ctx.endpoint == Endpoint::Feedback {
        return decode_lines(ctx, lines, text);
    }
    let batch: Batch<'_> = serde_json::from_str(text).map_err(undecodable)?;
    if batch.v != 1 {
        return Err(undecodable(format!("event batch version {} is not known, this server reads 1", batch.v)));
    }
    if batch.seq == 0 || batch.seq > i64::MAX as u64 {
        return Err(undecodable(format!("seq is {}; it counts 1, 2, 3, … per install", batch.seq)));
    }
    if batch.events.len() > ctx.limits.records {
        return Err(too_many(batch.events.len(), ctx.limits.records));
    }
    if let Some(proven) = ctx.sender.install
        && proven != batch.install_id
    {
        return Err(crate::trust::refused(
            "the batch names another install than the digest of the key that signed it".to_owned(),
        ));
    }
    let shared = Shared {
        install: Some(batch.install_id.to_string().into()),
        seq: i64::try_from(batch.seq).ok(),
        sent_at: Some(batch.sent_at.into()),
        sdk: short(batch.sdk.into()),
        device: &batch.device,
    };
    let mut out = Decoded { seq: Some(batch.seq), ..Decoded::default() };
    for (i, raw) in batch.events.iter().enumerate() {
        event(ctx, &shared, &mut out, i, raw.get());
    }
    Ok(out)
}

/// A single event, or one per line. `/v1/feedback` needs no `kind`.
fn decode_lines<'a>(ctx: &Context<'a>, lines: bool, text: &'a str) -> Result<Decoded<'a>, Error> {
    #[derive(Deserialize)]
    struct Claim {
        install_id: Option<InstallId>,
    }
    let device = DeviceFactsV1::default();
    let records: Vec<&str> = if lines { text.lines().filter(|l| !l.trim().is_empty()).collect() } else { vec![text] };
    if records.len() > ctx.limits.records {
        return Err(too_many(records.len(), ctx.limits.records));
    }
    if !lines {
        serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(undecodable)?;
    }
    let mut out = Decoded::default();
    for (i, record) in records.into_iter().enumerate() {
        let claimed = serde_json::from_str::<Claim>(record).ok().and_then(|c| c.install_id);
        let install = ctx.sender.install.or(claimed).map(|x| x.to_string().into());
        let shared = Shared { install, seq: None, sent_at: None, sdk: None, device: &device };
        if ctx.endpoint == Endpoint::Feedback {
            match serde_json::from_str::<FeedbackV1>(record) {
                Ok(f) => feedback(ctx, &shared, &mut out, f),
                Err(e) => out.quarantine(Kind::Feedback, "bad_event", format!("event {i}: {e}")),
            }
        } else {
            event(ctx, &shared, &mut out, i, record);
        }
    }
    Ok(out)
}

/// One line of history: an event, and beside its fields what a live upload has in its envelope: `install_id`, `sdk`,
/// `device`, and the `received_at` of the time. Adds one row or one quarantined record.
pub(crate) fn history<'a>(ctx: &Context<'a>, out: &mut Decoded<'a>, line: usize, text: &'a str) {
    #[derive(Deserialize)]
    struct Beside {
        install_id: Option<String>,
        sdk: Option<String>,
        received_at: Option<DateTime<Utc>>,
        device: Option<DeviceFactsV1>,
    }
    let beside = match serde_json::from_str::<Beside>(text) {
        Ok(beside) => beside,
        Err(e) => return out.quarantine(kind_of(text), "bad_event", format!("line {line}: {e}")),
    };
    let fact = |text: Option<String>| text.and_then(|t| short(t.into()));
    let device = beside.device.unwrap_or_default();
    let (install, sdk) = (fact(beside.install_id), fact(beside.sdk));
    let shared = Shared { install, seq: None, sent_at: None, sdk, device: &device };
    let mut one = Decoded::default();
    event(ctx, &shared, &mut one, line, text);
    crate::import::add(ctx, one, beside.received_at.map(Micros::from), line, out);
}

fn event<'a>(ctx: &Context<'a>, shared: &Shared<'_>, out: &mut Decoded<'a>, index: usize, raw: &'a str) {
    match serde_json::from_str::<EventV1>(raw) {
        Ok(EventV1::Interaction(x)) => interaction(ctx, shared, out, index, x),
        Ok(EventV1::Feedback(x)) => feedback(ctx, shared, out, x),
        Ok(EventV1::Device(x)) => device(ctx, shared, out, &x),
        Err(e) => {
            let kind = kind_of(raw);
            out.quarantine(kind, "bad_event", format!("event {index}: {e}"));
        }
    }
}

fn kind_of(raw: &str) -> Kind {
    #[derive(Deserialize)]
    struct Tag {
        kind: String,
    }
    match serde_json::from_str::<Tag>(raw).map(|t| t.kind).as_deref() {
        Ok("interaction") => Kind::Interaction,
        Ok("feedback") => Kind::Feedback,
        Ok("device") => Kind::Device,
        _ => Kind::Unknown,
    }
}

/// A short text of the batch, which all its rows carry.
fn fact<'a>(text: &Option<String>) -> Option<Text<'a>> {
    text.clone().and_then(|t| short(t.into()))
}

/// Rollout, phase and arm of an assignment.
fn arm(a: Option<&AssignedArmV1>) -> (Option<Text<'static>>, Option<i32>, Option<Text<'static>>) {
    match a {
        Some(a) => (Some(a.rollout_id.to_string().into()), i32::try_from(a.phase).ok(), Some(a.arm.as_str().into())),
        None => (None, None, None),
    }
}

fn interaction<'a>(ctx: &Context<'a>, shared: &Shared<'_>, out: &mut Decoded<'a>, index: usize, x: InteractionV1) {
    if x.retrieval.len() > ctx.limits.chunks {
        let detail =
            format!("event {index}: {} retrieved chunks, {} is the limit", x.retrieval.len(), ctx.limits.chunks);
        return out.quarantine(Kind::Interaction, "too_many_chunks", detail);
    }
    let mut texts = (None, None);
    let mut detected = None;
    if let Some(c) = x.content {
        detected = ctx.classify.and_then(|f| f(&c.answer)).map(|l| l.as_str().into());
        match (content(c.question.into(), "the question", ctx), content(c.answer.into(), "the answer", ctx)) {
            (Ok(q), Ok(a)) => texts = (Some(q), Some(a)),
            (Err(e), _) | (_, Err(e)) => {
                return out.quarantine(Kind::Interaction, "text_too_long", format!("event {index}: {e}"));
            }
        }
    }
    let st = stamps(ctx.now, Some(x.at.into()), shared.sent_at);
    let (rollout_id, phase, arm) = arm(x.assignment.as_ref());
    let d = shared.device;
    let mut nonfinite = 0;
    let mut finite = |v: Option<f64>| {
        v.filter(|n| {
            let ok = n.is_finite();
            nonfinite += i32::from(!ok);
            ok
        })
    };
    out.interactions.push(InteractionRow {
        app: ctx.app.as_str().into(),
        received_date: st.received_date,
        received_at: st.received_at,
        event_at: st.event_at,
        occurred_at: st.occurred_at,
        sent_at: st.sent_at,
        source: ctx.endpoint.source().into(),
        trust: ctx.sender.trust.as_str().into(),
        install_id: shared.install.clone(),
        batch_seq: shared.seq,
        interaction_id: x.interaction_id.as_str().to_owned().into(),
        template_id: Some(x.template_id.as_str().to_owned().into()),
        bundle: Some(x.bundle.to_hex().into()),
        rollout_id,
        phase,
        arm,
        chunk_ids: x.retrieval.iter().map(|r| r.chunk_id.as_str().to_owned().into()).collect(),
        chunk_versions: x.retrieval.iter().map(|r| i32::try_from(r.version).unwrap_or(i32::MAX)).collect(),
        chunk_scores: x.retrieval.iter().map(|r| if r.score.is_finite() { r.score } else { 0.0 }).collect(),
        chunk_hidden: x.retrieval.iter().map(|r| r.hidden).collect(),
        index_version: x.index_version.and_then(|v| i64::try_from(v).ok()),
        ttft_ms: finite(x.ttft_ms),
        ttfv_ms: finite(x.ttfv_ms),
        decode_tokens_per_s: finite(x.decode_tokens_per_s),
        input_tokens: x.input_tokens.map(i64::from),
        output_tokens: x.output_tokens.map(i64::from),
        peak_memory_bytes: x.peak_memory_bytes.and_then(|v| i64::try_from(v).ok()),
        memory_metric: x.memory_metric.and_then(|m| short(m.into())),
        energy_mj: finite(x.energy_mj),
        device_class: fact(&d.class),
        device_model: fact(&d.model),
        soc: fact(&d.soc),
        ram_bytes: d.ram_bytes.and_then(|v| i64::try_from(v).ok()),
        os: fact(&d.os),
        locale: fact(&d.locale),
        app_version: fact(&d.app_version),
        runtime: fact(&d.runtime),
        sdk: shared.sdk.clone(),
        detected,
        question_text: texts.0,
        answer_text: texts.1,
        nonfinite_fields: nonfinite,
        attrs: Attrs::default(),
        user_key: user_key(ctx, x.user_id.as_deref()),
        ..InteractionRow::default()
    });
}

fn feedback<'a>(ctx: &Context<'a>, shared: &Shared<'_>, out: &mut Decoded<'a>, x: FeedbackV1) {
    let st = stamps(ctx.now, Some(x.at.into()), shared.sent_at);
    let reason = x.reason.map(|r| {
        let mut masked = ctx.masks.apply(r.into()).into_owned();
        let limit = masked.len().min(ctx.limits.attribute_bytes);
        masked.truncate((0..=limit).rev().find(|i| masked.is_char_boundary(*i)).unwrap_or(0));
        masked.into()
    });
    out.feedback.push(FeedbackRow {
        app: ctx.app.as_str().into(),
        received_date: st.received_date,
        received_at: st.received_at,
        event_at: st.event_at,
        occurred_at: st.occurred_at,
        sent_at: st.sent_at,
        source: ctx.endpoint.source().into(),
        trust: ctx.sender.trust.as_str().into(),
        install_id: shared.install.clone(),
        batch_seq: shared.seq,
        interaction_id: x.interaction_id.as_str().to_owned().into(),
        label: x.label.as_str().into(),
        reason,
        user_key: user_key(ctx, x.user_id.as_deref()),
        ..FeedbackRow::default()
    });
}

fn device<'a>(ctx: &Context<'a>, shared: &Shared<'_>, out: &mut Decoded<'a>, x: &DeviceEventV1) {
    let st = stamps(ctx.now, Some(x.at.into()), shared.sent_at);
    let (rollout_id, phase, arm) = arm(x.assignment.as_ref());
    let d = shared.device;
    let load_ms = x.load_ms.filter(|v| v.is_finite());
    out.device_events.push(DeviceEventRow {
        app: ctx.app.as_str().into(),
        received_date: st.received_date,
        received_at: st.received_at,
        event_at: st.event_at,
        occurred_at: st.occurred_at,
        sent_at: st.sent_at,
        source: ctx.endpoint.source().into(),
        trust: ctx.sender.trust.as_str().into(),
        install_id: shared.install.clone(),
        batch_seq: shared.seq,
        event: x.event.as_str().into(),
        bundle: x.bundle.map(|b| b.to_hex().into()),
        rollout_id,
        phase,
        arm,
        load_ms,
        reason: fact(&x.reason),
        device_class: fact(&d.class),
        device_model: fact(&d.model),
        soc: fact(&d.soc),
        ram_bytes: d.ram_bytes.and_then(|v| i64::try_from(v).ok()),
        os: fact(&d.os),
        locale: fact(&d.locale),
        app_version: fact(&d.app_version),
        runtime: fact(&d.runtime),
        sdk: shared.sdk.clone(),
        nonfinite_fields: i32::from(x.load_ms.is_some() && load_ms.is_none()),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Masks;
    use crate::trust::Sender;
    use crate::user::UserKeys;
    use flywheel_types::{AppId, LabelKind, TrustClass};

    const GOLDEN: &str = include_str!("../../types/golden/event_batch_v1.json");

    fn classify(s: &str) -> Option<LabelKind> {
        s.starts_with("Sorry").then_some(LabelKind::Refused)
    }

    fn with<T>(endpoint: Endpoint, sender: Sender, f: impl FnOnce(&Context<'static>) -> T) -> T {
        f(&Context {
            app: Box::leak(Box::new(AppId::new("app").unwrap())),
            endpoint,
            sender,
            now: "2026-03-01T10:00:06Z".parse().unwrap(),
            limits: Box::leak(Box::default()),
            masks: Masks::default(),
            users: Box::leak(Box::new(UserKeys::new(&[0; 32]))),
            otlp_content: false,
            classify: Some(&classify),
        })
    }

    #[test]
    fn golden_batch_becomes_rows_of_three_tables() {
        let got = with(Endpoint::Events, Sender::ANONYMOUS, |c| decode(c, false, GOLDEN.as_bytes())).unwrap();
        assert_eq!((got.interactions.len(), got.feedback.len(), got.device_events.len()), (1, 1, 1));
        assert_eq!(got.seq, Some(7));
        let i = &got.interactions[0];
        assert_eq!(i.chunk_ids, ["kb-1", "kb-2"]);
        assert_eq!(i.chunk_hidden, [false, true]);
        assert_eq!(i.arm.as_deref(), Some("treatment"));
        assert_eq!(i.device_class.as_deref(), Some("high-8gb"));
        assert_eq!(i.trust, "anonymous");
        assert_eq!(got.encode().unwrap().rows(), 3);
    }

    #[test]
    fn a_user_id_becomes_a_key() {
        let body = GOLDEN.replace("\"label\": \"rejected\"", "\"label\": \"rejected\", \"user_id\": \"anna-17\"");
        let got = with(Endpoint::Events, Sender::ANONYMOUS, |c| decode(c, false, body.as_bytes())).unwrap();
        let key = UserKeys::new(&[0; 32]).key(&AppId::new("app").unwrap(), "anna-17");
        assert_eq!((got.feedback[0].user_key.as_deref(), &got.interactions[0].user_key), (key.as_deref(), &None));
        assert!(!format!("{got:?}").contains("anna-17"));
    }

    #[test]
    fn one_bad_event_costs_only_itself() {
        let body = GOLDEN.replace("\"label\": \"rejected\"", "\"label\": \"hated\"");
        let got = with(Endpoint::Events, Sender::ANONYMOUS, |c| decode(c, false, body.as_bytes())).unwrap();
        assert_eq!((got.interactions.len(), got.feedback.len(), got.device_events.len()), (1, 0, 1));
        assert_eq!(got.quarantined.len(), 1);
        assert_eq!((got.quarantined[0].kind, got.quarantined[0].reason), (Kind::Feedback, "bad_event"));
        assert!(got.quarantined[0].detail.contains("event 1"), "{}", got.quarantined[0].detail);
    }

    #[test]
    fn envelope_errors_refuse_the_request() {
        for (bad, code) in [
            (GOLDEN.replace("\"v\": 1", "\"v\": 2"), "undecodable_body"),
            (GOLDEN.replace("\"seq\": 7", "\"seq\": 0"), "undecodable_body"),
            (GOLDEN.replace("812.5", "NaN"), "undecodable_body"),
            ("{".to_owned(), "undecodable_body"),
        ] {
            let e = with(Endpoint::Events, Sender::ANONYMOUS, |c| decode(c, false, bad.as_bytes())).unwrap_err();
            assert_eq!(e.code, code);
        }
    }

    #[test]
    fn a_signed_batch_must_name_its_own_install() {
        let sender = Sender { trust: TrustClass::Keyed, install: Some(InstallId::of_public_key(&[1; 32])) };
        let e = with(Endpoint::Events, sender, |c| decode(c, false, GOLDEN.as_bytes())).unwrap_err();
        assert_eq!(e.code, "bad_signature");
    }

    #[test]
    fn feedback_alias_and_lines() {
        let one =
            r#"{"interaction_id":"i-1","at":"2026-03-01T10:00:00Z","label":"rejected","reason":"mail a@b.example"}"#;
        let got = with(Endpoint::Feedback, Sender::ANONYMOUS, |c| decode(c, false, one.as_bytes())).unwrap();
        assert_eq!(got.feedback[0].reason.as_deref(), Some("mail [email]"));
        let two = format!("{one}\n\nnot json\n{}\n", one.replace("i-1", "i-2"));
        let got = with(Endpoint::Feedback, Sender::ANONYMOUS, |c| decode(c, true, two.as_bytes())).unwrap();
        assert_eq!((got.feedback.len(), got.quarantined.len()), (2, 1));
    }

    #[test]
    fn content_is_masked_and_classified() {
        let body = GOLDEN.replace(
            "\"index_version\": 12",
            "\"index_version\": 12, \"content\": {\"question\": \"I am a.b@c.example\", \"answer\": \"Sorry, no.\"}",
        );
        let got = with(Endpoint::Events, Sender::ANONYMOUS, |c| decode(c, false, body.as_bytes())).unwrap();
        let i = &got.interactions[0];
        assert_eq!(i.question_text.as_deref(), Some("I am [email]"));
        assert_eq!(i.detected.as_deref(), Some("refused"));
    }
}
