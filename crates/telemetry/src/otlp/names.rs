//! Which attribute fills which column, as one table: `gen_ai.*` of the OpenTelemetry semantic conventions v1.41.1, the
//! deprecated spellings that old SDKs still send, OpenInference, general resource attributes, and our own `fleet.*`
//! names (`docs/semconv.yaml`).

use super::draft::Draft;
use super::value::Value;
use crate::column::Text;
use std::collections::HashMap;
use std::sync::OnceLock;

/// A column of `T` in a draft.
type Place<T> = for<'d, 'a> fn(&'d mut Draft<'a>) -> &'d mut Option<T>;

/// Where the value of an attribute goes, and as what.
#[derive(Clone, Copy)]
pub(crate) enum Field {
    /// A short text: no control characters, 128 bytes.
    Word(for<'d, 'a> fn(&'d mut Draft<'a>) -> &'d mut Option<Text<'a>>),
    /// A text as it is.
    Text(for<'d, 'a> fn(&'d mut Draft<'a>) -> &'d mut Option<Text<'a>>),
    /// A number, times the factor; not finite is NULL and counted.
    Number(Place<f64>, f64),
    Int(Place<i64>),
    Int32(Place<i32>),
    Flag(Place<bool>),
    /// Anything else.
    Other(for<'a> fn(&mut Draft<'a>, &Value<'a>)),
    /// Known, and not kept: of no use, or nobody's business.
    Nothing,
}

use Field::{Flag, Int, Int32, Nothing, Number, Other, Text as Whole, Word};

/// Seconds in the convention, milliseconds in the table.
const MS: f64 = 1000.0;

/// Attribute names and what becomes of them. Where two names fill one column, the one that comes later in the record wins.
pub(crate) const NAMES: &[(&str, Field)] = &[
    ("gen_ai.response.id", Whole(|d| &mut d.response_id)),
    ("gen_ai.operation.name", Word(|d| &mut d.row.operation)),
    ("gen_ai.provider.name", Word(|d| &mut d.row.provider)),
    ("gen_ai.request.model", Word(|d| &mut d.row.request_model)),
    ("gen_ai.response.model", Word(|d| &mut d.row.response_model)),
    ("gen_ai.response.time_to_first_chunk", Number(|d| &mut d.row.ttft_ms, MS)),
    ("gen_ai.response.finish_reasons", Other(|d, v| d.finish_reasons(v))),
    ("gen_ai.usage.input_tokens", Int(|d| &mut d.row.input_tokens)),
    ("gen_ai.usage.output_tokens", Int(|d| &mut d.row.output_tokens)),
    ("gen_ai.conversation.id", Word(|d| &mut d.row.conversation_id)),
    ("gen_ai.prompt.name", Word(|d| &mut d.prompt.0)),
    ("gen_ai.prompt.version", Word(|d| &mut d.prompt.1)),
    ("gen_ai.retrieval.documents", Other(|d, v| d.documents(v))),
    ("gen_ai.evaluation.name", Word(|d| &mut d.evaluation)),
    ("gen_ai.evaluation.score.label", Word(|d| &mut d.label)),
    ("gen_ai.evaluation.score.value", Number(|d| &mut d.score, 1.0)),
    ("gen_ai.evaluation.explanation", Whole(|d| &mut d.reason)),
    ("gen_ai.input.messages", Whole(|d| &mut d.question)),
    ("gen_ai.output.messages", Whole(|d| &mut d.answer)),
    // Deprecated spellings.
    ("gen_ai.system", Word(|d| &mut d.row.provider)),
    ("gen_ai.usage.prompt_tokens", Int(|d| &mut d.row.input_tokens)),
    ("gen_ai.usage.completion_tokens", Int(|d| &mut d.row.output_tokens)),
    ("gen_ai.prompt", Whole(|d| &mut d.question)),
    ("gen_ai.completion", Whole(|d| &mut d.answer)),
    // OpenInference (`retrieval.documents.<n>.document.*` is in `Draft::openinference`).
    ("openinference.span.kind", Other(|d, v| d.span_kind(v))),
    ("llm.model_name", Word(|d| &mut d.row.request_model)),
    ("llm.provider", Word(|d| &mut d.row.provider)),
    ("llm.token_count.prompt", Int(|d| &mut d.row.input_tokens)),
    ("llm.token_count.completion", Int(|d| &mut d.row.output_tokens)),
    ("llm.prompt_template.version", Word(|d| &mut d.prompt.1)),
    ("input.value", Whole(|d| &mut d.question)),
    ("output.value", Whole(|d| &mut d.answer)),
    // Our own.
    ("fleet.bundle.digest", Word(|d| &mut d.row.bundle)),
    ("fleet.bundle.id", Word(|d| &mut d.bundle_id)),
    ("fleet.template.id", Word(|d| &mut d.row.template_id)),
    ("fleet.prompt.hash", Word(|d| &mut d.row.template_hash)),
    ("fleet.adapter.id", Word(|d| &mut d.row.adapter)),
    ("fleet.retrieval.chunk_ids", Other(|d, v| d.chunk_ids(v))),
    ("fleet.retrieval.chunk_versions", Other(|d, v| d.chunk_versions(v))),
    ("fleet.retrieval.scores", Other(|d, v| d.chunk_scores(v))),
    ("fleet.retrieval.hidden", Other(|d, v| d.chunk_hidden(v))),
    ("fleet.index.version", Int(|d| &mut d.row.index_version)),
    ("fleet.response.time_to_first_visible_ms", Number(|d| &mut d.row.ttfv_ms, 1.0)),
    ("fleet.decode.tokens_per_second", Number(|d| &mut d.row.decode_tokens_per_s, 1.0)),
    ("fleet.prefill.tokens_per_second", Number(|d| &mut d.row.prefill_tokens_per_s, 1.0)),
    ("fleet.memory.peak_bytes", Int(|d| &mut d.row.peak_memory_bytes)),
    ("fleet.memory.metric", Word(|d| &mut d.row.memory_metric)),
    ("fleet.energy.millijoules", Number(|d| &mut d.row.energy_mj, 1.0)),
    ("fleet.battery.level_start", Number(|d| &mut d.row.battery_start, 1.0)),
    ("fleet.battery.level_end", Number(|d| &mut d.row.battery_end, 1.0)),
    ("fleet.battery.charging", Flag(|d| &mut d.row.charging)),
    ("fleet.thermal.state_start", Int32(|d| &mut d.row.thermal_start)),
    ("fleet.thermal.state_end", Int32(|d| &mut d.row.thermal_end)),
    ("fleet.model.load_ms", Number(|d| &mut d.row.load_ms, 1.0)),
    ("fleet.model.quantization", Word(|d| &mut d.row.quantization)),
    ("fleet.cold_start", Flag(|d| &mut d.row.cold_start)),
    ("fleet.refusal", Other(|d, v| d.refusal(v))),
    ("fleet.rollout.id", Word(|d| &mut d.row.rollout_id)),
    ("fleet.rollout.phase", Int32(|d| &mut d.row.phase)),
    ("fleet.rollout.arm", Other(|d, v| d.arm(v))),
    ("fleet.device.class", Word(|d| &mut d.row.device_class)),
    ("fleet.device.soc", Word(|d| &mut d.row.soc)),
    ("fleet.device.ram_bytes", Int(|d| &mut d.row.ram_bytes)),
    ("fleet.device.event", Word(|d| &mut d.device_event)),
    ("fleet.locale", Word(|d| &mut d.row.locale)),
    ("fleet.runtime.name", Word(|d| &mut d.row.runtime)),
    ("fleet.feedback.reason", Whole(|d| &mut d.reason)),
    ("fleet.batch.id", Word(|d| &mut d.batch_id)),
    // General.
    ("app.installation.id", Word(|d| &mut d.claimed_install)),
    ("session.id", Word(|d| &mut d.row.session_id)),
    ("user.id", Whole(|d| &mut d.user)),
    ("user.hash", Whole(|d| &mut d.user)),
    ("enduser.id", Whole(|d| &mut d.user)),
    ("enduser.pseudo.id", Whole(|d| &mut d.user)),
    ("user.name", Nothing),
    ("user.full_name", Nothing),
    ("user.email", Nothing),
    ("service.name", Nothing),
    ("service.version", Word(|d| &mut d.row.app_version)),
    ("device.model.identifier", Word(|d| &mut d.row.device_model)),
    ("device.model.name", Word(|d| &mut d.device_name)),
    ("os.name", Word(|d| &mut d.os.0)),
    ("os.version", Word(|d| &mut d.os.1)),
    ("telemetry.sdk.name", Word(|d| &mut d.sdk.0)),
    ("telemetry.sdk.version", Word(|d| &mut d.sdk.1)),
    ("feature_flag.result.variant", Other(|d, v| d.variant(v))),
    ("event.name", Word(|d| &mut d.event_name)),
];

fn index() -> &'static HashMap<&'static str, usize> {
    static INDEX: OnceLock<HashMap<&'static str, usize>> = OnceLock::new();
    INDEX.get_or_init(|| NAMES.iter().enumerate().map(|(i, (name, _))| (*name, i)).collect())
}

/// Finds names. The records of a request list their attributes in the same order, so the name at a place is guessed to be
/// the one that was there before; only a wrong guess is looked up.
#[derive(Debug, Default)]
pub(crate) struct Names {
    guesses: Vec<usize>,
}

impl Names {
    /// What becomes of the attribute `key` that stands at `place` in its record.
    pub(crate) fn find(&mut self, place: usize, key: &str) -> Option<Field> {
        let guess = self.guesses.get(place).and_then(|i| NAMES.get(*i));
        if let Some((name, field)) = guess
            && *name == key
        {
            return Some(*field);
        }
        let found = *index().get(key)?;
        if self.guesses.len() <= place {
            self.guesses.resize(place + 1, 0);
        }
        self.guesses[place] = found;
        NAMES.get(found).map(|(_, field)| *field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The registry names what is read here, and nothing else, with the type that is read.
    #[test]
    fn our_own_names_are_those_of_the_registry() {
        let yaml = include_str!("../../../../docs/semconv.yaml");
        let mut published: Vec<(&str, &str)> = Vec::new();
        for line in yaml.lines().map(str::trim) {
            if let Some(id) = line.strip_prefix("- id: ").filter(|id| id.starts_with("fleet.")) {
                published.push((id, ""));
            } else if let (Some(kind), Some((_, last @ ""))) = (line.strip_prefix("type: "), published.last_mut()) {
                *last = kind;
            }
        }
        let read: Vec<&str> = NAMES.iter().map(|(name, _)| *name).filter(|n| n.starts_with("fleet.")).collect();
        assert_eq!(published.iter().map(|(id, _)| *id).collect::<Vec<_>>(), read);
        for (id, kind) in published {
            let Some((_, field)) = NAMES.iter().find(|(name, _)| *name == id) else { panic!("{id}") };
            let fits = match field {
                Word(_) | Whole(_) => kind == "string",
                Number(..) => kind == "double",
                Int(_) | Int32(_) => kind == "int",
                Flag(_) => kind == "boolean",
                Other(_) => true,
                Nothing => false,
            };
            assert!(fits, "{id} is published as {kind}");
        }
    }

    #[test]
    fn names_are_unique_and_found_in_any_order() {
        assert_eq!(index().len(), NAMES.len());
        let mut names = Names::default();
        for (place, key) in
            ["os.name", "os.version", "unknown", "os.name", "os.version", "session.id"].iter().enumerate()
        {
            let got = names.find(place % 2, key);
            assert_eq!(got.is_some(), *key != "unknown", "{key}");
            if *key == "session.id" {
                assert!(matches!(got, Some(Word(_))));
            }
        }
    }
}
