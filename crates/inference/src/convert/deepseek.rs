//! DeepSeek-V2: what `config.json` says beside the sizes of every decoder, and where its tensors go.

use super::ConvertError;
use super::config::{HfConfig, LARGEST};
use super::tensors::{Origin, Plan};
use crate::gguf::Value;
use serde::Deserialize;

#[derive(Debug, Clone, Deserialize)]
struct Raw {
    q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
    n_routed_experts: usize,
    n_shared_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    #[serde(default)]
    first_k_dense_replace: usize,
    moe_layer_freq: Option<usize>,
    routed_scaling_factor: Option<f32>,
    #[serde(default)]
    norm_topk_prob: bool,
    scoring_func: Option<String>,
    topk_method: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    rope_scaling: Option<RawYarn>,
}

#[derive(Debug, Clone, Deserialize)]
struct RawYarn {
    r#type: Option<String>,
    rope_type: Option<String>,
    factor: Option<f32>,
    original_max_position_embeddings: Option<u32>,
    beta_fast: Option<f32>,
    beta_slow: Option<f32>,
    mscale: Option<f32>,
    mscale_all_dim: Option<f32>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Yarn {
    factor: f32,
    context: u32,
    beta: [f32; 2],
    log_weight: f32,
}

/// Sizes of latent attention and experts, checked.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct DeepSeek {
    q_rank: Option<usize>,
    kv_rank: usize,
    nope: usize,
    pub rope: usize,
    value: usize,
    experts: usize,
    shared: usize,
    used: usize,
    expert_ffn: usize,
    dense: usize,
    scale: f32,
    normalize: bool,
    yarn: Option<Yarn>,
}

impl DeepSeek {
    /// Reads the text of `config.json`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let raw: Raw = serde_json::from_str(text).map_err(|e| format!("not the config of DeepSeek-V2: {e}"))?;
        let sizes = [
            ("kv_lora_rank", raw.kv_lora_rank),
            ("q_lora_rank", raw.q_lora_rank.unwrap_or(1)),
            ("qk_nope_head_dim", raw.qk_nope_head_dim),
            ("qk_rope_head_dim", raw.qk_rope_head_dim),
            ("v_head_dim", raw.v_head_dim),
            ("n_routed_experts", raw.n_routed_experts),
            ("n_shared_experts", raw.n_shared_experts),
            ("num_experts_per_tok", raw.num_experts_per_tok),
            ("moe_intermediate_size", raw.moe_intermediate_size),
        ];
        if let Some((name, size)) = sizes.into_iter().find(|(_, size)| *size == 0 || *size > LARGEST) {
            return Err(format!("{name} is {size}"));
        }
        if raw.num_experts_per_tok > raw.n_routed_experts {
            return Err(format!("{} of {} experts a token", raw.num_experts_per_tok, raw.n_routed_experts));
        }
        for (name, value, known) in [
            ("scoring_func", raw.scoring_func.as_deref(), "softmax"),
            ("topk_method", raw.topk_method.as_deref(), "greedy"),
        ] {
            if let Some(other) = value.filter(|v| *v != known) {
                return Err(format!("{name} is `{other}`, only `{known}` is supported"));
            }
        }
        if raw.moe_layer_freq.is_some_and(|n| n != 1) || raw.attention_bias {
            return Err("experts in some of the layers only, or biases of attention, are not supported".into());
        }
        let scale = raw.routed_scaling_factor.unwrap_or(1.0);
        if !(scale.is_finite() && scale > 0.0) {
            return Err(format!("routed_scaling_factor is {scale}"));
        }
        Ok(Self {
            q_rank: raw.q_lora_rank,
            kv_rank: raw.kv_lora_rank,
            nope: raw.qk_nope_head_dim,
            rope: raw.qk_rope_head_dim,
            value: raw.v_head_dim,
            experts: raw.n_routed_experts,
            shared: raw.n_shared_experts,
            used: raw.num_experts_per_tok,
            expert_ffn: raw.moe_intermediate_size,
            dense: raw.first_k_dense_replace,
            scale,
            normalize: raw.norm_topk_prob,
            yarn: raw.rope_scaling.as_ref().map(yarn).transpose()?,
        })
    }

    /// Keys that other architectures do not have, or have in another way; `{arch}` stands for the architecture.
    pub fn metadata(&self) -> Vec<(&'static str, Value)> {
        let size = |n: usize| Value::U32(n as u32);
        let mut out = vec![
            ("{arch}.attention.head_count_kv", size(1)),
            ("{arch}.attention.key_length", size(self.kv_rank + self.rope)),
            ("{arch}.attention.value_length", size(self.kv_rank)),
            ("{arch}.attention.key_length_mla", size(self.nope + self.rope)),
            ("{arch}.attention.value_length_mla", size(self.value)),
            ("{arch}.attention.kv_lora_rank", size(self.kv_rank)),
            ("{arch}.rope.dimension_count", size(self.rope)),
            ("{arch}.leading_dense_block_count", size(self.dense)),
            ("{arch}.expert_count", size(self.experts)),
            ("{arch}.expert_used_count", size(self.used)),
            ("{arch}.expert_shared_count", size(self.shared)),
            ("{arch}.expert_feed_forward_length", size(self.expert_ffn)),
            ("{arch}.expert_weights_scale", self.scale.into()),
            ("{arch}.expert_weights_norm", self.normalize.into()),
            ("{arch}.expert_gating_func", size(1)),
        ];
        if let Some(rank) = self.q_rank {
            out.push(("{arch}.attention.q_lora_rank", size(rank)));
        }
        if let Some(yarn) = &self.yarn {
            out.extend([
                ("{arch}.rope.scaling.type", "yarn".into()),
                ("{arch}.rope.scaling.factor", yarn.factor.into()),
                ("{arch}.rope.scaling.original_context_length", Value::U32(yarn.context)),
                ("{arch}.rope.scaling.yarn_beta_fast", yarn.beta[0].into()),
                ("{arch}.rope.scaling.yarn_beta_slow", yarn.beta[1].into()),
                ("{arch}.rope.scaling.yarn_log_multiplier", (0.1 * yarn.log_weight).into()),
            ]);
        }
        out
    }

    /// The tensors of a block.
    pub fn block(&self, plan: &mut Plan<'_>, c: &HfConfig, layer: usize) -> Result<(), ConvertError> {
        let to = |part: &str| format!("blk.{layer}.{part}.weight");
        let from = |part: &str| format!("model.layers.{layer}.{part}.weight");
        plan.same(&to("attn_norm"), &from("input_layernorm"), &[c.width])?;
        let heads = c.heads * (self.nope + self.rope);
        match self.q_rank {
            None => plan.same(&to("attn_q"), &from("self_attn.q_proj"), &[heads, c.width])?,
            Some(rank) => {
                plan.same(&to("attn_q_a"), &from("self_attn.q_a_proj"), &[rank, c.width])?;
                plan.same(&to("attn_q_a_norm"), &from("self_attn.q_a_layernorm"), &[rank])?;
                plan.same(&to("attn_q_b"), &from("self_attn.q_b_proj"), &[heads, rank])?;
            }
        }
        let latent = self.kv_rank + self.rope;
        plan.same(&to("attn_kv_a_mqa"), &from("self_attn.kv_a_proj_with_mqa"), &[latent, c.width])?;
        plan.same(&to("attn_kv_a_norm"), &from("self_attn.kv_a_layernorm"), &[self.kv_rank])?;
        let both = from("self_attn.kv_b_proj");
        let split = |keys: bool| Origin::Heads { name: both.clone(), keys, nope: self.nope, value: self.value };
        plan.source(&both, &[c.heads * (self.nope + self.value), self.kv_rank])?;
        plan.made(&to("attn_k_b"), &[c.heads, self.kv_rank, self.nope], split(true));
        plan.made(&to("attn_v_b"), &[c.heads, self.value, self.kv_rank], split(false));
        plan.same(&to("attn_output"), &from("self_attn.o_proj"), &[c.width, c.heads * self.value])?;
        plan.same(&to("ffn_norm"), &from("post_attention_layernorm"), &[c.width])?;
        self.feed_forward(plan, c, layer)
    }

    fn feed_forward(&self, plan: &mut Plan<'_>, c: &HfConfig, layer: usize) -> Result<(), ConvertError> {
        let to = |part: &str| format!("blk.{layer}.{part}.weight");
        let from = |part: &str| format!("model.layers.{layer}.mlp.{part}.weight");
        let shapes = |ffn: usize| [("gate", [ffn, c.width]), ("up", [ffn, c.width]), ("down", [c.width, ffn])];
        if layer < self.dense {
            for (part, shape) in shapes(c.ffn) {
                plan.same(&to(&format!("ffn_{part}")), &from(&format!("{part}_proj")), &shape)?;
            }
            return Ok(());
        }
        plan.same(&to("ffn_gate_inp"), &from("gate"), &[self.experts, c.width])?;
        for (part, shape) in shapes(self.expert_ffn) {
            let mut names = Vec::new();
            for expert in 0..self.experts {
                let name = from(&format!("experts.{expert}.{part}_proj"));
                plan.source(&name, &shape)?;
                names.push(name);
            }
            plan.made(&to(&format!("ffn_{part}_exps")), &[self.experts, shape[0], shape[1]], Origin::Stacked(names));
        }
        for (part, shape) in shapes(self.expert_ffn * self.shared) {
            let name = from(&format!("shared_experts.{part}_proj"));
            plan.same(&to(&format!("ffn_{part}_shexp")), &name, &shape)?;
        }
        Ok(())
    }
}

fn yarn(raw: &RawYarn) -> Result<Yarn, String> {
    let kind = raw.rope_type.as_deref().or(raw.r#type.as_deref()).unwrap_or("none");
    if kind != "yarn" {
        return Err(format!("RoPE scaling `{kind}`; DeepSeek-V2 has `yarn`"));
    }
    let (scale, all) = (raw.mscale.unwrap_or(1.0), raw.mscale_all_dim.unwrap_or(0.0));
    if scale != all {
        return Err(format!("mscale {scale} and mscale_all_dim {all}: only equal ones are supported"));
    }
    let (Some(factor), Some(context)) = (raw.factor, raw.original_max_position_embeddings) else {
        return Err("RoPE scaling without `factor` or `original_max_position_embeddings`".into());
    };
    let beta = [raw.beta_fast.unwrap_or(32.0), raw.beta_slow.unwrap_or(1.0)];
    let numbers = [factor, beta[0], beta[1]];
    if numbers.iter().any(|v| !(v.is_finite() && *v > 0.0)) || !all.is_finite() || context == 0 {
        return Err(format!("RoPE scaling {raw:?} cannot be"));
    }
    Ok(Yarn { factor, context, beta, log_weight: all })
}

/// One half of the head matrices of `kv_b_proj`, whose heads are `nope` rows for keys, then `value` rows for values: keys
/// transposed (they are applied to queries), values as they are.
pub(super) fn heads(values: &[f32], rank: usize, keys: bool, nope: usize, value: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact((nope + value) * rank) {
        let (k, v) = head.split_at(nope * rank);
        if keys {
            out.extend((0..rank).flat_map(|r| (0..nope).map(move |n| k[n * rank + r])));
        } else {
            out.extend_from_slice(v);
        }
    }
    out
}
