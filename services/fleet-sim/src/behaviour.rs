//! What users do with an answer.

use crate::workload::Question;
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
    /// Whether the answer holds the expected text: white space, case and thousands separators aside, and not as a part
    /// of a longer number or word.
    #[must_use]
    pub fn is_right(&self) -> bool {
        contains_value(self.answer, &self.question.expected)
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

/// Whether `text` contains `value` as a whole word or number.
fn contains_value(text: &str, value: &str) -> bool {
    let (text, value) = (normalised(text), normalised(value));
    if value.is_empty() {
        return false;
    }
    // Chinese has no spaces between words: only the ends of numbers and Latin words are borders.
    let joins = |a: Option<char>, b: Option<char>| matches!((a, b), (Some(a), Some(b)) if a.is_ascii_alphanumeric() && b.is_ascii_alphanumeric());
    text.match_indices(&value).any(|(at, found)| {
        let (before, after) = (&text[..at], &text[at + found.len()..]);
        let decimal_before = value.starts_with(|c: char| c.is_ascii_digit())
            && before.ends_with('.')
            && before.trim_end_matches('.').ends_with(|c: char| c.is_ascii_digit());
        let decimal_after = value.ends_with(|c: char| c.is_ascii_digit())
            && after.strip_prefix('.').is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit()));
        !joins(before.chars().next_back(), value.chars().next())
            && !joins(value.chars().next_back(), after.chars().next())
            && !decimal_before
            && !decimal_after
    })
}

/// Lower case, single spaces, `1,700` as `1700`.
fn normalised(text: &str) -> String {
    let chars: Vec<char> = text.to_lowercase().chars().collect();
    let digit = |i: Option<usize>| i.and_then(|i| chars.get(i)).is_some_and(char::is_ascii_digit);
    let kept: String = chars
        .iter()
        .enumerate()
        .filter(|(i, c)| {
            let group =
                **c == ',' && digit(i.checked_sub(1)) && (1..=3).all(|n| digit(Some(i + n))) && !digit(Some(i + 4));
            !group
        })
        .map(|(_, c)| *c)
        .collect();
    kept.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::stream;
    use std::sync::Arc;

    #[test]
    fn values_match_as_whole_words_and_numbers() {
        for (text, value, right) in [
            ("It weighs 940 grams.", "940", true),
            ("It weighs 1940 grams.", "940", false),
            ("It weighs 940.5 grams.", "940", false),
            ("About 1.7 liters", "1.7", true),
            ("About 11.7 liters", "1.7", false),
            ("About 3.1.7", "1.7", false),
            ("The code is 12,500.", "12500", true),
            ("OLIVE green", "olive", true),
            ("olives", "olive", false),
            ("a Descaling  Brush is included", "descaling brush", true),
            ("保修期为30个月。", "30", true),
            ("", "30", false),
            ("x", "", false),
        ] {
            assert_eq!(contains_value(text, value), right, "{text} / {value}");
        }
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
