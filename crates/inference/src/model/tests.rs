//! Tests of the decoder on tiny random models: they check invariants and compare with a plain reference.

use super::*;
use crate::gguf::{self, Array, TensorData, TensorSpec, TensorType, Value};
use half::f16;
use std::borrow::Cow;

pub(crate) fn noise(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    use rand::{Rng, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| f16::from_f32((rng.random::<f32>() * 2.0 - 1.0) * scale).to_f32()).collect()
}

/// A whole file of a tiny model: 2 blocks, 4 heads over 2 key heads of 8, vocabulary 50.
pub(crate) fn tiny_file(arch: Arch) -> Gguf {
    tiny_file_with(arch, |_, _| ())
}

type Parts = Vec<(String, Vec<u64>, Vec<f32>)>;

pub(crate) fn tiny_file_with(arch: Arch, change: impl FnOnce(&mut Vec<(String, Value)>, &mut Parts)) -> Gguf {
    let key = |k: &str| format!("{}.{k}", arch.name());
    let mut metadata: Vec<(String, Value)> = vec![
        ("general.architecture".into(), arch.name().into()),
        ("general.file_type".into(), 0u32.into()),
        (key("block_count"), 2u32.into()),
        (key("context_length"), 256u32.into()),
        (key("embedding_length"), 24u32.into()),
        (key("feed_forward_length"), 40u32.into()),
        (key("attention.head_count"), 4u32.into()),
        (key("attention.head_count_kv"), 2u32.into()),
        (key("attention.key_length"), 8u32.into()),
        (key("attention.value_length"), 8u32.into()),
        (key("attention.layer_norm_rms_epsilon"), 1e-5f32.into()),
        (key("rope.freq_base"), 1000f32.into()),
        ("tokenizer.ggml.tokens".into(), Value::Array(Array::String(vec!["a".into()]))),
    ];
    let mut parts: Parts = vec![
        ("token_embd.weight".into(), vec![24, 50], noise(24 * 50, 1, 1.0)),
        ("output_norm.weight".into(), vec![24], noise(24, 2, 1.0)),
    ];
    for i in 0..2u64 {
        let mut push = |name: &str, dims: &[u64], scale: f32| {
            let n = dims.iter().product::<u64>() as usize;
            let seed = 100 * (i + 1) + parts.len() as u64;
            parts.push((format!("blk.{i}.{name}"), dims.to_vec(), noise(n, seed, scale)));
        };
        push("attn_norm.weight", &[24], 1.5);
        push("attn_q.weight", &[24, 32], 0.4);
        push("attn_k.weight", &[24, 16], 0.4);
        push("attn_v.weight", &[24, 16], 0.4);
        push("attn_output.weight", &[32, 24], 0.3);
        push("ffn_norm.weight", &[24], 1.5);
        push("ffn_gate.weight", &[24, 40], 0.3);
        push("ffn_up.weight", &[24, 40], 0.3);
        push("ffn_down.weight", &[40, 24], 0.3);
        if arch == Arch::Qwen2 {
            push("attn_q.bias", &[32], 0.5);
            push("attn_k.bias", &[16], 0.5);
            push("attn_v.bias", &[16], 0.5);
        }
        if arch == Arch::Qwen3 {
            push("attn_q_norm.weight", &[8], 1.5);
            push("attn_k_norm.weight", &[8], 1.5);
        }
    }
    change(&mut metadata, &mut parts);
    let tensors = parts.into_iter().map(|(name, dims, data)| {
        let bytes: Vec<u8> = data.iter().flat_map(|v| v.to_le_bytes()).collect();
        (TensorSpec { name, dims, ty: TensorType::F32 }, TensorData::Bytes(Cow::Owned(bytes)))
    });
    reopened(&metadata, tensors)
}

/// Writes and reads back.
pub(crate) fn reopened<'a>(
    metadata: &[(String, Value)],
    tensors: impl IntoIterator<Item = (TensorSpec, TensorData<'a>)>,
) -> Gguf {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.gguf");
    gguf::write(&path, metadata, tensors).unwrap();
    Gguf::from_bytes(std::fs::read(path).unwrap()).unwrap()
}

pub(crate) fn tiny(arch: Arch) -> Decoder {
    Decoder::load(&tiny_file(arch)).unwrap()
}

fn values(gguf: &Gguf, name: &str) -> Vec<f64> {
    gguf.dequantize(gguf.tensor(name).unwrap()).unwrap().into_iter().map(f64::from).collect()
}

/// The model written down plainly in f64: no batching, no cache, no packing.
pub(crate) fn reference(gguf: &Gguf, arch: Arch, tokens: &[u32]) -> Vec<Vec<f64>> {
    let linear = |x: &[f64], w: &[f64]| -> Vec<f64> {
        w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let inv = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + 1e-5).sqrt();
        x.iter().zip(w).map(|(x, w)| x * inv * w).collect()
    };
    let rotate = |head: &mut [f64], p: usize| {
        for i in 0..4 {
            let (a, b) = if arch == Arch::Llama { (2 * i, 2 * i + 1) } else { (i, i + 4) };
            let angle = p as f64 * 1000f64.powf(-2.0 * i as f64 / 8.0);
            let (x, y) = (head[a], head[b]);
            head[a] = x * angle.cos() - y * angle.sin();
            head[b] = x * angle.sin() + y * angle.cos();
        }
    };
    let embedding = values(gguf, "token_embd.weight");
    let mut xs: Vec<Vec<f64>> = tokens.iter().map(|t| embedding[*t as usize * 24..][..24].to_vec()).collect();
    for i in 0..2 {
        let w = |name: &str| values(gguf, &format!("blk.{i}.{name}"));
        let (mut qs, mut ks, mut vs) = (vec![], vec![], vec![]);
        for (p, x) in xs.iter().enumerate() {
            let h = norm(x, &w("attn_norm.weight"));
            let project = |name: &str| -> Vec<f64> {
                let y = linear(&h, &w(&format!("{name}.weight")));
                match arch {
                    Arch::Llama | Arch::Qwen3 | Arch::DeepSeek2 => y,
                    Arch::Qwen2 => y.iter().zip(w(&format!("{name}.bias"))).map(|(a, b)| a + b).collect(),
                }
            };
            let (mut q, mut k) = (project("attn_q"), project("attn_k"));
            if arch == Arch::Qwen3 {
                let each = |x: &[f64], name: &str| x.chunks(8).flat_map(|head| norm(head, &w(name))).collect();
                (q, k) = (each(&q, "attn_q_norm.weight"), each(&k, "attn_k_norm.weight"));
            }
            q.chunks_mut(8).chain(k.chunks_mut(8)).for_each(|head| rotate(head, p));
            qs.push(q);
            ks.push(k);
            vs.push(project("attn_v"));
        }
        for (p, x) in xs.iter_mut().enumerate() {
            let mut heads = vec![0.0; 32];
            for h in 0..4 {
                let kv = h / 2 * 8;
                let score =
                    |j: usize| -> f64 { (0..8).map(|d| qs[p][h * 8 + d] * ks[j][kv + d]).sum::<f64>() / 8f64.sqrt() };
                let e: Vec<f64> = (0..=p).map(|j| score(j).exp()).collect();
                let sum: f64 = e.iter().sum();
                for d in 0..8 {
                    heads[h * 8 + d] = (0..=p).map(|j| e[j] / sum * vs[j][kv + d]).sum();
                }
            }
            let o = linear(&heads, &w("attn_output.weight"));
            x.iter_mut().zip(o).for_each(|(x, o)| *x += o);
            let h = norm(x, &w("ffn_norm.weight"));
            let (g, u) = (linear(&h, &w("ffn_gate.weight")), linear(&h, &w("ffn_up.weight")));
            let act: Vec<f64> = g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let down = linear(&act, &w("ffn_down.weight"));
            x.iter_mut().zip(down).for_each(|(x, o)| *x += o);
        }
    }
    let last = values(gguf, "output_norm.weight");
    xs.iter().map(|x| linear(&norm(x, &last), &embedding)).collect()
}

pub(crate) fn some_tokens(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * i * 7 + i * 3 + seed * 11) % 50).collect()
}

fn all_logits(model: &Decoder, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = vec![];
    model
        .visit_logits(tokens, 0..tokens.len(), &mut |_, row| {
            rows.push(row.to_vec());
            Ok(())
        })
        .unwrap();
    rows
}

#[test]
fn logits_match_a_plain_f64_reference() {
    for arch in [Arch::Llama, Arch::Qwen2, Arch::Qwen3] {
        let file = tiny_file(arch);
        let tokens = some_tokens(90, 1);
        let want = reference(&file, arch, &tokens);
        for storage in [Storage::F16, Storage::F32] {
            let got = all_logits(&Decoder::load_with(&file, storage).unwrap(), &tokens);
            let worst = got
                .iter()
                .flatten()
                .zip(want.iter().flatten())
                .map(|(a, b)| (f64::from(*a) - b).abs())
                .fold(0.0, f64::max);
            // Keys and values are kept in f16, 11 bits.
            assert!(worst < 2e-2, "{arch:?} {storage:?}: {worst}");
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_in_a_batch_and_step_by_step() {
    for kv in [KvType::F16, KvType::Q8_0] {
        same_bits(&tiny(Arch::Llama), kv);
    }
    let Some(path) = crate::testing::model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let model = Decoder::load(&Gguf::open(&path).unwrap()).unwrap();
    assert!(model.size_bytes() < 100_000_000, "the blocks of the file: {} bytes", model.size_bytes());
    same_bits(&model, KvType::Q8_0);
}

fn same_bits(model: &Decoder, kv: KvType) {
    let texts: Vec<Vec<u32>> = [70, 3, 131, 64].iter().map(|n| some_tokens(*n, *n as u32)).collect();
    let alone: Vec<Vec<f32>> = texts
        .iter()
        .map(|t| model.advance(&mut [forward::Step { cache: &mut model.new_sequence_of(kv), tokens: t }]))
        .collect();
    let mut caches: Vec<_> = texts.iter().map(|_| model.new_sequence_of(kv)).collect();
    let mut steps: Vec<_> =
        caches.iter_mut().zip(&texts).map(|(cache, tokens)| forward::Step { cache, tokens }).collect();
    assert_eq!(model.advance(&mut steps), alone.concat());
    for (text, want) in texts.iter().zip(&alone) {
        let mut cache = model.new_sequence_of(kv);
        let mut got = vec![];
        for piece in text.chunks(7) {
            got.extend(model.advance(&mut [forward::Step { cache: &mut cache, tokens: piece }]));
        }
        assert_eq!(&got, want);
    }
}

#[test]
fn generation_does_not_depend_on_the_batch() {
    let model = tiny(Arch::Qwen2);
    let common = some_tokens(40, 9);
    let prompts: Vec<Vec<u32>> = (0..9).map(|i| [common.clone(), some_tokens(5 + 3 * i, i as u32)].concat()).collect();
    // Scoring keeps keys and values as f16; only then do its logits equal those of generation.
    let cache = KvType::F16;
    let options = GenerateOptions { max_new_tokens: 20, stop_ids: vec![7], max_batch: 4, cache, ..Default::default() };
    let together = model.generate_batch(&prompts, &options).unwrap();
    for (prompt, want) in prompts.iter().zip(&together) {
        assert_eq!(&model.generate_batch(std::slice::from_ref(prompt), &options).unwrap()[0], want);
        let mut streamed = Vec::new();
        let one = model.generate_stream(prompt, &options, &mut |token| {
            streamed.push(token);
            std::ops::ControlFlow::Continue(())
        });
        assert_eq!((&one.unwrap(), &streamed), (want, &want.tokens), "token by token");
        // And greedy is what the logits say.
        let mut text = prompt.clone();
        for token in &want.tokens {
            let rows = all_logits(&model, &text);
            assert_eq!(sample::argmax(rows.last().unwrap()) as u32, *token);
            text.push(*token);
        }
    }
    assert!(together.iter().any(|g| g.tokens.len() == 20 && g.stop == Stop::Length));
}

#[test]
fn sampling_repeats_with_its_seed_and_has_its_own_stream_per_prompt() {
    let model = tiny(Arch::Llama);
    let prompts = vec![some_tokens(20, 1); 3];
    let sampling = |seed| Sampling { temperature: 1.5, top_p: 0.95, seed, ..Sampling::GREEDY };
    let run = |seed, max_batch| {
        let options = GenerateOptions { max_new_tokens: 12, sampling: sampling(seed), max_batch, ..Default::default() };
        model.generate_batch(&prompts, &options).unwrap()
    };
    assert_eq!(run(1, 3), run(1, 1));
    assert_ne!(run(1, 3), run(2, 3));
    assert_ne!(run(1, 3)[0], run(1, 3)[1]);
}

#[test]
fn generation_stops_at_the_context_and_can_be_cancelled() {
    let model = tiny(Arch::Llama);
    let options = GenerateOptions { max_new_tokens: 1000, ..Default::default() };
    let out = model.generate_batch(&[some_tokens(250, 3)], &options).unwrap();
    assert_eq!((out[0].tokens.len(), out[0].stop), (7, Stop::Length));
    let cancel =
        model.generate_batch_watched(&[some_tokens(250, 3)], &options, &mut |_, _| std::ops::ControlFlow::Break(()));
    assert!(matches!(cancel, Err(ModelError::Cancelled)));
}

#[test]
fn bad_input_is_named() {
    let model = tiny(Arch::Llama);
    let run = |prompt: Vec<u32>| model.generate_batch(&[prompt], &GenerateOptions::default()).unwrap_err().to_string();
    assert!(run(vec![]).contains("prompt 0 has no tokens"));
    assert!(run(vec![1, 50]).contains("token 50"));
    assert!(run(vec![1; 257]).contains("257 tokens"));
    let zero = GenerateOptions { max_new_tokens: 0, ..Default::default() };
    assert!(model.generate_batch(&[vec![1]], &zero).is_err());
}

#[test]
fn a_file_that_is_not_understood_is_refused_by_name() {
    let refuse = |file: Gguf| Decoder::load(&file).unwrap_err().to_string();
    let extra = tiny_file_with(Arch::Llama, |_, t| t.push(("blk.0.attn_q_norm.weight".into(), vec![8], vec![1.0; 8])));
    assert!(refuse(extra).contains("blk.0.attn_q_norm.weight"));
    let missing = tiny_file_with(Arch::Llama, |_, t| t.retain(|(n, _, _)| n != "blk.1.ffn_up.weight"));
    assert!(refuse(missing).contains("blk.1.ffn_up.weight"));
    let wrong = tiny_file_with(Arch::Llama, |_, t| (t[2].1, t[2].2) = (vec![23], vec![1.0; 23]));
    assert!(refuse_shape(wrong));
    let nan = tiny_file_with(Arch::Llama, |_, t| t[3].2[5] = f32::NAN);
    let text = refuse(nan);
    assert!(text.contains("blk.0.attn_q.weight") && text.contains("weight 5"), "{text}");
    let yarn = tiny_file_with(Arch::Qwen2, |m, _| m.push(("qwen2.rope.scaling.type".into(), "yarn".into())));
    assert!(refuse(yarn).contains("yarn"));
    let arch = tiny_file_with(Arch::Llama, |m, _| m[0].1 = "gemma3".into());
    assert!(refuse(arch).contains("gemma3"));
}

fn refuse_shape(file: Gguf) -> bool {
    matches!(Decoder::load(&file), Err(ModelError::Weight { tensor, .. }) if tensor == "blk.0.attn_norm.weight")
}

#[test]
fn a_missing_rope_base_is_assumed_and_said() {
    let file = tiny_file_with(Arch::Llama, |m, _| m.retain(|(k, _)| k != "llama.rope.freq_base"));
    let model = Decoder::load(&file).unwrap();
    assert_eq!(model.config().rope.base, 10_000.0);
    assert!(model.warnings()[0].contains("llama.rope.freq_base"));
    assert!(tiny(Arch::Llama).warnings().is_empty());
}

/// An adapter that changes every matrix of the tiny model noticeably.
pub(crate) fn some_adapter(model: &Decoder, rank: usize) -> Adapter {
    let pairs = (0..2).flat_map(|layer| {
        Target::ALL.into_iter().map(move |t| (layer, t)).map(|(layer, t)| {
            let (outputs, inputs) = t.shape(model.config());
            let seed = layer as u64 * 10 + t as u64;
            let pair = Pair { rank, a: noise(rank * inputs, seed, 0.4), b: noise(outputs * rank, seed + 99, 0.4) };
            ((layer, t), pair)
        })
    });
    Adapter::new(model.config().arch, 6.0, Some(model.base_digest().into()), pairs).unwrap()
}

#[test]
fn an_adapter_survives_its_file_and_equals_the_merged_model() {
    let file = tiny_file(Arch::Qwen2);
    let model = Decoder::load_with(&file, Storage::F32).unwrap();
    let adapter = some_adapter(&model, 3);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gguf");
    adapter.write(&path).unwrap();
    let read = Adapter::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
    assert_eq!(read, adapter);

    let tokens = some_tokens(50, 4);
    let adapted = all_logits(&model.with_adapter(&read).unwrap(), &tokens);
    let merged = merge(&file, &adapter, MergedType::F32).unwrap();
    let merged = Decoder::load_with(&reopened(&merged.metadata, merged.tensors), Storage::F32).unwrap();
    let folded = all_logits(&merged, &tokens);
    let worst = adapted.iter().flatten().zip(folded.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 2e-2, "{worst}");
    let plain = all_logits(&model, &tokens);
    assert!(plain.iter().flatten().zip(folded.iter().flatten()).any(|(a, b)| (a - b).abs() > 0.5), "it does change");
}

#[test]
fn an_adapter_for_another_base_or_shape_is_refused() {
    let file = tiny_file(Arch::Llama);
    let model = Decoder::load(&file).unwrap();
    let adapter = some_adapter(&model, 2);
    let other = tiny_file_with(Arch::Llama, |_, t| t[0].2[0] += 0.5);
    assert!(merge(&other, &adapter, MergedType::F16).err().unwrap().to_string().contains("trained on base"));
    assert!(Decoder::load(&other).unwrap().with_adapter(&adapter).is_err());
    let qwen = adapter.for_any_base();
    assert!(merge(&other, &qwen, MergedType::F16).is_ok(), "asked for in so many words");
    assert!(tiny(Arch::Qwen2).with_adapter(&qwen).unwrap_err().to_string().contains("qwen2"));
    let short = Pair { rank: 2, a: vec![0.1; 2 * 23], b: vec![0.1; 64] };
    let short = Adapter::new(Arch::Llama, 1.0, None, [((0, Target::Q), short)]).unwrap();
    assert!(model.with_adapter(&short).unwrap_err().to_string().contains("blk.0.attn_q.weight"));
}

#[test]
fn broken_adapter_files_have_their_own_errors() {
    let meta = |alpha: f32, kind: &str| -> Vec<(String, Value)> {
        vec![
            ("general.type".into(), "adapter".into()),
            ("general.architecture".into(), "llama".into()),
            ("adapter.type".into(), kind.into()),
            ("adapter.lora.alpha".into(), alpha.into()),
        ]
    };
    let tensor = |name: &str, dims: [u64; 2]| {
        let bytes = vec![0u8; (dims[0] * dims[1] * 4) as usize];
        (
            TensorSpec { name: name.into(), dims: dims.to_vec(), ty: TensorType::F32 },
            TensorData::Bytes(Cow::Owned(bytes)),
        )
    };
    let q = "blk.0.attn_q.weight";
    let refuse = |m: Vec<(String, Value)>, names: &[(&str, [u64; 2])]| {
        let file = reopened(&m, names.iter().map(|(n, d)| tensor(n, *d)).collect::<Vec<_>>());
        Adapter::from_gguf(&file).unwrap_err().to_string()
    };
    let (a, b) = (format!("{q}.lora_a"), format!("{q}.lora_b"));
    assert!(refuse(meta(1.0, "lora"), &[(&a, [24, 2])]).contains("no partner"));
    assert!(refuse(meta(1.0, "lora"), &[(&b, [2, 24])]).contains("no partner"));
    assert!(refuse(meta(1.0, "lora"), &[(&a, [24, 2]), (&b, [3, 32])]).contains("ranks"));
    assert!(
        refuse(meta(1.0, "lora"), &[("output.weight.lora_a", [24, 2]), ("output.weight.lora_b", [2, 50])])
            .contains("output.weight")
    );
    assert!(refuse(meta(1.0, "lora"), &[(q, [24, 2])]).contains("neither"));
    let spec = |name: &str, dims: [u64; 2], ty: TensorType| {
        let bytes = vec![0; ty.row_bytes(dims[0] as usize).unwrap() * dims[1] as usize];
        (TensorSpec { name: name.into(), dims: dims.into(), ty }, TensorData::Bytes(Cow::Owned(bytes)))
    };
    let small = [spec(&a, [32, 2], TensorType::Q8_0), spec(&b, [2, 32], TensorType::F32)];
    let e = Adapter::from_gguf(&reopened(&meta(1.0, "lora"), small)).unwrap_err().to_string();
    assert!(e.contains("Q8_0; an adapter must be F32"), "{e}");
    let none = Pair { rank: 0, a: vec![], b: vec![] };
    let e = Adapter::new(Arch::Llama, 1.0, None, [((0, Target::Q), none)]).unwrap_err().to_string();
    assert!(e.contains("rank 0"), "{e}");
    assert!(refuse(meta(0.0, "lora"), &[(&a, [24, 2]), (&b, [2, 32])]).contains("alpha"));
    assert!(refuse(meta(1.0, "ia3"), &[]).contains("ia3"));
    assert!(refuse(meta(1.0, "lora"), &[]).contains("no tensor"));
}

#[test]
fn scores_agree_with_the_logits() {
    let model = tiny(Arch::Llama);
    let tokens = some_tokens(30, 5);
    let nll = model.nll(&[Scored { tokens: &tokens, from: 10 }]).unwrap().remove(0);
    let rows = all_logits(&model, &tokens);
    for (i, nll) in nll.iter().enumerate() {
        let row = &rows[9 + i];
        let sum: f64 = row.iter().map(|l| f64::from(*l).exp()).sum();
        let want = sum.ln() - f64::from(row[tokens[10 + i] as usize]);
        assert!((f64::from(*nll) - want).abs() < 1e-4);
    }
    let options = model.option_log_likelihoods(&tokens[..10], &[tokens[10..].to_vec(), vec![1]]).unwrap();
    assert!((options[0] + nll.iter().map(|v| f64::from(*v)).sum::<f64>()).abs() < 1e-4);
    assert!(model.nll(&[Scored { tokens: &tokens, from: 0 }]).is_err());
}
