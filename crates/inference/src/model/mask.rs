//! Parts of a decoder left out while running, to see what they are worth.

use super::{Decoder, ModelConfig, ModelError};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// What is left out. A head group is the query heads that share one key head, numbered by that head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mask {
    /// Whole blocks; the residual stream passes by.
    pub layers: BTreeSet<usize>,
    /// By layer: head groups whose output is 0.
    pub groups: BTreeMap<usize, BTreeSet<usize>>,
}

impl Mask {
    pub(super) fn skips(&self, layer: usize) -> bool {
        self.layers.contains(&layer)
    }

    /// Sets the heads of masked groups to 0, in rows of all heads.
    pub(super) fn silence(&self, layer: usize, c: &ModelConfig, heads: &mut [f32]) {
        let width = c.group() * c.head_dim;
        for group in self.groups.get(&layer).into_iter().flatten() {
            heads.chunks_exact_mut(c.q_width()).for_each(|row| row[group * width..][..width].fill(0.0));
        }
    }

    /// Refuses parts that the model does not have, and a model without a block.
    pub(crate) fn check(&self, c: &ModelConfig) -> Result<(), ModelError> {
        c.check_plain("leaving out parts")?;
        let layers = self.layers.iter().chain(self.groups.keys());
        if let Some(layer) = layers.max().filter(|l| **l >= c.layers) {
            return Err(ModelError::input(format!("layer {layer} of a model of {} layers", c.layers)));
        }
        if let Some(group) = self.groups.values().flatten().max().filter(|g| **g >= c.kv_heads) {
            return Err(ModelError::input(format!("head group {group} of a model of {} groups", c.kv_heads)));
        }
        if self.layers.len() == c.layers {
            return Err(ModelError::input("a model needs a layer"));
        }
        Ok(())
    }
}

impl Decoder {
    /// This model without the parts in `mask`; the weights are shared, a previous mask is replaced.
    ///
    /// # Errors
    /// [`ModelError::Input`] for parts that the model does not have, or all its layers.
    pub fn with_mask(&self, mask: Mask) -> Result<Self, ModelError> {
        mask.check(self.config())?;
        Ok(Self { mask: Arc::new(mask), ..self.clone() })
    }
}
