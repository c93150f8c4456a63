//! Scores of whole texts, one by one: likelihood of every token, the most likely tokens, and logits that are no
//! numbers. Two models' scores of the same tokens can be compared position by position.

use crate::linalg::log_sum_exp;
use crate::model::{Decoder, ModelError};
use serde::Serialize;
use std::ops::ControlFlow;

/// What a model made of one text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TextScore {
    /// Negative log-likelihood of each token but the first, nats; empty when a logit was not finite.
    pub nll: Vec<f32>,
    /// The most likely token at each of these positions.
    pub top: Vec<u32>,
    /// Logits that were NaN or infinite, over all positions and the whole vocabulary.
    pub non_finite_logits: u64,
}

impl TextScore {
    /// Sum over the tokens from `from` on (at least 1), nats, and their number.
    #[must_use]
    pub fn nll_from(&self, from: usize) -> (f64, usize) {
        let part = self.nll.get(from.saturating_sub(1)..).unwrap_or_default();
        (part.iter().map(|v| f64::from(*v)).sum(), part.len())
    }
}

/// Scores `texts`; `watch` sees texts done and their number.
///
/// # Errors
/// [`ModelError::Input`] for a text without tokens, longer than the context or with unknown tokens;
/// [`ModelError::Cancelled`].
pub fn score_texts(
    model: &Decoder,
    texts: &[Vec<u32>],
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<TextScore>, ModelError> {
    let mut out = Vec::with_capacity(texts.len());
    for text in texts {
        out.push(score(model, text)?);
        if watch(out.len(), texts.len()).is_break() {
            return Err(ModelError::Cancelled);
        }
    }
    Ok(out)
}

fn score(model: &Decoder, text: &[u32]) -> Result<TextScore, ModelError> {
    let last = text.len().saturating_sub(1);
    let mut out = TextScore { nll: Vec::with_capacity(last), top: Vec::with_capacity(last), non_finite_logits: 0 };
    model.visit_raw_logits(text, 0..last, &mut |position, row| {
        out.non_finite_logits += row.iter().filter(|l| !l.is_finite()).count() as u64;
        out.nll.push(log_sum_exp(row) - row[text[position + 1] as usize]);
        out.top.push(crate::model::argmax(row) as u32);
        Ok(())
    })?;
    if out.non_finite_logits > 0 {
        out.nll.clear();
    }
    Ok(out)
}
