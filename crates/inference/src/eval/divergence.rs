//! Perplexity, and how far a model's predictions are from a base model's.
//!
//! The text is cut into windows; in each the second half is scored, with the first half as context. This is
//! the convention of `llama-perplexity`, so numbers can be compared.

use crate::linalg::log_sum_exp;
use crate::model::{Decoder, ModelError, Scored};
use serde::Serialize;
use std::ops::ControlFlow;

/// Perplexity of a text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Perplexity {
    /// `exp(mean nll)`.
    pub perplexity: f64,
    /// Mean negative log-likelihood, nats a token.
    pub nll: f64,
    /// Standard error of `nll`.
    pub nll_se: f64,
    /// Tokens scored.
    pub tokens: usize,
}

/// A model measured against a base model on the same tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Divergence {
    pub base: Perplexity,
    pub other: Perplexity,
    /// Mean Kullback-Leibler divergence KL(base ‖ other) of the next-token distributions, nats.
    pub kld: f64,
    /// Standard error of `kld`.
    pub kld_se: f64,
    pub kld_p99: f64,
    pub kld_max: f64,
    /// Share of positions where both have the same most likely token.
    pub top1: f64,
}

fn windows(tokens: &[u32], window: usize) -> Result<std::slice::ChunksExact<'_, u32>, ModelError> {
    if window < 4 || tokens.len() < window {
        let what = format!(
            "a text of {} tokens in windows of {window}; a window needs 4 and the text one window",
            tokens.len()
        );
        return Err(ModelError::input(what));
    }
    Ok(tokens.chunks_exact(window))
}

/// Perplexity of `tokens` in windows of `window`; `watch` sees windows done and their number.
///
/// # Errors
/// [`ModelError::Input`] for a text shorter than a window, [`ModelError::Cancelled`], and those of scoring.
pub fn perplexity(
    model: &Decoder,
    tokens: &[u32],
    window: usize,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Perplexity, ModelError> {
    let windows = windows(tokens, window)?;
    let total = windows.len();
    let mut nll = Vec::with_capacity(total * window / 2);
    for (i, text) in windows.enumerate() {
        for part in model.nll(&[Scored { tokens: text, from: window / 2 }])? {
            nll.extend(part.into_iter().map(f64::from));
        }
        if watch(i + 1, total).is_break() {
            return Err(ModelError::Cancelled);
        }
    }
    Ok(summary(&nll))
}

/// Both models over the same windows; one window's predictions of the base are in memory at a time.
///
/// # Errors
/// As [`perplexity`], and [`ModelError::Input`] for models with different vocabularies.
pub fn divergence(
    base: &Decoder,
    other: &Decoder,
    tokens: &[u32],
    window: usize,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Divergence, ModelError> {
    let vocab = base.config().vocab;
    if other.config().vocab != vocab {
        let what = format!("the models have vocabularies of {vocab} and {} tokens", other.config().vocab);
        return Err(ModelError::input(what));
    }
    let windows = windows(tokens, window)?;
    let total = windows.len();
    let mut all = Pairs::default();
    for (i, text) in windows.enumerate() {
        let range = window / 2 - 1..window - 1;
        let mut kept: Vec<f32> = Vec::with_capacity(range.len() * vocab);
        base.visit_logits(text, range.clone(), &mut |_, row| {
            kept.extend_from_slice(row);
            Ok(())
        })?;
        let mut rows = kept.chunks_exact(vocab);
        other.visit_logits(text, range, &mut |position, row| {
            if let Some(base_row) = rows.next() {
                all.push(base_row, row, text[position + 1] as usize);
            }
            Ok(())
        })?;
        if watch(i + 1, total).is_break() {
            return Err(ModelError::Cancelled);
        }
    }
    Ok(all.finish())
}

/// What is kept of each position.
#[derive(Default)]
pub(crate) struct Pairs {
    base_nll: Vec<f64>,
    other_nll: Vec<f64>,
    kld: Vec<f64>,
    agree: usize,
}

impl Pairs {
    /// Logits of both models and the token that follows.
    pub fn push(&mut self, base: &[f32], other: &[f32], target: usize) {
        let (base_sum, other_sum) = (f64::from(log_sum_exp(base)), f64::from(log_sum_exp(other)));
        let (mut kld, mut best) = (0.0f64, (0, 0));
        for (i, (b, o)) in base.iter().zip(other).enumerate() {
            let (log_b, log_o) = (f64::from(*b) - base_sum, f64::from(*o) - other_sum);
            kld += log_b.exp() * (log_b - log_o);
            if *b > base[best.0] {
                best.0 = i;
            }
            if *o > other[best.1] {
                best.1 = i;
            }
        }
        self.kld.push(kld);
        self.agree += usize::from(best.0 == best.1);
        self.base_nll.push(base_sum - f64::from(base[target]));
        self.other_nll.push(other_sum - f64::from(other[target]));
    }

    pub fn finish(mut self) -> Divergence {
        let n = self.kld.len();
        let (kld, kld_se) = mean_and_error(&self.kld);
        self.kld.sort_unstable_by(f64::total_cmp);
        let at = |q: f64| self.kld.get(((n.max(1) - 1) as f64 * q).round() as usize).copied().unwrap_or(f64::NAN);
        Divergence {
            base: summary(&self.base_nll),
            other: summary(&self.other_nll),
            kld,
            kld_se,
            kld_p99: at(0.99),
            kld_max: at(1.0),
            top1: self.agree as f64 / n as f64,
        }
    }
}

fn summary(nll: &[f64]) -> Perplexity {
    let (mean, se) = mean_and_error(nll);
    Perplexity { perplexity: mean.exp(), nll: mean, nll_se: se, tokens: nll.len() }
}

/// Mean and its standard error.
fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, (variance / n).sqrt())
}
