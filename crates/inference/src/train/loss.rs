//! Cross-entropy of the answers' tokens; logits exist only where an answer token is predicted.

use crate::linalg::{log_sum_exp, rms_norm_backward};
use crate::model::Weights;
use crate::model::norm_rows;

/// Rows of logits in memory at a time.
const ROWS: usize = 64;

/// A row of the residual stream and the token it must predict.
pub(super) struct Prediction {
    pub row: usize,
    pub token: u32,
}

/// Gets inputs of the output matrix, their number, and the gradients of the logits.
pub(super) type SeeLogits<'a> = dyn FnMut(&[f32], usize, &[f32]) + 'a;

/// Sum of the losses; `dx` (all rows) gets the gradient of `sum · scale`.
pub(super) fn cross_entropy(
    w: &Weights,
    x: &[f32],
    predictions: &[Prediction],
    scale: f32,
    dx: &mut [f32],
    see: &mut SeeLogits<'_>,
) -> f64 {
    let c = &w.config;
    let mut total = 0.0f64;
    for part in predictions.chunks(ROWS) {
        let m = part.len();
        let rows: Vec<f32> = part.iter().flat_map(|p| &x[p.row * c.width..][..c.width]).copied().collect();
        let mut normed = vec![0.0; m * c.width];
        norm_rows(&rows, &w.norm, c.rms_eps, &mut normed);
        let mut logits = vec![0.0; m * c.vocab];
        w.output.forward(&normed, m, &mut logits, false);
        for (row, p) in logits.chunks_exact_mut(c.vocab).zip(part) {
            let log_sum = log_sum_exp(row);
            total += f64::from(log_sum - row[p.token as usize]);
            crate::linalg::exp_in_place(row, log_sum); // the softmax
            row[p.token as usize] -= 1.0;
            row.iter_mut().for_each(|d| *d *= scale);
        }
        see(&normed, m, &logits);
        w.output.backward(&logits, m, &mut normed, false);
        for ((row, dy), p) in rows.chunks_exact(c.width).zip(normed.chunks_exact(c.width)).zip(part) {
            rms_norm_backward(row, &w.norm, c.rms_eps, dy, &mut dx[p.row * c.width..][..c.width]);
        }
    }
    total
}
