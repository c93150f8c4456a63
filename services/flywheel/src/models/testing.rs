//! A small random decoder with a tokenizer of bytes, for tests of steps that work on models.

use flywheel_inference::gguf::{self, Array, TensorData, TensorSpec, TensorType, Value};
use std::path::Path;

const WIDTH: u64 = 64;
const FFN: u64 = 128;
/// ASCII from the space on, as byte-level vocabularies write it, and two marks of turns.
const PRINTED: std::ops::Range<u8> = 33..127;

/// Writes a Llama of so many layers with matrices of F16; the vocabulary knows printed ASCII, the space and line breaks.
pub fn write_model(path: &Path, layers: u64) {
    let mut tokens: Vec<String> = PRINTED.map(|b| char::from(b).to_string()).collect();
    tokens.extend(["Ġ", "Ċ", "<|im_start|>", "<|im_end|>"].map(str::to_owned));
    let kinds: Vec<i32> = tokens.iter().map(|t| if t.len() > 3 { 3 } else { 1 }).collect();
    let template = "<|im_start|>user\n…<|im_end|>\n";
    let mut metadata = vec![("general.architecture".to_owned(), Value::from("llama"))];
    for (key, value) in [
        ("block_count", layers),
        ("context_length", 512),
        ("embedding_length", WIDTH),
        ("feed_forward_length", FFN),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ] {
        metadata.push((format!("llama.{key}"), Value::U32(value as u32)));
    }
    metadata.push(("llama.attention.layer_norm_rms_epsilon".into(), 1e-5f32.into()));
    metadata.push(("tokenizer.ggml.model".into(), "gpt2".into()));
    metadata.push(("tokenizer.ggml.pre".into(), "gpt-2".into()));
    metadata.push(("tokenizer.chat_template".into(), template.into()));
    metadata.push(("tokenizer.ggml.merges".into(), Value::Array(Array::String(Vec::new()))));
    let vocabulary = tokens.len() as u64;
    metadata.push(("tokenizer.ggml.tokens".into(), Value::Array(Array::String(tokens))));
    metadata.push(("tokenizer.ggml.token_type".into(), Value::Array(Array::I32(kinds))));
    let mut shapes = vec![("token_embd".to_owned(), vec![WIDTH, vocabulary]), ("output_norm".to_owned(), vec![WIDTH])];
    for i in 0..layers {
        let mut add = |part: &str, dims: &[u64]| shapes.push((format!("blk.{i}.{part}"), dims.to_vec()));
        add("attn_norm", &[WIDTH]);
        add("ffn_norm", &[WIDTH]);
        for (part, rows) in [("attn_q", WIDTH), ("attn_k", WIDTH / 2), ("attn_v", WIDTH / 2), ("attn_output", WIDTH)] {
            add(part, &[WIDTH, rows]);
        }
        for (part, dims) in [("ffn_gate", [WIDTH, FFN]), ("ffn_up", [WIDTH, FFN]), ("ffn_down", [FFN, WIDTH])] {
            add(part, &dims);
        }
    }
    let mut state = 1u64;
    let mut draw = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let tensors: Vec<_> = shapes
        .into_iter()
        .map(|(name, dims)| {
            let n = dims.iter().product::<u64>();
            let (ty, values): (_, Vec<f32>) = match dims.len() {
                1 => (TensorType::F32, (0..n).map(|_| 1.0 + 0.2 * draw()).collect()),
                _ => (TensorType::F16, (0..n).map(|_| 0.25 * draw()).collect()),
            };
            let bytes = flywheel_inference::codec::quantize(ty, &values, dims[0] as usize, None).unwrap();
            (TensorSpec { name: format!("{name}.weight"), dims, ty }, TensorData::Bytes(bytes.into()))
        })
        .collect();
    gguf::write(path, &metadata, tensors).unwrap();
}
