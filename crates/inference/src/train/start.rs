//! A model with random weights to train from, and the file of a model whose tensors were trained.

use crate::gguf::{Gguf, TensorData, TensorSpec, TensorType};
use crate::model::{Arch, ModelConfig, ModelError, Target};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{borrow::Cow, collections::BTreeMap};

/// Standard deviation of a random weight (GPT-2).
const DEVIATION: f32 = 0.02;

/// F32 tensors of a decoder with random weights and tied embedding, in the order of a file, ready for
/// [`crate::gguf::write`]. Weights are uniform around 0 with a standard deviation of 0.02, those that write to the
/// residual stream less by `sqrt(2 · layers)` (GPT-2); norms are 1. The same seed gives the same bits everywhere.
///
/// # Errors
/// [`ModelError::Unsupported`] for sizes that cannot be, and for another architecture than llama.
pub fn random_model(c: &ModelConfig, seed: u64) -> Result<Vec<(TensorSpec, TensorData<'static>)>, ModelError> {
    c.check()?;
    if c.arch != Arch::Llama {
        return Err(ModelError::unsupported("random weights for another architecture than `llama`"));
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let residual = DEVIATION / (2.0 * c.layers as f32).sqrt();
    let mut out = Vec::new();
    let mut push = |name: String, dims: &[usize], deviation: Option<f32>| {
        let half_width = |d: f32| d * 3f32.sqrt();
        let mut value = || deviation.map_or(1.0, |d| (rng.random::<f32>() * 2.0 - 1.0) * half_width(d));
        let values: Vec<f32> = (0..dims.iter().product()).map(|_| value()).collect();
        out.push(f32_tensor(name, dims.iter().map(|d| *d as u64).collect(), &values));
    };
    push("token_embd.weight".into(), &[c.width, c.vocab], Some(DEVIATION));
    for layer in 0..c.layers {
        push(format!("blk.{layer}.attn_norm.weight"), &[c.width], None);
        push(format!("blk.{layer}.ffn_norm.weight"), &[c.width], None);
        for target in Target::ALL {
            let (outputs, inputs) = target.shape(c);
            let writes = matches!(target, Target::O | Target::Down);
            push(target.tensor(layer), &[inputs, outputs], Some(if writes { residual } else { DEVIATION }));
        }
    }
    push("output_norm.weight".into(), &[c.width], None);
    Ok(out)
}

/// The tensors of `base` in order, those in `trained` replaced by F32 tensors with the new values whatever type they had, for
/// [`crate::gguf::write`] with the metadata of `base`. All others keep their bytes.
///
/// # Errors
/// [`ModelError::Weight`] for a trained tensor that `base` does not have in this size, or with a value that is not finite.
pub fn with_tensors<'a>(
    base: &'a Gguf,
    trained: &BTreeMap<String, Vec<f32>>,
) -> Result<Vec<(TensorSpec, TensorData<'a>)>, ModelError> {
    if let Some(name) = trained.keys().find(|name| base.find(name).is_none()) {
        return Err(ModelError::weight(name, "the base has no such tensor"));
    }
    let one = |tensor: &'a crate::gguf::TensorInfo| match trained.get(&tensor.name) {
        None => {
            let spec = TensorSpec { name: tensor.name.clone(), dims: tensor.dims.clone(), ty: tensor.ty };
            Ok((spec, TensorData::Bytes(Cow::Borrowed(base.bytes(tensor)))))
        }
        Some(values) if values.len() != tensor.n_elements() => {
            let what = format!("{} trained values, the base has {}", values.len(), tensor.n_elements());
            Err(ModelError::weight(&tensor.name, what))
        }
        Some(values) => match values.iter().position(|v| !v.is_finite()) {
            // The last step is followed by no other that would notice.
            Some(at) => {
                let what = format!("trained value {at} is {}; train with a lower learning rate", values[at]);
                Err(ModelError::weight(&tensor.name, what))
            }
            None => Ok(f32_tensor(tensor.name.clone(), tensor.dims.clone(), values)),
        },
    };
    base.tensors().iter().map(one).collect()
}

fn f32_tensor(name: String, dims: Vec<u64>, values: &[f32]) -> (TensorSpec, TensorData<'static>) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    (TensorSpec { name, dims, ty: TensorType::F32 }, TensorData::Bytes(Cow::Owned(bytes)))
}
