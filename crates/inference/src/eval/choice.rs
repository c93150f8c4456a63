//! Multiple choice by log-likelihood: the option that the model finds most likely after the question is its answer.

use super::{AnswerResult, Engine};
use crate::model::ModelError;
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;

/// A question with its options.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChoiceItem {
    pub prompt: String,
    /// Continuations of the prompt, each with its leading space.
    pub options: Vec<String>,
    /// Index of the right one.
    pub right: usize,
}

/// What a model chose.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChoiceResult {
    /// Sum over the tokens of each option, nats.
    pub log_likelihoods: Vec<f64>,
    /// The largest sum; the first of equal ones.
    pub chosen: usize,
    pub right: bool,
    /// Whether the option with the largest mean over its tokens is the right one.
    pub right_by_mean: bool,
}

impl ChoiceResult {
    /// For [`super::paired`].
    #[must_use]
    pub fn answer(&self, item: &ChoiceItem) -> AnswerResult {
        AnswerResult { answer: item.options.get(self.chosen).cloned().unwrap_or_default(), right: self.right }
    }
}

/// Asks `model` everything; `encode` makes tokens of prompts and options, `watch` sees how many are done.
///
/// # Errors
/// [`ModelError::Input`] for an item without options, or whose prompt or options are no tokens or too many;
/// [`ModelError::Cancelled`].
pub fn multiple_choice(
    model: &dyn Engine,
    items: &[ChoiceItem],
    encode: &dyn Fn(&str) -> Vec<u32>,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<ChoiceResult>, ModelError> {
    let mut out = Vec::with_capacity(items.len());
    for (i, item) in items.iter().enumerate() {
        if item.right >= item.options.len() {
            let what = format!("question {i} has {} options, the right one is {}", item.options.len(), item.right);
            return Err(ModelError::input(what));
        }
        let options: Vec<Vec<u32>> = item.options.iter().map(|o| encode(o)).collect();
        let sums = model.option_log_likelihoods(&encode(&item.prompt), &options)?;
        let means: Vec<f64> = sums.iter().zip(&options).map(|(s, o)| s / o.len() as f64).collect();
        let chosen = first_largest(&sums);
        let (right, right_by_mean) = (chosen == item.right, first_largest(&means) == item.right);
        out.push(ChoiceResult { log_likelihoods: sums, chosen, right, right_by_mean });
        if watch(out.len(), items.len()).is_break() {
            return Err(ModelError::Cancelled);
        }
    }
    Ok(out)
}

fn first_largest(values: &[f64]) -> usize {
    (0..values.len()).rev().max_by(|a, b| values[*a].total_cmp(&values[*b])).unwrap_or(0)
}

/// A line of GSM8K (arXiv 2110.14168).
#[derive(Deserialize)]
struct Gsm8k {
    question: String,
    answer: String,
}

/// Questions with four options from lines of GSM8K: the number after `####` and three wrong ones of the kinds that slips
/// make (off by one or ten, doubled, halved, ten times, two digits exchanged), drawn by `seed` and the line's number.
///
/// # Errors
/// [`ModelError::Input`] for a line that is not of this form, with its number.
pub fn gsm8k_choices(lines: &str, seed: u64) -> Result<Vec<ChoiceItem>, ModelError> {
    let given = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    given
        .map(|(i, line)| {
            let refuse = |what: &str| ModelError::input(format!("line {} of the questions: {what}", i + 1));
            let item: Gsm8k = serde_json::from_str(line).map_err(|e| refuse(&e.to_string()))?;
            let (_, last) = item.answer.rsplit_once("####").ok_or_else(|| refuse("the answer has no `####`"))?;
            let number: i64 =
                last.trim().replace(',', "").parse().map_err(|_| refuse("no whole number after `####`"))?;
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(i as u64);
            let mut options = vec![number];
            options.extend(slips(number, &mut rng));
            options.shuffle(&mut rng);
            Ok(ChoiceItem {
                prompt: format!("Question: {}\nAnswer: The final answer is", item.question.trim()),
                right: options.iter().position(|o| *o == number).unwrap_or(0),
                options: options.iter().map(|o| format!(" {o}")).collect(),
            })
        })
        .collect()
}

/// Three different wrong numbers.
fn slips(number: i64, rng: &mut ChaCha8Rng) -> Vec<i64> {
    let at = |n: i64| number.saturating_add(n);
    let mut near =
        vec![at(1), at(-1), at(10), at(-10), number.saturating_mul(2), number / 2, number.saturating_mul(10)];
    let digits: Vec<char> = number.to_string().chars().collect();
    for i in 1..digits.len() {
        let mut swapped = digits.clone();
        swapped.swap(i - 1, i);
        near.extend(swapped.iter().collect::<String>().parse::<i64>());
    }
    near.retain(|n| *n != number);
    near.sort_unstable();
    near.dedup();
    near.shuffle(rng);
    near.truncate(3);
    near
}
