//! Safetensors files, a whole model folder of one layer, and tokenizers as their authors publish them.

use super::Corpus;
use flywheel_fuzz::join_pieces;
use flywheel_fuzz::text::byte_tokens;
use serde_json::{Value as Json, json};

/// A safetensors file: length of the header, header, data; every value is 1.0 or another small number.
fn weights(of: &[(&str, &[usize], &str)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
    for (name, shape, dtype) in of {
        let size = if *dtype == "F32" { 4 } else { 2 };
        let from = data.len();
        data.extend(std::iter::repeat_n([0x00, 0x3c], shape.iter().product::<usize>() * size / 2).flatten());
        header
            .insert((*name).to_owned(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [from, data.len()] }));
    }
    let header = Json::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

fn bytes(regex: bool) -> Json {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": regex })
}

fn byte_level(pre: &Json) -> Json {
    let vocab: serde_json::Map<String, Json> = byte_tokens()
        .into_iter()
        .chain(["ab".to_owned(), "Ġa".to_owned()])
        .enumerate()
        .map(|(id, token)| (token, json!(id)))
        .collect();
    json!({
        "added_tokens": [{ "id": 258, "content": "<|end|>", "special": true }, { "id": 260, "content": "<tool>" }],
        "pre_tokenizer": pre,
        "model": { "type": "BPE", "vocab": vocab, "merges": ["a b", "Ġ a"] },
    })
}

pub fn tokenizer_json(out: &Corpus) {
    let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    let sequence = |steps: Json| json!({ "type": "Sequence", "pretokenizers": steps });
    let qwen2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let digits = json!({ "type": "Digits", "individual_digits": true });
    let own = r#"{"eos_token":{"content":"<|end|>"},"pad_token":"<tool>","add_bos_token":true,"chat_template":"T"}"#;
    let config = r#"{"bos_token_id":[1,2]}"#;
    let add = |name: &str, json: Json| {
        let text = json.to_string();
        out.add(name, join_pieces([text.as_bytes(), own.as_bytes(), config.as_bytes()]));
    };
    add("gpt2", byte_level(&bytes(true)));
    add("smollm", byte_level(&sequence(json!([digits, bytes(true)]))));
    add("qwen2", byte_level(&sequence(json!([split(qwen2), bytes(false)]))));
    let spm = json!({
        "added_tokens": [{ "id": 0, "content": "<unk>", "special": true }, { "id": 1, "content": "<s>", "special": true }],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ] },
        "post_processor": { "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>" } }] },
        "model": {
            "type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "merges": [["▁", "a"], ["a", "b"]],
            "vocab": { "<unk>": 0, "<s>": 1, "<0x41>": 2, "▁": 3, "a": 4, "b": 5, "ab": 6, "▁a": 7 },
        },
    });
    out.add("spm", join_pieces([spm.to_string().as_bytes()]));
}

pub fn safetensors(out: &Corpus) {
    out.add_with(
        0,
        "types",
        weights(&[("a", &[2, 3], "F32"), ("b", &[4], "F16"), ("c", &[], "BF16"), ("d", &[0, 2], "F32")]),
    );
    let config = json!({
        "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16,
        "vocab_size": 6, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "rope_scaling": { "rope_type": "linear", "factor": 2.0 },
    });
    let tokenizer = json!({
        "pre_tokenizer": bytes(true),
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": ["a b"] },
    });
    let layer = |part: &str| format!("model.layers.0.{part}.weight");
    let names = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm"];
    let more = ["self_attn.k_norm", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"];
    let names: Vec<String> = names.iter().chain(&more).chain(&["mlp.down_proj"]).map(|n| layer(n)).collect();
    let shapes: [&[usize]; 11] =
        [&[8], &[8, 8], &[4, 8], &[4, 8], &[4], &[4], &[8, 8], &[8], &[8, 8], &[8, 8], &[8, 8]];
    let mut all: Vec<(&str, &[usize], &str)> = names.iter().zip(shapes).map(|(n, s)| (n.as_str(), s, "BF16")).collect();
    all.push(("model.embed_tokens.weight", &[6, 8], "F16"));
    all.push(("model.norm.weight", &[8], "F32"));
    let (config, tokenizer) = (config.to_string(), tokenizer.to_string());
    out.add_with(1, "folder", join_pieces([config.as_bytes(), tokenizer.as_bytes(), &weights(&all)]));
    let (config, names) = deepseek();
    let all: Vec<(&str, &[usize], &str)> = names.iter().map(|(n, s)| (n.as_str(), s.as_slice(), "BF16")).collect();
    out.add_with(1, "deepseek", join_pieces([config.to_string().as_bytes(), tokenizer.as_bytes(), &weights(&all)]));
}

/// DeepSeek-V2 of one layer with two experts, one of them used: configuration, names and shapes.
fn deepseek() -> (Json, Vec<(String, Vec<usize>)>) {
    let config = json!({
        "model_type": "deepseek_v2", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16, "vocab_size": 6,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "q_lora_rank": 4, "kv_lora_rank": 4,
        "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2, "n_routed_experts": 2, "n_shared_experts": 1,
        "num_experts_per_tok": 1, "moe_intermediate_size": 4, "scoring_func": "softmax", "topk_method": "greedy",
        "rope_scaling": { "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4, "mscale": 0.707,
            "mscale_all_dim": 0.707 },
    });
    let mut names: Vec<(String, Vec<usize>)> =
        vec![("model.embed_tokens.weight".into(), vec![6, 8]), ("model.norm.weight".into(), vec![8])];
    let mut add = |part: &str, shape: &[usize]| names.push((format!("model.layers.0.{part}.weight"), shape.to_vec()));
    for (part, shape) in [
        ("input_layernorm", &[8][..]),
        ("self_attn.q_a_proj", &[4, 8]),
        ("self_attn.q_a_layernorm", &[4]),
        ("self_attn.q_b_proj", &[8, 4]),
        ("self_attn.kv_a_proj_with_mqa", &[6, 8]),
        ("self_attn.kv_a_layernorm", &[4]),
        ("self_attn.kv_b_proj", &[8, 4]),
        ("self_attn.o_proj", &[8, 4]),
        ("post_attention_layernorm", &[8]),
        ("mlp.gate", &[2, 8]),
    ] {
        add(part, shape);
    }
    for owner in ["experts.0", "experts.1", "shared_experts"] {
        for (part, shape) in [("gate", [4, 8]), ("up", [4, 8]), ("down", [8, 4])] {
            add(&format!("mlp.{owner}.{part}_proj"), &shape);
        }
    }
    (config, names)
}
