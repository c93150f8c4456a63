//! Decoders: load a GGUF file, generate text for many prompts together, score given text; LoRA adapters.
//!
//! The result of a sequence does not depend on what else is in the batch, how prompts are cut into pieces, or
//! how many threads there are (see [`crate::linalg`]): greedy generation and scores are bit-equal between runs,
//! batch sizes and x86-64 machines with FMA.

mod adapter;
mod attention;
mod config;
mod error;
mod forward;
mod generate;
mod kv;
mod lora;
mod mask;
mod merge;
mod mla;
mod moe;
mod peft;
mod prefix;
mod rope;
mod sample;
mod score;
mod serve;
mod speculative;
mod text;
mod weights;

pub use crate::linalg::Storage;
pub use adapter::{Adapter, Pair, Target};
pub use config::{Arch, ModelConfig, RopeConfig};
pub use error::ModelError;
pub use generate::{GenerateOptions, Generated, Stop};
pub use kv::KvType;
pub use mask::Mask;
pub use merge::{Merged, MergedType, base_digest, merge};
pub use mla::LatentConfig;
pub use moe::{ExpertConfig, Gating};
pub use rope::Yarn;
pub use sample::Sampling;
pub use score::{LogitVisitor, Scored};
pub use serve::{Event, Request, RequestId, Scheduler, ServeOptions};
pub use speculative::Speculation;
pub use text::TextStream;

pub(crate) use forward::{Site, Step, add_bias, each_row, norm_heads, norm_rows, swiglu_rows};
pub(crate) use rope::RopeTable;
pub(crate) use sample::argmax;
pub(crate) use weights::{Block, HeadNorms, Values, Weights, load_block, load_head};

use crate::gguf::Gguf;
use std::sync::{Arc, OnceLock};

/// The digest of the file that weights came from; empty for a block alone.
#[derive(Debug, Default)]
struct BaseDigest {
    of: Option<Gguf>,
    value: OnceLock<String>,
}

impl BaseDigest {
    fn get(&self) -> &str {
        self.value.get_or_init(|| self.of.as_ref().map(base_digest).unwrap_or_default())
    }
}

/// A decoder ready to run. Clones and adapted versions share the frozen weights.
#[derive(Debug, Clone)]
pub struct Decoder {
    pub(crate) weights: Arc<Weights>,
    lora: Option<Arc<lora::Lora>>,
    mask: Arc<Mask>,
    /// Activations are not rounded, see [`Decoder::exact`].
    exact: bool,
    digest: Arc<BaseDigest>,
    warnings: Arc<[String]>,
}

impl Decoder {
    /// Loads all weights with [`Storage::Blocks`]. The file stays mapped (for its digest, when that is asked for), but is
    /// not read any more. Products with quantised weights
    /// round activations to 8 bits, as stock llama.cpp does; [`Decoder::exact`] does not.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for an architecture, feature or tensor that this decoder does not know,
    /// [`ModelError::Weight`] for shapes or values that cannot be, [`ModelError::Gguf`].
    pub fn load(gguf: &Gguf) -> Result<Self, ModelError> {
        Self::load_with(gguf, Storage::Blocks)
    }

    /// The same with a choice of [`Storage`].
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn load_with(gguf: &Gguf, storage: Storage) -> Result<Self, ModelError> {
        let mut warnings = Vec::new();
        let config = ModelConfig::from_gguf(gguf, &mut warnings)?;
        Ok(Self {
            weights: Arc::new(weights::load(gguf, config, storage)?),
            lora: None,
            mask: Arc::default(),
            exact: false,
            digest: Arc::new(BaseDigest { of: Some(gguf.tensors_only()), value: OnceLock::new() }),
            warnings: warnings.into(),
        })
    }

    /// Block `layer` of a file alone, for [`Decoder::run_blocks`]; `changed` tensors replace those of the file.
    pub(crate) fn one_block(
        gguf: &Gguf,
        changed: &Values,
        config: &ModelConfig,
        layer: usize,
    ) -> Result<Self, ModelError> {
        let weights = Arc::new(weights::load_block(gguf, changed, config, layer)?);
        Ok(Self {
            weights,
            lora: None,
            mask: Arc::default(),
            exact: false,
            digest: Arc::default(),
            warnings: Vec::new().into(),
        })
    }

    /// This model with `adapter` applied while running; the weights are shared, a previous adapter is replaced.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] if it was trained on another base or does not fit.
    pub fn with_adapter(&self, adapter: &Adapter) -> Result<Self, ModelError> {
        adapter.check_base(self.base_digest())?;
        let lora = lora::Lora::new(&self.weights.config, adapter)?;
        Ok(Self { lora: Some(Arc::new(lora)), ..self.clone() })
    }

    /// This model with activations as they are, for measuring what quantisation does to the weights alone: several
    /// times slower where weights are in blocks, the same otherwise.
    #[must_use]
    pub fn exact(&self) -> Self {
        Self { exact: true, ..self.clone() }
    }

    /// Sizes and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.weights.config
    }
    /// Digest of the loaded tensors, see [`base_digest`]; computed when it is asked for, which reads the whole file.
    #[must_use]
    pub fn base_digest(&self) -> &str {
        self.digest.get()
    }
    /// What had to be assumed while loading, for the log.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
    /// Memory of the frozen matrices, bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.weights.size_bytes()
    }

    pub(crate) fn check_tokens(&self, tokens: &[u32], what: &str) -> Result<(), ModelError> {
        self.weights.config.check_tokens(tokens, what)
    }
}

#[cfg(test)]
pub(crate) mod tests;
