//! What the metadata of a GGUF file says about a decoder.

use super::{ModelError, mla::LatentConfig, moe::ExpertConfig, rope::Yarn};
use crate::gguf::{Gguf, Value};

/// Decoder families that this crate can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// Llama, SmolLM2, Mistral: no biases, RoPE over neighbouring pairs (the GGUF converter permutes q and k).
    Llama,
    /// Qwen2 and the R1 distillations of it: biases on q, k, v; RoPE over halves.
    Qwen2,
    /// Qwen3: no biases, queries and keys normed per head before RoPE over halves.
    Qwen3,
    /// DeepSeek-V2: keys and values from one latent vector a token, experts behind a router.
    DeepSeek2,
}

impl Arch {
    pub(crate) fn parse(name: &str) -> Result<Self, ModelError> {
        match name {
            "llama" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            "deepseek2" => Ok(Self::DeepSeek2),
            other => Err(ModelError::unsupported(format!(
                "architecture `{other}`; this decoder runs `llama`, `qwen2`, `qwen3` and `deepseek2`"
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
            Self::DeepSeek2 => "deepseek2",
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
    pub yarn: Option<Yarn>,
}

/// Sizes and constants of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub arch: Arch,
    pub layers: usize,
    /// Values of the residual stream (`embedding_length`).
    pub width: usize,
    pub heads: usize,
    /// Heads of keys and values (grouped-query attention, arXiv 2305.13245). One where they come from a latent vector.
    pub kv_heads: usize,
    /// Values of a head as it is cached.
    pub head_dim: usize,
    /// Inner size of the feed-forward part.
    pub ffn: usize,
    pub vocab: usize,
    /// Longest context that the model was trained for, tokens.
    pub context: usize,
    pub rms_eps: f32,
    pub rope: RopeConfig,
    /// Multi-head latent attention, where the architecture has it.
    pub latent: Option<LatentConfig>,
    /// Experts of the blocks behind the leading dense ones, where the architecture has them.
    pub experts: Option<ExpertConfig>,
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
        let latent = (arch == Arch::DeepSeek2).then(|| LatentConfig::from_gguf(gguf)).transpose()?;
        let experts = (arch == Arch::DeepSeek2).then(|| ExpertConfig::from_gguf(gguf)).transpose()?;
        let (kv_heads, head_dim) = match &latent {
            Some(latent) => (1, latent.cached()),
            None => (
                maybe("attention.head_count_kv")?.unwrap_or(heads),
                maybe("attention.key_length")?.unwrap_or(width / heads.max(1)),
            ),
        };
        let config = Self {
            arch,
            layers: size("block_count")?,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn: size("feed_forward_length")?,
            vocab: vocab(gguf, width)?,
            context: size("context_length")?,
            rms_eps: gguf.f32(&key("attention.layer_norm_rms_epsilon"))?,
            rope: rope(gguf, arch, head_dim, warnings)?,
            latent,
            experts,
        };
        if config.latent.is_none() && maybe("attention.value_length")?.is_some_and(|v| v != head_dim) {
            return Err(ModelError::unsupported("value heads of another size than key heads"));
        }
        if config.experts.is_none() && maybe("expert_count")?.is_some_and(|n| n > 0) {
            let what = format!("mixture of experts in architecture `{}`; known is that of `deepseek2`", arch.name());
            return Err(ModelError::unsupported(what));
        }
        config.check()?;
        Ok(config)
    }

    /// Metadata of an F32 file with this decoder, but for its vocabulary: what [`ModelConfig::from_gguf`] reads of an
    /// architecture without latent attention and experts.
    #[must_use]
    pub fn metadata(&self, name: &str) -> Vec<(String, Value)> {
        let size = |v: usize| Value::U32(v as u32);
        let own = [
            ("block_count", size(self.layers)),
            ("context_length", size(self.context)),
            ("embedding_length", size(self.width)),
            ("feed_forward_length", size(self.ffn)),
            ("attention.head_count", size(self.heads)),
            ("attention.head_count_kv", size(self.kv_heads)),
            ("attention.layer_norm_rms_epsilon", self.rms_eps.into()),
            ("rope.dimension_count", size(self.rope.dims)),
            ("rope.freq_base", self.rope.base.into()),
            ("vocab_size", size(self.vocab)),
        ];
        let mut all = vec![
            ("general.architecture".to_owned(), Value::from(self.arch.name())),
            ("general.name".to_owned(), name.into()),
            ("general.file_type".to_owned(), 0u32.into()),
        ];
        all.extend(own.map(|(key, value)| (format!("{}.{key}", self.arch.name()), value)));
        all
    }

    /// Refuses what only works on blocks of seven plain matrices; `what` names it.
    pub(crate) fn plain(self, what: &str) -> Result<Self, ModelError> {
        self.check_plain(what)?;
        Ok(self)
    }
    /// As [`ModelConfig::plain`].
    pub(crate) fn check_plain(&self, what: &str) -> Result<(), ModelError> {
        if self.latent.is_none() && self.experts.is_none() {
            return Ok(());
        }
        let what = format!(
            "{what} of architecture `{}` (latent attention and experts): convert, calibrate, quantise by profile, \
             evaluate and generate work with it",
            self.arch.name()
        );
        Err(ModelError::unsupported(what))
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
    /// Weights of all blocks that one token is multiplied with.
    pub(crate) fn token_weights(&self) -> usize {
        let plain = self.width * self.qkv_width() + self.q_width() * self.width;
        let attention = self.latent.map_or(plain, |l| l.weights(self.width, self.heads));
        let dense = 3 * self.width * self.ffn;
        let leading = self.experts.map_or(self.layers, |e| e.dense_blocks.min(self.layers));
        let experts = self.experts.map_or(0, |e| e.token_weights(self.width));
        self.layers * attention + leading * dense + (self.layers - leading) * experts
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
        Some("yarn") if arch == Arch::DeepSeek2 => 1.0,
        Some("linear") => gguf.optional::<f32>(&key("scaling.factor"))?.filter(|f| *f > 0.0).unwrap_or(1.0),
        Some(other) => {
            return Err(ModelError::unsupported(format!("RoPE scaling `{other}`; known are none and linear")));
        }
    };
    let yarn = match gguf.optional::<&str>(&key("scaling.type"))? {
        Some("yarn") => Some(Yarn::from_gguf(gguf, arch)?),
        _ => None,
    };
    let dims = gguf.optional::<u32>(&key("dimension_count"))?.map_or(head_dim, |d| d as usize);
    Ok(RopeConfig { base, dims, linear_factor, yarn })
}
