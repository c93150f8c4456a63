//! The gates a correction must pass before it may train, and the reasons when it does not.

use super::{Correction, DatasetPolicyV1, EvalGuard};
use crate::diff::{Diff, diff};
use crate::refusal::normalise_characters;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Why a correction gave no sample.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum DropReason {
    /// The annotator skipped the task; that says nothing about the answer.
    Skipped,
    /// The correction is empty.
    Empty,
    /// The correction equals the output (after normalisation).
    SameAsOutput,
    /// The correction is the beginning of the output: cut off, not corrected.
    PrefixOfOutput,
    TooShort,
    TooLong,
    /// Fewer changes than a correction has, or so many that it is another text.
    EditRatio {
        per_mille: u32,
    },
    /// Waits for a second person (or a trusted one).
    NeedsSecondPerson,
    /// Annotators disagree: queued for a person, not trained.
    Disagreement,
    /// Nearly the same as an earlier sample.
    NearDuplicate {
        of: String,
    },
    /// Its chunk or question is in the evaluation set.
    EvalContamination {
        what: String,
    },
    /// Too many samples of one person.
    PersonShare {
        person: String,
    },
}

/// A correction that people agree on.
pub(super) struct Agreed<'a> {
    pub correction: &'a Correction,
    pub chosen: String,
    pub people: Vec<String>,
    pub diff: Diff,
}

/// Comparable form of a text: normalised characters, single spaces.
pub(super) fn comparable(text: &str) -> String {
    normalise_characters(text).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Settles the submissions for one interaction: the last of each person counts; one trusted person or the needed number
/// of agreeing people decide. All submissions are of the same interaction, in order of submission.
pub(super) fn settle<'a>(submissions: &[&'a Correction], policy: &DatasetPolicyV1) -> Result<Agreed<'a>, DropReason> {
    let mut last: BTreeMap<&str, &Correction> = BTreeMap::new();
    for s in submissions {
        last.insert(&s.person, s);
    }
    let given: Vec<&Correction> = last.into_values().filter(|s| s.corrected.is_some()).collect();
    if given.is_empty() {
        return Err(DropReason::Skipped);
    }
    let mut votes: BTreeMap<String, Vec<&Correction>> = BTreeMap::new();
    for s in &given {
        votes.entry(comparable(s.corrected.as_deref().unwrap_or_default())).or_default().push(s);
    }
    let trusted: Vec<_> = votes.iter().filter(|v| v.1.iter().any(|s| s.trusted)).collect();
    let agreed: Vec<_> = votes.iter().filter(|v| v.1.len() >= policy.people_needed as usize).collect();
    let winners = if trusted.is_empty() { &agreed } else { &trusted };
    let group = match winners.as_slice() {
        [one] => one.1,
        [] if votes.len() == 1 => return Err(DropReason::NeedsSecondPerson),
        _ => return Err(DropReason::Disagreement),
    };
    let first =
        submissions.iter().copied().find(|s| group.iter().any(|g| std::ptr::eq(*g, *s))).ok_or(DropReason::Skipped)?;
    let chosen = first.corrected.clone().unwrap_or_default();
    let people = group.iter().map(|s| s.person.clone()).collect();
    let diff = texts(first, &chosen, policy)?;
    Ok(Agreed { correction: first, chosen, people, diff })
}

/// Gates on the two texts.
fn texts(c: &Correction, chosen: &str, policy: &DatasetPolicyV1) -> Result<Diff, DropReason> {
    let (before, after) = (comparable(&c.output), comparable(chosen));
    if after.is_empty() {
        return Err(DropReason::Empty);
    }
    if before == after {
        return Err(DropReason::SameAsOutput);
    }
    if before.starts_with(&after) {
        return Err(DropReason::PrefixOfOutput);
    }
    let length = after.chars().count();
    if length < policy.min_chars as usize {
        return Err(DropReason::TooShort);
    }
    if length > policy.max_chars as usize {
        return Err(DropReason::TooLong);
    }
    let d = diff(&c.output, chosen).map_err(|_| DropReason::TooLong)?;
    if d.ratio < policy.min_edit_ratio || d.ratio > policy.max_edit_ratio {
        return Err(DropReason::EditRatio { per_mille: (d.ratio * 1000.0).round() as u32 });
    }
    Ok(d)
}

/// Whether the evaluation set knows this sample.
pub(super) fn contamination(c: &Correction, guard: &EvalGuard, questions: &[String]) -> Result<(), DropReason> {
    if let Some(chunk) = c.chunks.iter().find(|x| guard.chunks.contains(*x)) {
        return Err(DropReason::EvalContamination { what: format!("chunk {chunk}") });
    }
    let q = comparable(&c.question).to_lowercase();
    if questions.contains(&q) {
        return Err(DropReason::EvalContamination { what: "question".to_owned() });
    }
    Ok(())
}
