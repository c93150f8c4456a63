//! Small random DeepSeek-V2 models: what stock computes, what they become in quantisation, and what is refused.

use super::{compare, windows};
use crate::calibrate::calibrate;
use crate::gguf::{self, Gguf, TensorData, TensorSpec, TensorType, Value};
use crate::model::tests::noise;
use crate::model::{Decoder, Storage};
use crate::quantize::{Imatrix, Profile, QuantizeError, QuantizeOptions, TuneOptions, quantize, tune};
use crate::train::{LoraConfig, Sample, TrainConfig, Trainer};
use std::{ops::ControlFlow, path::Path};

/// What a random model looks like.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Stock takes 27 layers for the model without a latent of the queries, others for the one with it.
    pub layers: u64,
    pub q_rank: Option<u64>,
    /// Keys and values of all heads in one tensor, as files before April 2025.
    pub old: bool,
    pub yarn: bool,
    pub normalize: bool,
    pub sigmoid: bool,
    pub experts: u64,
}

pub(super) const FULL: Shape =
    Shape { layers: 3, q_rank: Some(32), old: false, yarn: true, normalize: true, sigmoid: false, experts: 6 };

const WIDTH: u64 = 64;
const HEADS: u64 = 4;
/// Values of a head without and with rotation, of a value head, and of the latent.
const NOPE: u64 = 16;
const ROPE: u64 = 8;
const VALUE: u64 = 24;
const RANK: u64 = 32;
pub(super) const VOCAB: u64 = 96;
const FFN: u64 = 96;
const EXPERT: u64 = 32;

fn metadata(s: &Shape) -> Vec<(String, Value)> {
    let cached = ROPE + RANK;
    let key = NOPE + ROPE;
    let mut sizes = vec![
        ("block_count", s.layers),
        ("context_length", 4096),
        ("embedding_length", WIDTH),
        ("feed_forward_length", FFN),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", if s.old { HEADS } else { 1 }),
        ("attention.key_length", if s.old { key } else { cached }),
        ("attention.value_length", if s.old { VALUE } else { RANK }),
        ("attention.kv_lora_rank", RANK),
        ("rope.dimension_count", ROPE),
        ("vocab_size", VOCAB),
        ("leading_dense_block_count", 1),
        ("expert_count", s.experts),
        ("expert_used_count", 2),
        ("expert_shared_count", 2),
        ("expert_feed_forward_length", EXPERT),
        ("expert_gating_func", if s.sigmoid { 2 } else { 1 }),
    ];
    if !s.old {
        sizes.extend([("attention.key_length_mla", key), ("attention.value_length_mla", VALUE)]);
    }
    sizes.extend(s.q_rank.map(|rank| ("attention.q_lora_rank", rank)));
    let mut out: Vec<(String, Value)> = vec![("general.architecture".into(), "deepseek2".into())];
    out.extend(sizes.into_iter().map(|(k, v)| (format!("deepseek2.{k}"), Value::U32(v as u32))));
    let mut more = vec![
        ("attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
        ("rope.freq_base", Value::F32(10_000.0)),
        ("expert_weights_scale", Value::F32(1.5)),
        ("expert_weights_norm", Value::Bool(s.normalize)),
    ];
    if s.yarn {
        more.extend([
            ("rope.scaling.type", "yarn".into()),
            ("rope.scaling.factor", Value::F32(40.0)),
            ("rope.scaling.original_context_length", Value::U32(64)),
            ("rope.scaling.yarn_log_multiplier", Value::F32(0.0707)),
        ]);
    }
    out.extend(more.into_iter().map(|(k, v)| (format!("deepseek2.{k}"), v)));
    out.push(("tokenizer.ggml.model".into(), "none".into()));
    out
}

/// Names and shapes of all tensors.
fn shapes(s: &Shape) -> Vec<(String, Vec<u64>)> {
    let mut out = vec![
        ("token_embd.weight".to_owned(), vec![WIDTH, VOCAB]),
        ("output_norm.weight".to_owned(), vec![WIDTH]),
        ("output.weight".to_owned(), vec![WIDTH, VOCAB]),
    ];
    for i in 0..s.layers {
        let mut parts: Vec<(&str, Vec<u64>)> = vec![("attn_norm", vec![WIDTH])];
        match s.q_rank {
            None => parts.push(("attn_q", vec![WIDTH, HEADS * (NOPE + ROPE)])),
            Some(rank) => parts.extend([
                ("attn_q_a", vec![WIDTH, rank]),
                ("attn_q_a_norm", vec![rank]),
                ("attn_q_b", vec![rank, HEADS * (NOPE + ROPE)]),
            ]),
        }
        parts.extend([("attn_kv_a_mqa", vec![WIDTH, RANK + ROPE]), ("attn_kv_a_norm", vec![RANK])]);
        if s.old {
            parts.push(("attn_kv_b", vec![RANK, HEADS * (NOPE + VALUE)]));
        } else {
            parts.extend([("attn_k_b", vec![NOPE, RANK, HEADS]), ("attn_v_b", vec![RANK, VALUE, HEADS])]);
        }
        parts.extend([("attn_output", vec![HEADS * VALUE, WIDTH]), ("ffn_norm", vec![WIDTH])]);
        if i == 0 {
            parts.extend([
                ("ffn_gate", vec![WIDTH, FFN]),
                ("ffn_up", vec![WIDTH, FFN]),
                ("ffn_down", vec![FFN, WIDTH]),
            ]);
        } else {
            let shared = 2 * EXPERT;
            parts.extend([
                ("ffn_gate_inp", vec![WIDTH, s.experts]),
                ("ffn_gate_exps", vec![WIDTH, EXPERT, s.experts]),
                ("ffn_up_exps", vec![WIDTH, EXPERT, s.experts]),
                ("ffn_down_exps", vec![EXPERT, WIDTH, s.experts]),
                ("ffn_gate_shexp", vec![WIDTH, shared]),
                ("ffn_up_shexp", vec![WIDTH, shared]),
                ("ffn_down_shexp", vec![shared, WIDTH]),
            ]);
        }
        out.extend(parts.into_iter().map(|(part, dims)| (format!("blk.{i}.{part}.weight"), dims)));
        if s.sigmoid && i > 0 {
            out.push((format!("blk.{i}.exp_probs_b.bias"), vec![s.experts]));
        }
    }
    out
}

/// Writes a random model with matrices of type `ty`.
pub(super) fn made(s: &Shape, ty: TensorType, path: &Path) -> Gguf {
    let tensors = shapes(s).into_iter().enumerate().map(|(seed, (name, dims))| {
        let n = dims.iter().product::<u64>() as usize;
        let values = if name.contains("norm") {
            noise(n, seed as u64, 0.3).iter().map(|v| 1.0 + v).collect()
        } else {
            let inputs = if dims.len() > 1 { dims[0] as f32 } else { 16.0 };
            // what is added to the residual stream gets smaller with depth: a router that stands on the edge between two
            // experts makes a jump of a rounding error
            let deep = (s.layers as f32 / 3.0).sqrt();
            let scale = if name.contains("gate_inp") {
                4.0
            } else if name.contains("attn_output") || name.contains("down") {
                1.6 / deep
            } else {
                1.6
            };
            noise(n, seed as u64, scale / inputs.sqrt())
        };
        let float = dims.len() == 1 || name.contains("gate_inp");
        let ty = if float { TensorType::F32 } else { ty };
        let bytes = crate::codec::quantize(ty, &values, dims[0] as usize, None).unwrap();
        (TensorSpec { name, dims, ty }, TensorData::Bytes(bytes.into()))
    });
    gguf::write(path, &metadata(s), tensors).unwrap();
    Gguf::open(path).unwrap()
}

pub(super) fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * i * 5 + i * 7 + 3) % VOCAB as u32).collect()
}

#[test]
fn logits_are_those_of_stock() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deepseek2.gguf");
    let plain = Shape { yarn: false, normalize: false, ..FULL };
    // stock rounds activations to half precision before it multiplies them with F16: a router on the edge between two
    // experts then jumps, and 26 routers in a row do so at every tenth token. With all experts in use none can.
    let both = [TensorType::F32, TensorType::F16].as_slice();
    let lite = Shape { layers: 27, q_rank: None, ..FULL };
    for (name, shape, types) in [
        ("plain", plain, both),
        ("old heads", Shape { old: true, ..plain }, both),
        ("yarn, weights normed", FULL, both),
        ("sigmoid with a bias", Shape { sigmoid: true, ..FULL }, both),
        ("lite", lite, &both[..1]),
        ("lite, all experts", Shape { experts: 2, ..lite }, both),
    ] {
        for ty in types {
            let file = made(&shape, *ty, &path);
            let ours = Decoder::load_with(&file, Storage::F32).unwrap();
            let Some(d) = compare(&path, &ours, &windows(&tokens(1200), 300, 800)) else { return };
            println!("{name} {ty}: {d:?}");
            assert!(d.positions >= 800 && d.kld < 1e-3 && d.top1 >= 0.98, "{name} {ty}: {d:?}");
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_in_pieces_and_both_forms_of_the_heads_agree() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deepseek2.gguf");
    let model = Decoder::load(&made(&FULL, TensorType::F32, &path)).unwrap();
    let text = tokens(40);
    let rows = |model: &Decoder, from: usize| {
        let mut out = Vec::new();
        let mut see = |_: usize, row: &[f32]| {
            out.extend_from_slice(row);
            Ok(())
        };
        model.visit_logits(&text, from..text.len(), &mut see).unwrap();
        out
    };
    let options = crate::model::GenerateOptions { max_new_tokens: 9, max_batch: 3, ..Default::default() };
    let prompts = vec![text.clone(), text[..7].to_vec(), text[..23].to_vec()];
    let together = model.generate_batch(&prompts, &options).unwrap();
    for (prompt, want) in prompts.iter().zip(&together) {
        assert_eq!(&model.generate_batch(std::slice::from_ref(prompt), &options).unwrap()[0], want);
    }
    assert!(rows(&model, 0).iter().all(|v| v.is_finite()));
    assert!(model.size_bytes() > 100_000);
}

#[test]
fn experts_without_calibration_data_are_quantised_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deepseek2.gguf");
    let base = made(&Shape { experts: 24, ..FULL }, TensorType::F32, &path);
    let calibration = calibrate(&base, &[tokens(4)], &mut |_, _| ControlFlow::Continue(())).unwrap();
    let imatrix = calibration.imatrix(vec!["test".into()]).unwrap();
    let down = "blk.1.ffn_down_exps.weight";
    let unseen = imatrix.unseen(down);
    // four tokens reach at most eight of 24 experts
    assert!((16..24).contains(&unseen), "{unseen}");
    assert_eq!(imatrix.get(down).unwrap().len(), 24 * EXPERT as usize);
    for name in ["blk.0.ffn_down.weight", "blk.1.attn_q_a.weight", "blk.1.attn_k_b.weight", "blk.2.ffn_up_shexp.weight"]
    {
        assert!(imatrix.get(name).is_some(), "{name}");
    }
    let kept = folder.path().join("imatrix.gguf");
    imatrix.write(&kept).unwrap();
    assert_eq!(Imatrix::read(&kept).unwrap(), imatrix);

    let out = folder.path().join("q.gguf");
    let options =
        QuantizeOptions { imatrix: Some(imatrix), fill_zero_importance: true, ..QuantizeOptions::new(Profile::Q4_0) };
    let report = quantize(&base, &out, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let file = Gguf::open(&out).unwrap();
    let quantized = report.tensors.iter().find(|t| t.row.name == down).unwrap();
    assert!(quantized.weighted && quantized.filled_channels >= unseen * EXPERT as usize, "{quantized:?}");
    assert_eq!(file.tensor(down).unwrap().ty, TensorType::Q4_0);
    assert!(report.tensors.iter().all(|t| t.relative_error.is_finite() && t.relative_error < 0.2));
    // the same file in stock: nothing is missing or broken
    let ours = Decoder::load_with(&file, Storage::F32).unwrap();
    let Some(d) = compare(&out, &ours, &windows(&tokens(256), 64, 150)) else { return };
    assert!(d.kld < 2e-2 && d.top1 > 0.9, "{d:?}");
}

#[test]
fn what_needs_seven_plain_matrices_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deepseek2.gguf");
    let base = made(&FULL, TensorType::F32, &path);
    let model = Decoder::load(&base).unwrap();
    let sample = Sample::new(tokens(12), 4);
    let refused = Trainer::new(&model, LoraConfig::default(), TrainConfig::default(), vec![sample]);
    let text = refused.err().unwrap().to_string();
    assert!(text.contains("training of architecture `deepseek2`"), "{text}");
    let options = TuneOptions::new(crate::quantize::Goal::Budget(1 << 30));
    let refused = tune(&base, &path.with_extension("out"), &[tokens(12)], &options, &mut |_| ControlFlow::Continue(()));
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("tuning of architecture `deepseek2`"), "{text}");
    assert!(matches!(
        quantize(&base, &path.with_extension("q"), &QuantizeOptions::new(Profile::Q4KM), &mut |_| ControlFlow::Break(
            ()
        )),
        Err(QuantizeError::Cancelled)
    ));
    let mut broken = metadata(&FULL);
    broken.push(("deepseek2.expert_group_count".into(), 4u32.into()));
    let grouped = path.with_extension("grouped");
    gguf::write(&grouped, &broken, base.contents()).unwrap();
    let text = Decoder::load(&Gguf::open(&grouped).unwrap()).unwrap_err().to_string();
    assert!(text.contains("4 groups of experts"), "{text}");
}
