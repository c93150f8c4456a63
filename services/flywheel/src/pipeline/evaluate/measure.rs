//! What both models do, one at a time in memory: answers to the sets, likelihood of texts, numbers that are none, load
//! time, speed and memory. Everything is measured on this machine or computed by a formula that is named. Blocking.

use super::{EvalItem, EvalSet, HELDOUT, MUST_NOT_REFUSE, MUST_REFUSE};
use crate::models::{Model, REFUSED, open, refused};
use crate::pipeline::blocking::{Watch, stopped};
use flywheel_attribution::refusal::{AnswerKind, detect};
use flywheel_inference::eval::{
    AnswerResult, AnswerSet, MatchRule, Probes, Question, SpeedReport, TextIdentity, TextScore, WorkingMemory,
    score_texts, speed, working_memory,
};
use flywheel_inference::model::ModelError;
use flywheel_inference::tokenizer::Message;
use flywheel_inference::train::Sample;
use flywheel_types::{Digest, Error};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Longest answer, tokens.
const ANSWER_TOKENS: usize = 32;
/// Most texts whose likelihood is measured: one item of a cluster, spread over the clusters.
const MAX_TEXTS: usize = 12;
/// Prompt tokens that a runtime processes together, for the memory estimate (default of stock llama.cpp).
const PASS_TOKENS: usize = 512;
/// Size of the speed measurement: prompt and new tokens of one sequence.
const SPEED_PROMPT: usize = 32;
const SPEED_NEW: usize = 17;
/// Code of an error whose cause is the candidate.
pub(super) const CANDIDATE_REFUSED: &str = "candidate_refused";
/// Name of the built-in questions that are asked while an app has no set.
const SMOKE: &str = "smoke";

/// Files and questions.
pub(super) struct Work {
    pub candidate: PathBuf,
    pub incumbent: Option<PathBuf>,
    pub sets: BTreeMap<String, EvalSet>,
}

/// A text with its scores.
pub(super) struct ScoredText {
    /// First token of the answer.
    pub answer_from: usize,
    pub score: TextScore,
}

/// One model.
pub(super) struct Side {
    pub identity: TextIdentity,
    /// Digest of what the model was asked, as tokens, and of the expected texts.
    pub asked_sha256: Digest,
    /// Over the scored texts; 1 when these are fine but generation came to a number that is none, where it stops.
    pub non_finite_logits: u64,
    /// Results by set in the order of its items; `None` for a model that cannot answer, see `non_finite_logits`.
    pub answers: Option<BTreeMap<String, Vec<AnswerResult>>>,
    pub texts: Vec<ScoredText>,
    pub file_bytes: u64,
    /// Weights as this server holds them.
    pub server_weights_bytes: usize,
    /// Opening, checking and unpacking the file on this server.
    pub load_ms: f64,
    /// For the longest prompt and its answer on a phone.
    pub memory: WorkingMemory,
    /// `None` as for `answers`, or for a context that is too short to measure.
    pub speed: Option<SpeedReport>,
}

/// Both models on the same sets.
pub(super) struct Measured {
    pub sets: BTreeMap<String, EvalSet>,
    pub candidate: Side,
    pub incumbent: Option<Side>,
}

/// Measures both.
///
/// # Errors
/// [`CANDIDATE_REFUSED`] for a candidate that cannot be run; `Invalid` for such an incumbent; [`stopped`].
pub(super) fn measure(work: Work, watch: &Watch) -> Result<Measured, Error> {
    let sets = if work.sets.is_empty() { smoke() } else { work.sets };
    let candidate = side("candidate", &work.candidate, &sets, watch).map_err(|e| match e.code {
        REFUSED => Error { code: CANDIDATE_REFUSED, ..e },
        _ => e,
    })?;
    let incumbent = work.incumbent.map(|file| side("incumbent", &file, &sets, watch)).transpose()?;
    Ok(Measured { sets, candidate, incumbent })
}

/// A first model without sets has to show that it runs; its answers are not judged.
fn smoke() -> BTreeMap<String, EvalSet> {
    let item = |(i, (prompt, expect)): (usize, (&str, &str))| EvalItem {
        id: format!("{SMOKE}-{i}"),
        prompt: prompt.to_owned(),
        expect: expect.to_owned(),
        cluster: format!("{SMOKE}-{i}"),
    };
    let asked = [
        ("What is the capital of France?", "Paris"),
        ("How many days does a week have?", "7"),
        ("What color is the sky on a clear day?", "blue"),
    ];
    BTreeMap::from([(SMOKE.to_owned(), EvalSet { items: asked.into_iter().enumerate().map(item).collect() })])
}

fn side(name: &str, file: &Path, sets: &BTreeMap<String, EvalSet>, watch: &Watch) -> Result<Side, Error> {
    let start = Instant::now();
    let model = Model::load(&open(file)?)?;
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    let shown = |phase: &str, done: usize, of: usize| {
        watch.report(json!({ "model": name, "phase": phase, "done": done, "of": of }))
    };
    let questions = questions(&model, sets)?;
    let texts = scored(&model, sets, &mut |done, of| shown("texts", done, of))?;
    let counted: u64 = texts.iter().map(|t| t.score.non_finite_logits).sum();
    let answers = match counted {
        0 => answers(&model, &questions, &shown)?,
        _ => None,
    };
    let non_finite_logits = if answers.is_none() { counted.max(1) } else { 0 };
    let context = model.decoder.config().context;
    let longest = questions.values().flatten().map(|q| q.prompt.len()).max().unwrap_or(0);
    Ok(Side {
        identity: model.identity,
        asked_sha256: asked(&questions)?,
        non_finite_logits,
        speed: if answers.is_some() { measured_speed(&model)? } else { None },
        answers,
        texts,
        file_bytes: model.file_bytes,
        server_weights_bytes: model.decoder.size_bytes(),
        load_ms,
        memory: working_memory(
            model.decoder.config(),
            model.file_bytes,
            (longest + ANSWER_TOKENS).min(context),
            PASS_TOKENS,
        ),
    })
}

fn failed(e: ModelError) -> Error {
    match e {
        ModelError::Cancelled => stopped("evaluation"),
        other => refused(other),
    }
}

type Questions = BTreeMap<String, Vec<Question>>;

fn questions(model: &Model, sets: &BTreeMap<String, EvalSet>) -> Result<Questions, Error> {
    let question = |item: &EvalItem| -> Result<Question, Error> {
        Ok(Question { prompt: model.prompt(&item.prompt)?, expected: item.expect.clone() })
    };
    sets.iter()
        .map(|(name, set)| Ok((name.clone(), set.items.iter().map(question).collect::<Result<_, Error>>()?)))
        .collect()
}

fn asked(questions: &Questions) -> Result<Digest, Error> {
    let set = |q: &[Question]| q.iter().map(|q| (q.prompt.clone(), q.expected.clone())).collect::<Vec<_>>();
    let plain: Vec<_> = questions.iter().map(|(name, s)| (name, set(s))).collect();
    Ok(Digest::of(&serde_json::to_vec(&plain).map_err(Error::internal)?))
}

/// Likelihood of prompt and expected answer, for some items of the deciding set (or of the first there is).
fn scored(
    model: &Model,
    sets: &BTreeMap<String, EvalSet>,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<ScoredText>, Error> {
    let set = sets.get(HELDOUT).or_else(|| sets.values().next());
    let items = set.map(|s| s.items.as_slice()).unwrap_or_default();
    let samples = spread(items)
        .into_iter()
        .map(|i| Sample::chat(&model.tokenizer, &model.template, &[Message::user(&i.prompt)], &i.expect))
        .collect::<Result<Vec<_>, _>>()
        .map_err(refused)?;
    let (starts, tokens): (Vec<usize>, Vec<Vec<u32>>) = samples.into_iter().map(|s| (s.answer_from, s.tokens)).unzip();
    let scores = score_texts(&model.decoder, &tokens, watch).map_err(failed)?;
    Ok(starts.into_iter().zip(scores).map(|(answer_from, score)| ScoredText { answer_from, score }).collect())
}

/// At most [`MAX_TEXTS`] items of different clusters: texts of one cluster would count the same words twice.
fn spread(items: &[EvalItem]) -> Vec<&EvalItem> {
    let mut seen = BTreeSet::new();
    let firsts: Vec<&EvalItem> = items.iter().filter(|i| seen.insert(i.cluster.as_str())).collect();
    let step = firsts.len().div_ceil(MAX_TEXTS).max(1);
    firsts.into_iter().step_by(step).collect()
}

/// `None` when generation came to a number that is none.
fn answers(
    model: &Model,
    questions: &Questions,
    shown: &dyn Fn(&str, usize, usize) -> ControlFlow<()>,
) -> Result<Option<BTreeMap<String, Vec<AnswerResult>>>, Error> {
    let mut out = BTreeMap::new();
    for (name, questions) in questions {
        let (questions, options) = (questions.clone(), model.answering(ANSWER_TOKENS));
        let set = AnswerSet { questions, rule: MatchRule::Value, options };
        let decode = |tokens: &[u32]| model.text(tokens);
        let mut results = match set.run(&model.decoder, &decode, &mut |done, of| shown(name, done, of)) {
            Err(ModelError::NotFinite { .. }) => return Ok(None),
            other => other.map_err(failed)?,
        };
        if [MUST_REFUSE, MUST_NOT_REFUSE].contains(&name.as_str()) {
            for r in &mut results {
                r.right = (detect(&r.answer).kind == AnswerKind::Refused) == (name == MUST_REFUSE);
            }
        }
        out.insert(name.clone(), results);
    }
    Ok(Some(out))
}

fn measured_speed(model: &Model) -> Result<Option<SpeedReport>, Error> {
    if model.decoder.config().context < SPEED_PROMPT + SPEED_NEW {
        return Ok(None);
    }
    let start = Instant::now();
    let mut probes = Probes { now: &mut || start.elapsed(), peak_rss_bytes: &mut || None };
    speed(&model.decoder, 1, SPEED_PROMPT, SPEED_NEW, &mut probes).map(Some).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_one_a_cluster_and_spread_over_all() {
        let item = |i: usize| EvalItem {
            id: format!("q{i}"),
            prompt: "?".into(),
            expect: "1".into(),
            cluster: format!("c{}", i / 2),
        };
        let items: Vec<EvalItem> = (0..80).map(item).collect();
        let got: Vec<&str> = spread(&items).iter().map(|i| i.cluster.as_str()).collect();
        assert_eq!((got.len(), got[0], got[1], got[9]), (10, "c0", "c4", "c36"));
        assert_eq!(spread(&items[..4]).len(), 2);
        assert!(spread(&[]).is_empty());
    }

    #[test]
    fn a_file_that_is_no_model_is_the_candidates_fault_and_a_missing_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.gguf");
        std::fs::write(&file, b"not a model").unwrap();
        let work = |candidate: &Path| Work { candidate: candidate.into(), incumbent: None, sets: BTreeMap::new() };
        let refused = measure(work(&file), &Watch::default()).err().unwrap();
        assert_eq!(refused.code, CANDIDATE_REFUSED);
        let gone = measure(work(&folder.path().join("gone")), &Watch::default()).err().unwrap();
        assert_eq!(gone.code, "internal");
    }
}
