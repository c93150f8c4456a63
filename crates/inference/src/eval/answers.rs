//! Questions with one right answer.

use super::Engine;
use crate::model::{GenerateOptions, ModelError};
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use unicode_normalization::UnicodeNormalization;

/// When a text counts as the right answer; both sides are [`normalize`]d first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MatchRule {
    /// The whole text is the expected one.
    Whole,
    /// The expected words occur in the text, next to each other.
    Contains,
    /// As `Contains`; but if the expected text has a number, the first number of the answer must be the first
    /// expected one, so that an answer listing every value it saw is not right. The same for codes. A number is a
    /// word that begins with a digit (`45`, `3.5`, `8gb`), a code any other word with digits (`ab12`); they are told
    /// apart because products are called `X1`: "X1 price: 389" gives the number 389.
    Value,
}

/// A prompt and the answer it should get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    pub prompt: Vec<u32>,
    pub expected: String,
}

/// Questions that are judged by one rule.
#[derive(Debug, Clone)]
pub struct AnswerSet {
    pub questions: Vec<Question>,
    pub rule: MatchRule,
    pub options: GenerateOptions,
}

/// What a model answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AnswerResult {
    pub answer: String,
    pub right: bool,
}

/// How two models did on the same questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Paired {
    pub both_right: usize,
    pub only_first: usize,
    pub only_second: usize,
    pub both_wrong: usize,
}

impl AnswerSet {
    /// Asks `model` everything; `decode` turns tokens into text, `watch` sees how many are done.
    ///
    /// # Errors
    /// Those of [`Engine::generate`].
    pub fn run(
        &self,
        model: &dyn Engine,
        decode: &dyn Fn(&[u32]) -> String,
        watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Vec<AnswerResult>, ModelError> {
        let prompts: Vec<Vec<u32>> = self.questions.iter().map(|q| q.prompt.clone()).collect();
        let mut done = 0;
        let answers = model.generate(&prompts, &self.options, &mut |_, _| {
            done += 1;
            watch(done, prompts.len())
        })?;
        let judge = |(generated, question): (crate::model::Generated, &Question)| {
            let answer = decode(&generated.tokens);
            AnswerResult { right: self.rule.accepts(&answer, &question.expected), answer }
        };
        Ok(answers.into_iter().zip(&self.questions).map(judge).collect())
    }
}

impl MatchRule {
    /// Whether `answer` is right.
    #[must_use]
    pub fn accepts(self, answer: &str, expected: &str) -> bool {
        let (answer, expected) = (normalize(answer), normalize(expected));
        if expected.is_empty() {
            return answer.is_empty();
        }
        let (answer, expected): (Vec<&str>, Vec<&str>) = (answer.split(' ').collect(), expected.split(' ').collect());
        let contains = || answer.windows(expected.len()).any(|w| w == expected);
        match self {
            Self::Whole => answer == expected,
            Self::Contains => contains(),
            Self::Value => {
                let want = expected.iter().find(|w| value_kind(w).is_some());
                let first_alike = |want: &&str| answer.iter().find(|w| value_kind(w) == value_kind(want));
                contains() && want.is_none_or(|want| first_alike(want) == Some(want))
            }
        }
    }
}

/// Whether a normalised word is a value, and which kind of one.
fn value_kind(word: &str) -> Option<ValueKind> {
    let digit = |c: char| c.is_ascii_digit();
    match (word.starts_with(digit), word.contains(digit)) {
        (true, _) => Some(ValueKind::Number),
        (false, true) => Some(ValueKind::Code),
        (false, false) => None,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueKind {
    Number,
    Code,
}

impl Paired {
    /// Questions asked.
    #[must_use]
    pub fn questions(&self) -> usize {
        self.both_right + self.only_first + self.only_second + self.both_wrong
    }
    /// Right answers of the first model.
    #[must_use]
    pub fn first_right(&self) -> usize {
        self.both_right + self.only_first
    }
    /// Right answers of the second model.
    #[must_use]
    pub fn second_right(&self) -> usize {
        self.both_right + self.only_second
    }
}

/// Words in lower case (Unicode NFKC), separated by single spaces, without punctuation; `3.5`, `1,200` and
/// `AB-12` stay one word (as `3.5`, `1200` and `ab12`); `30-month` is two. Chinese and Japanese characters are words of their own.
#[must_use]
pub fn normalize(text: &str) -> String {
    let chars: Vec<char> = text.nfkc().flat_map(char::to_lowercase).collect();
    let mut out = String::with_capacity(text.len());
    for (i, &c) in chars.iter().enumerate() {
        let inside = || {
            let (before, after) = (i.checked_sub(1).and_then(|j| chars.get(j)), chars.get(i + 1));
            before.zip(after)
        };
        let digits = || inside().is_some_and(|(a, b)| a.is_ascii_digit() && b.is_ascii_digit());
        let code = || inside().is_some_and(|(a, b)| a.is_ascii_alphabetic() && b.is_ascii_digit());
        match c {
            '.' if digits() => out.push(c),
            ',' if digits() => {}
            '-' if code() => {}
            c if is_ideograph(c) => {
                out.push(' ');
                out.push(c);
                out.push(' ');
            }
            c if c.is_alphanumeric() => out.push(c),
            _ => out.push(' '),
        }
    }
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn is_ideograph(c: char) -> bool {
    matches!(c as u32, 0x3040..=0x30FF | 0x3400..=0x9FFF | 0xF900..=0xFAFF | 0x2_0000..=0x3_FFFF)
}

/// Counts pairs; both slices are about the same questions in the same order.
#[must_use]
pub fn paired(first: &[AnswerResult], second: &[AnswerResult]) -> Paired {
    let mut counts = Paired::default();
    for (a, b) in first.iter().zip(second) {
        *match (a.right, b.right) {
            (true, true) => &mut counts.both_right,
            (true, false) => &mut counts.only_first,
            (false, true) => &mut counts.only_second,
            (false, false) => &mut counts.both_wrong,
        } += 1;
    }
    counts
}
