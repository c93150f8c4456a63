//! Low-rank factors of adapted matrices: their product forward and backward.

use super::params::Params;
use crate::linalg::{Operand, gemm, gemm_columns};
use crate::model::Target;
use std::ops::Range;

/// Where one adapted matrix's factors are.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub layer: usize,
    pub target: Target,
    pub inputs: usize,
    pub outputs: usize,
    /// `rank × inputs`.
    pub a: Range<usize>,
    /// `B` transposed: `rank × outputs`, so that both factors are read row by row.
    pub b: Range<usize>,
}

impl Params {
    /// `(A, Bᵀ)`.
    pub fn pair(&self, slot: &Slot) -> (&[f32], &[f32]) {
        (&self.values()[slot.a.clone()], &self.values()[slot.b.clone()])
    }

    /// The change of a matrix, `scale · B · A`, summed in the order of a merge.
    pub fn delta(&self, slot: &Slot) -> Vec<f32> {
        let (a, b) = self.pair(slot);
        let (outputs, inputs) = (slot.outputs, slot.inputs);
        let scaled: Vec<f32> = b.iter().map(|b| b * self.scale).collect();
        let mut out = vec![0.0; outputs * inputs];
        gemm_columns(outputs, inputs, self.rank, &scaled, outputs, Operand::rows(a, inputs), &mut out, inputs, false);
        out
    }

    /// `y[.., at..] += scale · (x · Aᵀ) · Bᵀ`.
    pub fn forward(&self, slot: &Slot, x: &[f32], m: usize, y: &mut [f32], stride: usize) {
        let (a, b) = self.pair(slot);
        let mut u = self.project(a, slot, x, m);
        u.iter_mut().for_each(|u| *u *= self.scale);
        gemm(m, slot.outputs, self.rank, &u, self.rank, Operand::rows(b, slot.outputs), y, stride, true);
    }

    /// `x · Aᵀ`, `m × rank`.
    fn project(&self, a: &[f32], slot: &Slot, x: &[f32], m: usize) -> Vec<f32> {
        let (rank, inputs) = (self.rank, slot.inputs);
        let mut u = vec![0.0; m * rank];
        gemm(m, rank, inputs, x, inputs, Operand::transposed(a, inputs), &mut u, rank, false);
        u
    }

    /// Gradients of [`Params::forward`]: adds to `grads`, and `dx += dU · A` unless `dx` is not wanted.
    /// `dy` has `stride` values per row and starts at the slot's first column.
    #[allow(clippy::too_many_arguments, reason = "two matrices, their sizes, two results")]
    pub fn backward(
        &self,
        slot: &Slot,
        x: &[f32],
        m: usize,
        dy: &[f32],
        stride: usize,
        grads: &mut [f32],
        dx: Option<&mut [f32]>,
    ) {
        let (a, b) = self.pair(slot);
        let (rank, inputs, outputs) = (self.rank, slot.inputs, slot.outputs);
        let scaled = |mut v: Vec<f32>| {
            v.iter_mut().for_each(|v| *v *= self.scale);
            v
        };
        let u = scaled(self.project(a, slot, x, m));
        gemm_columns(rank, outputs, m, &u, rank, Operand::rows(dy, stride), &mut grads[slot.b.clone()], outputs, true);
        let mut du = vec![0.0; m * rank];
        gemm(m, rank, outputs, dy, stride, Operand::transposed(b, outputs), &mut du, rank, false);
        let du = scaled(du);
        gemm_columns(rank, inputs, m, &du, rank, Operand::rows(x, inputs), &mut grads[slot.a.clone()], inputs, true);
        if let Some(dx) = dx {
            gemm(m, inputs, rank, &du, rank, Operand::rows(a, inputs), dx, inputs, true);
        }
    }
}
