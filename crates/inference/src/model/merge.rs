//! Folding an adapter into its base, and the identity of a base.

use super::{Adapter, ModelConfig, ModelError, Target};
use crate::gguf::{Gguf, GgufError, TensorData, TensorInfo, TensorSpec, TensorType, Value};
use half::f16;
use sha2::{Digest, Sha256};

/// SHA-256 (hex) over name, type, shape and bytes of every tensor in file order: two files with the same
/// digest compute the same, whatever their other metadata says.
#[must_use]
pub fn base_digest(gguf: &Gguf) -> String {
    let mut hash = Sha256::new();
    for tensor in gguf.tensors() {
        hash.update((tensor.name.len() as u64).to_le_bytes());
        hash.update(tensor.name.as_bytes());
        hash.update(tensor.ty.id().to_le_bytes());
        hash.update((tensor.dims.len() as u64).to_le_bytes());
        tensor.dims.iter().for_each(|d| hash.update(d.to_le_bytes()));
        hash.update(gguf.bytes(tensor));
    }
    hex::encode(hash.finalize())
}

/// Type of the matrices of a merged model; vectors stay F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergedType {
    F16,
    F32,
}

/// What [`merge`] makes, ready for [`crate::gguf::write`]; a tensor is computed when the writer reaches it.
pub struct Merged<'a> {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<(TensorSpec, TensorData<'a>)>,
}

/// The base with `adapter` folded in: `W + alpha / rank · B · A` for every adapted matrix.
///
/// # Errors
/// [`ModelError::Adapter`] if the adapter was trained on another base or does not fit. Values that do not fit
/// into `ty` are reported by the tensor's own data when it is written.
pub fn merge<'a>(base: &'a Gguf, adapter: &'a Adapter, ty: MergedType) -> Result<Merged<'a>, ModelError> {
    let config = ModelConfig::from_gguf(base, &mut Vec::new())?;
    adapter.check_shapes(&config)?;
    if adapter.base_sha256.is_some() {
        adapter.check_base(&base_digest(base))?;
    }
    let targets: std::collections::HashMap<String, (usize, Target)> =
        adapter.pairs().map(|(layer, target, _)| (target.tensor(layer), (layer, target))).collect();
    let tensors = base
        .tensors()
        .iter()
        .map(|tensor| {
            let out = match (tensor.dims.len(), ty) {
                (1, _) | (_, MergedType::F32) => TensorType::F32,
                (_, MergedType::F16) => TensorType::F16,
            };
            let spec = TensorSpec { name: tensor.name.clone(), dims: tensor.dims.clone(), ty: out };
            let slot = targets.get(&tensor.name).copied();
            let make = move || merged(base, tensor, adapter, slot, out);
            (spec, TensorData::Lazy(Box::new(make)))
        })
        .collect();
    Ok(Merged { metadata: metadata(base, ty), tensors })
}

fn merged(
    base: &Gguf,
    tensor: &TensorInfo,
    adapter: &Adapter,
    slot: Option<(usize, Target)>,
    ty: TensorType,
) -> Result<Vec<u8>, GgufError> {
    let mut values = base.dequantize(tensor)?;
    let inputs = tensor.dims.first().map_or(0, |d| *d as usize);
    if let Some(delta) = slot.and_then(|(layer, target)| adapter.delta(layer, target, inputs)) {
        crate::linalg::add(&mut values, &delta);
    }
    let limit = if ty == TensorType::F16 { 65_520.0 } else { f32::INFINITY };
    if let Some(at) = values.iter().position(|v| v.is_nan() || v.abs() >= limit) {
        let what =
            format!("value {at} is {} after merging, which {ty} cannot hold; train with a lower rate", values[at]);
        return Err(GgufError::tensor(&tensor.name, what));
    }
    Ok(match ty {
        TensorType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    })
}

/// The base's metadata with the new file type and without what described the old encoding of the weights.
fn metadata(base: &Gguf, ty: MergedType) -> Vec<(String, Value)> {
    let file_type = match ty {
        MergedType::F32 => 0u32,
        MergedType::F16 => 1,
    };
    let old = |key: &str| key.starts_with("quantize.") || key == "general.quantization_version";
    let mut metadata: Vec<(String, Value)> = base.metadata().iter().filter(|(k, _)| !old(k)).cloned().collect();
    match metadata.iter_mut().find(|(k, _)| k == "general.file_type") {
        Some((_, value)) => *value = file_type.into(),
        None => metadata.push(("general.file_type".into(), file_type.into())),
    }
    metadata
}
