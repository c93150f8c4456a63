//! What the metadata of a GGUF file says about a decoder.

use super::ModelError;
use crate::gguf::Gguf;

/// Decoder families that this crate can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// Llama, SmolLM2, Mistral: no biases, RoPE over neighbouring pairs (the GGUF converter permutes q and k).
    Llama,
    /// Qwen2 and the R1 distillations of it: biases on q, k, v; RoPE over halves.
    Qwen2,
    /// Qwen3: no biases, queries and keys normed per head before RoPE over halves.
    Qwen3,
}

impl Arch {
    pub(crate) fn parse(name: &str) -> Result<Self, ModelError> {
        match name {
            "llama" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            other => Err(ModelError::unsupported(format!(
                "architecture `{other}`; this decoder runs `llama`, `qwen2` and `qwen3`"
            ))),
        }
    }
    /// Value of `general.architecture`, the prefix of all other keys.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// Rotary position embedding (arXiv 2104.09864).
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    pub base: f32,
    /// Leading values of a head that are rotated; the rest passes through.
    pub dims: usize,
    /// Positions are divided by this (linear scaling); 1 without.
    pub linear_factor: f32,
}

/// Sizes and constants of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub arch: Arch,
    pub layers: usize,
    /// Values of the residual stream (`embedding_length`).
    pub width: usize,
    pub heads: usize,
    /// Heads of keys and values (grouped-query attention, arXiv 2305.13245).
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Inner size of the feed-forward part.
    pub ffn: usize,
    pub vocab: usize,
    /// Longest context that the model was trained for, tokens.
    pub context: usize,
    pub rms_eps: f32,
    pub rope: RopeConfig,
}

impl ModelConfig {
    /// Reads the configuration; lines added to `warnings` name defaults that had to be assumed.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for another architecture or feature, [`ModelError::Gguf`] for missing keys.
    pub fn from_gguf(gguf: &Gguf, warnings: &mut Vec<String>) -> Result<Self, ModelError> {
        let arch = Arch::parse(gguf.str("general.architecture")?)?;
        let key = |name: &str| format!("{}.{name}", arch.name());
        let size = |name: &str| -> Result<usize, ModelError> { Ok(gguf.u32(&key(name))? as usize) };
        let maybe = |name: &str| -> Result<Option<usize>, ModelError> {
            Ok(gguf.optional::<u32>(&key(name))?.map(|v| v as usize))
        };
        let (width, heads) = (size("embedding_length")?, size("attention.head_count")?);
        let head_dim = maybe("attention.key_length")?.unwrap_or(width / heads.max(1));
        let config = Self {
            arch,
            layers: size("block_count")?,
            width,
            heads,
            kv_heads: maybe("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            ffn: size("feed_forward_length")?,
            vocab: vocab(gguf, width)?,
            context: size("context_length")?,
            rms_eps: gguf.f32(&key("attention.layer_norm_rms_epsilon"))?,
            rope: rope(gguf, arch, head_dim, warnings)?,
        };
        if maybe("attention.value_length")?.is_some_and(|v| v != head_dim) {
            return Err(ModelError::unsupported("value heads of another size than key heads"));
        }
        if maybe("expert_count")?.is_some_and(|n| n > 0) {
            return Err(ModelError::unsupported("mixture of experts"));
        }
        config.check()?;
        Ok(config)
    }

    pub(crate) fn check(&self) -> Result<(), ModelError> {
        let sizes = [self.layers, self.width, self.heads, self.kv_heads, self.head_dim, self.ffn, self.vocab];
        if sizes.contains(&0) || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ModelError::unsupported(format!("sizes that cannot be: {self:?}")));
        }
        if self.rope.dims > self.head_dim || !self.rope.dims.is_multiple_of(2) {
            let what = format!("{} rotated values in heads of {}", self.rope.dims, self.head_dim);
            return Err(ModelError::unsupported(what));
        }
        Ok(())
    }
    /// A token id that the model does not have would read another's embedding: refuse it.
    pub(crate) fn check_tokens(&self, tokens: &[u32], what: &str) -> Result<(), ModelError> {
        let (vocab, context) = (self.vocab, self.context);
        if tokens.is_empty() {
            return Err(ModelError::input(format!("{what} has no tokens")));
        }
        if tokens.len() > context {
            let what = format!("{what} has {} tokens, the model's context is {context}", tokens.len());
            return Err(ModelError::input(what));
        }
        match tokens.iter().find(|t| **t as usize >= vocab) {
            Some(t) => Err(ModelError::input(format!("{what} has token {t}, the vocabulary has {vocab}"))),
            None => Ok(()),
        }
    }
    /// Values of all query heads of a token.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }
    /// Values of all key (or value) heads of a token.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
    pub(crate) fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }
    /// Query heads that share one key head.
    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Vocabulary size: the rows of the embedding are what counts.
fn vocab(gguf: &Gguf, width: usize) -> Result<usize, ModelError> {
    let tensor = gguf.tensor("token_embd.weight")?;
    match *tensor.dims.as_slice() {
        [cols, rows] if cols == width as u64 => Ok(rows as usize),
        _ => Err(ModelError::weight(&tensor.name, format!("shape {:?}, expected [{width}, vocabulary]", tensor.dims))),
    }
}

fn rope(gguf: &Gguf, arch: Arch, head_dim: usize, warnings: &mut Vec<String>) -> Result<RopeConfig, ModelError> {
    let key = |name: &str| format!("{}.rope.{name}", arch.name());
    let base = gguf.optional::<f32>(&key("freq_base"))?.unwrap_or_else(|| {
        warnings.push(format!("`{}` is absent; 10000 is assumed, as stock llama.cpp does", key("freq_base")));
        10_000.0
    });
    let linear_factor = match gguf.optional::<&str>(&key("scaling.type"))? {
        None | Some("none") => 1.0,
        Some("linear") => gguf.optional::<f32>(&key("scaling.factor"))?.filter(|f| *f > 0.0).unwrap_or(1.0),
        Some(other) => {
            return Err(ModelError::unsupported(format!("RoPE scaling `{other}`; known are none and linear")));
        }
    };
    let dims = gguf.optional::<u32>(&key("dimension_count"))?.map_or(head_dim, |d| d as usize);
    Ok(RopeConfig { base, dims, linear_factor })
}
