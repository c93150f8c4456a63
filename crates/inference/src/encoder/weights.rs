//! Weights of the encoder from a safetensors file: shapes and values checked, matrices packed.

use super::{EncoderError, config::Config};
use crate::linalg::{Packed, Storage};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use std::{fs::File, path::Path};

/// `y = x · Wᵀ + bias`.
#[derive(Debug)]
pub(super) struct Linear {
    pub weight: Packed,
    pub bias: Vec<f32>,
}

#[derive(Debug)]
pub(super) struct Norm {
    pub weight: Vec<f32>,
    pub bias: Vec<f32>,
}

#[derive(Debug)]
pub(super) struct Layer {
    /// Query, key and value stacked.
    pub qkv: Linear,
    pub attention_out: Linear,
    pub attention_norm: Norm,
    pub up: Linear,
    pub down: Linear,
    pub output_norm: Norm,
}

#[derive(Debug)]
pub(super) struct Weights {
    pub words: Vec<f32>,
    /// Position embedding plus that of the first segment: a sentence is one segment.
    pub positions: Vec<f32>,
    pub norm: Norm,
    pub layers: Vec<Layer>,
}

impl Weights {
    pub fn open(path: &Path, config: &Config) -> Result<Self, EncoderError> {
        let file = File::open(path).map_err(|e| EncoderError::file(path, e))?;
        // SAFETY: read-only map of a model file that is only ever replaced by rename, never written in place;
        // the safetensors parser checks all offsets against the mapped length.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| EncoderError::file(path, e))?;
        let tensors = SafeTensors::deserialize(&map).map_err(|e| EncoderError::file(path, e))?;
        let prefix = if tensors.tensor("bert.embeddings.word_embeddings.weight").is_ok() { "bert." } else { "" };
        let source = Source { tensors, path, prefix };
        let h = config.hidden_size;
        let mut positions =
            source.get("embeddings.position_embeddings.weight", &[config.max_position_embeddings, h])?;
        let segments = source.get("embeddings.token_type_embeddings.weight", &[config.type_vocab_size, h])?;
        for row in positions.chunks_mut(h) {
            row.iter_mut().zip(&segments[..h]).for_each(|(p, s)| *p += s);
        }
        Ok(Self {
            words: source.get("embeddings.word_embeddings.weight", &[config.vocab_size, h])?,
            positions,
            norm: source.norm("embeddings.LayerNorm", h)?,
            layers: (0..config.num_hidden_layers)
                .map(|i| source.layer(&format!("encoder.layer.{i}"), h, config.intermediate_size))
                .collect::<Result<_, _>>()?,
        })
    }
}

struct Source<'a> {
    tensors: SafeTensors<'a>,
    path: &'a Path,
    prefix: &'a str,
}

impl Source<'_> {
    fn layer(&self, at: &str, h: usize, ffn: usize) -> Result<Layer, EncoderError> {
        let attention = |name: &str| format!("{at}.attention.{name}");
        Ok(Layer {
            qkv: self.linear(&["query", "key", "value"].map(|n| attention(&format!("self.{n}"))), h, h)?,
            attention_out: self.linear(&[attention("output.dense")], h, h)?,
            attention_norm: self.norm(&attention("output.LayerNorm"), h)?,
            up: self.linear(&[format!("{at}.intermediate.dense")], ffn, h)?,
            down: self.linear(&[format!("{at}.output.dense")], h, ffn)?,
            output_norm: self.norm(&format!("{at}.output.LayerNorm"), h)?,
        })
    }

    fn linear(&self, names: &[String], rows: usize, cols: usize) -> Result<Linear, EncoderError> {
        let (mut weights, mut bias) = (Vec::new(), Vec::new());
        for name in names {
            weights.push(self.get(&format!("{name}.weight"), &[rows, cols])?);
            bias.extend(self.get(&format!("{name}.bias"), &[rows])?);
        }
        let parts: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
        let weight = Packed::stack(&parts, cols, Storage::F32)
            .map_err(|at| self.error(&names.join(", "), format!("weight {at} is not finite")))?;
        Ok(Linear { weight, bias })
    }

    fn norm(&self, name: &str, h: usize) -> Result<Norm, EncoderError> {
        Ok(Norm { weight: self.get(&format!("{name}.weight"), &[h])?, bias: self.get(&format!("{name}.bias"), &[h])? })
    }

    fn get(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EncoderError> {
        let full = format!("{}{name}", self.prefix);
        let view = self.tensors.tensor(&full).map_err(|e| self.error(&full, e))?;
        if view.shape() != shape {
            return Err(self.error(&full, format!("shape {:?}, expected {shape:?}", view.shape())));
        }
        let data = view.data();
        let values: Vec<f32> = match view.dtype() {
            Dtype::F32 => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => data.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => data.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => return Err(self.error(&full, format!("type {other:?} is not supported"))),
        };
        match values.iter().position(|v| !v.is_finite()) {
            Some(at) => Err(self.error(&full, format!("value {at} is not finite"))),
            None => Ok(values),
        }
    }

    fn error(&self, tensor: &str, what: impl ToString) -> EncoderError {
        EncoderError::file(self.path, format!("tensor `{tensor}`: {}", what.to_string()))
    }
}
