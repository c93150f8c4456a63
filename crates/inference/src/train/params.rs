//! The trainable values, all in one vector: adapter factors, or whole tensors of the decoder.

use super::{
    Trainable,
    dense::{Part, place},
    lora::Slot,
};
use crate::linalg::{Operand, gemm_columns, rms_norm_weight_backward};
use crate::model::{Target, Weights};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{collections::BTreeMap, ops::Range};

/// Random streams below this number belong to start values, one per matrix.
pub(super) const STREAMS: u64 = 1 << 32;

#[derive(Debug)]
pub(super) struct Params {
    slots: Vec<Slot>,
    /// `[layer][target]` → index into `slots`.
    index: Vec<[Option<usize>; Target::ALL.len()]>,
    parts: BTreeMap<Part, Range<usize>>,
    values: Vec<f32>,
    pub rank: usize,
    /// Factor of an adapter's whole change.
    pub scale: f32,
}

impl Params {
    /// Nothing to train.
    pub fn none(w: &Weights) -> Self {
        let index = vec![[None; Target::ALL.len()]; w.config.layers];
        Self { slots: Vec::new(), index, parts: BTreeMap::new(), values: Vec::new(), rank: 0, scale: 0.0 }
    }

    /// Start values: of adapters, `A` is uniform in ±1/sqrt(inputs) and `B` zero as in PEFT, so that the first step is
    /// the base model; of whole tensors, what the decoder has.
    pub fn new(w: &Weights, trainable: &Trainable, seed: u64) -> Self {
        let mut this = Self::none(w);
        let norms = match trainable {
            Trainable::Lora(lora) => {
                let divisor = if lora.rank_stabilized { (lora.rank as f32).sqrt() } else { lora.rank as f32 };
                (this.rank, this.scale) = (lora.rank, lora.alpha / divisor);
                this.add_slots(w, &lora.targets, seed);
                return this;
            }
            Trainable::Norms => true,
            Trainable::Full => false,
        };
        for part in Part::of(w, norms) {
            let start = this.values.len();
            this.values.extend(part.values(w));
            this.parts.insert(part, start..this.values.len());
        }
        this
    }

    fn add_slots(&mut self, w: &Weights, targets: &[Target], seed: u64) {
        for (layer, row) in self.index.iter_mut().enumerate() {
            for target in Target::ALL.into_iter().filter(|t| targets.contains(t)) {
                let (outputs, inputs) = target.shape(&w.config);
                let start = self.values.len();
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(self.slots.len() as u64);
                let bound = 1.0 / (inputs as f32).sqrt();
                self.values.extend((0..self.rank * inputs).map(|_| (rng.random::<f32>() * 2.0 - 1.0) * bound));
                let middle = self.values.len();
                self.values.resize(middle + self.rank * outputs, 0.0);
                row[target as usize] = Some(self.slots.len());
                self.slots.push(Slot {
                    layer,
                    target,
                    inputs,
                    outputs,
                    first: place(&w.config, target).1,
                    a: start..middle,
                    b: middle..self.values.len(),
                });
            }
        }
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
    /// Where a tensor's values are, if it is trained.
    pub fn part(&self, part: Part) -> Option<Range<usize>> {
        self.parts.get(&part).cloned()
    }
    pub fn parts(&self) -> impl Iterator<Item = (Part, &[f32])> {
        self.parts.iter().map(|(part, range)| (*part, &self.values[range.clone()]))
    }
    /// The trained values of a vector, else the `frozen` ones.
    pub fn vector<'a>(&'a self, part: Part, frozen: &'a [f32]) -> &'a [f32] {
        self.part(part).map_or(frozen, |range| &self.values[range])
    }

    /// What weight decay applies to.
    pub fn decayed(&self) -> Vec<Range<usize>> {
        if self.parts.is_empty() {
            return std::iter::once(0..self.values.len()).collect();
        }
        self.parts.iter().filter(|(part, _)| part.decays()).map(|(_, range)| range.clone()).collect()
    }

    /// Name of the first tensor whose gradient is not finite.
    pub fn not_finite(&self, grads: &[f32]) -> Option<String> {
        let bad = |range: &Range<usize>| !grads[range.clone()].iter().all(|g| g.is_finite());
        let factor = self.slots.iter().find_map(|s| {
            let part = [("lora_a", &s.a), ("lora_b", &s.b)].into_iter().find(|(_, range)| bad(range))?.0;
            Some(format!("{}.{part}", s.target.tensor(s.layer)))
        });
        factor.or_else(|| self.parts.iter().find(|(_, range)| bad(range)).map(|(part, _)| part.name()))
    }

    /// Adds the gradient of a whole matrix, `dyᵀ · x` over `m` rows.
    #[allow(clippy::too_many_arguments, reason = "two matrices, their sizes, the result")]
    pub fn matrix_gradient(&self, part: Part, x: &[f32], m: usize, dy: &[f32], stride: usize, grads: &mut [f32]) {
        let Some(range) = self.part(part) else { return };
        let inputs = x.len() / m.max(1);
        let outputs = range.len() / inputs.max(1);
        gemm_columns(outputs, inputs, m, dy, stride, Operand::rows(x, inputs), &mut grads[range], inputs, true);
    }

    /// Adds the gradient of a norm's weights: rows one after the other, so that every run gives the same bits.
    pub fn norm_gradient<'a>(
        &self,
        part: Part,
        eps: f32,
        rows: impl Iterator<Item = (&'a [f32], &'a [f32])>,
        grads: &mut [f32],
    ) {
        let Some(range) = self.part(part) else { return };
        for (x, dy) in rows {
            rms_norm_weight_backward(x, eps, dy, &mut grads[range.clone()]);
        }
    }
}
