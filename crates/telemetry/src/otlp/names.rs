//! Which attribute fills which column: `gen_ai.*` of the OpenTelemetry semantic conventions v1.41.1, the deprecated
//! spellings old SDKs still send, general resource attributes, and our own `fleet.*` names.

use super::value::Value;
use crate::decode::short;
use crate::rows::InteractionRow;
use serde::Deserialize;

/// Values gathered from the attributes of one record and its resource, before it is known what the record is.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub row: InteractionRow,
    pub response_id: Option<String>,
    pub prompt: (Option<String>, Option<String>),
    pub bundle_id: Option<String>,
    pub os: (Option<String>, Option<String>),
    pub sdk: (Option<String>, Option<String>),
    pub event_name: Option<String>,
    pub evaluation: Option<String>,
    pub label: Option<String>,
    pub score: Option<f64>,
    pub reason: Option<String>,
    pub device_event: Option<String>,
    pub batch_id: Option<String>,
    pub question: Option<String>,
    pub answer: Option<String>,
    pub claimed_install: Option<String>,
}

impl Draft {
    fn finite(&mut self, number: Option<f64>) -> Option<f64> {
        let d = number?;
        if d.is_finite() {
            return Some(d);
        }
        self.row.nonfinite_fields += 1;
        None
    }

    /// Puts `value` where `key` belongs; `false` when the key has no column.
    pub(crate) fn apply(&mut self, key: &str, value: &Value<'_>) -> bool {
        if key.starts_with("gen_ai.") {
            self.gen_ai(key, value)
        } else if key.starts_with("fleet.") {
            self.fleet(key, value)
        } else {
            self.general(key, value)
        }
    }

    fn gen_ai(&mut self, key: &str, value: &Value<'_>) -> bool {
        let word = || value.to_text().as_deref().and_then(short);
        match key {
            "gen_ai.response.id" => self.response_id = value.to_text(),
            "gen_ai.operation.name" => self.row.operation = word(),
            // `gen_ai.system` was renamed in v1.37.
            "gen_ai.provider.name" | "gen_ai.system" => self.row.provider = word(),
            "gen_ai.request.model" => self.row.request_model = word(),
            "gen_ai.response.model" => self.row.response_model = word(),
            // Seconds in the convention, milliseconds in the table.
            "gen_ai.response.time_to_first_chunk" => {
                self.row.ttft_ms = self.finite(value.to_double().map(|s| s * 1000.0))
            }
            "gen_ai.usage.input_tokens" | "gen_ai.usage.prompt_tokens" => self.row.input_tokens = value.to_int(),
            "gen_ai.usage.output_tokens" | "gen_ai.usage.completion_tokens" => {
                self.row.output_tokens = value.to_int();
            }
            "gen_ai.response.finish_reasons" => {
                let first = if let Value::List(v) = value { v.first() } else { Some(value) };
                self.row.finish_reason = first.and_then(Value::to_text).as_deref().and_then(short);
            }
            "gen_ai.prompt.name" => self.prompt.0 = word(),
            "gen_ai.prompt.version" => self.prompt.1 = word(),
            "gen_ai.retrieval.documents" => self.documents(value),
            "gen_ai.evaluation.name" => self.evaluation = word(),
            "gen_ai.evaluation.score.label" => self.label = word(),
            "gen_ai.evaluation.score.value" => self.score = self.finite(value.to_double()),
            "gen_ai.evaluation.explanation" => self.reason = value.to_text(),
            "gen_ai.input.messages" | "gen_ai.prompt" => self.question = value.to_text(),
            "gen_ai.output.messages" | "gen_ai.completion" => self.answer = value.to_text(),
            _ => return false,
        }
        true
    }

    fn fleet(&mut self, key: &str, value: &Value<'_>) -> bool {
        let word = || value.to_text().as_deref().and_then(short);
        match key {
            "fleet.bundle.digest" => self.row.bundle = word(),
            "fleet.bundle.id" => self.bundle_id = word(),
            "fleet.template.id" => self.row.template_id = word(),
            "fleet.retrieval.chunk_ids" => self.row.chunk_ids = list(value, |v| v.to_text().as_deref().and_then(short)),
            "fleet.retrieval.chunk_versions" => {
                self.row.chunk_versions = list(value, |v| v.to_int().and_then(|i| i32::try_from(i).ok()));
            }
            "fleet.retrieval.scores" => {
                self.row.chunk_scores = list(value, |v| v.to_double().map(chunk_score));
            }
            "fleet.retrieval.hidden" => self.row.chunk_hidden = list(value, |v| v.to_bool()),
            "fleet.index.version" => self.row.index_version = value.to_int(),
            "fleet.response.time_to_first_visible_ms" => self.row.ttfv_ms = self.finite(value.to_double()),
            "fleet.decode.tokens_per_second" => self.row.decode_tokens_per_s = self.finite(value.to_double()),
            "fleet.memory.peak_bytes" => self.row.peak_memory_bytes = value.to_int(),
            "fleet.memory.metric" => self.row.memory_metric = word(),
            "fleet.energy.millijoules" => self.row.energy_mj = self.finite(value.to_double()),
            "fleet.model.load_ms" => self.row.load_ms = self.finite(value.to_double()),
            "fleet.model.quantization" => self.row.quantization = word(),
            "fleet.cold_start" => self.row.cold_start = value.to_bool(),
            "fleet.refusal" => {
                if value.to_bool() == Some(true) {
                    self.row.detected = Some("refused".to_owned());
                }
            }
            "fleet.rollout.id" => self.row.rollout_id = word(),
            "fleet.rollout.phase" => self.row.phase = value.to_int().and_then(|i| i32::try_from(i).ok()),
            "fleet.rollout.arm" => self.row.arm = arm(value),
            "fleet.device.class" => self.row.device_class = word(),
            "fleet.device.soc" => self.row.soc = word(),
            "fleet.device.ram_bytes" => self.row.ram_bytes = value.to_int(),
            "fleet.device.event" => self.device_event = word(),
            "fleet.locale" => self.row.locale = word(),
            "fleet.runtime.name" => self.row.runtime = word(),
            "fleet.feedback.reason" => self.reason = value.to_text(),
            "fleet.batch.id" => self.batch_id = word(),
            _ => return false,
        }
        true
    }

    fn general(&mut self, key: &str, value: &Value<'_>) -> bool {
        let word = || value.to_text().as_deref().and_then(short);
        match key {
            "app.installation.id" => self.claimed_install = word(),
            "session.id" => self.row.session_id = word(),
            "service.version" => self.row.app_version = word(),
            "device.model.identifier" => self.row.device_model = word(),
            "device.model.name" => {
                if self.row.device_model.is_none() {
                    self.row.device_model = word();
                }
            }
            "os.name" => self.os.0 = word(),
            "os.version" => self.os.1 = word(),
            "telemetry.sdk.name" => self.sdk.0 = word(),
            "telemetry.sdk.version" => self.sdk.1 = word(),
            "feature_flag.result.variant" => {
                if self.row.arm.is_none() {
                    self.row.arm = arm(value);
                }
            }
            "event.name" => self.event_name = word(),
            // Same for all records of an app; the app column says it.
            "service.name" => {}
            _ => return false,
        }
        true
    }

    /// `gen_ai.retrieval.documents`: JSON text of `[{"id": …, "score": …}]` in rank order. The parallel
    /// `fleet.retrieval.*` lists win when both are there.
    fn documents(&mut self, value: &Value<'_>) {
        #[derive(Deserialize)]
        struct Document {
            id: String,
            #[serde(default)]
            score: Option<f64>,
        }
        let texts: Vec<String> = match value {
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
            let named = found.iter().filter_map(|d| Some((short(&d.id)?, chunk_score(d.score.unwrap_or(0.0)))));
            (self.row.chunk_ids, self.row.chunk_scores) = named.unzip();
        }
    }
}

fn list<T>(value: &Value<'_>, f: impl Fn(&Value<'_>) -> Option<T>) -> Vec<T> {
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
fn arm(value: &Value<'_>) -> Option<String> {
    match value.to_text()?.as_str() {
        "control" => Some("control".to_owned()),
        "treatment" | "canary" => Some("treatment".to_owned()),
        _ => None,
    }
}
