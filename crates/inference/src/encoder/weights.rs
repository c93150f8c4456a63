//! Weights of the encoder from a safetensors file: shapes and values checked, matrices packed.

use super::{EncoderError, config::Config};
use crate::linalg::{Packed, Storage};
use crate::safetensors_file::SafetensorsFile;
use std::path::Path;

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
        let file = SafetensorsFile::open(path)?;
        let prefix = if file.find("bert.embeddings.word_embeddings.weight").is_some() { "bert." } else { "" };
        let source = Source { file, prefix };
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

struct Source {
    file: SafetensorsFile,
    prefix: &'static str,
}

impl Source {
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
        let weight = Packed::stack(&parts, cols, Storage::F32).map_err(|at| {
            EncoderError::file(self.file.path(), format!("tensors {}: weight {at} is not finite", names.join(", ")))
        })?;
        Ok(Linear { weight, bias })
    }

    fn norm(&self, name: &str, h: usize) -> Result<Norm, EncoderError> {
        Ok(Norm { weight: self.get(&format!("{name}.weight"), &[h])?, bias: self.get(&format!("{name}.bias"), &[h])? })
    }

    fn get(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EncoderError> {
        Ok(self.file.get(&format!("{}{name}", self.prefix), shape)?.values()?)
    }
}
