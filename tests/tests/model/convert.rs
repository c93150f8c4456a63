//! `convert`: a safetensors folder that is written by hand becomes a file that runs.

use super::Place;
use super::tiny::{Tiny, byte_tokens};
use flywheel_inference::gguf::TensorType;
use serde_json::{Map, Value, json};
use std::fs;

/// Published names of the tensors.
fn published(name: &str) -> String {
    let part = |p: &str| match p {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        other => panic!("{other}"),
    };
    match name.split('.').collect::<Vec<_>>()[..] {
        ["token_embd", "weight"] => "model.embed_tokens.weight".into(),
        ["output_norm", "weight"] => "model.norm.weight".into(),
        ["blk", layer, p, "weight"] => format!("model.layers.{layer}.{}.weight", part(p)),
        _ => panic!("{name}"),
    }
}

/// Rows of a head as published models order them: the first of every pair that is rotated together, then the second.
fn halves(values: &[f32], columns: usize) -> Vec<f32> {
    let order = |row: usize| row / 16 * 16 + row % 8 * 2 + row % 16 / 8;
    (0..values.len() / columns).flat_map(|row| values[order(row) * columns..][..columns].to_vec()).collect()
}

/// Length of the head, head, data.
fn safetensors(model: &Tiny) -> Vec<u8> {
    let (mut head, mut data) = (Map::new(), Vec::new());
    for spec in model.specs() {
        let (from, mut values) = (data.len(), model.values(&spec));
        if spec.name.contains("attn_q.") || spec.name.contains("attn_k.") {
            values = halves(&values, spec.dims[0] as usize);
        }
        data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        let shape: Vec<u64> = spec.dims.iter().rev().copied().collect();
        head.insert(
            published(&spec.name),
            json!({ "dtype": "F32", "shape": shape, "data_offsets": [from, data.len()] }),
        );
    }
    let head = Value::Object(head).to_string();
    [&(head.len() as u64).to_le_bytes(), head.as_bytes(), &data].concat()
}

#[test]
fn a_folder_becomes_a_file_that_runs() {
    let model = Tiny::default();
    let place = Place::new(model);
    let folder = place.at("hf");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("model.safetensors"), safetensors(&model)).unwrap();
    let config = json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 259, "tie_word_embeddings": true,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let vocab: Map<String, Value> = byte_tokens().into_iter().enumerate().map(|(i, t)| (t, json!(i))).collect();
    let special = |id: u32, text: &str| json!({ "id": id, "content": text, "special": true });
    let tokenizer = json!({
        "added_tokens": [special(256, "<|im_start|>"), special(257, "<|im_end|>"), special(258, "<|endoftext|>")],
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    for (name, ty) in [("f16", TensorType::F16), ("bf16", TensorType::BF16), ("f32", TensorType::F32)] {
        let made = place.ok(&format!("convert hf {name}.gguf --type {name} --json")).json();
        assert_eq!((made["architecture"].clone(), made["tensors"].clone()), (json!("llama"), json!(20)));
        let file = place.open(&format!("{name}.gguf"));
        assert_eq!(file.tensor("blk.1.attn_q.weight").unwrap().ty, ty);
    }
    let (made, base) = (place.open("f16.gguf"), place.open("base.gguf"));
    for t in base.tensors() {
        assert_eq!(made.bytes(made.tensor(&t.name).unwrap()), base.bytes(t), "{}", t.name);
    }
    let seen = place.ok("eval f16.gguf --base base.gguf --text text.txt --window 128 --max-tokens 1024 --json").json();
    assert_eq!(seen["divergence"]["kld"], 0.0, "the same tokens, the same predictions");
    fs::write(folder.join("config.json"), config.to_string().replace("\"llama\"", "\"gemma\"")).unwrap();
    place.fails(1, "convert hf x.gguf", "gemma");
    place.fails(1, "convert absent x.gguf", "absent");
    assert!(!place.at("x.gguf").exists());
}
