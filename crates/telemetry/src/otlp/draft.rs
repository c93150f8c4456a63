//! Values gathered from the attributes of one record and its resource, before it is known what the record is.

use super::names::Field;
use super::value::Value;
use crate::column::{Micros, Text};
use crate::decode::{Context, short, stamps, user_key};
use crate::rows::InteractionRow;
use flywheel_types::TrustClass;
use serde::Deserialize;
use std::borrow::Cow;

/// One record in the making. Texts are borrowed from the body.
#[derive(Debug, Default)]
pub(crate) struct Draft<'a> {
    pub row: InteractionRow<'a>,
    pub response_id: Option<Text<'a>>,
    /// Name and version.
    pub prompt: (Option<Text<'a>>, Option<Text<'a>>),
    pub bundle_id: Option<Text<'a>>,
    pub device_name: Option<Text<'a>>,
    pub os: (Option<Text<'a>>, Option<Text<'a>>),
    pub sdk: (Option<Text<'a>>, Option<Text<'a>>),
    pub event_name: Option<Text<'a>>,
    pub evaluation: Option<Text<'a>>,
    pub label: Option<Text<'a>>,
    pub score: Option<f64>,
    pub reason: Option<Text<'a>>,
    pub device_event: Option<Text<'a>>,
    pub batch_id: Option<Text<'a>>,
    pub question: Option<Text<'a>>,
    pub answer: Option<Text<'a>>,
    pub claimed_install: Option<Text<'a>>,
    /// Whose it is, in the app's own words.
    pub user: Option<Text<'a>>,
}

impl<'a> Draft<'a> {
    /// Puts `value` where its name belongs.
    pub(crate) fn put(&mut self, field: Field, value: &Value<'a>) {
        match field {
            Field::Word(place) => *place(self) = word(value),
            Field::Text(place) => *place(self) = value.to_text(),
            Field::Number(place, factor) => {
                let number = value.to_double().map(|d| d * factor);
                let finite = number.filter(|d| d.is_finite());
                self.row.nonfinite_fields += i32::from(number.is_some() && finite.is_none());
                *place(self) = finite;
            }
            Field::Int(place) => *place(self) = value.to_int(),
            Field::Int32(place) => *place(self) = value.to_int().and_then(|i| i32::try_from(i).ok()),
            Field::Flag(place) => *place(self) = value.to_bool(),
            Field::Other(put) => put(self, value),
            Field::Nothing => {}
        }
    }

    /// Keeps an attribute without a column of its own, within the limits.
    pub(crate) fn extra(&mut self, ctx: &Context<'_>, key: &Text<'a>, value: &Value<'a>) {
        if let Value::Double(n) = value
            && !n.is_finite()
        {
            self.row.nonfinite_fields += 1;
        }
        let (Some(text), Some(key)) = (value.to_text(), short(key.clone())) else { return };
        let fits = text.len() <= ctx.limits.attribute_bytes;
        if fits && self.row.attrs.0.len() < ctx.limits.extra_attributes {
            self.row.attrs.0.retain(|(k, _)| *k != key);
            self.row.attrs.0.push((key, ctx.masks.apply(text)));
        } else {
            self.row.dropped_attrs += 1;
        }
    }

    /// What all rows have: app, stamps, trust, and facts that come in two attributes. `time_ns` is 0 when it was not given.
    pub(crate) fn common(&mut self, ctx: &Context<'a>, time_ns: u64) {
        let st = stamps(ctx.now, micros(time_ns), None);
        let row = &mut self.row;
        row.app = ctx.app.as_str().into();
        row.received_date = st.received_date;
        row.received_at = st.received_at;
        row.event_at = st.event_at;
        row.occurred_at = st.occurred_at;
        row.source = ctx.endpoint.source().into();
        row.trust = ctx.sender.trust.as_str().into();
        row.install_id = match (ctx.sender.trust, ctx.sender.install) {
            (TrustClass::Anonymous, _) | (_, None) => self.claimed_install.take(),
            (TrustClass::Keyed | TrustClass::Attested, Some(i)) => Some(i.to_string().into()),
        };
        row.user_key = user_key(ctx, self.user.as_deref());
        if row.template_id.is_none() {
            row.template_id = match (self.prompt.0.take(), self.prompt.1.take()) {
                (Some(name), Some(version)) => Some(format!("{name}@{version}").into()),
                (name, _) => name,
            };
        }
        if row.bundle.is_none() {
            row.bundle = self.bundle_id.take();
        }
        if row.device_model.is_none() {
            row.device_model = self.device_name.take();
        }
        row.os = joined(&mut self.os);
        row.sdk = joined(&mut self.sdk);
    }

    pub(crate) fn finish_reasons(&mut self, value: &Value<'a>) {
        let first = if let Value::List(v) = value { v.first() } else { Some(value) };
        self.row.finish_reason = first.and_then(word);
    }
    pub(crate) fn chunk_ids(&mut self, value: &Value<'a>) {
        self.row.chunk_ids = list(value, word);
    }
    pub(crate) fn chunk_versions(&mut self, value: &Value<'a>) {
        self.row.chunk_versions = list(value, |v| v.to_int().and_then(|i| i32::try_from(i).ok()));
    }
    pub(crate) fn chunk_scores(&mut self, value: &Value<'a>) {
        self.row.chunk_scores = list(value, |v| v.to_double().map(chunk_score));
    }
    pub(crate) fn chunk_hidden(&mut self, value: &Value<'a>) {
        self.row.chunk_hidden = list(value, Value::to_bool);
    }
    pub(crate) fn refusal(&mut self, value: &Value<'a>) {
        if value.to_bool() == Some(true) {
            self.row.detected = Some(Cow::Borrowed("refused"));
        }
    }
    pub(crate) fn arm(&mut self, value: &Value<'a>) {
        self.row.arm = arm(value);
    }
    /// A feature flag says which arm where the app has no name of ours for it.
    pub(crate) fn variant(&mut self, value: &Value<'a>) {
        if self.row.arm.is_none() {
            self.row.arm = arm(value);
        }
    }

    /// `gen_ai.retrieval.documents`: JSON text of `[{"id": …, "score": …}]` in rank order. The parallel
    /// `fleet.retrieval.*` lists win when both are there.
    pub(crate) fn documents(&mut self, value: &Value<'a>) {
        #[derive(Deserialize)]
        struct Document {
            id: String,
            #[serde(default)]
            score: Option<f64>,
        }
        let texts: Vec<Text<'a>> = match value {
            Value::List(items) => items.iter().filter_map(Value::to_text).collect(),
            other => other.to_text().into_iter().collect(),
        };
        let mut found: Vec<Document> = Vec::new();
        for t in texts {
            if let Ok(many) = serde_json::from_str::<Vec<Document>>(&t) {
                found.extend(many);
            } else if let Ok(one) = serde_json::from_str::<Document>(&t) {
                found.push(one);
            }
        }
        if self.row.chunk_ids.is_empty() {
            let named =
                found.into_iter().filter_map(|d| Some((short(d.id.into())?, chunk_score(d.score.unwrap_or(0.0)))));
            (self.row.chunk_ids, self.row.chunk_scores) = named.unzip();
        }
    }

    /// `openinference.span.kind` in the words of `gen_ai.operation.name`.
    pub(crate) fn span_kind(&mut self, value: &Value<'a>) {
        let operation = match value.to_text().as_deref() {
            Some("LLM") => "chat",
            Some("RETRIEVER") => "retrieval",
            Some("EMBEDDING") => "embeddings",
            _ => return,
        };
        if self.row.operation.is_none() {
            self.row.operation = Some(Cow::Borrowed(operation));
        }
    }

    /// OpenInference flattens lists into names: `retrieval.documents.<n>.document.id` and `.score`. The texts of the
    /// documents are content and not kept. `false` for any other name; `limit` bounds the list.
    pub(crate) fn openinference(&mut self, key: &str, value: &Value<'a>, limit: usize) -> bool {
        let Some((place, what)) =
            key.strip_prefix("retrieval.documents.").and_then(|rest| rest.split_once(".document."))
        else {
            return false;
        };
        // one more than the limit is kept, so that the record is refused for its size
        let Some(place) = place.parse::<usize>().ok().filter(|n| *n <= limit) else { return false };
        let row = &mut self.row;
        match what {
            "id" => {
                row.chunk_ids.resize(row.chunk_ids.len().max(place + 1), Text::default());
                row.chunk_ids[place] = word(value).unwrap_or_default();
            }
            "score" => {
                row.chunk_scores.resize(row.chunk_scores.len().max(place + 1), 0.0);
                row.chunk_scores[place] = value.to_double().map(chunk_score).unwrap_or_default();
            }
            _ => {}
        }
        true
    }
}

/// Device clock in microseconds; `None` for 0, which is how OTLP says that it is not known.
pub(crate) fn micros(ns: u64) -> Option<Micros> {
    (ns != 0).then(|| Micros(i64::try_from(ns / 1000).unwrap_or(i64::MAX)))
}

fn joined<'a>(pair: &mut (Option<Text<'a>>, Option<Text<'a>>)) -> Option<Text<'a>> {
    match (pair.0.take(), pair.1.take()) {
        (Some(a), Some(b)) => Some(format!("{a} {b}").into()),
        (a, b) => a.or(b),
    }
}

pub(crate) fn word<'a>(value: &Value<'a>) -> Option<Text<'a>> {
    value.to_text().and_then(short)
}

fn list<'a, T>(value: &Value<'a>, f: impl Fn(&Value<'a>) -> Option<T>) -> Vec<T> {
    match value {
        Value::List(items) => items.iter().filter_map(f).collect(),
        Value::Null => Vec::new(),
        one => f(one).into_iter().collect(),
    }
}

/// A score in the width of its column; 0 for what is not finite there.
fn chunk_score(score: f64) -> f32 {
    let narrow = score as f32;
    if narrow.is_finite() { narrow } else { 0.0 }
}

/// `canary` is what many feature-flag systems call the treatment arm.
fn arm<'a>(value: &Value<'a>) -> Option<Text<'a>> {
    match value.to_text()?.as_ref() {
        "control" => Some(Cow::Borrowed("control")),
        "treatment" | "canary" => Some(Cow::Borrowed("treatment")),
        _ => None,
    }
}
