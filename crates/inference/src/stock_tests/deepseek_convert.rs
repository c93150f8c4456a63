//! A DeepSeek-V2 folder in the layout of its authors, written from a random model by an independent table, and converted.

use super::deepseek::{FULL, Shape, VOCAB, made, tokens};
use super::{compare, windows};
use crate::convert::folders::{self, Torch};
use crate::convert::{FloatType, convert};
use crate::gguf::{Gguf, TensorType};
use crate::model::{Decoder, Storage};
use serde_json::{Value as Json, json};
use std::{ops::ControlFlow, path::Path};

fn values(file: &Gguf, name: &str) -> Vec<f32> {
    file.dequantize(file.tensor(name).unwrap()).unwrap()
}

/// The tensors of block `i` under the names of the published models.
fn block(file: &Gguf, i: usize, out: &mut Vec<Torch>) {
    let mut put = |name: String, shape: Vec<usize>, values: &[f32]| {
        out.push(Torch::f32(format!("model.layers.{i}.{name}.weight"), shape, values));
    };
    let get = |part: &str| {
        (values(file, &format!("blk.{i}.{part}.weight")), &file.tensor(&format!("blk.{i}.{part}.weight")).unwrap().dims)
    };
    for (part, name) in [
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_q_a", "self_attn.q_a_proj"),
        ("attn_q_a_norm", "self_attn.q_a_layernorm"),
        ("attn_q_b", "self_attn.q_b_proj"),
        ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
        ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
        ("attn_kv_b", "self_attn.kv_b_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("ffn_gate_inp", "mlp.gate"),
        ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
        ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ] {
        if file.find(&format!("blk.{i}.{part}.weight")).is_some() {
            let (v, dims) = get(part);
            put(name.into(), dims.iter().rev().map(|d| *d as usize).collect(), &v);
        }
    }
    for part in ["gate", "up", "down"] {
        if file.find(&format!("blk.{i}.ffn_{part}_exps.weight")).is_some() {
            let (v, dims) = get(&format!("ffn_{part}_exps"));
            let (cols, rows) = (dims[0] as usize, dims[1] as usize);
            for (e, v) in v.chunks(cols * rows).enumerate() {
                put(format!("mlp.experts.{e}.{part}_proj"), vec![rows, cols], v);
            }
        }
    }
}

fn config(s: &Shape) -> Json {
    let yarn = json!({ "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707 });
    json!({
        "model_type": "deepseek_v2", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": s.layers, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 4096, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "q_lora_rank": s.q_rank, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
        "n_routed_experts": s.experts, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": s.normalize,
        "scoring_func": "softmax", "topk_method": "greedy", "rope_scaling": if s.yarn { yarn } else { Json::Null },
    })
}

fn write(folder: &Path, file: &Gguf, config: &Json) {
    let mut tensors = Vec::new();
    for (from, to) in [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")] {
        let name = format!("{from}.weight");
        let shape = file.tensor(&name).unwrap().dims.iter().rev().map(|d| *d as usize).collect();
        tensors.push(Torch::f32(format!("{to}.weight"), shape, &values(file, &name)));
    }
    (0..file.u32("deepseek2.block_count").unwrap() as usize).for_each(|i| block(file, i, &mut tensors));
    folders::write(folder, config, &folders::tokenizer_json(), &tensors);
}

#[test]
fn a_converted_folder_is_the_model_it_was_made_from() {
    // published weights have the heads of keys and values in one tensor
    let old = Shape { old: true, ..FULL };
    for shape in [old, Shape { yarn: false, normalize: false, layers: 27, q_rank: None, ..old }] {
        let folder = tempfile::tempdir().unwrap();
        let original = made(&shape, TensorType::F32, &folder.path().join("original.gguf"));
        write(folder.path(), &original, &config(&shape));
        let out = folder.path().join("out.gguf");
        let ours = Decoder::load_with(&folders::converted(folder.path(), &out), Storage::F32).unwrap();
        let before = Decoder::load_with(&original, Storage::F32).unwrap();
        let (got, want) = (folders::logits(&ours, &tokens(90)), folders::logits(&before, &tokens(90)));
        // a tenth of `mscale_all_dim` is rounded in the file
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == want.len() && worst < 1e-3, "{worst}");
        let Some(d) = compare(&out, &ours, &windows(&tokens(300), 100, 200)) else { continue };
        assert!(d.kld < 1e-3 && d.top1 >= 0.98, "{d:?}");
    }
}

#[test]
fn settings_that_are_not_known_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let shape = Shape { old: true, ..FULL };
    let original = made(&shape, TensorType::F32, &folder.path().join("original.gguf"));
    for (key, value, message) in [
        ("topk_method", json!("group_limited_greedy"), "topk_method is `group_limited_greedy`"),
        ("scoring_func", json!("sigmoid"), "scoring_func is `sigmoid`"),
        ("kv_lora_rank", json!(0), "kv_lora_rank is 0"),
        ("num_experts_per_tok", json!(7), "7 of 6 experts"),
        ("n_routed_experts", json!(7), "config.json says [7, 64]"),
        ("rope_scaling", json!({ "type": "linear", "factor": 2.0 }), "RoPE scaling `linear`"),
        ("v_head_dim", json!(23), "config.json says"),
    ] {
        let mut config = config(&shape);
        config[key] = value;
        write(folder.path(), &original, &config);
        let out = folder.path().join("out.gguf");
        let error =
            convert(folder.path(), &out, FloatType::F32, &mut |_| ControlFlow::Continue(())).unwrap_err().to_string();
        assert!(error.contains(message), "{key}: `{error}` does not say `{message}`");
        assert!(!out.exists());
    }
}
