//! The frozen weights of a decoder, packed for the inner loop.

use super::{ModelConfig, ModelError, config::Arch, mla, moe, rope::Rope};
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::linalg::{Packed, Storage};
use rayon::prelude::*;
use std::sync::Arc;

/// One transformer block. q, k, v and gate, up are stacked: one product each.
#[derive(Debug)]
pub(crate) struct Block {
    pub attn_norm: Vec<f32>,
    pub qkv: Packed,
    pub qkv_bias: Option<Vec<f32>>,
    pub head_norms: Option<HeadNorms>,
    /// Makes queries, keys and values instead of `qkv`, which then has no rows.
    pub latent: Option<mla::Latent>,
    pub out: Packed,
    pub ffn_norm: Vec<f32>,
    pub gate_up: Packed,
    pub down: Packed,
    /// The feed-forward part instead of `gate_up` and `down`, which then have no rows.
    pub experts: Option<moe::Experts>,
}

impl Block {
    fn size_bytes(&self) -> usize {
        let plain = [&self.qkv, &self.out, &self.gate_up, &self.down].map(Packed::size_bytes).iter().sum::<usize>();
        plain
            + self.latent.as_ref().map_or(0, mla::Latent::size_bytes)
            + self.experts.as_ref().map_or(0, moe::Experts::size_bytes)
    }
}

/// Weights of the norms of every query and key head (Qwen3), `head_dim` values each.
#[derive(Debug)]
pub(crate) struct HeadNorms {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
}

impl HeadNorms {
    /// Weight of a head of `[q | k]`, counted through.
    pub fn of(&self, c: &ModelConfig, head: usize) -> &[f32] {
        if head < c.heads { &self.q } else { &self.k }
    }
}

#[derive(Debug)]
pub(crate) struct Weights {
    pub config: ModelConfig,
    pub embedding: Arc<Packed>,
    pub blocks: Vec<Block>,
    pub norm: Vec<f32>,
    /// The embedding itself when tied.
    pub output: Arc<Packed>,
    pub rope: Rope,
}

impl Weights {
    pub fn size_bytes(&self) -> usize {
        let tied = Arc::ptr_eq(&self.embedding, &self.output);
        let blocks: usize = self.blocks.iter().map(Block::size_bytes).sum();
        blocks + self.embedding.size_bytes() + if tied { 0 } else { self.output.size_bytes() }
    }
}

/// Values of tensors, row-major, by name.
pub(crate) type Values = std::collections::BTreeMap<String, Vec<f32>>;

/// Reads tensors of one file by name and checks their shapes.
pub(super) struct Loader<'a> {
    gguf: &'a Gguf,
    /// Values that replace those of the file.
    changed: Option<&'a Values>,
    storage: Storage,
}

pub(crate) fn load(gguf: &Gguf, config: ModelConfig, storage: Storage) -> Result<Weights, ModelError> {
    let l = Loader { gguf, changed: None, storage };
    refuse_unknown(gguf, config.arch)?;
    let embedding = Arc::new(l.matrix(&["token_embd.weight"], config.width, &[config.vocab])?);
    let output = match gguf.find("output.weight") {
        Some(_) => Arc::new(l.matrix(&["output.weight"], config.width, &[config.vocab])?),
        None => embedding.clone(),
    };
    let blocks = (0..config.layers).into_par_iter().map(|i| l.block(i, &config)).collect::<Result<_, _>>()?;
    let norm = l.vector("output_norm.weight", config.width)?;
    let rope = l.rope(&config)?;
    Ok(Weights { config, embedding, blocks, norm, output, rope })
}

/// Block `layer` alone, as a decoder of one block without embedding and output; `changed` values replace those of
/// the file.
pub(crate) fn load_block(
    gguf: &Gguf,
    changed: &Values,
    config: &ModelConfig,
    layer: usize,
) -> Result<Weights, ModelError> {
    let l = Loader { gguf, changed: Some(changed), storage: Storage::F32 };
    let none = Arc::new(Packed::empty(config.width));
    let blocks = vec![l.block(layer, config)?];
    let rope = l.rope(config)?;
    let config = ModelConfig { layers: 1, ..config.clone() };
    Ok(Weights { config, embedding: none.clone(), blocks, norm: Vec::new(), output: none, rope })
}

/// The norm and the matrix behind the blocks alone, as exact as the file has them.
pub(crate) fn load_head(gguf: &Gguf, config: &ModelConfig) -> Result<Weights, ModelError> {
    let name = if gguf.find("output.weight").is_some() { "output.weight" } else { "token_embd.weight" };
    let float = matches!(gguf.tensor(name)?.ty, TensorType::F32 | TensorType::BF16);
    let storage = if float { Storage::F32 } else { Storage::Blocks };
    let l = Loader { gguf, changed: None, storage };
    let output = Arc::new(l.matrix(&[name], config.width, &[config.vocab])?);
    let norm = l.vector("output_norm.weight", config.width)?;
    let (embedding, rope) = (Arc::new(Packed::empty(config.width)), l.rope(config)?);
    let config = ModelConfig { layers: 0, ..config.clone() };
    Ok(Weights { config, embedding, blocks: Vec::new(), norm, output, rope })
}

impl Loader<'_> {
    fn rope(&self, config: &ModelConfig) -> Result<Rope, ModelError> {
        let factors = match self.gguf.find("rope_freqs.weight") {
            Some(_) => Some(self.vector("rope_freqs.weight", config.rope.dims / 2)?),
            None => None,
        };
        Ok(Rope::new(config, factors.as_deref()))
    }

    fn block(&self, i: usize, c: &ModelConfig) -> Result<Block, ModelError> {
        if let Some(latent) = &c.latent {
            return mla::load_block(self, i, c, latent);
        }
        let name = |part: &str| format!("blk.{i}.{part}");
        let (q, k, v) = (name("attn_q"), name("attn_k"), name("attn_v"));
        let weight = |n: &str| format!("{n}.weight");
        let qkv = [weight(&q), weight(&k), weight(&v)];
        let rows = [c.q_width(), c.kv_width(), c.kv_width()];
        let gate_up = [weight(&name("ffn_gate")), weight(&name("ffn_up"))];
        Ok(Block {
            attn_norm: self.vector(&weight(&name("attn_norm")), c.width)?,
            qkv: self.matrix(&[&qkv[0], &qkv[1], &qkv[2]], c.width, &rows)?,
            qkv_bias: self.biases(&[q, k, v], &rows)?,
            head_norms: match c.arch {
                Arch::Qwen3 => Some(HeadNorms {
                    q: self.vector(&name("attn_q_norm.weight"), c.head_dim)?,
                    k: self.vector(&name("attn_k_norm.weight"), c.head_dim)?,
                }),
                Arch::Llama | Arch::Qwen2 | Arch::DeepSeek2 => None,
            },
            latent: None,
            experts: None,
            out: self.matrix(&[&weight(&name("attn_output"))], c.q_width(), &[c.width])?,
            ffn_norm: self.vector(&weight(&name("ffn_norm")), c.width)?,
            gate_up: self.matrix(&[&gate_up[0], &gate_up[1]], c.width, &[c.ffn, c.ffn])?,
            down: self.matrix(&[&weight(&name("ffn_down"))], c.ffn, &[c.width])?,
        })
    }

    /// Stacks the named matrices, each `rows[i] × cols`.
    pub(super) fn matrix(&self, names: &[&str], cols: usize, rows: &[usize]) -> Result<Packed, ModelError> {
        if let Some(packed) = self.as_in_file(names, cols, rows)? {
            return Ok(packed);
        }
        let mut parts = Vec::with_capacity(names.len());
        for (name, rows) in names.iter().zip(rows) {
            parts.push(self.values(name, &[cols, *rows])?);
        }
        let slices: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        Packed::stack(&slices, cols, self.storage).map_err(|at| self.unfit(names, &slices, at))
    }

    /// The error of weight `at`, counted over all `parts`, each of the tensor of its name.
    fn unfit(&self, names: &[&str], parts: &[&[f32]], mut at: usize) -> ModelError {
        let mut i = 0;
        while i + 1 < parts.len() && at >= parts[i].len() {
            at -= parts[i].len();
            i += 1;
        }
        let what = format!(
            "weight {at} is {}; it is not a finite number in {:?} storage; make the file anew, or load with F32",
            parts[i].get(at).copied().unwrap_or(f32::NAN),
            self.storage
        );
        ModelError::weight(names[i], what)
    }

    /// Packs values that are there already; `name` is for the error.
    pub(super) fn pack(&self, name: &str, parts: &[&[f32]], cols: usize) -> Result<Packed, ModelError> {
        Packed::stack(parts, cols, self.storage).map_err(|at| self.unfit(&vec![name; parts.len()], parts, at))
    }

    /// The `n` matrices of `rows × cols` of a tensor of three dimensions.
    pub(super) fn slices(&self, name: &str, cols: usize, rows: usize, n: usize) -> Result<Vec<Packed>, ModelError> {
        let values = self.values(name, &[cols, rows, n])?;
        values.chunks_exact(cols * rows).map(|slice| self.pack(name, &[slice], cols)).collect()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.gguf.find(name).is_some()
    }

    /// The same without decoding, where types and storage allow it.
    fn as_in_file(&self, names: &[&str], cols: usize, rows: &[usize]) -> Result<Option<Packed>, ModelError> {
        if self.changed.is_some() {
            return Ok(None);
        }
        let mut parts = Vec::with_capacity(names.len());
        for (name, rows) in names.iter().zip(rows) {
            let tensor = self.tensor(name, &[cols, *rows])?;
            parts.push((tensor.ty, self.gguf.bytes(tensor)));
        }
        let Some(packed) = Packed::of_file(&parts, cols, self.storage) else { return Ok(None) };
        packed.map(Some).map_err(|at| {
            let (row, mut i) = (at / cols.max(1), 0);
            let mut first = 0;
            while i + 1 < names.len() && row >= first + rows[i] {
                first += rows[i];
                i += 1;
            }
            let at = at - first * cols;
            ModelError::weight(
                names[i],
                format!("weight {at}, or the scale of its block, is not a finite number; make the file anew"),
            )
        })
    }

    /// The bias vectors side by side, `None` when there is none; only some of them is an error.
    fn biases(&self, names: &[String], lens: &[usize]) -> Result<Option<Vec<f32>>, ModelError> {
        let names: Vec<String> = names.iter().map(|n| format!("{n}.bias")).collect();
        if names.iter().all(|n| self.gguf.find(n).is_none()) {
            return Ok(None);
        }
        let mut all = Vec::with_capacity(lens.iter().sum());
        for (name, len) in names.iter().zip(lens) {
            all.extend(self.vector(name, *len)?);
        }
        Ok(Some(all))
    }

    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let values = self.values(name, &[len])?;
        match values.iter().position(|v| !v.is_finite()) {
            Some(at) => Err(ModelError::weight(name, format!("value {at} is not finite; make the file anew"))),
            None => Ok(values),
        }
    }

    /// The tensor's entry, if it has this shape.
    fn tensor(&self, name: &str, dims: &[usize]) -> Result<&TensorInfo, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        let want: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
        // Trailing dimensions of 1 mean nothing.
        let shape = tensor.dims.iter().rev().skip_while(|d| **d == 1 && tensor.dims.len() > dims.len()).count();
        if tensor.dims[..shape] != want[..] {
            return Err(ModelError::weight(name, format!("shape {:?}, expected {want:?}", tensor.dims)));
        }
        Ok(tensor)
    }

    pub(super) fn values(&self, name: &str, dims: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, dims)?;
        match self.changed.and_then(|c| c.get(name)) {
            Some(values) if values.len() == tensor.n_elements() => Ok(values.clone()),
            Some(values) => Err(ModelError::weight(name, format!("{} values for {dims:?}", values.len()))),
            None => Ok(self.gguf.dequantize(tensor)?),
        }
    }
}

/// A tensor that the forward pass would ignore changes the model's meaning: refuse it.
fn refuse_unknown(gguf: &Gguf, arch: Arch) -> Result<(), ModelError> {
    const TOP: [&str; 4] = ["token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight"];
    const PARTS: [&str; 9] = [
        "attn_norm.weight",
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_output.weight",
        "ffn_norm.weight",
        "ffn_gate.weight",
        "ffn_up.weight",
        "ffn_down.weight",
    ];
    const BIASES: [&str; 3] = ["attn_q.bias", "attn_k.bias", "attn_v.bias"];
    let head_norms: &[&str] = if arch == Arch::Qwen3 { &["attn_q_norm.weight", "attn_k_norm.weight"] } else { &[] };
    for tensor in gguf.tensors() {
        let name = tensor.name.as_str();
        let part = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map(|(_, part)| part);
        let of_block = |p: &str| match arch {
            Arch::DeepSeek2 => mla::PARTS.contains(&p) || moe::PARTS.contains(&p),
            _ => PARTS.contains(&p) || BIASES.contains(&p) || head_norms.contains(&p),
        };
        let known = part.map_or(TOP.contains(&name), of_block);
        if !known {
            let what = format!("tensor `{name}`, which architecture `{}` does not use here", arch.name());
            return Err(ModelError::unsupported(what));
        }
    }
    Ok(())
}
