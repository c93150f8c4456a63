//! What the small model is made of. It is fixed before quantisation is tuned on the model, and never changed for its sake.

use flywheel_inference::model::{Arch, ModelConfig, RopeConfig};
use flywheel_inference::train::{Schedule, TrainConfig};

/// A text that the model learns.
pub struct Text {
    pub name: &'static str,
    /// Below the data folder.
    pub file: &'static str,
    pub sha256: &'static str,
}

/// English encyclopedia (WikiText-2 raw, test part), plays, and arithmetic word problems with answers (GSM8K).
pub const TEXTS: [Text; 3] = [
    Text {
        name: "wiki",
        file: "text/wiki.dev.raw",
        sha256: "32d091013e8363abb715449549f821e4d8114b288c494f5515b0517f58ccd9a1",
    },
    Text {
        name: "shakespeare",
        file: "text/tinyshakespeare.txt",
        sha256: "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    },
    Text {
        name: "gsm8k",
        file: "text/gsm8k_test.jsonl",
        sha256: "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    },
];

/// One part in this many at the end of each text is not trained on.
pub const VALIDATION: usize = 10;
/// Pre-tokenizer and size of the vocabulary, which is learned from the training parts.
pub const PRE: &str = "smollm";
pub const VOCABULARY: usize = 2048;
/// Tokens of a sample. Samples are cut from a text one after the other.
pub const WINDOW: usize = 512;
/// Start values.
pub const SEED: u64 = 20_261_201;

/// SHA-256 of the finished file, the same on every x86-64 with FMA, for any number of threads.
pub const RESULT: &str = "44ae5cf7a48614191e5bb3390b09238bfab3db371878fde566fbd97cda1eb438";

/// Every dimension is a multiple of 256, so that every matrix can have a K-quant type.
pub fn model() -> ModelConfig {
    ModelConfig {
        arch: Arch::Llama,
        layers: 6,
        width: 256,
        heads: 4,
        kv_heads: 4,
        head_dim: 64,
        ffn: 768,
        vocab: VOCABULARY,
        context: WINDOW,
        rms_eps: 1e-5,
        rope: RopeConfig { base: 10_000.0, dims: 64, linear_factor: 1.0, yarn: None },
        latent: None,
        experts: None,
    }
}

/// About 2 million tokens, a little more than two epochs.
pub fn training() -> TrainConfig {
    TrainConfig {
        steps: 2000,
        batch: 2,
        learning_rate: 1.5e-3,
        schedule: Schedule::Cosine,
        warmup_steps: 100,
        weight_decay: 0.1,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        clip_norm: Some(1.0),
        seed: SEED,
        pass_tokens: 2 * WINDOW,
        ..TrainConfig::default()
    }
}
