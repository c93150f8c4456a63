//! Small model files: metadata, tensors of several types, an adapter, a whole decoder.

use super::Corpus;
use flywheel_fuzz::text::{Metadata, bpe, spm};

pub fn gguf(out: &Corpus) {
    out.add("empty", padded(Metadata::default().head(0)));
    let mut scalars = Metadata::default();
    scalars.string("general.name", "tiny");
    scalars.u32("general.alignment", 64);
    scalars.f32("x.f32", 1.5);
    scalars.i32s("x.i32", &[1, 2, 3]);
    scalars.strings("x.strings", &["a".into(), "b".into()]);
    out.add("metadata", padded(scalars.head(0)));
    out.add("spm", padded(spm().head(0)));
    out.add("bpe", padded(bpe("qwen2").head(0)));
    out.add(
        "tensors",
        tensors(
            Metadata::default(),
            &[("a", &[32, 2], 2), ("b", &[256], 14), ("c", &[4, 1, 1, 2], 0), ("d", &[3], 30)],
        ),
    );
    out.add("adapter", adapter());
    out.add("model", model());
    out.add("deepseek", deepseek());
}

/// Importance of two tensors as GGUF, and as `imatrix.dat` with and without the newer end.
pub fn imatrix(out: &Corpus) {
    let mut m = Metadata::default();
    m.string("general.type", "imatrix");
    m.strings("imatrix.datasets", &["wiki".into()]);
    m.u32("imatrix.chunk_count", 17);
    m.u32("imatrix.chunk_size", 512);
    let of: &[(&str, &[u64], u32)] = &[
        ("blk.0.attn_q.weight.in_sum2", &[8, 1], 0),
        ("blk.0.attn_q.weight.counts", &[1, 1], 0),
        ("x.in_sum2", &[4, 2], 0),
        ("x.counts", &[1, 2], 0),
    ];
    out.add("gguf", tensors(m, of));
    let mut old = 2i32.to_le_bytes().to_vec();
    for (name, calls, values) in [("blk.0.attn_q.weight", 4i32, &[8.0f32, 2.0][..]), ("x", 1, &[3.0])] {
        old.extend((name.len() as i32).to_le_bytes());
        old.extend(name.as_bytes());
        old.extend(calls.to_le_bytes());
        old.extend((values.len() as i32).to_le_bytes());
        values.iter().for_each(|v| old.extend(v.to_le_bytes()));
    }
    out.add("dat_bare", &old);
    old.extend(17i32.to_le_bytes());
    old.extend(4i32.to_le_bytes());
    old.extend(b"wiki");
    out.add("dat", old);
}

fn padded(mut file: Vec<u8>) -> Vec<u8> {
    file.resize(file.len().next_multiple_of(32), 0);
    file
}

/// Bytes of a tensor: (weights per block, bytes per block) by type id.
fn data_len(dims: &[u64], ty: u32) -> usize {
    let (weights, bytes) = match ty {
        0 => (1, 4),
        1 | 30 => (1, 2),
        2 => (32, 18),
        8 => (32, 34),
        14 => (256, 210),
        other => unreachable!("type {other} is not used here"),
    };
    dims.iter().product::<u64>() as usize / weights * bytes
}

/// A file with these tensors (name, shape, type id), filled with a pattern of small values.
fn tensors(metadata: Metadata, of: &[(&str, &[u64], u32)]) -> Vec<u8> {
    let mut file = metadata.head(of.len() as u64);
    let mut offset = 0usize;
    for (name, dims, ty) in of {
        file.extend_from_slice(&(name.len() as u64).to_le_bytes());
        file.extend_from_slice(name.as_bytes());
        file.extend_from_slice(&(dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| file.extend_from_slice(&d.to_le_bytes()));
        file.extend_from_slice(&ty.to_le_bytes());
        file.extend_from_slice(&(offset as u64).to_le_bytes());
        offset = (offset + data_len(dims, *ty)).next_multiple_of(32);
    }
    let mut file = padded(file);
    for (_, dims, ty) in of {
        // 0x3c00 is 1.0 as f16 and a small number as f32: finite under every type
        file.extend(
            std::iter::repeat_n([0x00, 0x3c], data_len(dims, *ty).div_ceil(2)).flatten().take(data_len(dims, *ty)),
        );
        file = padded(file);
    }
    file
}

fn adapter() -> Vec<u8> {
    let mut m = Metadata::default();
    m.string("general.type", "adapter");
    m.string("adapter.type", "lora");
    m.string("general.architecture", "llama");
    m.f32("adapter.lora.alpha", 16.0);
    tensors(m, &[("blk.0.attn_q.weight.lora_a", &[8, 2], 0), ("blk.0.attn_q.weight.lora_b", &[2, 8], 0)])
}

/// A decoder of one layer with 32 values and 8 tokens.
fn model() -> Vec<u8> {
    let mut m = Metadata::default();
    m.string("general.architecture", "llama");
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 16),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ] {
        m.u32(&format!("llama.{key}"), value);
    }
    m.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    m.f32("llama.rope.freq_base", 10_000.0);
    m.strings("tokenizer.ggml.tokens", &["a", "b", "c", "d", "e", "f", "g", "h"].map(str::to_owned));
    tensors(
        m,
        &[
            ("token_embd.weight", &[32, 8], 8),
            ("output_norm.weight", &[32], 0),
            ("blk.0.attn_norm.weight", &[32], 0),
            ("blk.0.attn_q.weight", &[32, 32], 8),
            ("blk.0.attn_k.weight", &[32, 16], 8),
            ("blk.0.attn_v.weight", &[32, 16], 8),
            ("blk.0.attn_output.weight", &[32, 32], 8),
            ("blk.0.ffn_norm.weight", &[32], 0),
            ("blk.0.ffn_gate.weight", &[32, 32], 2),
            ("blk.0.ffn_up.weight", &[32, 32], 2),
            ("blk.0.ffn_down.weight", &[32, 32], 2),
        ],
    )
}

/// DeepSeek-V2 of one layer with two experts.
fn deepseek() -> Vec<u8> {
    let mut m = Metadata::default();
    m.string("general.architecture", "deepseek2");
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 16),
        ("embedding_length", 8),
        ("feed_forward_length", 8),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 6),
        ("attention.value_length", 4),
        ("attention.key_length_mla", 4),
        ("attention.value_length_mla", 2),
        ("attention.q_lora_rank", 4),
        ("attention.kv_lora_rank", 4),
        ("rope.dimension_count", 2),
        ("leading_dense_block_count", 0),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", 4),
        ("expert_gating_func", 2),
        ("rope.scaling.original_context_length", 4),
    ] {
        m.u32(&format!("deepseek2.{key}"), value);
    }
    m.f32("deepseek2.attention.layer_norm_rms_epsilon", 1e-5);
    m.string("deepseek2.rope.scaling.type", "yarn");
    m.f32("deepseek2.rope.scaling.factor", 40.0);
    m.f32("deepseek2.rope.scaling.yarn_log_multiplier", 0.0707);
    m.strings("tokenizer.ggml.tokens", &["a", "b", "c", "d"].map(str::to_owned));
    let of: &[(&str, &[u64], u32)] = &[
        ("token_embd.weight", &[8, 4], 0),
        ("output_norm.weight", &[8], 0),
        ("blk.0.attn_norm.weight", &[8], 0),
        ("blk.0.attn_q_a.weight", &[8, 4], 0),
        ("blk.0.attn_q_a_norm.weight", &[4], 0),
        ("blk.0.attn_q_b.weight", &[4, 8], 0),
        ("blk.0.attn_kv_a_mqa.weight", &[8, 6], 0),
        ("blk.0.attn_kv_a_norm.weight", &[4], 0),
        ("blk.0.attn_k_b.weight", &[2, 4, 2], 0),
        ("blk.0.attn_v_b.weight", &[4, 2, 2], 0),
        ("blk.0.attn_output.weight", &[4, 8], 0),
        ("blk.0.ffn_norm.weight", &[8], 0),
        ("blk.0.ffn_gate_inp.weight", &[8, 2], 0),
        ("blk.0.exp_probs_b.bias", &[2], 0),
        ("blk.0.ffn_gate_exps.weight", &[8, 4, 2], 0),
        ("blk.0.ffn_up_exps.weight", &[8, 4, 2], 0),
        ("blk.0.ffn_down_exps.weight", &[4, 8, 2], 0),
        ("blk.0.ffn_gate_shexp.weight", &[8, 4], 0),
        ("blk.0.ffn_up_shexp.weight", &[8, 4], 0),
        ("blk.0.ffn_down_shexp.weight", &[4, 8], 0),
    ];
    tensors(m, of)
}
