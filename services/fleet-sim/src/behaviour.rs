//! What users do with an answer.

use crate::workload::Question;
use flywheel_inference::eval::MatchRule;
use flywheel_types::{ChunkId, LabelKind};
use rand::Rng as _;
use rand_chacha::ChaCha8Rng;

/// What a user sees.
#[derive(Debug, Clone, Copy)]
pub struct Judgement<'a> {
    pub index: usize,
    pub question: &'a Question,
    pub answer: &'a str,
    /// Chunks that were in the prompt.
    pub shown: &'a [ChunkId],
}

impl Judgement<'_> {
    /// Whether the answer gives the expected value, by the rule that evaluations judge by; nobody expects nothing.
    #[must_use]
    pub fn is_right(&self) -> bool {
        !self.question.expected.trim().is_empty() && MatchRule::Value.accepts(self.answer, &self.question.expected)
    }
}

/// What a user says, and when: at once, or with the next tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    pub label: LabelKind,
    pub reason: Option<String>,
    pub later: bool,
}

/// A kind of user. Must depend on its arguments only; `rng` belongs to (phone, tick).
pub trait Behaviour: Send + Sync {
    /// `None`: the user says nothing.
    fn judge(&self, seen: &Judgement<'_>, rng: &mut ChaCha8Rng) -> Option<Verdict>;
}

fn said(label: LabelKind, reason: Option<&str>, rng: &mut ChaCha8Rng) -> Option<Verdict> {
    Some(Verdict { label, reason: reason.map(str::to_owned), later: rng.random_bool(0.2) })
}

/// Rejects wrong answers and accepts right ones, now and then by mistake, and often says nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Honest {
    /// Chance to say anything about a right and about a wrong answer.
    pub says_right: f64,
    pub says_wrong: f64,
    /// Chance that the judgement is turned round.
    pub mistake: f64,
}

impl Default for Honest {
    fn default() -> Self {
        Self { says_right: 0.3, says_wrong: 0.8, mistake: 0.02 }
    }
}

impl Behaviour for Honest {
    fn judge(&self, seen: &Judgement<'_>, rng: &mut ChaCha8Rng) -> Option<Verdict> {
        let right = seen.is_right() != rng.random_bool(self.mistake);
        if !rng.random_bool(if right { self.says_right } else { self.says_wrong }) {
            return None;
        }
        let label = if right { LabelKind::Accepted } else { LabelKind::Rejected };
        said(label, (!right).then_some("wrong answer"), rng)
    }
}

/// Rejects whatever comes, at this rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomRejecter {
    pub rate: f64,
}

impl Behaviour for RandomRejecter {
    fn judge(&self, _seen: &Judgement<'_>, rng: &mut ChaCha8Rng) -> Option<Verdict> {
        if rng.random_bool(self.rate) { said(LabelKind::Rejected, None, rng) } else { None }
    }
}

/// Rejects every answer that used one chunk, to have it taken out of service; judges the rest honestly.
#[derive(Debug, Clone, PartialEq)]
pub struct Spammer {
    pub target: ChunkId,
}

impl Behaviour for Spammer {
    fn judge(&self, seen: &Judgement<'_>, rng: &mut ChaCha8Rng) -> Option<Verdict> {
        if seen.shown.contains(&self.target) {
            return said(LabelKind::Rejected, Some("bad source"), rng);
        }
        Honest::default().judge(seen, rng)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::stream;
    use std::sync::Arc;

    #[test]
    fn a_right_answer_gives_the_value_and_no_other() {
        let judged = |answer: &str, expected: &str| {
            let question = Question {
                id: "q".into(),
                text: Arc::from("?"),
                lang: "en".into(),
                expected: expected.into(),
                chunk: None,
            };
            Judgement { index: 0, question: &question, answer, shown: &[] }.is_right()
        };
        assert!(judged("It weighs 1,940 grams.", "1940"));
        assert!(!judged("It weighs 900 or 1940 grams.", "1940"));
        assert!(!judged("", ""), "a question without an expected text cannot be answered rightly");
    }

    #[test]
    fn honest_users_reject_wrong_answers_and_spammers_their_target() {
        let question =
            Question { id: "q".into(), text: Arc::from("?"), lang: "en".into(), expected: "30".into(), chunk: None };
        let target = ChunkId::new("t").unwrap();
        let shown = [target.clone()];
        let mut rng = stream(1, 0, "t");
        let mut rejected = |b: &dyn Behaviour, answer: &str, shown: &[ChunkId]| {
            (0..1000)
                .filter_map(|_| b.judge(&Judgement { index: 0, question: &question, answer, shown }, &mut rng))
                .filter(|v| v.label == LabelKind::Rejected)
                .count()
        };
        assert!((740..820).contains(&rejected(&Honest::default(), "31", &[])));
        assert!(rejected(&Honest::default(), "30", &[]) < 40);
        assert_eq!(rejected(&Spammer { target }, "30", &shown), 1000);
        assert!((450..550).contains(&rejected(&RandomRejecter { rate: 0.5 }, "30", &[])));
    }
}
