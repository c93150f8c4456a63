//! The trainable values: all adapter matrices in one vector.

use super::LoraConfig;
use crate::linalg::{Operand, gemm};
use crate::model::{ModelConfig, Target};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// Random streams below this number belong to start values, one per matrix.
pub(super) const STREAMS: u64 = 1 << 32;

/// Where one adapted matrix's factors are.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub layer: usize,
    pub target: Target,
    pub inputs: usize,
    pub outputs: usize,
    /// `rank × inputs`.
    a: Range<usize>,
    /// `B` transposed: `rank × outputs`, so that both factors are read row by row.
    b: Range<usize>,
}

#[derive(Debug)]
pub(super) struct Params {
    slots: Vec<Slot>,
    /// `[layer][target]` → index into `slots`.
    index: Vec<[Option<usize>; Target::ALL.len()]>,
    values: Vec<f32>,
    pub rank: usize,
    /// Factor of the whole change.
    pub scale: f32,
}

impl Params {
    /// `A` is uniform in ±1/sqrt(inputs) and `B` zero, the start values of PEFT: the first step is the base model.
    pub fn new(config: &ModelConfig, lora: &LoraConfig, seed: u64) -> Self {
        let rank = lora.rank;
        let mut slots = Vec::new();
        let mut index = vec![[None; Target::ALL.len()]; config.layers];
        let mut values = Vec::new();
        for (layer, row) in index.iter_mut().enumerate() {
            for target in Target::ALL.into_iter().filter(|t| lora.targets.contains(t)) {
                let (outputs, inputs) = target.shape(config);
                let start = values.len();
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(slots.len() as u64);
                let bound = 1.0 / (inputs as f32).sqrt();
                values.extend((0..rank * inputs).map(|_| (rng.random::<f32>() * 2.0 - 1.0) * bound));
                let middle = values.len();
                values.resize(middle + rank * outputs, 0.0);
                row[target as usize] = Some(slots.len());
                slots.push(Slot { layer, target, inputs, outputs, a: start..middle, b: middle..values.len() });
            }
        }
        let divisor = if lora.rank_stabilized { (rank as f32).sqrt() } else { rank as f32 };
        Self { slots, index, values, rank, scale: lora.alpha / divisor }
    }

    pub fn len(&self) -> usize {
        self.values.len()
    }
    pub fn values(&self) -> &[f32] {
        &self.values
    }
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter()
    }
    pub fn slot(&self, layer: usize, target: Target) -> Option<&Slot> {
        self.index[layer][target as usize].map(|i| &self.slots[i])
    }
    /// `(A, Bᵀ)`.
    pub fn pair(&self, slot: &Slot) -> (&[f32], &[f32]) {
        (&self.values[slot.a.clone()], &self.values[slot.b.clone()])
    }
    /// Name of the first tensor whose gradient is not finite.
    pub fn not_finite(&self, grads: &[f32]) -> Option<String> {
        let bad = |range: &Range<usize>| !grads[range.clone()].iter().all(|g| g.is_finite());
        self.slots.iter().find_map(|s| {
            let part = if bad(&s.a) {
                "lora_a"
            } else if bad(&s.b) {
                "lora_b"
            } else {
                return None;
            };
            Some(format!("{}.{part}", s.target.tensor(s.layer)))
        })
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
        let u = self.columns(&self.project(a, slot, x, m), m);
        gemm(rank, outputs, m, &u, m, Operand::rows(dy, stride), &mut grads[slot.b.clone()], outputs, true);
        let mut du = vec![0.0; m * rank];
        gemm(m, rank, outputs, dy, stride, Operand::transposed(b, outputs), &mut du, rank, false);
        let columns = self.columns(&du, m);
        gemm(rank, inputs, m, &columns, m, Operand::rows(x, inputs), &mut grads[slot.a.clone()], inputs, true);
        if let Some(dx) = dx {
            du.iter_mut().for_each(|d| *d *= self.scale);
            gemm(m, inputs, rank, &du, rank, Operand::rows(a, inputs), dx, inputs, true);
        }
    }

    /// `m × rank` → `rank × m`, times the scale.
    fn columns(&self, rows: &[f32], m: usize) -> Vec<f32> {
        let mut out = vec![0.0; rows.len()];
        for (i, row) in rows.chunks_exact(self.rank).enumerate() {
            for (j, v) in row.iter().enumerate() {
                out[j * m + i] = v * self.scale;
            }
        }
        out
    }
}
