//! The loss of the answers' tokens; logits exist only where an answer token is predicted.

use super::{
    buffers::Lent,
    dense::{Part, tied},
    distill::Distillation,
    pass::Pass,
};
use crate::linalg::{exp_in_place, log_sum_exp, rms_norm_backward};
use crate::model::{Weights, norm_rows};
use rayon::prelude::*;

/// Logits in memory at a time, and the fewest rows of them.
const LOGITS: usize = 16 << 20;
const ROWS: usize = 64;

/// A row of the residual stream, the token it must predict, and how much that counts.
pub(super) struct Prediction {
    pub row: usize,
    pub token: u32,
    pub weight: f32,
}

/// What a teacher's last block makes of all rows.
pub(super) struct Taught<'a> {
    pub weights: &'a Weights,
    pub x: Lent<'a>,
    pub how: Distillation,
}

impl Pass<'_> {
    /// Weighted sum of the losses; `dx` (all rows) gets the gradient of `sum · scale`, unless only the sum is wanted.
    pub(super) fn losses(
        &self,
        x: &[f32],
        predictions: &[Prediction],
        taught: Option<&Taught<'_>>,
        scale: f32,
        mut back: Option<(&mut [f32], &mut [f32])>,
    ) -> f64 {
        let c = &self.weights.config;
        let norm = self.params.vector(Part::OutputNorm, &self.weights.norm);
        let output = self.effective.output(self.weights);
        let part_of = if tied(self.weights) { Part::Embedding } else { Part::Output };
        let mut total = 0.0f64;
        for part in predictions.chunks(ROWS.max(LOGITS / c.vocab)) {
            let m = part.len();
            let rows = gather(x, c.width, part);
            let mut normed = self.buffers.any(m * c.width);
            norm_rows(&rows, norm, c.rms_eps, &mut normed);
            let mut logits = self.buffers.any(m * c.vocab);
            output.forward(&normed, m, &mut logits, false);
            total += match taught {
                None => softmax_errors(&mut logits, c.vocab, part, scale),
                Some(taught) => taught.errors(&mut logits, part, scale),
            };
            let Some((dx, grads)) = &mut back else { continue };
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

fn gather(x: &[f32], width: usize, part: &[Prediction]) -> Vec<f32> {
    part.iter().flat_map(|p| &x[p.row * width..][..width]).copied().collect()
}

/// Turns logits into the gradient of the loss times `scale`; returns the sum of the losses.
fn softmax_errors(logits: &mut [f32], vocab: usize, predictions: &[Prediction], scale: f32) -> f64 {
    let one = |(row, p): (&mut [f32], &Prediction)| {
        let log_sum = log_sum_exp(row);
        let loss = f64::from(log_sum - row[p.token as usize]);
        exp_in_place(row, log_sum); // the softmax
        row[p.token as usize] -= 1.0;
        let scale = scale * p.weight;
        row.iter_mut().for_each(|d| *d *= scale);
        loss * f64::from(p.weight)
    };
    let losses: Vec<f64> = logits.par_chunks_exact_mut(vocab).zip(predictions).map(one).collect();
    losses.iter().sum()
}

impl Taught<'_> {
    /// The same with the teacher's predictions.
    fn errors(&self, logits: &mut [f32], predictions: &[Prediction], scale: f32) -> f64 {
        let (w, m) = (self.weights, predictions.len());
        let c = &w.config;
        let rows = gather(&self.x, c.width, predictions);
        let mut normed = vec![0.0; m * c.width];
        norm_rows(&rows, &w.norm, c.rms_eps, &mut normed);
        let mut wanted = vec![0.0; m * c.vocab];
        w.output.forward(&normed, m, &mut wanted, false);
        let one = |((row, wanted), p): ((&mut [f32], &mut [f32]), &Prediction)| {
            let loss = self.how.errors(row, wanted, p.token as usize);
            let scale = scale * p.weight;
            row.iter_mut().for_each(|d| *d *= scale);
            loss * f64::from(p.weight)
        };
        let rows = logits.par_chunks_exact_mut(c.vocab).zip(wanted.par_chunks_exact_mut(c.vocab));
        let losses: Vec<f64> = rows.zip(predictions).map(one).collect();
        losses.iter().sum()
    }
}
