//! Which tensor becomes which: names, shapes, and the order of rows that llama's rotation needs.

use super::{ConvertError, config::HfConfig, deepseek, source::Weights};
use crate::gguf::{TensorSpec, TensorType};
use crate::model::Arch;
use crate::safetensors_file::View;
use std::collections::HashSet;

/// Where the values of a tensor come from.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Origin {
    /// A tensor of the folder, as it is.
    Same(String),
    /// Queries or keys with this many heads: rows of a head are the halves of pairs there, but pairs are neighbours
    /// in a GGUF file of architecture `llama`.
    Interleaved(String, usize),
    /// Equal matrices of the folder, one after the other: experts.
    Stacked(Vec<String>),
    /// The key or the value matrices of the heads of latent attention.
    Heads { name: String, keys: bool, nope: usize, value: usize },
    /// Made from the configuration.
    Values(Vec<f32>),
}

/// A tensor of the file to be.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    name: String,
    /// Outermost dimension first.
    shape: Vec<usize>,
    from: Origin,
}

impl Entry {
    /// Vectors are F32 whatever the type of matrices.
    pub fn spec(&self, ty: TensorType) -> TensorSpec {
        let dims: Vec<u64> = self.shape.iter().rev().map(|d| *d as u64).collect();
        // a router decides between experts by small differences
        let ty = if dims.len() == 1 || self.name.ends_with("ffn_gate_inp.weight") { TensorType::F32 } else { ty };
        TensorSpec { name: self.name.clone(), dims, ty }
    }
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }
    pub fn values(&self, weights: &Weights) -> Result<Vec<f32>, ConvertError> {
        let read = |name: &str| -> Result<Vec<f32>, ConvertError> {
            let view = weights.find(name).ok_or_else(|| missing(weights, name))?;
            Ok(view.values()?)
        };
        match &self.from {
            Origin::Same(name) => read(name),
            Origin::Interleaved(name, heads) => {
                let cols = if self.shape.len() > 1 { self.row_len() } else { 1 };
                Ok(interleave(&read(name)?, *heads, cols))
            }
            Origin::Stacked(names) => {
                let mut out = Vec::with_capacity(self.shape.iter().product());
                for name in names {
                    out.extend(read(name)?);
                }
                Ok(out)
            }
            Origin::Heads { name, keys, nope, value } => {
                let both = read(name)?;
                let heads = self.shape.first().copied().unwrap_or(1);
                let rank = both.len() / (heads * (nope + value));
                Ok(deepseek::heads(&both, rank, *keys, *nope, *value))
            }
            Origin::Values(values) => Ok(values.clone()),
        }
    }
}

/// Row `i` and row `i + half` of a head become rows `2 i` and `2 i + 1`.
pub(crate) fn interleave(values: &[f32], heads: usize, cols: usize) -> Vec<f32> {
    let head_len = values.len() / heads;
    let half = head_len / cols / 2;
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_len) {
        for i in 0..half {
            out.extend_from_slice(&head[i * cols..][..cols]);
            out.extend_from_slice(&head[(i + half) * cols..][..cols]);
        }
    }
    out
}

fn missing(weights: &Weights, name: &str) -> ConvertError {
    let near = weights.names().next().unwrap_or("nothing");
    let what = format!("tensor `{name}` is missing (the first one there is `{near}`)");
    ConvertError::Model { path: weights.path().to_owned(), what }
}

/// Every tensor of the file in order; all checks that need no values.
pub(super) fn plan(c: &HfConfig, weights: &Weights) -> Result<Vec<Entry>, ConvertError> {
    let mut plan = Plan { weights, out: Vec::new(), used: HashSet::new() };
    if let Some(factors) = c.rope_factors() {
        let shape = vec![factors.len()];
        plan.out.push(Entry { name: "rope_freqs.weight".into(), shape, from: Origin::Values(factors) });
    }
    plan.same("token_embd.weight", "model.embed_tokens.weight", &[c.vocab_size, c.width])?;
    for layer in 0..c.layers {
        match &c.deepseek {
            Some(deepseek) => deepseek.block(&mut plan, c, layer)?,
            None => plan.block(c, layer)?,
        }
    }
    plan.same("output_norm.weight", "model.norm.weight", &[c.width])?;
    plan.output(c)?;
    plan.refuse_unused()?;
    Ok(plan.out)
}

pub(super) struct Plan<'a> {
    weights: &'a Weights,
    out: Vec<Entry>,
    /// Names in the folder.
    used: HashSet<String>,
}

const OUTPUT: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

impl Plan<'_> {
    fn block(&mut self, c: &HfConfig, layer: usize) -> Result<(), ConvertError> {
        let to = |part: &str| format!("blk.{layer}.{part}");
        let from = |part: &str| format!("model.layers.{layer}.{part}");
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        self.same(&to("attn_norm.weight"), &from("input_layernorm.weight"), &[c.width])?;
        for (part, name, rows, heads) in [
            ("attn_q", "q_proj", q, Some(c.heads)),
            ("attn_k", "k_proj", kv, Some(c.kv_heads)),
            ("attn_v", "v_proj", kv, None),
        ] {
            let heads = heads.filter(|_| c.arch == Arch::Llama);
            let (weight, bias) = (from(&format!("self_attn.{name}.weight")), from(&format!("self_attn.{name}.bias")));
            self.tensor(&to(&format!("{part}.weight")), &weight, &[rows, c.width], heads)?;
            if c.arch == Arch::Qwen2 || self.weights.find(&bias).is_some() {
                self.tensor(&to(&format!("{part}.bias")), &bias, &[rows], heads)?;
            }
        }
        if c.arch == Arch::Qwen3 {
            self.same(&to("attn_q_norm.weight"), &from("self_attn.q_norm.weight"), &[c.head_dim])?;
            self.same(&to("attn_k_norm.weight"), &from("self_attn.k_norm.weight"), &[c.head_dim])?;
        }
        self.same(&to("attn_output.weight"), &from("self_attn.o_proj.weight"), &[c.width, q])?;
        self.same(&to("ffn_norm.weight"), &from("post_attention_layernorm.weight"), &[c.width])?;
        self.same(&to("ffn_gate.weight"), &from("mlp.gate_proj.weight"), &[c.ffn, c.width])?;
        self.same(&to("ffn_up.weight"), &from("mlp.up_proj.weight"), &[c.ffn, c.width])?;
        self.same(&to("ffn_down.weight"), &from("mlp.down_proj.weight"), &[c.width, c.ffn])?;
        // A table that old files carry; it follows from the configuration.
        self.used.insert(from("self_attn.rotary_emb.inv_freq"));
        Ok(())
    }

    /// A tied output is the embedding: not written, and a copy in the folder must be one.
    fn output(&mut self, c: &HfConfig) -> Result<(), ConvertError> {
        if !c.tied {
            return self.same("output.weight", OUTPUT, &[c.vocab_size, c.width]);
        }
        self.used.insert(OUTPUT.to_owned());
        let (copy, embedding) = (self.weights.find(OUTPUT), self.weights.find(EMBEDDING));
        match (copy, embedding) {
            (Some(copy), Some(embedding)) if copy.bytes != embedding.bytes => {
                Err(copy.error("differs from the embedding, but `tie_word_embeddings` says that it is the same").into())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn same(&mut self, name: &str, from: &str, shape: &[usize]) -> Result<(), ConvertError> {
        self.tensor(name, from, shape, None)
    }

    fn tensor(&mut self, name: &str, from: &str, shape: &[usize], heads: Option<usize>) -> Result<(), ConvertError> {
        let origin = match heads {
            Some(heads) => Origin::Interleaved(from.to_owned(), heads),
            None => Origin::Same(from.to_owned()),
        };
        self.source(from, shape)?;
        self.made(name, shape, origin);
        Ok(())
    }

    /// Takes a tensor of the folder, which must be there with this shape.
    pub(super) fn source(&mut self, from: &str, shape: &[usize]) -> Result<(), ConvertError> {
        let view: View<'_> = self.weights.find(from).ok_or_else(|| missing(self.weights, from))?;
        if view.shape != shape {
            return Err(view.error(format!("shape {:?}, config.json says {shape:?}", view.shape)).into());
        }
        self.used.insert(from.to_owned());
        Ok(())
    }

    /// A tensor of the file, made of what was taken before.
    pub(super) fn made(&mut self, name: &str, shape: &[usize], from: Origin) {
        self.out.push(Entry { name: name.to_owned(), shape: shape.to_vec(), from });
    }

    fn refuse_unused(&self) -> Result<(), ConvertError> {
        match self.weights.names().find(|name| !self.used.contains(*name)).and_then(|n| self.weights.find(n)) {
            Some(view) => Err(view
                .error("has no place in the file: it is of another model, or of a feature that is not supported")
                .into()),
            None => Ok(()),
        }
    }
}
