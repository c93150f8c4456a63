//! Memory that a runtime needs for a model, by formula: nothing is run.

use crate::model::ModelConfig;
use serde::Serialize;

/// Bytes of a key or value in the cache (f16, the default of stock llama.cpp).
const KV_BYTES: u64 = 2;

/// Working memory of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WorkingMemory {
    /// The mapped file: a runtime that computes on the stored format reads all of it for every token.
    pub weights_bytes: u64,
    /// Keys and values of `context_tokens`.
    pub kv_bytes: u64,
    /// Buffers of a pass over `pass_tokens` and one row of logits.
    pub activation_bytes: u64,
    pub context_tokens: usize,
    pub pass_tokens: usize,
}

impl WorkingMemory {
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes + self.kv_bytes + self.activation_bytes
    }
}

/// Memory for a file of `file_bytes` with `context_tokens` in the cache, whose prompts are processed `pass_tokens` at a
/// time:
///
/// - keys and values: `2 · layers · kv_heads · head_dim` values a token, 2 bytes each;
/// - buffers of a block: `3 · width + qkv + q + 3 · ffn` values a token of the pass and `vocabulary` logits, 4 bytes
///   each (as this crate's own forward pass; runtimes differ by a small factor).
#[must_use]
pub fn working_memory(
    config: &ModelConfig,
    file_bytes: u64,
    context_tokens: usize,
    pass_tokens: usize,
) -> WorkingMemory {
    let kv_values = 2 * config.layers * config.kv_width() * context_tokens;
    let pass_tokens = pass_tokens.min(context_tokens);
    let row = 3 * config.width + config.qkv_width() + config.q_width() + 3 * config.ffn;
    WorkingMemory {
        weights_bytes: file_bytes,
        kv_bytes: kv_values as u64 * KV_BYTES,
        activation_bytes: 4 * (row * pass_tokens + config.vocab) as u64,
        context_tokens,
        pass_tokens,
    }
}
