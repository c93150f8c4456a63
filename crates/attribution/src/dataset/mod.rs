//! From corrections to an immutable, named training set. Same corrections, same policy: same bytes, same digest.

mod gates;
mod minhash;

pub use gates::DropReason;

use crate::diff::Edit;
use flywheel_types::Digest;
use gates::{Agreed, comparable, contamination, settle};
use minhash::{NearDuplicates, Signature};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One submission of one annotator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Correction {
    pub interaction_id: String,
    /// Annotator, pseudonymous.
    pub person: String,
    /// A trusted role: one of them is enough.
    pub trusted: bool,
    /// What the model was told beside the question (instructions, retrieved text).
    pub system: Option<String>,
    pub question: String,
    pub output: String,
    /// The corrected answer; `None` = the task was skipped, `Some("")` = intentionally empty.
    pub corrected: Option<String>,
    /// Chunk ids (without version) behind the answer.
    pub chunks: Vec<String>,
    /// Key by which train and evaluation are split: samples with the same key stay together.
    pub group: String,
}

/// What the frozen evaluation set holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvalGuard {
    pub chunks: BTreeSet<String>,
    pub questions: Vec<String>,
}

/// Limits of the gates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DatasetPolicyV1 {
    /// Format version, 1.
    pub v: u8,
    /// People who must agree when none of them is trusted.
    pub people_needed: u32,
    pub min_chars: u32,
    pub max_chars: u32,
    /// Changed tokens over all tokens.
    pub min_edit_ratio: f64,
    pub max_edit_ratio: f64,
    /// Jaccard similarity of question and answer above which a sample repeats an earlier one.
    pub near_duplicate: f64,
    /// Largest share of the dataset one person may have contributed (at least one sample).
    pub max_person_share: f64,
    /// Share of the groups held out for evaluation during training.
    pub holdout_share: f64,
}

impl Default for DatasetPolicyV1 {
    fn default() -> Self {
        Self {
            v: 1,
            people_needed: 2,
            min_chars: 1,
            max_chars: 16_000,
            min_edit_ratio: 0.02,
            max_edit_ratio: 0.8,
            near_duplicate: 0.9,
            max_person_share: 0.01,
            holdout_share: 0.1,
        }
    }
}

/// Part of the dataset a sample belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    Train,
    Holdout,
}

/// One chat message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    pub content: String,
}

/// One training sample; one line of the dataset. `messages` alternate and end with the assistant; loss belongs on
/// that last message only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleV1 {
    /// SHA-256 of interaction, question and chosen answer.
    pub id: String,
    pub interaction_id: String,
    pub split: Split,
    pub group: String,
    pub messages: Vec<Message>,
    /// What the model said, for preference training.
    pub rejected: String,
    pub chunks: Vec<String>,
    /// People who agreed, as the caller names them.
    pub people: Vec<String>,
    /// What the correction changed.
    pub edits: Vec<Edit>,
}

impl SampleV1 {
    fn chosen(&self) -> &str {
        self.messages.last().map_or("", |m| m.content.as_str())
    }
}

/// A correction that gave no sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    pub interaction_id: String,
    #[serde(flatten)]
    pub reason: DropReason,
}

/// An immutable dataset snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetV1 {
    /// Names the snapshot: SHA-256 of `jsonl`.
    pub digest: Digest,
    /// One [`SampleV1`] per line, ordered by id.
    pub jsonl: Vec<u8>,
    pub samples: Vec<SampleV1>,
    pub dropped: Vec<Dropped>,
}

impl DatasetV1 {
    /// Reads a stored snapshot back.
    ///
    /// # Errors
    /// The line number and what is wrong with it.
    pub fn read(jsonl: &[u8]) -> Result<Vec<SampleV1>, DatasetError> {
        jsonl
            .split(|b| *b == b'\n')
            .enumerate()
            .filter(|(_, l)| !l.is_empty())
            .map(|(i, l)| serde_json::from_slice(l).map_err(|e| DatasetError::Line { line: i + 1, why: e.to_string() }))
            .collect()
    }

    /// Preference pairs of the training part with explicit prompt: `{"prompt", "chosen", "rejected"}` per line.
    ///
    /// # Errors
    /// [`DatasetError::Write`] when a sample cannot be written as JSON.
    pub fn dpo_jsonl(&self) -> Result<Vec<u8>, DatasetError> {
        let assistant = |text: &str| [Message { role: "assistant".to_owned(), content: text.to_owned() }];
        let rows = self.samples.iter().filter(|s| s.split == Split::Train).map(|s| {
            let prompt = &s.messages[..s.messages.len().saturating_sub(1)];
            serde_json::json!({ "prompt": prompt, "chosen": assistant(s.chosen()), "rejected": assistant(&s.rejected) })
        });
        write_lines(rows)
    }
}

/// Why a dataset could not be written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DatasetError {
    #[error("line {line} is no sample: {why}")]
    Line { line: usize, why: String },
    #[error("a sample could not be written: {0}")]
    Write(String),
}

fn write_lines<T: Serialize>(rows: impl Iterator<Item = T>) -> Result<Vec<u8>, DatasetError> {
    let mut out = Vec::new();
    for r in rows {
        serde_json::to_writer(&mut out, &r).map_err(|e| DatasetError::Write(e.to_string()))?;
        out.push(b'\n');
    }
    Ok(out)
}

/// Builds a snapshot. `corrections` are in order of submission; for the rest their order does not matter.
///
/// # Errors
/// [`DatasetError::Write`] when a sample cannot be written as JSON.
pub fn build(
    policy: &DatasetPolicyV1,
    corrections: &[Correction],
    guard: &EvalGuard,
) -> Result<DatasetV1, DatasetError> {
    let mut by_interaction: BTreeMap<&str, Vec<&Correction>> = BTreeMap::new();
    for c in corrections {
        by_interaction.entry(&c.interaction_id).or_default().push(c);
    }
    let questions: Vec<String> = guard.questions.iter().map(|q| comparable(q).to_lowercase()).collect();
    let mut dropped = Vec::new();
    let mut drop_it = |id: &str, reason| dropped.push(Dropped { interaction_id: id.to_owned(), reason });
    let mut samples: Vec<SampleV1> = Vec::new();
    for (id, submissions) in by_interaction {
        let settled =
            settle(&submissions, policy).and_then(|a| contamination(a.correction, guard, &questions).map(|()| a));
        match settled {
            Ok(a) => samples.push(sample(policy, a)),
            Err(reason) => drop_it(id, reason),
        }
    }
    samples.sort_by(|a, b| a.id.cmp(&b.id));
    let mut seen = NearDuplicates::default();
    let mut kept: Vec<SampleV1> = Vec::new();
    for s in samples {
        let question = s.messages.iter().rev().nth(1).map_or("", |m| m.content.as_str());
        let signature = Signature::of(&format!("{question}\n{}", s.chosen()));
        match seen.find(&signature, policy.near_duplicate) {
            Some(of) => {
                let of = kept[of as usize].id.clone();
                drop_it(&s.interaction_id, DropReason::NearDuplicate { of });
            }
            None => {
                seen.add(signature);
                kept.push(s);
            }
        }
    }
    for (s, person) in over_share(policy.max_person_share, &mut kept) {
        drop_it(&s.interaction_id, DropReason::PersonShare { person });
    }
    let jsonl = write_lines(kept.iter())?;
    dropped.sort_by(|a, b| a.interaction_id.cmp(&b.interaction_id));
    Ok(DatasetV1 { digest: Digest::of(&jsonl), jsonl, samples: kept, dropped })
}

/// Removes samples of people with more than their share, last ids first; the allowance follows the size that remains.
fn over_share(share: f64, samples: &mut Vec<SampleV1>) -> Vec<(SampleV1, String)> {
    let mut removed = Vec::new();
    loop {
        let allowed = ((share * samples.len() as f64).floor() as usize).max(1);
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for p in samples.iter().flat_map(|s| &s.people) {
            *counts.entry(p).or_default() += 1;
        }
        let Some((person, _)) = counts.into_iter().filter(|c| c.1 > allowed).max_by_key(|c| c.1) else {
            return removed;
        };
        let person = person.to_owned();
        let Some(at) = samples.iter().rposition(|s| s.people.contains(&person)) else {
            return removed;
        };
        removed.push((samples.remove(at), person));
    }
}

fn sample(policy: &DatasetPolicyV1, a: Agreed<'_>) -> SampleV1 {
    let c = a.correction;
    let message = |role: &str, content: &str| Message { role: role.to_owned(), content: content.to_owned() };
    let mut messages = Vec::with_capacity(3);
    if let Some(system) = c.system.as_deref().filter(|s| !s.is_empty()) {
        messages.push(message("system", system));
    }
    messages.push(message("user", &c.question));
    messages.push(message("assistant", &a.chosen));
    let id = Digest::of(format!("{}\0{}\0{}", c.interaction_id, c.question, a.chosen).as_bytes());
    let group = Digest::of(format!("split\0{}", c.group).as_bytes()).0;
    let bucket = f64::from(u32::from_be_bytes([group[0], group[1], group[2], group[3]])) / f64::from(u32::MAX);
    SampleV1 {
        id: id.to_hex(),
        interaction_id: c.interaction_id.clone(),
        split: if bucket < policy.holdout_share { Split::Holdout } else { Split::Train },
        group: c.group.clone(),
        messages,
        rejected: c.output.clone(),
        chunks: c.chunks.clone(),
        people: a.people,
        edits: a.diff.edits,
    }
}

#[cfg(test)]
mod tests;
