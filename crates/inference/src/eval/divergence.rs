//! Perplexity, and how far a model's predictions are from a base model's.
//!
//! The text is cut into windows; in each the second half is scored, with the first half as context. This is
//! the convention of `llama-perplexity`, so numbers can be compared.

use super::{
    Engine, Estimate,
    interval::{Interval, bootstrap},
    recorded::{BaseRow, RecordedBase, base_row},
};
use crate::linalg::log_sum_exp;
use crate::model::{ModelError, argmax};
use serde::Serialize;
use std::ops::{ControlFlow, Range};

/// Sees windows done and their number.
pub(super) type Watch<'a> = dyn FnMut(usize, usize) -> ControlFlow<()> + 'a;

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
    pub kld_p999: f64,
    pub kld_max: f64,
    /// Share of positions where both have the same most likely token.
    pub top1: f64,
    /// Mean and root mean square of the change Δp of the probability of the token that follows.
    pub dp_mean: f64,
    pub dp_rms: f64,
    /// Bootstrap over windows; `None` below 8 windows. A maximum has none: no bootstrap is consistent for it.
    pub intervals: Option<DivergenceIntervals>,
}

/// 95 % intervals of the figures of a [`Divergence`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DivergenceIntervals {
    pub kld: Interval,
    pub kld_p99: Interval,
    pub kld_p999: Interval,
    pub top1: Interval,
    pub dp_rms: Interval,
    /// Of `other.nll − base.nll`, the logarithm of the ratio of the perplexities.
    pub nll_difference: Interval,
}

/// Two models against the same base on the same positions: second minus first, below 0 where the second is better
/// (`top1`: above 0).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PairedDivergence {
    pub kld: Estimate,
    /// Mean KLD of the second over that of the first.
    pub kld_ratio: Estimate,
    pub top1: Estimate,
    pub nll: Estimate,
}

/// What is kept of each scored position, window after window.
#[derive(Debug, Clone, PartialEq)]
pub struct PositionScores {
    /// Positions of each window.
    per_window: usize,
    kld: Vec<f64>,
    base_nll: Vec<f64>,
    other_nll: Vec<f64>,
    same_top: Vec<bool>,
}

/// Where the base's predictions come from.
#[derive(Debug, Clone, Copy)]
pub enum Base<'a> {
    Model(&'a dyn Engine),
    /// Made earlier by [`super::record_base`].
    Recorded(&'a RecordedBase),
}

/// The windows of a text.
pub(super) fn windows(tokens: &[u32], window: usize) -> Result<std::slice::ChunksExact<'_, u32>, ModelError> {
    if window < 4 || tokens.len() < window {
        let what = format!(
            "a text of {} tokens in windows of {window}; a window needs 4 and the text one window",
            tokens.len()
        );
        return Err(ModelError::input(what));
    }
    Ok(tokens.chunks_exact(window))
}

/// Positions of a window whose next token is scored.
pub(super) fn scored(window: usize) -> Range<usize> {
    window / 2 - 1..window - 1
}

/// Perplexity of `tokens` in windows of `window`; `watch` sees windows done and their number.
///
/// # Errors
/// [`ModelError::Input`] for a text shorter than a window, [`ModelError::Cancelled`], and those of scoring.
pub fn perplexity(
    model: &dyn Engine,
    tokens: &[u32],
    window: usize,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Perplexity, ModelError> {
    let windows = windows(tokens, window)?;
    let total = windows.len();
    let mut nll = Vec::with_capacity(total * window / 2);
    for (i, text) in windows.enumerate() {
        model.visit_logits(text, scored(window), &mut |position, row| {
            nll.push(f64::from(log_sum_exp(row) - row[text[position + 1] as usize]));
            Ok(())
        })?;
        if watch(i + 1, total).is_break() {
            return Err(ModelError::Cancelled);
        }
    }
    Ok(summary(&nll))
}

/// Both models over the same windows, summed up; see [`position_scores`].
///
/// # Errors
/// As [`position_scores`].
pub fn divergence(
    base: &dyn Engine,
    other: &dyn Engine,
    tokens: &[u32],
    window: usize,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Divergence, ModelError> {
    Ok(position_scores(Base::Model(base), other, tokens, window, watch)?.summary())
}

/// `other` against the base, position by position; one window's predictions of the base are in memory at a time.
///
/// # Errors
/// As [`perplexity`], and [`ModelError::Input`] for models with different vocabularies or a record of other tokens,
/// another order of them or other windows.
pub fn position_scores(
    base: Base<'_>,
    other: &dyn Engine,
    tokens: &[u32],
    window: usize,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<PositionScores, ModelError> {
    let mut all = [PositionScores::new(window)];
    score_many(base, &[other], tokens, window, &mut all, watch)?;
    let [all] = all;
    Ok(all)
}

/// Many models against the base, which runs once; `watch` sees runs of a model over a window done and their number.
pub(crate) fn position_scores_of(
    base: Base<'_>,
    others: &[&dyn Engine],
    tokens: &[u32],
    window: usize,
    watch: &mut Watch<'_>,
) -> Result<Vec<PositionScores>, ModelError> {
    let mut all: Vec<PositionScores> = others.iter().map(|_| PositionScores::new(window)).collect();
    score_many(base, others, tokens, window, &mut all, watch)?;
    Ok(all)
}

fn score_many(
    base: Base<'_>,
    others: &[&dyn Engine],
    tokens: &[u32],
    window: usize,
    all: &mut [PositionScores],
    watch: &mut Watch<'_>,
) -> Result<(), ModelError> {
    let windows = windows(tokens, window)?;
    let vocab = match base {
        Base::Model(model) => model.vocab(),
        Base::Recorded(record) => record.check(tokens, window)?,
    };
    if let Some(other) = others.iter().find(|o| o.vocab() != vocab) {
        let what = format!("the models have vocabularies of {vocab} and {} tokens", other.vocab());
        return Err(ModelError::input(what));
    }
    let (total, mut done) = (windows.len() * others.len(), 0);
    for (i, text) in windows.enumerate() {
        let base_rows = match base {
            Base::Model(model) => rows_of(model, text)?,
            Base::Recorded(record) => record.window(i)?,
        };
        for (other, scores) in others.iter().zip(all.iter_mut()) {
            let mut rows = base_rows.iter();
            other.visit_logits(text, scored(window), &mut |position, row| {
                if let Some(base_row) = rows.next() {
                    scores.push(base_row, row, text[position + 1] as usize);
                }
                Ok(())
            })?;
            done += 1;
            if watch(done, total).is_break() {
                return Err(ModelError::Cancelled);
            }
        }
    }
    Ok(())
}

/// The base's predictions in one window.
pub(super) fn rows_of(model: &dyn Engine, text: &[u32]) -> Result<Vec<BaseRow>, ModelError> {
    let mut rows = Vec::with_capacity(text.len() / 2);
    model.visit_logits(text, scored(text.len()), &mut |position, row| {
        rows.push(base_row(row, text[position + 1] as usize));
        Ok(())
    })?;
    Ok(rows)
}

/// KL(base ‖ other) of two rows of logits over the same vocabulary, nats.
pub(crate) fn kl_divergence(base: &[f32], other: &[f32]) -> f64 {
    kl(base, f64::from(log_sum_exp(base)), other, f64::from(log_sum_exp(other)))
}

/// With the logarithms of the sums of the exponentials.
fn kl(base: &[f32], base_sum: f64, other: &[f32], other_sum: f64) -> f64 {
    let terms = base.iter().zip(other).map(|(b, o)| {
        let (log_b, log_o) = (f64::from(*b) - base_sum, f64::from(*o) - other_sum);
        log_b.exp() * (log_b - log_o)
    });
    terms.sum()
}

impl PositionScores {
    fn new(window: usize) -> Self {
        // A window that is too short is refused before it is used.
        let per_window = window.saturating_sub(window / 2);
        Self { per_window, kld: Vec::new(), base_nll: Vec::new(), other_nll: Vec::new(), same_top: Vec::new() }
    }

    fn push(&mut self, base: &BaseRow, other: &[f32], target: usize) {
        let (base_sum, other_sum) = (f64::from(log_sum_exp(&base.logits)), f64::from(log_sum_exp(other)));
        self.kld.push(kl(&base.logits, base_sum, other, other_sum));
        self.same_top.push(base.top == argmax(other));
        self.base_nll.push(base.nll);
        self.other_nll.push(other_sum - f64::from(other[target]));
    }

    /// The recorded base against itself, without running it.
    pub(super) fn of_base(record: &RecordedBase) -> Result<Self, ModelError> {
        let mut all = Self::new(record.head().window);
        for i in 0..record.head().windows {
            for row in record.window(i)? {
                all.kld.push(0.0);
                all.same_top.push(true);
                all.base_nll.push(row.nll);
                all.other_nll.push(row.nll);
            }
        }
        Ok(all)
    }

    /// What another engine measured: divergence and both negative log-likelihoods in nats, and whether the most likely
    /// tokens are the same, for `per_window` positions of each window.
    ///
    /// # Errors
    /// [`ModelError::Input`] for lists of different lengths, or ones that are not whole windows.
    pub fn of_other_engine(
        per_window: usize,
        kld: Vec<f64>,
        base_nll: Vec<f64>,
        other_nll: Vec<f64>,
        same_top: Vec<bool>,
    ) -> Result<Self, ModelError> {
        let n = kld.len();
        if per_window == 0
            || !n.is_multiple_of(per_window)
            || [base_nll.len(), other_nll.len(), same_top.len()] != [n; 3]
        {
            return Err(ModelError::input(format!("{n} scores that are not whole windows of {per_window}")));
        }
        Ok(Self { per_window, kld, base_nll, other_nll, same_top })
    }

    /// KL(base ‖ other) at every position, nats.
    #[must_use]
    pub fn kld(&self) -> &[f64] {
        &self.kld
    }

    /// Δp at every position: probability of the token that follows, other minus base.
    fn dp(&self) -> impl Iterator<Item = f64> {
        self.base_nll.iter().zip(&self.other_nll).map(|(b, o)| (-o).exp() - (-b).exp())
    }

    /// Sum of `values` over each window.
    fn by_window(&self, values: impl Iterator<Item = f64>) -> Vec<f64> {
        let mut sums = vec![0.0; self.kld.len() / self.per_window];
        values.enumerate().for_each(|(i, v)| sums[i / self.per_window] += v);
        sums
    }

    fn top(&self) -> impl Iterator<Item = f64> {
        self.same_top.iter().map(|same| f64::from(u8::from(*same)))
    }

    /// All figures with their intervals.
    #[must_use]
    pub fn summary(&self) -> Divergence {
        let (n, (kld, kld_se)) = (self.kld.len() as f64, mean_and_error(&self.kld));
        let mut order: Vec<usize> = (0..self.kld.len()).collect();
        order.sort_unstable_by(|a, b| self.kld[*a].total_cmp(&self.kld[*b]));
        let once = vec![1; self.kld.len() / self.per_window];
        Divergence {
            base: summary(&self.base_nll),
            other: summary(&self.other_nll),
            kld,
            kld_se,
            kld_p99: self.quantile(&order, &once, 0.99),
            kld_p999: self.quantile(&order, &once, 0.999),
            kld_max: self.quantile(&order, &once, 1.0),
            top1: self.top().sum::<f64>() / n,
            dp_mean: self.dp().sum::<f64>() / n,
            dp_rms: (self.dp().map(|d| d * d).sum::<f64>() / n).sqrt(),
            intervals: self.intervals(&order),
        }
    }

    fn intervals(&self, order: &[usize]) -> Option<DivergenceIntervals> {
        let mean = |values: Vec<f64>| self.mean_interval(&values);
        let squares = self.by_window(self.dp().map(|d| d * d));
        let rms = mean(squares)?;
        let difference = self.other_nll.iter().zip(&self.base_nll).map(|(o, b)| o - b);
        let quantile = |q: f64| bootstrap(order.len() / self.per_window, &|drawn| self.quantile(order, drawn, q));
        Some(DivergenceIntervals {
            kld: mean(self.by_window(self.kld.iter().copied()))?,
            kld_p99: quantile(0.99)?,
            kld_p999: quantile(0.999)?,
            top1: mean(self.by_window(self.top()))?,
            dp_rms: Interval { low: rms.low.sqrt(), high: rms.high.sqrt() },
            nll_difference: mean(self.by_window(difference))?,
        })
    }

    /// Interval of a mean over positions from its sums by window.
    fn mean_interval(&self, sums: &[f64]) -> Option<Interval> {
        let n = (sums.len() * self.per_window) as f64;
        bootstrap(sums.len(), &|drawn| drawn.iter().zip(sums).map(|(k, s)| f64::from(*k) * s).sum::<f64>() / n)
    }

    /// The KLD that a share `q` of the positions does not exceed, each counted as often as its window was drawn: the one
    /// at the rounded rank `(n−1)·q`. `order` sorts the positions by KLD.
    fn quantile(&self, order: &[usize], drawn: &[u32], q: f64) -> f64 {
        let n = order.len();
        let above = n.saturating_sub(1) - ((n.max(1) - 1) as f64 * q).round() as usize;
        let mut passed = 0;
        for i in order.iter().rev() {
            passed += drawn[i / self.per_window] as usize;
            if passed > above {
                return self.kld[*i];
            }
        }
        f64::NAN
    }

    /// Compares two models measured against the same base; intervals are paired, by bootstrap over windows.
    ///
    /// # Errors
    /// [`ModelError::Input`] if the scores are not about the same base, tokens and windows.
    pub fn compare(first: &Self, second: &Self) -> Result<PairedDivergence, ModelError> {
        if first.per_window != second.per_window || first.base_nll != second.base_nll {
            let what = "the scores to compare are not about the same base model on the same windows of the same tokens";
            return Err(ModelError::input(what));
        }
        let n = first.kld.len() as f64;
        let difference = |a: &mut dyn Iterator<Item = f64>, b: &mut dyn Iterator<Item = f64>| {
            let sums = first.by_window(b.zip(a).map(|(b, a)| b - a));
            Estimate { value: sums.iter().sum::<f64>() / n, interval: first.mean_interval(&sums) }
        };
        let [a, b] = [first, second].map(|s| s.by_window(s.kld.iter().copied()));
        let ratio = |drawn: &[u32]| {
            let total = |sums: &[f64]| drawn.iter().zip(sums).map(|(k, s)| f64::from(*k) * s).sum::<f64>();
            total(&b) / total(&a)
        };
        Ok(PairedDivergence {
            kld: difference(&mut first.kld.iter().copied(), &mut second.kld.iter().copied()),
            kld_ratio: Estimate { value: ratio(&vec![1; a.len()]), interval: bootstrap(a.len(), &ratio) },
            top1: difference(&mut first.top(), &mut second.top()),
            nll: difference(&mut first.other_nll.iter().copied(), &mut second.other_nll.iter().copied()),
        })
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
