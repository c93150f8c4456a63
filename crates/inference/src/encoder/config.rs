//! The JSON files of a sentence-transformers folder.

use super::EncoderError;
use serde::{Deserialize, de::DeserializeOwned};
use std::{fs, path::Path};

/// Shape of the encoder, checked.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Config {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub max_position_embeddings: usize,
    pub type_vocab_size: usize,
    pub vocab_size: usize,
    pub layer_norm_eps: f32,
    model_type: String,
    hidden_act: String,
    position_embedding_type: Option<String>,
    /// From `sentence_bert_config.json`; zero while reading `config.json`.
    #[serde(skip)]
    pub max_tokens: usize,
}

#[derive(Deserialize)]
struct SentenceConfig {
    max_seq_length: Option<usize>,
}

#[derive(Deserialize)]
struct Pooling {
    #[serde(default)]
    pooling_mode_mean_tokens: bool,
    #[serde(default)]
    pooling_mode_cls_token: bool,
    #[serde(default)]
    pooling_mode_max_tokens: bool,
    #[serde(default)]
    pooling_mode_mean_sqrt_len_tokens: bool,
}

/// Larger than any encoder of this kind; keeps a broken file from asking for absurd memory.
const LARGEST: usize = 1 << 20;

impl Config {
    pub fn open(folder: &Path) -> Result<Self, EncoderError> {
        let path = folder.join("config.json");
        let mut config: Self = read(&path)?;
        config.check().map_err(|what| EncoderError::file(&path, what))?;
        let sentence = folder.join("sentence_bert_config.json");
        let wanted = if sentence.exists() { read::<SentenceConfig>(&sentence)?.max_seq_length } else { None };
        config.max_tokens = wanted.unwrap_or(usize::MAX).min(config.max_position_embeddings);
        let pooling = folder.join("1_Pooling").join("config.json");
        if pooling.exists() {
            let p: Pooling = read(&pooling)?;
            let other = p.pooling_mode_cls_token || p.pooling_mode_max_tokens || p.pooling_mode_mean_sqrt_len_tokens;
            if !p.pooling_mode_mean_tokens || other {
                return Err(EncoderError::file(&pooling, "only mean pooling is supported"));
            }
        }
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        if self.model_type != "bert" {
            return Err(format!("model_type is `{}`, only `bert` is supported", self.model_type));
        }
        if self.hidden_act != "gelu" {
            return Err(format!("hidden_act is `{}`, only `gelu` is supported", self.hidden_act));
        }
        if self.position_embedding_type.as_deref().unwrap_or("absolute") != "absolute" {
            return Err("only absolute position embeddings are supported".into());
        }
        let sizes = [
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.max_position_embeddings,
            self.type_vocab_size,
            self.vocab_size,
        ];
        if sizes.iter().any(|s| *s == 0 || *s > LARGEST) || self.max_position_embeddings < 2 {
            return Err("a size is zero or absurdly large".into());
        }
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(format!(
                "hidden_size {} is not a multiple of {} heads",
                self.hidden_size, self.num_attention_heads
            ));
        }
        if !(self.layer_norm_eps > 0.0 && self.layer_norm_eps < 1.0) {
            return Err(format!("layer_norm_eps is {}", self.layer_norm_eps));
        }
        Ok(())
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, EncoderError> {
    let text = fs::read_to_string(path).map_err(|e| EncoderError::file(path, e))?;
    serde_json::from_str(&text).map_err(|e| EncoderError::file(path, e))
}
