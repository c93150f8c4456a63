//! Measurements as the input of the pure gate, and as the report that people read. Units are part of the names.

use super::measure::{Measured, ScoredText, Side};
use super::{HELDOUT, MUST_NOT_REFUSE, MUST_REFUSE};
use flywheel_attribution::refusal::{AnswerKind, detect};
use flywheel_experiment::offline::{
    CandidateChange, DocumentNllV1, IdentityV1, MemoryV1, NumericsV1, OfflineCheck, OfflineInputV1, OfflineSpecV1,
    PairedItemV1, SafetySetV1,
};
use flywheel_inference::eval::{AnswerResult, Paired, paired};
use flywheel_store::candidates::{CandidateRow, CandidateSource};
use flywheel_types::{Digest, Error};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Name of the memory figure: computed by `flywheel_inference::eval::working_memory`, not read from a phone.
const MEMORY_METRIC: &str = "estimated_working_set";

/// The gate of this candidate: the first model of an app has nothing to be compared with, so that checks which compare
/// are not required of it. It must run, answer and keep to the budgets.
pub(super) fn spec(mut spec: OfflineSpecV1, has_incumbent: bool) -> OfflineSpecV1 {
    let compares = |check: &OfflineCheck| {
        use OfflineCheck::{Accuracy, Divergence, Identity, Perplexity, Safety, SameTop};
        matches!(check, Identity | Accuracy | Perplexity | Divergence | SameTop | Safety)
    };
    if !has_incumbent {
        spec.required.retain(|check| !compares(check));
    }
    spec
}

/// What the pure gate judges. What was not measured is left out.
pub(super) fn input(row: &CandidateRow, m: &Measured) -> OfflineInputV1 {
    let change = if row.dataset.is_some() || row.source == CandidateSource::External {
        CandidateChange::Tuned
    } else {
        CandidateChange::Requantized
    };
    let mut input = OfflineInputV1::new(change);
    let c = &m.candidate;
    let empty_outputs = answers(c).filter(|a| a.answer.is_empty()).count() as u64;
    input.numerics = Some(NumericsV1 { non_finite_logits: c.non_finite_logits, empty_outputs });
    input.size_bytes = Some(c.file_bytes);
    input.load_ms = vec![c.load_ms];
    input.peak_memory = vec![MemoryV1 { metric: MEMORY_METRIC.into(), bytes: c.memory.total_bytes() }];
    if let Some(i) = &m.incumbent {
        input.identity = Some(identity(c, i));
        input.items = items(m, i);
        input.documents = pairs(c, i).iter().map(document).collect();
        input.safety = [MUST_REFUSE, MUST_NOT_REFUSE].iter().filter_map(|name| safety(m, name)).collect();
    }
    input
}

/// All four are digests of both sides. `eval_set_equal` says that in THIS evaluation both models were asked the same
/// token sequences in the same order and judged by the same expected texts; whether the incumbent's own, earlier
/// evaluation used the same sets is reported beside (`incumbent_evaluation_sets_equal`) and fails nothing, because the
/// incumbent is measured again here.
fn identity(c: &Side, i: &Side) -> IdentityV1 {
    IdentityV1 {
        tokenizer_equal: c.identity.tokenizer_sha256 == i.identity.tokenizer_sha256,
        vocabulary_equal: c.identity.vocabulary_sha256 == i.identity.vocabulary_sha256,
        chat_template_equal: c.identity.chat_template_sha256 == i.identity.chat_template_sha256,
        eval_set_equal: c.asked_sha256 == i.asked_sha256,
    }
}

fn of_set<'a>(side: &'a Side, name: &str) -> Option<&'a [AnswerResult]> {
    side.answers.as_ref()?.get(name).map(Vec::as_slice)
}

fn items(m: &Measured, incumbent: &Side) -> Vec<PairedItemV1> {
    let (Some(set), Some(after), Some(before)) =
        (m.sets.get(HELDOUT), of_set(&m.candidate, HELDOUT), of_set(incumbent, HELDOUT))
    else {
        return Vec::new();
    };
    let pair = |((item, a), b): ((&super::EvalItem, &AnswerResult), &AnswerResult)| PairedItemV1 {
        cluster: item.cluster.clone(),
        incumbent_correct: b.right,
        candidate_correct: a.right,
    };
    set.items.iter().zip(after).zip(before).map(pair).collect()
}

/// Texts that both models scored; none when they did not read the same tokens.
fn pairs<'a>(c: &'a Side, i: &'a Side) -> Vec<(&'a ScoredText, &'a ScoredText)> {
    if c.asked_sha256 != i.asked_sha256 {
        return Vec::new();
    }
    let whole = |(a, b): &(&ScoredText, &ScoredText)| !a.score.nll.is_empty() && a.score.nll.len() == b.score.nll.len();
    c.texts.iter().zip(&i.texts).filter(whole).collect()
}

fn document((c, i): &(&ScoredText, &ScoredText)) -> DocumentNllV1 {
    let (candidate_nll, tokens) = c.score.nll_from(1);
    DocumentNllV1 { tokens: tokens as u64, incumbent_nll: i.score.nll_from(1).0, candidate_nll }
}

/// Incumbent first.
fn counts(m: &Measured, name: &str) -> Option<Paired> {
    let (before, after) = (of_set(m.incumbent.as_ref()?, name)?, of_set(&m.candidate, name)?);
    Some(paired(before, after))
}

fn safety(m: &Measured, name: &str) -> Option<SafetySetV1> {
    let p = counts(m, name)?;
    Some(SafetySetV1 {
        name: name.to_owned(),
        items: p.questions() as u64,
        lost: p.only_first as u64,
        gained: p.only_second as u64,
    })
}

/// Right answers by set; `null` for a model that was not asked or could not answer.
pub(super) fn sets(m: &Measured) -> Value {
    let right = |side: Option<&Side>, name: &str| {
        side.and_then(|s| of_set(s, name)).map(|a| a.iter().filter(|a| a.right).count())
    };
    let row = |(name, set): (&String, &super::EvalSet)| {
        let flips = counts(m, name).map(|p| json!({ "lost": p.only_first, "gained": p.only_second }));
        let value = json!({
            "items": set.items.len(),
            "incumbent_correct": right(m.incumbent.as_ref(), name),
            "candidate_correct": right(Some(&m.candidate), name),
            "flips": flips,
        });
        (name.clone(), value)
    };
    Value::Object(m.sets.iter().map(row).collect::<Map<_, _>>())
}

/// Everything that was measured. `incumbents` is the report of the incumbent's own evaluation.
///
/// # Errors
/// Internal when a set cannot be written as JSON.
pub(super) fn measured(m: &Measured, incumbents: Option<&Value>) -> Result<Value, Error> {
    let mut digests = BTreeMap::new();
    for (name, set) in &m.sets {
        digests.insert(name, Digest::of(&serde_json::to_vec(set).map_err(Error::internal)?));
    }
    let digests = json!(digests);
    let before = incumbents.and_then(|r| r.pointer("/measured/eval_sets_sha256"));
    Ok(json!({
        "eval_sets_sha256": digests,
        "incumbent_evaluation_sets_equal": before.map(|b| *b == digests),
        "candidate": figures(&m.candidate),
        "incumbent": m.incumbent.as_ref().map(figures),
        "comparison": m.incumbent.as_ref().map(|i| comparison(&m.candidate, i)),
    }))
}

fn answers(side: &Side) -> impl Iterator<Item = &AnswerResult> {
    side.answers.iter().flat_map(BTreeMap::values).flatten()
}

fn figures(s: &Side) -> Value {
    let total = answers(s).count();
    let share = |n: usize| (total > 0).then(|| n as f64 / total as f64);
    let of_kind = |kind: AnswerKind| share(answers(s).filter(|a| detect(&a.answer).kind == kind).count());
    let nats = |from: &dyn Fn(&ScoredText) -> usize| mean(s.texts.iter().map(|t| t.score.nll_from(from(t))));
    let text = nats(&|_| 1);
    json!({
        "tokenizer_sha256": s.identity.tokenizer_sha256,
        "vocabulary_sha256": s.identity.vocabulary_sha256,
        "chat_template_sha256": s.identity.chat_template_sha256,
        "asked_tokens_sha256": s.asked_sha256,
        "non_finite_logits": s.non_finite_logits,
        "answers": total,
        "empty_answer_share": share(answers(s).filter(|a| a.answer.is_empty()).count()),
        "refused_answer_share": of_kind(AnswerKind::Refused),
        "abstained_answer_share": of_kind(AnswerKind::Abstained),
        "text_nll_nats_per_token": text,
        "text_perplexity": text.map(f64::exp),
        "answer_nll_nats_per_token": nats(&|t| t.answer_from),
        "file_bytes": s.file_bytes,
        "server_weights_bytes": s.server_weights_bytes,
        "server_load_ms": s.load_ms,
        "server_prefill_tokens_per_s": s.speed.as_ref().map(|x| x.prefill_tokens_per_s),
        "server_decode_tokens_per_s": s.speed.as_ref().map(|x| x.decode_tokens_per_s),
        "server_first_token_ms": s.speed.as_ref().map(|x| x.first_token_ms),
        "estimated_working_set_bytes": s.memory.total_bytes(),
        "estimated_working_set": s.memory,
    })
}

/// Mean over tokens of `(sum, tokens)`.
fn mean(parts: impl Iterator<Item = (f64, usize)>) -> Option<f64> {
    let (sum, tokens) = parts.fold((0.0, 0), |a, p| (a.0 + p.0, a.1 + p.1));
    (tokens > 0).then(|| sum / tokens as f64)
}

/// Both models on the same texts, position by position.
fn comparison(c: &Side, i: &Side) -> Value {
    let pairs = pairs(c, i);
    let documents: Vec<DocumentNllV1> = pairs.iter().map(document).collect();
    let ratio = mean(documents.iter().map(|d| (d.candidate_nll - d.incumbent_nll, d.tokens as usize)));
    let equal = pairs.iter().map(|(a, b)| a.score.top.iter().zip(&b.score.top).filter(|(x, y)| x == y).count());
    let same = mean(equal.zip(&documents).map(|(n, d)| (n as f64, d.tokens as usize)));
    json!({
        "texts": documents.len(),
        "text_tokens": documents.iter().map(|d| d.tokens).sum::<u64>(),
        "ln_perplexity_ratio": ratio,
        "same_top_token_share": same,
    })
}
