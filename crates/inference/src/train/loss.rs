//! Cross-entropy of the answers' tokens; logits exist only where an answer token is predicted.

use super::{
    dense::{Part, tied},
    pass::Pass,
};
use crate::linalg::{exp_in_place, log_sum_exp, rms_norm_backward};
use crate::model::norm_rows;
use rayon::prelude::*;

/// Logits in memory at a time, and the fewest rows of them.
const LOGITS: usize = 4 << 20;
const ROWS: usize = 64;

/// A row of the residual stream and the token it must predict.
pub(super) struct Prediction {
    pub row: usize,
    pub token: u32,
}

impl Pass<'_> {
    /// Sum of the losses; `dx` (all rows) gets the gradient of `sum · scale`.
    pub(super) fn cross_entropy(
        &self,
        x: &[f32],
        predictions: &[Prediction],
        scale: f32,
        dx: &mut [f32],
        grads: &mut [f32],
    ) -> f64 {
        let c = &self.weights.config;
        let norm = self.params.vector(Part::OutputNorm, &self.weights.norm);
        let output = self.effective.output(self.weights);
        let part_of = if tied(self.weights) { Part::Embedding } else { Part::Output };
        let mut total = 0.0f64;
        for part in predictions.chunks(ROWS.max(LOGITS / c.vocab)) {
            let m = part.len();
            let rows: Vec<f32> = part.iter().flat_map(|p| &x[p.row * c.width..][..c.width]).copied().collect();
            let mut normed = vec![0.0; m * c.width];
            norm_rows(&rows, norm, c.rms_eps, &mut normed);
            let mut logits = vec![0.0; m * c.vocab];
            output.forward(&normed, m, &mut logits, false);
            total += softmax_errors(&mut logits, c.vocab, part, scale);
            self.observe(None, &normed, m, &logits, c.vocab);
            self.params.matrix_gradient(part_of, &normed, m, &logits, c.vocab, grads);
            output.backward(&logits, m, &mut normed, false);
            let pairs = || rows.chunks_exact(c.width).zip(normed.chunks_exact(c.width));
            self.params.norm_gradient(Part::OutputNorm, c.rms_eps, pairs(), grads);
            for ((row, dy), p) in pairs().zip(part) {
                rms_norm_backward(row, norm, c.rms_eps, dy, &mut dx[p.row * c.width..][..c.width]);
            }
        }
        total
    }
}

/// Turns logits into the gradient of the loss times `scale`; returns the sum of the losses.
fn softmax_errors(logits: &mut [f32], vocab: usize, predictions: &[Prediction], scale: f32) -> f64 {
    let one = |(row, p): (&mut [f32], &Prediction)| {
        let log_sum = log_sum_exp(row);
        let loss = f64::from(log_sum - row[p.token as usize]);
        exp_in_place(row, log_sum); // the softmax
        row[p.token as usize] -= 1.0;
        row.iter_mut().for_each(|d| *d *= scale);
        loss
    };
    let losses: Vec<f64> = logits.par_chunks_exact_mut(vocab).zip(predictions).map(one).collect();
    losses.iter().sum()
}
