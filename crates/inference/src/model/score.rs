//! Scoring of given text: logits at positions, log-likelihoods, answer options.

use super::{Decoder, ModelError, forward::Step, kv::Sequence};
use crate::linalg::log_sum_exp;

/// Rows of logits in memory at a time.
const LOGIT_ROWS: usize = 64;
/// Tokens in one pass.
const PASS_TOKENS: usize = 512;

/// Sees the position and its logits.
pub type LogitVisitor<'a> = dyn FnMut(usize, &[f32]) -> Result<(), ModelError> + 'a;

/// A text and the part of it to score.
#[derive(Debug, Clone, Copy)]
pub struct Scored<'a> {
    pub tokens: &'a [u32],
    /// The first token that is scored, at least 1: the first token of a text has no prediction.
    pub from: usize,
}

/// Rows of hidden states and their number to rows of logits.
type LogitsOf<'a> = dyn Fn(&[f32], usize) -> Result<Vec<f32>, ModelError> + 'a;

impl Decoder {
    /// Logits that follow each of `positions` (rising) of `tokens`, row by row: `visit(position, logits)`.
    ///
    /// # Errors
    /// [`ModelError::Input`], [`ModelError::NotFinite`], or what `visit` returned.
    pub fn visit_logits(
        &self,
        tokens: &[u32],
        positions: std::ops::Range<usize>,
        visit: &mut LogitVisitor<'_>,
    ) -> Result<(), ModelError> {
        self.visit_rows(tokens, positions, &|x, m| self.logits_of(x, m), visit)
    }

    /// As [`Decoder::visit_logits`], but logits that are not finite are shown instead of refused, so that they can
    /// be counted.
    ///
    /// # Errors
    /// [`ModelError::Input`], or what `visit` returned.
    pub fn visit_raw_logits(
        &self,
        tokens: &[u32],
        positions: std::ops::Range<usize>,
        visit: &mut LogitVisitor<'_>,
    ) -> Result<(), ModelError> {
        self.visit_rows(tokens, positions, &|x, m| Ok(self.raw_logits_of(x, m)), visit)
    }

    fn visit_rows(
        &self,
        tokens: &[u32],
        positions: std::ops::Range<usize>,
        logits_of: &LogitsOf<'_>,
        visit: &mut LogitVisitor<'_>,
    ) -> Result<(), ModelError> {
        self.check_tokens(tokens, "the text")?;
        if positions.end > tokens.len() {
            let what = format!("position {} of a text of {} tokens", positions.end - 1, tokens.len());
            return Err(ModelError::input(what));
        }
        let mut cache = self.new_sequence();
        let (width, vocab) = (self.config().width, self.config().vocab);
        for piece in tokens[..positions.end].chunks(PASS_TOKENS) {
            let start = cache.len();
            let hidden = self.advance(&mut [Step { cache: &mut cache, tokens: piece }]);
            let from = positions.start.saturating_sub(start).min(piece.len());
            for (i, rows) in hidden[from * width..].chunks(LOGIT_ROWS * width).enumerate() {
                let logits = logits_of(rows, rows.len() / width)?;
                for (j, row) in logits.chunks_exact(vocab).enumerate() {
                    visit(start + from + i * LOGIT_ROWS + j, row)?;
                }
            }
        }
        Ok(())
    }

    /// Negative log-likelihood (nats) of each token of `tokens[from..]` of every item.
    ///
    /// # Errors
    /// As [`Decoder::visit_logits`].
    pub fn nll(&self, items: &[Scored<'_>]) -> Result<Vec<Vec<f32>>, ModelError> {
        items.iter().map(|item| self.nll_of(item)).collect()
    }

    fn nll_of(&self, item: &Scored<'_>) -> Result<Vec<f32>, ModelError> {
        if item.from == 0 || item.from >= item.tokens.len() {
            let what = format!("scoring from token {} of a text of {}", item.from, item.tokens.len());
            return Err(ModelError::input(what));
        }
        let mut out = Vec::with_capacity(item.tokens.len() - item.from);
        self.check_tokens(item.tokens, "the text")?;
        self.visit_logits(item.tokens, item.from - 1..item.tokens.len() - 1, &mut |p, row| {
            out.push(log_sum_exp(row) - row[item.tokens[p + 1] as usize]);
            Ok(())
        })?;
        Ok(out)
    }

    /// Sum of the log-likelihoods of each option's tokens after `prompt`, which runs once for all of them.
    ///
    /// # Errors
    /// As [`Decoder::visit_logits`], and [`ModelError::Input`] for an option without tokens.
    pub fn option_log_likelihoods(&self, prompt: &[u32], options: &[Vec<u32>]) -> Result<Vec<f64>, ModelError> {
        self.check_tokens(prompt, "the prompt")?;
        for (i, option) in options.iter().enumerate() {
            self.check_tokens(option, &format!("option {i}"))?;
            if prompt.len() + option.len() > self.config().context {
                let (p, o, c) = (prompt.len(), option.len(), self.config().context);
                let what = format!("a prompt of {p} tokens and option {i} of {o}; the model's context is {c}");
                return Err(ModelError::input(what));
            }
        }
        let (mut root, mut last) = (self.new_sequence(), Vec::new());
        for piece in prompt.chunks(PASS_TOKENS) {
            last = self.advance(&mut [Step { cache: &mut root, tokens: piece }]);
        }
        let last = last.split_off(last.len() - self.config().width);
        options.iter().map(|option| self.continued(&root, &last, option)).collect()
    }

    /// Log-likelihood of `option` after what is in `root`, whose last hidden state is `last`.
    fn continued(&self, root: &Sequence, last: &[f32], option: &[u32]) -> Result<f64, ModelError> {
        let (width, vocab) = (self.config().width, self.config().vocab);
        let mut rows = last.to_vec();
        let before_last = &option[..option.len() - 1];
        if !before_last.is_empty() {
            let mut cache = root.clone();
            rows.extend(self.advance(&mut [Step { cache: &mut cache, tokens: before_last }]));
        }
        let (mut sum, mut targets) = (0.0, option.iter());
        for rows in rows.chunks(LOGIT_ROWS * width) {
            let logits = self.logits_of(rows, rows.len() / width)?;
            for (row, target) in logits.chunks_exact(vocab).zip(&mut targets) {
                sum -= f64::from(log_sum_exp(row) - row[*target as usize]);
            }
        }
        Ok(sum)
    }
}
