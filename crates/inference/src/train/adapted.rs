//! Matrices with their adapters, forward and backward: `y = x · Wᵀ + scale · (x · Aᵀ) · Bᵀ` for matrices that stand one below
//! the other. Rows are rearranged once for the frozen matrix and for all adapters.

use super::{
    buffers::Lent,
    dense::{Part, Stack, stacked},
    lora::Slot,
    pass::Pass,
};
use crate::linalg::{Diagonal, Operand, gemm, gemm_columns};
use crate::model::{Block, Target};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::borrow::Cow;

/// What a stack's backward pass gets: inputs of `m` rows, what [`Pass::forward`] answered, gradients of the outputs.
pub(super) struct Seen<'a> {
    pub x: &'a [f32],
    pub projected: Option<&'a [f32]>,
    pub dy: &'a [f32],
    pub m: usize,
}

impl<'a> Pass<'a> {
    /// `y (+)=` the stack's outputs. Answers `scale · x · Aᵀ` of all adapters side by side, which the backward pass needs.
    pub fn forward(
        &self,
        (layer, stack, block): (usize, Stack, &Block),
        x: &[f32],
        m: usize,
        y: &mut [f32],
        add: bool,
    ) -> Option<Lent<'a>> {
        let matrix = self.effective.site(layer, stack, block);
        let slots = if self.merged { Vec::new() } else { self.params.stack(layer, stack) };
        let Some(first) = slots.first() else {
            matrix.forward(x, m, y, add);
            return None;
        };
        let (rank, width, stride) = (self.params.rank, slots.len() * self.params.rank, matrix.rows());
        let mut u = self.buffers.any(m * width);
        if self.dropout == 0.0 {
            let a = self.params.downs(&slots);
            matrix.forward_also(x, m, y, add, Operand::transposed(&a, first.inputs), width, &mut u);
        } else {
            matrix.forward(x, m, y, add);
            self.project(&slots, x, m, &mut u);
        }
        u.iter_mut().for_each(|u| *u *= self.params.scale);
        for (i, slot) in slots.iter().enumerate() {
            let up = Operand::rows(self.params.pair(slot).1, slot.outputs);
            gemm(m, slot.outputs, rank, &u[i * rank..], width, up, &mut y[slot.first..], stride, true);
        }
        Some(u)
    }

    /// `u = x · Aᵀ` of each slot, of the inputs that dropout leaves it.
    fn project(&self, slots: &[&Slot], x: &[f32], m: usize, u: &mut [f32]) {
        let (rank, width) = (self.params.rank, slots.len() * self.params.rank);
        for (i, slot) in slots.iter().enumerate() {
            let (x, a) = (self.dropped(slot, x), self.params.pair(slot).0);
            gemm(
                m,
                rank,
                slot.inputs,
                &x,
                slot.inputs,
                Operand::transposed(a, slot.inputs),
                &mut u[i * rank..],
                width,
                false,
            );
        }
    }

    /// Adds the gradients of what is trained in the stack to `grads`, and `dx (+)=` those of its inputs, where they are wanted.
    pub fn backward(
        &self,
        (layer, stack, block): (usize, Stack, &Block),
        seen: &Seen<'_>,
        grads: &mut [f32],
        dx: Option<&mut [f32]>,
        add: bool,
    ) {
        let matrix = self.effective.site(layer, stack, block);
        self.whole_matrices(layer, stack, seen, grads);
        let slots = self.params.stack(layer, stack);
        if slots.is_empty() {
            if let Some(dx) = dx {
                matrix.backward(seen.dy, seen.m, dx, add);
            }
            return;
        }
        let mut du = self.buffers.any(seen.m * slots.len() * self.params.rank);
        let ups = slots.iter().map(|s| (s.first, self.params.pair(s).1)).collect();
        let ups = Diagonal { rank: self.params.rank, parts: ups };
        let mut dx = dx;
        matrix.backward_also(seen.dy, seen.m, dx.as_deref_mut(), add, &ups, &mut du);
        du.iter_mut().for_each(|d| *d *= self.params.scale);
        self.up_gradients(&slots, seen, matrix.rows(), grads);
        self.down_gradients(&slots, seen, &du, grads);
        if let Some(dx) = dx.filter(|_| !self.merged) {
            self.through_downs(&slots, seen.m, &du, dx);
        }
    }

    /// Shows the stack's matrices to the observer, and adds the gradients of those that are trained as a whole.
    fn whole_matrices(&self, layer: usize, stack: Stack, seen: &Seen<'_>, grads: &mut [f32]) {
        let c = &self.weights.config;
        let stride = seen.dy.len() / seen.m.max(1);
        let mut at = 0;
        for target in stacked(stack) {
            let dy = &seen.dy[at.min(seen.dy.len())..];
            self.observe(Some((layer, *target)), seen.x, seen.m, dy, stride);
            self.params.matrix_gradient(Part::Matrix(layer, *target), seen.x, seen.m, dy, stride, grads);
            at += target.shape(c).0;
        }
    }

    /// `dBᵀ += uᵀ · dy`.
    fn up_gradients(&self, slots: &[&Slot], seen: &Seen<'_>, stride: usize, grads: &mut [f32]) {
        let (rank, width) = (self.params.rank, slots.len() * self.params.rank);
        let mut own = None;
        let u = seen.projected.unwrap_or_else(|| {
            // adapters that are inside the matrices were not projected on the way
            let u = own.insert(self.buffers.any(seen.m * width));
            self.project(slots, seen.x, seen.m, u);
            u.iter_mut().for_each(|u| *u *= self.params.scale);
            u
        });
        for (i, slot) in slots.iter().enumerate() {
            let (u, dy) = (&u[i * rank..], Operand::rows(&seen.dy[slot.first..], stride));
            gemm_columns(rank, slot.outputs, seen.m, u, width, dy, &mut grads[slot.b.clone()], slot.outputs, true);
        }
    }

    /// `dA += duᵀ · x`.
    fn down_gradients(&self, slots: &[&Slot], seen: &Seen<'_>, du: &[f32], grads: &mut [f32]) {
        let (rank, width) = (self.params.rank, slots.len() * self.params.rank);
        if self.dropout > 0.0 {
            for (i, slot) in slots.iter().enumerate() {
                let x = self.dropped(slot, seen.x);
                let (du, x) = (&du[i * rank..], Operand::rows(&x, slot.inputs));
                gemm_columns(rank, slot.inputs, seen.m, du, width, x, &mut grads[slot.a.clone()], slot.inputs, true);
            }
            return;
        }
        let inputs = slots.first().map_or(0, |s| s.inputs);
        let mut all = self.buffers.any(width * inputs);
        gemm_columns(width, inputs, seen.m, du, width, Operand::rows(seen.x, inputs), &mut all, inputs, false);
        for (slot, part) in slots.iter().zip(all.chunks_exact(rank * inputs)) {
            crate::linalg::add(&mut grads[slot.a.clone()], part);
        }
    }

    /// `dx += du · A`.
    fn through_downs(&self, slots: &[&Slot], m: usize, du: &[f32], dx: &mut [f32]) {
        let (rank, width) = (self.params.rank, slots.len() * self.params.rank);
        let inputs = slots.first().map_or(0, |s| s.inputs);
        if self.dropout == 0.0 {
            let a = self.params.downs(slots);
            return gemm(m, inputs, width, du, width, Operand::rows(&a, inputs), dx, inputs, true);
        }
        for (i, slot) in slots.iter().enumerate() {
            let mut part = self.buffers.any(m * inputs);
            let a = Operand::rows(self.params.pair(slot).0, inputs);
            gemm(m, inputs, rank, &du[i * rank..], width, a, &mut part, inputs, false);
            crate::linalg::add(dx, &self.dropped(slot, &part));
        }
    }

    /// `x` with a share of its values set to 0 and the others raised to keep the mean; the same ones each time
    /// within a pass.
    fn dropped<'x>(&self, slot: &Slot, x: &'x [f32]) -> Cow<'x, [f32]> {
        if self.dropout == 0.0 {
            return Cow::Borrowed(x);
        }
        let mut seed = [0u8; 32];
        for (bytes, n) in seed.chunks_exact_mut(8).zip(self.noise) {
            bytes.copy_from_slice(&n.to_le_bytes());
        }
        let mut rng = ChaCha8Rng::from_seed(seed);
        rng.set_stream((slot.layer * Target::ALL.len() + slot.target as usize) as u64);
        let keep = 1.0 / (1.0 - self.dropout);
        Cow::Owned(x.iter().map(|v| if rng.random::<f32>() < self.dropout { 0.0 } else { v * keep }).collect())
    }
}
