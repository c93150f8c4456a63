//! Low-rank factors of adapted matrices.

use super::dense::{Stack, stacked};
use super::params::Params;
use crate::linalg::{Operand, gemm_columns};
use crate::model::Target;
use std::ops::Range;

/// Where one adapted matrix's factors are.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub layer: usize,
    pub target: Target,
    pub inputs: usize,
    pub outputs: usize,
    /// Its first row in the stack.
    pub first: usize,
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

    /// The adapters of a stack's matrices, in order.
    pub fn stack(&self, layer: usize, stack: Stack) -> Vec<&Slot> {
        stacked(stack).iter().filter_map(|target| self.slot(layer, *target)).collect()
    }

    /// Their `A`, one below the other.
    pub fn downs(&self, slots: &[&Slot]) -> Vec<f32> {
        slots.iter().flat_map(|slot| self.pair(slot).0).copied().collect()
    }
}
