//! `config.json` of a decoder, checked, and what of it goes into a GGUF file.

use super::{ConvertError, deepseek::DeepSeek};
use crate::gguf::Value;
use crate::model::Arch;
use serde::Deserialize;
use std::{fs, path::Path};

/// Sizes above this are taken for damage.
pub(super) const LARGEST: usize = 1 << 24;

#[derive(Debug, Clone, Deserialize)]
struct Raw {
    model_type: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    vocab_size: usize,
    rms_norm_eps: f32,
    hidden_act: Option<String>,
    rope_theta: Option<f32>,
    rope_scaling: Option<Rope>,
    /// Where newer files keep both of the above.
    rope_parameters: Option<Rope>,
    partial_rotary_factor: Option<f32>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    use_sliding_window: bool,
    quantization_config: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    /// The older name of the same.
    r#type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
}

/// How positions beyond the original context are reached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scaling {
    None,
    /// Positions are divided by this.
    Linear(f32),
    /// Llama 3.1: long waves are stretched by `factor`, short ones kept, with a slope between.
    Llama3 {
        factor: f32,
        low: f32,
        high: f32,
        context: f32,
    },
}

/// Sizes and constants of the model, checked.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HfConfig {
    pub arch: Arch,
    pub layers: usize,
    pub width: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    pub tied: bool,
    pub scaling: Scaling,
    pub deepseek: Option<DeepSeek>,
    context: usize,
    rms_eps: f32,
    rope_base: f32,
}

impl HfConfig {
    /// Reads `config.json` of `folder`.
    pub fn open(folder: &Path, warnings: &mut Vec<String>) -> Result<Self, ConvertError> {
        let path = folder.join("config.json");
        let fail = |what: String| ConvertError::Model { path: path.clone(), what };
        let text = fs::read_to_string(&path).map_err(|e| fail(e.to_string()))?;
        Self::parse(&text, warnings).map_err(fail)
    }

    /// The same for the text of the file.
    pub fn parse(text: &str, warnings: &mut Vec<String>) -> Result<Self, String> {
        let raw: Raw = serde_json::from_str(text).map_err(|e| format!("not the config of a decoder: {e}"))?;
        let arch = match raw.model_type.as_str() {
            "llama" => Arch::Llama,
            "qwen2" => Arch::Qwen2,
            "qwen3" => Arch::Qwen3,
            "deepseek_v2" => Arch::DeepSeek2,
            other => return Err(format!("model_type is `{other}`; known are llama, qwen2, qwen3 and deepseek_v2")),
        };
        if let Some(act) = raw.hidden_act.as_deref().filter(|a| *a != "silu") {
            return Err(format!("hidden_act is `{act}`, only `silu` is supported"));
        }
        if raw.use_sliding_window {
            return Err("sliding-window attention is not supported".into());
        }
        if raw.partial_rotary_factor.is_some_and(|f| f != 1.0) {
            return Err("rotation of a part of each head is not supported".into());
        }
        if raw.quantization_config.is_some() {
            return Err("the weights are quantised already; convert the original model".into());
        }
        let deepseek = (arch == Arch::DeepSeek2).then(|| DeepSeek::parse(text)).transpose()?;
        let (rope_base, scaling) = match &deepseek {
            Some(_) => (raw.rope_theta.unwrap_or(10_000.0), Scaling::None),
            None => rope(&raw, warnings)?,
        };
        let head_dim = match &deepseek {
            Some(d) => d.rope,
            None => raw.head_dim.unwrap_or(raw.hidden_size / raw.num_attention_heads.max(1)),
        };
        let config = Self {
            arch,
            layers: raw.num_hidden_layers,
            width: raw.hidden_size,
            ffn: raw.intermediate_size,
            heads: raw.num_attention_heads,
            kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
            head_dim,
            vocab_size: raw.vocab_size,
            tied: raw.tie_word_embeddings,
            context: raw.max_position_embeddings,
            rms_eps: raw.rms_norm_eps,
            scaling,
            deepseek,
            rope_base,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let sizes = [
            ("num_hidden_layers", self.layers),
            ("hidden_size", self.width),
            ("intermediate_size", self.ffn),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.context),
        ];
        if let Some((name, size)) = sizes.into_iter().find(|(_, size)| *size == 0 || *size > LARGEST) {
            return Err(format!("{name} is {size}"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) || !self.head_dim.is_multiple_of(2) {
            let (heads, kv, dim) = (self.heads, self.kv_heads, self.head_dim);
            return Err(format!("{heads} heads of {dim} over {kv} key heads cannot be"));
        }
        let constants = self.rms_eps > 0.0 && self.rms_eps < 1.0 && self.rope_base > 0.0 && self.rope_base.is_finite();
        if !constants {
            return Err(format!("rms_norm_eps {} or rope_theta {} cannot be", self.rms_eps, self.rope_base));
        }
        Ok(())
    }

    /// Everything but the tokenizer, in the order in which llama.cpp's converter writes it.
    pub fn metadata(&self, folder: &Path, file_type: u32) -> Vec<(String, Value)> {
        let size = |n: usize| Value::U32(n as u32);
        let name = folder.file_name().map_or("model".into(), |n| n.to_string_lossy());
        let mut out: Vec<(&str, Value)> = vec![
            ("general.architecture", self.arch.name().into()),
            ("general.type", "model".into()),
            ("general.name", name.as_ref().into()),
            ("{arch}.block_count", size(self.layers)),
            ("{arch}.context_length", size(self.context)),
            ("{arch}.embedding_length", size(self.width)),
            ("{arch}.feed_forward_length", size(self.ffn)),
            ("{arch}.attention.head_count", size(self.heads)),
            ("{arch}.rope.freq_base", self.rope_base.into()),
            ("{arch}.attention.layer_norm_rms_epsilon", self.rms_eps.into()),
            ("{arch}.vocab_size", size(self.vocab_size)),
        ];
        match &self.deepseek {
            Some(deepseek) => out.extend(deepseek.metadata()),
            None => out.extend([
                ("{arch}.attention.head_count_kv", size(self.kv_heads)),
                ("{arch}.attention.key_length", size(self.head_dim)),
                ("{arch}.attention.value_length", size(self.head_dim)),
                ("{arch}.rope.dimension_count", size(self.head_dim)),
            ]),
        }
        if let Scaling::Linear(factor) = self.scaling {
            out.push(("{arch}.rope.scaling.type", "linear".into()));
            out.push(("{arch}.rope.scaling.factor", factor.into()));
        }
        out.push(("general.file_type", Value::U32(file_type)));
        out.push(("general.quantization_version", Value::U32(2)));
        out.into_iter().map(|(key, value)| (key.replace("{arch}", self.arch.name()), value)).collect()
    }

    /// Divisor of each frequency, `head_dim / 2` values, where it is not 1 throughout: Llama 3.1's rule.
    pub fn rope_factors(&self) -> Option<Vec<f32>> {
        let Scaling::Llama3 { factor, low, high, context } = self.scaling else { return None };
        let (longest, shortest) = (f64::from(context) / f64::from(low), f64::from(context) / f64::from(high));
        let of = |pair: usize| {
            let exponent = 2.0 * pair as f64 / self.head_dim as f64;
            let wave = 2.0 * std::f64::consts::PI * f64::from(self.rope_base).powf(exponent);
            if wave < shortest {
                1.0
            } else if wave > longest {
                f64::from(factor)
            } else {
                let slope = (f64::from(context) / wave - f64::from(low)) / f64::from(high - low);
                1.0 / ((1.0 - slope) / f64::from(factor) + slope)
            }
        };
        Some((0..self.head_dim / 2).map(|pair| of(pair) as f32).collect())
    }
}

/// Base and scaling, from whichever place the file keeps them.
fn rope(raw: &Raw, warnings: &mut Vec<String>) -> Result<(f32, Scaling), String> {
    let rope = raw.rope_parameters.clone().or_else(|| raw.rope_scaling.clone()).unwrap_or_default();
    let base = raw.rope_theta.or(rope.rope_theta).unwrap_or_else(|| {
        warnings.push("`rope_theta` is absent; 10000 is assumed, as transformers does".into());
        10_000.0
    });
    let positive = |name: &str, value: Option<f32>| match value.filter(|v| *v > 0.0 && v.is_finite()) {
        Some(value) => Ok(value),
        None => Err(format!("RoPE scaling without a usable `{name}`")),
    };
    let scaling = match rope.rope_type.as_deref().or(rope.r#type.as_deref()) {
        None | Some("default") => Scaling::None,
        Some("linear") => Scaling::Linear(positive("factor", rope.factor)?),
        Some("llama3") => {
            let (low, high) = (
                positive("low_freq_factor", rope.low_freq_factor)?,
                positive("high_freq_factor", rope.high_freq_factor)?,
            );
            if low >= high {
                return Err(format!("RoPE scaling from {low} to {high}"));
            }
            let context = positive("original_max_position_embeddings", rope.original_max_position_embeddings)?;
            Scaling::Llama3 { factor: positive("factor", rope.factor)?, low, high, context }
        }
        Some(other) => return Err(format!("RoPE scaling `{other}`; known are linear and llama3")),
    };
    Ok((base, scaling))
}
