//! From OTLP records to rows: what a record is (answer, feedback, device event, retrieval step), and the checks
//! that need the whole record. Retrieval spans carry the chunks of the answer in the same trace, so they are kept
//! until the request is read and joined then.

use super::draft::Draft;
use super::names::Names;
use super::value::{Attribute, Record, Sink};
use crate::column::Text;
use crate::decode::{Context, Decoded, content, short};
use crate::disposition::Kind;
use crate::rows::{DeviceEventRow, FeedbackRow, InteractionRow};
use flywheel_types::wire::DeviceEventKind;
use flywheel_types::{InteractionId, LabelKind};
use std::borrow::Cow;
use std::collections::HashMap;

/// Chunks found on a retrieval span, by trace id.
struct Retrieval<'a> {
    ids: Vec<Text<'a>>,
    versions: Vec<i32>,
    scores: Vec<f32>,
    hidden: Vec<bool>,
}

/// Turns records into rows.
pub struct Mapper<'c, 'a> {
    ctx: &'c Context<'a>,
    out: Decoded<'a>,
    seen: usize,
    names: Names,
    /// Trace id of each interaction, by position, for the join with retrieval spans.
    traces: Vec<Cow<'a, [u8]>>,
    retrievals: HashMap<Cow<'a, [u8]>, Vec<Retrieval<'a>>>,
}

impl<'c, 'a> Mapper<'c, 'a> {
    #[must_use]
    pub fn new(ctx: &'c Context<'a>) -> Self {
        let names = Names::default();
        Self { ctx, out: Decoded::default(), seen: 0, names, traces: Vec::new(), retrievals: HashMap::new() }
    }

    /// Joins retrieval spans with their answers and returns the rows.
    #[must_use]
    pub fn finish(mut self) -> Decoded<'a> {
        let limit = self.ctx.limits.chunks;
        let mut too_many = 0;
        for (row, trace) in self.out.interactions.iter_mut().zip(&self.traces) {
            if row.chunk_ids.is_empty()
                && !trace.is_empty()
                && let Some(found) = self.retrievals.remove(trace)
            {
                for r in found {
                    if row.chunk_ids.len() + r.ids.len() > limit {
                        too_many += 1;
                        continue;
                    }
                    row.chunk_ids.extend(r.ids);
                    row.chunk_versions.extend(r.versions);
                    row.chunk_scores.extend(r.scores);
                    row.chunk_hidden.extend(r.hidden);
                }
            }
        }
        for _ in 0..too_many {
            let detail = format!("the retrieval spans of a trace name more chunks than the limit of {limit}");
            self.out.quarantine(Kind::Unknown, "too_many_chunks", detail);
        }
        for _ in self.retrievals.values().flatten() {
            let detail = "a retrieval span without a chat span of its trace in the same request";
            self.out.quarantine(Kind::Unknown, "retrieval_without_answer", detail);
        }
        self.out
    }

    fn draft(&mut self, resource: &[Attribute<'a>], record: &Record<'a>) -> Draft<'a> {
        let mut d = Draft::default();
        let limits = self.ctx.limits;
        for (place, (key, value)) in resource.iter().chain(&record.attributes).enumerate() {
            if let Some(field) = self.names.find(place, key) {
                d.put(field, value);
                continue;
            }
            if !d.openinference(key, value, limits.chunks) {
                d.extra(self.ctx, key, value);
            }
        }
        d
    }

    fn interaction(&mut self, mut d: Draft<'a>, record: &Record<'a>) {
        let fallback = || match (record.trace_id.is_empty(), record.span_id.is_empty()) {
            (false, false) => {
                Some(format!("{}:{}", hex::encode(&record.trace_id), hex::encode(&record.span_id)).into())
            }
            _ => None,
        };
        let Some(id) = d.response_id.take().or_else(fallback) else {
            let detail = "neither gen_ai.response.id nor trace and span ids are set";
            return self.out.quarantine(Kind::Interaction, "no_interaction_id", detail);
        };
        if let Err(e) = InteractionId::new(id.as_ref()) {
            return self.out.quarantine(Kind::Interaction, "bad_interaction_id", e.to_string());
        }
        let limits = self.ctx.limits;
        if d.row.chunk_ids.len() > limits.chunks {
            let detail = format!("{} retrieved chunks, {} is the limit", d.row.chunk_ids.len(), limits.chunks);
            return self.out.quarantine(Kind::Interaction, "too_many_chunks", detail);
        }
        if let Some(answer) = &d.answer
            && d.row.detected.is_none()
        {
            d.row.detected = self.ctx.classify.and_then(|f| f(answer)).map(|l| l.as_str().into());
        }
        if self.ctx.otlp_content {
            let texts = (
                d.question.take().map(|t| content(t, "the input", self.ctx)).transpose(),
                d.answer.take().map(|t| content(t, "the output", self.ctx)).transpose(),
            );
            match texts {
                (Ok(q), Ok(a)) => (d.row.question_text, d.row.answer_text) = (q, a),
                (Err(e), _) | (_, Err(e)) => {
                    return self.out.quarantine(Kind::Interaction, "text_too_long", e);
                }
            }
        }
        align_chunks(&mut d.row);
        d.row.interaction_id = id;
        self.traces.push(record.trace_id.clone());
        self.out.interactions.push(d.row);
    }

    /// `gen_ai.evaluation.result` named `user_feedback`.
    fn feedback(&mut self, d: Draft<'a>) {
        if d.evaluation.as_deref().is_some_and(|n| n != "user_feedback") {
            let detail = "only gen_ai.evaluation.name = user_feedback is kept";
            return self.out.quarantine(Kind::Feedback, "unsupported_evaluation", detail);
        }
        let Some(id) = d.response_id.filter(|id| InteractionId::new(id.as_ref()).is_ok()) else {
            let detail = "gen_ai.response.id is missing or not a valid id";
            return self.out.quarantine(Kind::Feedback, "no_interaction_id", detail);
        };
        let word = d.label.unwrap_or_default();
        // A person who asks for another answer rejected this one.
        let label = match word.as_ref() {
            "regenerated" => Ok(LabelKind::Rejected),
            other => other.parse::<LabelKind>(),
        };
        let Ok(label) = label else {
            return self.out.quarantine(Kind::Feedback, "unknown_label", format!("score label `{word}`"));
        };
        let row = d.row;
        self.out.feedback.push(FeedbackRow {
            app: row.app,
            received_date: row.received_date,
            received_at: row.received_at,
            event_at: row.event_at,
            occurred_at: row.occurred_at,
            sent_at: None,
            source: row.source,
            trust: row.trust,
            install_id: row.install_id,
            batch_seq: None,
            interaction_id: id,
            label: label.as_str().into(),
            reason: d.reason.map(|r| self.ctx.masks.apply(r)).and_then(short),
            score: d.score,
            nonfinite_fields: row.nonfinite_fields,
            user_key: row.user_key,
        });
    }

    fn device(&mut self, d: Draft<'a>) {
        let word = d.device_event.unwrap_or_default();
        let parsed = serde_json::from_value::<DeviceEventKind>(word.as_ref().into());
        let Ok(kind) = parsed else {
            return self.out.quarantine(Kind::Device, "unknown_device_event", format!("fleet.device.event `{word}`"));
        };
        let row = d.row;
        self.out.device_events.push(DeviceEventRow {
            app: row.app,
            received_date: row.received_date,
            received_at: row.received_at,
            event_at: row.event_at,
            occurred_at: row.occurred_at,
            sent_at: None,
            source: row.source,
            trust: row.trust,
            install_id: row.install_id,
            batch_seq: None,
            event: kind.as_str().into(),
            bundle: row.bundle,
            rollout_id: row.rollout_id,
            phase: row.phase,
            arm: row.arm,
            load_ms: row.load_ms,
            reason: d.reason.and_then(short),
            device_class: row.device_class,
            device_model: row.device_model,
            soc: row.soc,
            ram_bytes: row.ram_bytes,
            os: row.os,
            locale: row.locale,
            app_version: row.app_version,
            runtime: row.runtime,
            sdk: row.sdk,
            nonfinite_fields: row.nonfinite_fields,
        });
    }
}

impl<'a> Sink<'a> for Mapper<'_, 'a> {
    fn record(&mut self, resource: &[Attribute<'a>], record: &Record<'a>) {
        self.seen += 1;
        let mut d = self.draft(resource, record);
        d.common(self.ctx, record.time_ns);
        if let Some(id) = d.batch_id.take() {
            self.out.batch_id = Some(id.into_owned());
        }
        let name = if record.is_span { "" } else { d.event_name.as_deref().unwrap_or(&record.name) };
        match (name, d.row.operation.as_deref()) {
            ("gen_ai.evaluation.result", _) => self.feedback(d),
            ("fleet.device", _) => self.device(d),
            ("gen_ai.client.inference.operation.details", _)
            | ("", Some("chat" | "generate_content" | "text_completion")) => self.interaction(d, record),
            ("", Some("retrieval")) if record.is_span && !record.trace_id.is_empty() => {
                align_chunks(&mut d.row);
                self.retrievals.entry(record.trace_id.clone()).or_default().push(Retrieval {
                    ids: d.row.chunk_ids,
                    versions: d.row.chunk_versions,
                    scores: d.row.chunk_scores,
                    hidden: d.row.chunk_hidden,
                });
            }
            _ => {
                let detail = format!(
                    "`{}` is no answer, feedback or device event",
                    short(record.name.clone()).unwrap_or_default()
                );
                self.out.quarantine(Kind::Unknown, "unsupported_record", detail);
            }
        }
        for event in &record.events {
            if event.name == "gen_ai.evaluation.result" {
                self.seen += 1;
                let mut d = self.draft(resource, event);
                d.common(self.ctx, event.time_ns);
                self.feedback(d);
            }
        }
    }

    fn broken(&mut self, reason: &'static str, detail: String) {
        self.seen += 1;
        self.out.quarantine(Kind::Unknown, reason, detail);
    }

    fn seen(&self) -> usize {
        self.seen
    }
}

/// Makes the four chunk lists equally long; `id@version` in the id sets the version.
fn align_chunks(row: &mut InteractionRow<'_>) {
    let n = row.chunk_ids.len();
    let given = row.chunk_versions.len() == n;
    row.chunk_versions.resize(n, 0);
    row.chunk_scores.resize(n, 0.0);
    row.chunk_hidden.resize(n, false);
    for (id, version) in row.chunk_ids.iter_mut().zip(&mut row.chunk_versions) {
        if !given
            && let Some((head, tail)) = id.rsplit_once('@')
            && let Ok(v) = tail.parse()
        {
            *version = v;
            *id = head.to_owned().into();
        }
    }
}
