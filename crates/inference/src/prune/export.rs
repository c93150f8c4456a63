//! A GGUF file without some layers and head groups.
//!
//! Layers are numbered anew. Every layer loses the same number of head groups, as the format has one number of heads;
//! `attention.key_length` and `value_length` are written, since `embedding_length / head_count` is no longer the size of a
//! head. Rows are cut at any storage type; the columns of the output projection only where whole blocks go.

use crate::gguf::{Array, Gguf, GgufError, TensorData, TensorInfo, TensorSpec, Value, write};
use crate::model::{Mask, ModelConfig, ModelError};
use std::{collections::BTreeSet, path::Path};

/// Why no file was made.
#[derive(Debug, thiserror::Error)]
pub enum PruneError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Layers would have different numbers of heads.
    #[error("layer {layer} would lose {got} head groups and another layer {want}: all must lose the same number")]
    Uneven { layer: usize, got: usize, want: usize },
    #[error("tensor `{tensor}`: {what}")]
    Tensor { tensor: String, what: String },
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pruned {
    pub size_bytes: u64,
    /// Of the new file.
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub weights_before: u64,
    pub weights_after: u64,
}

struct Plan<'a> {
    config: &'a ModelConfig,
    /// Old numbers of the layers that stay, in order.
    kept: Vec<usize>,
    mask: &'a Mask,
}

/// Writes `base` without what `mask` names; the result is the function of [`crate::model::Decoder::with_mask`].
///
/// # Errors
/// [`PruneError`]; nothing is left on disk.
pub fn export(base: &Gguf, mask: &Mask, out: &Path) -> Result<Pruned, PruneError> {
    let config = ModelConfig::from_gguf(base, &mut Vec::new())?;
    mask.check(&config)?;
    let kept: Vec<usize> = (0..config.layers).filter(|l| !mask.layers.contains(l)).collect();
    let plan = Plan { config: &config, kept, mask };
    let lost = plan.lost_groups()?;
    let mut tensors = Vec::with_capacity(base.tensors().len());
    for tensor in base.tensors() {
        if let Some((name, layer)) = plan.renamed(&tensor.name) {
            let (spec, bytes) = plan.cut(base, tensor, name, layer)?;
            tensors.push((spec, TensorData::Bytes(bytes.into())));
        }
    }
    let count = |dims: &[u64]| dims.iter().product::<u64>();
    let weights_after = tensors.iter().map(|(spec, _)| count(&spec.dims)).sum();
    let size_bytes = write(out, &plan.metadata(base, lost), tensors)?;
    Ok(Pruned {
        size_bytes,
        layers: plan.kept.len(),
        heads: (config.kv_heads - lost) * config.group(),
        kv_heads: config.kv_heads - lost,
        weights_before: base.tensors().iter().map(|t| count(&t.dims)).sum(),
        weights_after,
    })
}

impl Plan<'_> {
    /// Head groups that every layer loses.
    fn lost_groups(&self) -> Result<usize, PruneError> {
        let lost = |layer: &usize| self.mask.groups.get(layer).map_or(0, BTreeSet::len);
        let want = self.kept.first().map_or(0, lost);
        if want >= self.config.kv_heads {
            return Err(ModelError::input("a layer needs a head").into());
        }
        match self.kept.iter().find(|l| lost(l) != want) {
            Some(layer) => Err(PruneError::Uneven { layer: *layer, got: lost(layer), want }),
            None => Ok(want),
        }
    }

    /// New name of a tensor and the old number of its layer; `None` if it goes.
    fn renamed(&self, name: &str) -> Option<(String, Option<usize>)> {
        let parsed = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let Some((layer, part)) = parsed.and_then(|(n, part)| Some((n.parse::<usize>().ok()?, part))) else {
            return Some((name.to_owned(), None));
        };
        let new = self.kept.iter().position(|l| *l == layer)?;
        Some((format!("blk.{new}.{part}"), Some(layer)))
    }

    /// The tensor with its head groups cut out.
    fn cut(
        &self,
        base: &Gguf,
        tensor: &TensorInfo,
        name: String,
        layer: Option<usize>,
    ) -> Result<(TensorSpec, Vec<u8>), PruneError> {
        let (c, mut spec, bytes) = (self.config, TensorSpec { name, ..tensor.spec() }, base.bytes(tensor));
        let none = BTreeSet::new();
        let gone = layer.and_then(|l| self.mask.groups.get(&l)).unwrap_or(&none);
        let kept: Vec<usize> = (0..c.kv_heads).filter(|g| !gone.contains(g)).collect();
        let part = tensor.name.rsplit_once('.').map_or("", |(stem, _)| stem.rsplit('.').next().unwrap_or(""));
        // Values of a head group, and whether they are columns.
        let (width, columns) = match part {
            "attn_q" => (c.group() * c.head_dim, false),
            "attn_k" | "attn_v" => (c.head_dim, false),
            "attn_output" => (c.group() * c.head_dim, true),
            _ => return Ok((spec, bytes.to_vec())),
        };
        let fail = |what: String| PruneError::Tensor { tensor: tensor.name.clone(), what };
        if gone.is_empty() {
            return Ok((spec, bytes.to_vec()));
        }
        // A bias is a column of heads.
        let flat = tensor.dims.len() == 1;
        let (axis, row) = if columns || flat { (0, width) } else { (1, tensor.row_len()) };
        let whole = tensor.ty.row_bytes(row).ok_or_else(|| {
            fail(format!("head groups of {width} are not whole blocks of {}; prune the float model first", tensor.ty))
        })?;
        if tensor.dims.get(axis) != Some(&((width * c.kv_heads) as u64)) {
            return Err(fail(format!("shape {:?} does not have {} head groups of {width}", tensor.dims, c.kv_heads)));
        }
        let group_bytes = if axis == 0 { whole } else { whole * width };
        let all = group_bytes * c.kv_heads;
        let mut out = Vec::with_capacity(bytes.len() / c.kv_heads * kept.len());
        for line in bytes.chunks_exact(all) {
            kept.iter().for_each(|g| out.extend_from_slice(&line[g * group_bytes..][..group_bytes]));
        }
        spec.dims[axis] = (width * kept.len()) as u64;
        Ok((spec, out))
    }

    fn metadata(&self, base: &Gguf, lost: usize) -> Vec<(String, Value)> {
        let (c, mut out) = (self.config, base.metadata().to_vec());
        let mut set = |key: &str, value: Value| match out.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => out.push((key.to_owned(), value)),
        };
        let own = |name: &str| format!("{}.{name}", c.arch.name());
        let number = |n: usize| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
        set(&own("block_count"), number(self.kept.len()));
        if lost > 0 {
            let kv_heads = c.kv_heads - lost;
            set(&own("attention.head_count"), number(kv_heads * c.group()));
            set(&own("attention.head_count_kv"), number(kv_heads));
            set(&own("attention.key_length"), number(c.head_dim));
            set(&own("attention.value_length"), number(c.head_dim));
            set(&own("rope.dimension_count"), number(c.rope.dims));
        }
        // For the record; readers skip keys that they do not know.
        let layers = self.kept.iter().map(|l| u32::try_from(*l).unwrap_or(u32::MAX)).collect();
        set("flywheel.prune.kept_layers", Value::Array(Array::U32(layers)));
        out
    }
}
