//! Function-preserving rescaling of input channels (the folds of AWQ, arXiv 2306.00978).
//!
//! A matrix's input channel is multiplied by `s`, and whatever makes that channel is divided by it: the norm before
//! q, k, v and before gate, up; the rows of up before down (SwiGLU is linear in up); the rows (and bias) of v before
//! the output projection, where all query heads of a group share their value head's scale. No tensor is added.

use super::QuantizeError;
use crate::calibrate::readers;
use crate::gguf::{Gguf, GgufError, TensorSpec, TensorType, Writer};
use crate::model::{ModelConfig, Site, Target, Values};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{collections::BTreeMap, path::Path};

/// Where a block's channels can be rescaled.
pub(crate) const SITES: [Site; 4] = [Site::Qkv, Site::Out, Site::GateUp, Site::Down];

/// Number of scales at a site: one for each channel of what makes the input.
pub(crate) fn channels(site: Site, c: &ModelConfig) -> usize {
    match site {
        Site::Qkv | Site::GateUp | Site::Part { .. } => c.width,
        Site::Out => c.kv_width(),
        Site::Down => c.ffn,
    }
}

/// The scale of each input column of the matrices at `site`.
pub(crate) fn columns(site: Site, c: &ModelConfig, scales: &[f32]) -> Vec<f32> {
    match site {
        Site::Out => {
            (0..c.q_width()).map(|j| scales[j / (c.group() * c.head_dim) * c.head_dim + j % c.head_dim]).collect()
        }
        _ => scales.to_vec(),
    }
}

/// The mean of `values` (one for each input column at `site`) over the columns that share a scale.
pub(crate) fn shared_mean(site: Site, c: &ModelConfig, values: &[f32]) -> Vec<f32> {
    let Site::Out = site else { return values.to_vec() };
    let of = |channel: usize| {
        let (head, d) = (channel / c.head_dim, channel % c.head_dim);
        let sum: f32 = (0..c.group()).map(|g| values[(head * c.group() + g) * c.head_dim + d]).sum();
        sum / c.group() as f32
    };
    (0..c.kv_width()).map(of).collect()
}

/// Folds `scales` (positive, one for each channel) into the tensors of block `layer` in `values`.
///
/// # Errors
/// [`GgufError::MissingTensor`] if a tensor of the fold is not in `values`.
pub(crate) fn apply(
    values: &mut Values,
    layer: usize,
    site: Site,
    c: &ModelConfig,
    scales: &[f32],
) -> Result<(), GgufError> {
    for target in readers(site) {
        multiply_columns(find(values, &target.tensor(layer))?, &columns(site, c, scales));
    }
    match site {
        Site::Qkv => divide(find(values, &format!("blk.{layer}.attn_norm.weight"))?, scales),
        Site::GateUp => divide(find(values, &format!("blk.{layer}.ffn_norm.weight"))?, scales),
        Site::Down => divide_rows(find(values, &Target::Up.tensor(layer))?, scales),
        // refused before: nothing of such a block is folded
        Site::Part { .. } => (),
        Site::Out => {
            divide_rows(find(values, &Target::V.tensor(layer))?, scales);
            if let Some(bias) = values.get_mut(&format!("blk.{layer}.attn_v.bias")) {
                divide(bias, scales);
            }
        }
    }
    Ok(())
}

fn find<'v>(values: &'v mut Values, name: &str) -> Result<&'v mut Vec<f32>, GgufError> {
    values.get_mut(name).ok_or_else(|| GgufError::MissingTensor { name: name.to_owned() })
}

/// Multiplies column `j` by `scales[j]`.
pub(crate) fn multiply_columns(matrix: &mut [f32], scales: &[f32]) {
    for row in matrix.chunks_exact_mut(scales.len()) {
        row.iter_mut().zip(scales).for_each(|(w, s)| *w *= s);
    }
}

fn divide(vector: &mut [f32], scales: &[f32]) {
    vector.iter_mut().zip(scales).for_each(|(w, s)| *w /= s);
}

fn divide_rows(matrix: &mut [f32], scales: &[f32]) {
    let width = matrix.len() / scales.len();
    for (row, s) in matrix.chunks_exact_mut(width).zip(scales) {
        row.iter_mut().for_each(|w| *w /= s);
    }
}

/// Scales for blocks of a model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Fold {
    scales: BTreeMap<(usize, Site), Vec<f32>>,
}

impl Fold {
    /// `exp(sigma · N(0, 1))` for every channel of every block: the same function with badly scaled channels, on which
    /// a quantiser can be measured that must not profit from how the base was made.
    #[must_use]
    pub fn noise(config: &ModelConfig, sigma: f32, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut draw =
            |site| -> Vec<f32> { (0..channels(site, config)).map(|_| libm::expf(sigma * normal(&mut rng))).collect() };
        let mut scales = BTreeMap::new();
        for layer in 0..config.layers {
            for site in SITES {
                scales.insert((layer, site), draw(site));
            }
        }
        Self { scales }
    }

    /// Writes `base` with the scales folded in, matrices as `ty` (F16 or F32), vectors as F32. The result computes the
    /// same function.
    ///
    /// # Errors
    /// [`QuantizeError::Model`] for an architecture that is not known (norms of the form `1 + w` cannot be folded like
    /// this), [`QuantizeError::AlreadyQuantized`], [`QuantizeError::Gguf`].
    pub fn write(&self, base: &Gguf, out: &Path, ty: TensorType) -> Result<u64, QuantizeError> {
        let config = ModelConfig::from_gguf(base, &mut Vec::new())?.plain("folding scales")?;
        let mut metadata = base.metadata().to_vec();
        metadata.retain(|(key, _)| key != "general.quantization_version");
        if let Some((_, value)) = metadata.iter_mut().find(|(key, _)| key == "general.file_type") {
            *value = u32::from(ty == TensorType::F16).into();
        }
        let mut block: (Option<usize>, Values) = (None, Values::new());
        let specs = base
            .tensors()
            .iter()
            .map(|t| TensorSpec { ty: if t.dims.len() > 1 { ty } else { TensorType::F32 }, ..t.spec() });
        let specs: Vec<TensorSpec> = specs.collect();
        let mut writer = Writer::create(out, &metadata, &specs)?;
        for (tensor, spec) in base.tensors().iter().zip(&specs) {
            let layer = super::profile::layer(&tensor.name);
            if layer.is_some() && block.0 != layer {
                block = (layer, self.block(base, &config, layer.unwrap_or(0))?);
            }
            let values = match block.1.get(&tensor.name) {
                Some(values) => values.clone(),
                None => base.dequantize(tensor)?,
            };
            let bytes = crate::codec::quantize(spec.ty, &values, tensor.row_len(), None)
                .map_err(|source| QuantizeError::Codec { tensor: tensor.name.clone(), source })?;
            writer.push(&bytes)?;
        }
        Ok(writer.finish()?)
    }

    fn block(&self, base: &Gguf, config: &ModelConfig, layer: usize) -> Result<Values, QuantizeError> {
        let mut values = block_values(base, layer)?;
        for ((_, site), scales) in self.scales.range((layer, Site::Qkv)..=(layer, Site::Down)) {
            apply(&mut values, layer, *site, config, scales)?;
        }
        Ok(values)
    }
}

/// A number that is normally distributed to about three standard deviations (the sum of twelve uniform ones), the same
/// on every machine.
pub(super) fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0
}

/// All tensors of a block as f32.
pub(crate) fn block_values(gguf: &Gguf, layer: usize) -> Result<Values, GgufError> {
    let prefix = format!("blk.{layer}.");
    let of_block = gguf.tensors().iter().filter(|t| t.name.starts_with(&prefix));
    of_block.map(|t| Ok((t.name.clone(), gguf.dequantize(t)?))).collect()
}
