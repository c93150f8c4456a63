//! Models written as safetensors folders by an independent table of names, converted, and compared with what they were
//! made from: tensors bit for bit, then logits.

use super::folders::{self, Torch, save, tokenizer_json};
use super::*;
use crate::gguf::{Gguf, TensorInfo};
use crate::model::tests::{some_tokens, tiny_file};
use crate::model::{Arch, Decoder, Storage};
use crate::testing::model_file;
use safetensors::Dtype;
use serde_json::{Value as Json, json};
use std::fs;

/// Pair and divisor.
const LLAMA31: [(usize, f64); 7] = [
    (28, 1.0),
    (29, 1.207_483_871_283_662),
    (30, 1.553_414_628_504_925_5),
    (32, 2.694_529_687_894_733),
    (34, 5.257_326_588_708_467),
    (35, 8.0),
    (63, 8.0),
];

fn go(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn hf_name(gguf: &str) -> String {
    const PARTS: [(&str, &str); 11] = [
        ("attn_norm.", "input_layernorm."),
        ("attn_q.", "self_attn.q_proj."),
        ("attn_k.", "self_attn.k_proj."),
        ("attn_v.", "self_attn.v_proj."),
        ("attn_q_norm.", "self_attn.q_norm."),
        ("attn_k_norm.", "self_attn.k_norm."),
        ("attn_output.", "self_attn.o_proj."),
        ("ffn_norm.", "post_attention_layernorm."),
        ("ffn_gate.", "mlp.gate_proj."),
        ("ffn_up.", "mlp.up_proj."),
        ("ffn_down.", "mlp.down_proj."),
    ];
    match gguf {
        "token_embd.weight" => "model.embed_tokens.weight".into(),
        "output_norm.weight" => "model.norm.weight".into(),
        "output.weight" => "lm_head.weight".into(),
        block => {
            let (layer, part) = block.strip_prefix("blk.").unwrap().split_once('.').unwrap();
            let (from, to) = PARTS.into_iter().find(|(from, _)| part.starts_with(from)).unwrap();
            format!("model.layers.{layer}.{}", part.replace(from, to))
        }
    }
}

/// Neighbouring rows of a head back to its two halves, the layout of the published weights.
fn halves(values: &[f32], head_dim: usize, cols: usize) -> Vec<f32> {
    let row = |r: usize| &values[r * cols..][..cols];
    let rows = values.len() / cols;
    let order = (0..rows / head_dim)
        .flat_map(|h| (0..2).flat_map(move |side| (0..head_dim / 2).map(move |i| h * head_dim + 2 * i + side)));
    order.flat_map(|r| row(r).to_vec()).collect()
}

fn torch(file: &Gguf, tensor: &TensorInfo, arch: Arch, head_dim: usize) -> Torch {
    let mut values = file.dequantize(tensor).unwrap();
    let rotated = tensor.name.contains("attn_q.") || tensor.name.contains("attn_k.");
    if arch == Arch::Llama && rotated {
        let cols = if tensor.dims.len() > 1 { tensor.row_len() } else { 1 };
        values = halves(&values, head_dim, cols);
    }
    let shape = tensor.dims.iter().rev().map(|d| *d as usize).collect();
    Torch::f32(hf_name(&tensor.name), shape, &values)
}

/// `config.json` of a file of this crate.
fn config_json(file: &Gguf, arch: Arch) -> Json {
    let key = |k: &str| format!("{}.{k}", arch.name());
    let size = |k: &str| file.u32(&key(k)).unwrap();
    json!({
        "model_type": arch.name(),
        "hidden_act": "silu",
        "hidden_size": size("embedding_length"),
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": size("attention.head_count"),
        "num_key_value_heads": size("attention.head_count_kv"),
        "head_dim": file.optional::<u32>(&key("attention.key_length")).unwrap(),
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": file.f32(&key("attention.layer_norm_rms_epsilon")).unwrap(),
        "rope_theta": file.f32(&key("rope.freq_base")).unwrap(),
        "vocab_size": file.tensor("token_embd.weight").unwrap().dims[1],
        "tie_word_embeddings": file.find("output.weight").is_none(),
    })
}

/// A model folder that a test may damage before it is written.
struct Folder {
    dir: tempfile::TempDir,
    config: Json,
    tokenizer: Json,
    tensors: Vec<Torch>,
}

impl Folder {
    fn tiny(arch: Arch) -> Self {
        let file = tiny_file(arch);
        Self {
            dir: tempfile::tempdir().unwrap(),
            config: config_json(&file, arch),
            tokenizer: tokenizer_json(),
            tensors: file.tensors().iter().map(|t| torch(&file, t, arch, 8)).collect(),
        }
    }
    fn tensor(&mut self, name: &str) -> &mut Torch {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }
    fn write(&self) -> &Path {
        folders::write(self.dir.path(), &self.config, &self.tokenizer, &self.tensors);
        self.dir.path()
    }
    fn convert(&self, ty: FloatType) -> Result<(ConvertReport, Gguf), ConvertError> {
        let folder = self.write();
        let out = folder.join("out.gguf");
        let report = convert(folder, &out, ty, &mut go)?;
        Ok((report, Gguf::open(&out).unwrap()))
    }
    fn refusal(&self) -> String {
        let error = self.convert(FloatType::F16).unwrap_err().to_string();
        let mut left = fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        assert!(left.all(|n| !n.contains("gguf")), "a file was left behind");
        error
    }
}

fn logits(file: &Gguf, tokens: &[u32]) -> Vec<f32> {
    folders::logits(&Decoder::load_with(file, Storage::F32).unwrap(), tokens)
}

fn same_tensors(made: &Gguf, original: &Gguf) {
    assert_eq!(made.tensors().len(), original.tensors().len());
    for tensor in original.tensors() {
        let new = made.tensor(&tensor.name).unwrap();
        assert_eq!(new.dims, tensor.dims, "{}", tensor.name);
        assert!(made.dequantize(new).unwrap() == original.dequantize(tensor).unwrap(), "{}", tensor.name);
    }
}

#[test]
fn every_architecture_comes_back_as_it_was() {
    for arch in [Arch::Llama, Arch::Qwen2, Arch::Qwen3] {
        let original = tiny_file(arch);
        let (report, made) = Folder::tiny(arch).convert(FloatType::F32).unwrap();
        assert_eq!((report.architecture, report.warnings.len()), (arch.name(), 0));
        assert_eq!((report.tensors, report.size_bytes), (made.tensors().len(), made.size_bytes()));
        same_tensors(&made, &original);
        let tokens = some_tokens(30, 3);
        assert_eq!(logits(&made, &tokens), logits(&original, &tokens), "{arch:?}");
        let t = crate::tokenizer::Tokenizer::from_gguf(&made).unwrap();
        assert_eq!((t.vocab_size(), t.encode("abc<|end|>", true)), (50, vec![3, 2, 4]));
    }
}

#[test]
fn the_type_of_matrices_is_chosen_and_vectors_stay_exact() {
    for (ty, want, file_type) in [(FloatType::F16, TensorType::F16, 1), (FloatType::BF16, TensorType::BF16, 32)] {
        let (_, made) = Folder::tiny(Arch::Qwen2).convert(ty).unwrap();
        assert_eq!(made.u32("general.file_type").unwrap(), file_type);
        for tensor in made.tensors() {
            assert_eq!(tensor.ty, if tensor.dims.len() == 1 { TensorType::F32 } else { want }, "{}", tensor.name);
        }
    }
    // F16 and BF16 weights are read exactly.
    for (dtype, ty) in [(Dtype::F16, FloatType::F16), (Dtype::BF16, FloatType::BF16)] {
        let mut folder = Folder::tiny(Arch::Llama);
        let tensor = folder.tensor("model.layers.0.mlp.up_proj.weight");
        let values: Vec<f32> = tensor.bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let rounded: Vec<u8> = match dtype {
            Dtype::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
        };
        (tensor.dtype, tensor.bytes) = (dtype, rounded.clone());
        let (_, made) = folder.convert(ty).unwrap();
        assert_eq!(made.bytes(made.tensor("blk.0.ffn_up.weight").unwrap()), rounded);
    }
}

#[test]
fn sharded_weights_are_found_through_their_index() {
    let folder = Folder::tiny(Arch::Qwen2);
    let path = folder.write().to_owned();
    fs::remove_file(path.join("model.safetensors")).unwrap();
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let (first, second) = folder.tensors.split_at(9);
    save(&path.join(names[0]), first);
    save(&path.join(names[1]), second);
    let place = |i: usize, name: &str| (name.to_owned(), json!(names[usize::from(i >= 9)]));
    let map: serde_json::Map<String, Json> =
        folder.tensors.iter().enumerate().map(|(i, t)| place(i, &t.name)).collect();
    let index = |map: &serde_json::Map<String, Json>| {
        let text = json!({ "metadata": { "total_size": 1 }, "weight_map": map }).to_string();
        fs::write(path.join("model.safetensors.index.json"), text).unwrap();
        convert(&path, &path.join("out.gguf"), FloatType::F32, &mut go)
    };
    index(&map).unwrap();
    same_tensors(&Gguf::open(&path.join("out.gguf")).unwrap(), &tiny_file(Arch::Qwen2));
    let refusal = |name: &str, file: &str| {
        let mut map = map.clone();
        map.insert(name.to_owned(), json!(file));
        index(&map).unwrap_err().to_string()
    };
    let e = refusal("model.norm.weight", names[1]);
    assert!(e.contains("tensor `model.norm.weight` is not in model-00002-of-00002.safetensors"), "{e}");
    let e = refusal("model.norm.weight", "../other.safetensors");
    assert!(e.contains("`../other.safetensors` is not the name of a file beside it"), "{e}");
    let e = refusal("model.norm.weight", "model-00003-of-00002.safetensors");
    assert!(e.contains("model-00003-of-00002.safetensors: "), "{e}");
    save(&path.join(names[1]), &folder.tensors[8..]);
    let e = index(&map).unwrap_err().to_string();
    assert!(e.contains("is in") && e.contains("and in"), "{e}");
}

#[test]
fn models_that_do_not_fit_are_refused_by_name() {
    let check = |change: &dyn Fn(&mut Folder), message: &str| {
        let mut folder = Folder::tiny(Arch::Llama);
        change(&mut folder);
        let error = folder.refusal();
        assert!(error.contains(message), "`{error}` does not say `{message}`");
    };
    let up = "model.layers.1.mlp.up_proj.weight";
    check(&|f| f.tensors.retain(|t| t.name != up), "tensor `model.layers.1.mlp.up_proj.weight` is missing");
    check(&|f| f.tensor(up).shape = vec![24, 40], "shape [24, 40], config.json says [40, 24]");
    let extra = || Torch {
        name: "model.layers.0.mlp.gate.weight".into(),
        shape: vec![1],
        dtype: Dtype::F32,
        bytes: vec![0; 4],
    };
    check(&|f| f.tensors.push(extra()), "`model.layers.0.mlp.gate.weight`: has no place in the file");
    check(&|f| f.tensor(up).bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes()), "value 0 is NaN");
    check(&|f| f.tensor(up).bytes[4..8].copy_from_slice(&1e6f32.to_le_bytes()), "`blk.1.ffn_up.weight`");
    check(&|f| f.tensor(up).dtype = Dtype::I32, "type I32 is not supported");
    check(&|f| f.config["tie_word_embeddings"] = json!(false), "tensor `lm_head.weight` is missing");
    let head = |f: &mut Folder| {
        let bytes = f.tensor("model.embed_tokens.weight").bytes.iter().map(|b| b ^ 1).collect();
        f.tensors.push(Torch { name: "lm_head.weight".into(), shape: vec![50, 24], dtype: Dtype::F32, bytes });
    };
    check(&head, "`lm_head.weight`: differs from the embedding");
    check(&|f| f.config["model_type"] = json!("gemma3"), "model_type is `gemma3`");
    check(&|f| f.config["hidden_act"] = json!("gelu"), "hidden_act is `gelu`");
    check(&|f| f.config["use_sliding_window"] = json!(true), "sliding-window");
    check(&|f| f.config["quantization_config"] = json!({ "bits": 4 }), "quantised already");
    check(&|f| f.config["num_key_value_heads"] = json!(3), "4 heads of 8 over 3 key heads");
    check(&|f| f.config["num_hidden_layers"] = json!(0), "num_hidden_layers is 0");
    check(&|f| f.config["num_hidden_layers"] = json!(1u64 << 40), "num_hidden_layers is 1099511627776");
    check(&|f| f.config["rms_norm_eps"] = json!("x"), "not the config of a decoder");
    check(&|f| f.config["rope_scaling"] = json!({ "type": "yarn", "factor": 4.0 }), "RoPE scaling `yarn`");
    check(&|f| f.config["rope_scaling"] = json!({ "type": "linear" }), "without a usable `factor`");
    check(&|f| f.config["vocab_size"] = json!(3), "config.json says [3, 24]");
    check(&|f| f.tokenizer["pre_tokenizer"] = json!({ "type": "Whitespace" }), "pre-tokenizer `Whitespace");
}

#[test]
fn cancelling_leaves_nothing() {
    let folder = Folder::tiny(Arch::Llama);
    let path = folder.write();
    let mut seen = Vec::new();
    let stopped = convert(path, &path.join("out.gguf"), FloatType::F16, &mut |p| {
        seen.push(p.tensor.to_owned());
        if p.done == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped, Err(ConvertError::Cancelled)));
    assert_eq!(seen, ["token_embd.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight"]);
    assert!(fs::read_dir(path).unwrap().all(|e| !e.unwrap().file_name().to_string_lossy().contains("gguf")));
}

#[test]
fn an_untied_output_and_a_tied_copy() {
    let mut folder = Folder::tiny(Arch::Llama);
    let copy = folder.tensor("model.embed_tokens.weight").bytes.clone();
    folder.tensors.push(Torch { name: "lm_head.weight".into(), shape: vec![50, 24], dtype: Dtype::F32, bytes: copy });
    assert!(folder.convert(FloatType::F32).unwrap().1.find("output.weight").is_none());
    folder.config["tie_word_embeddings"] = json!(false);
    assert!(folder.convert(FloatType::F32).unwrap().1.find("output.weight").is_some());
}

#[test]
fn rope_settings_reach_the_decoder() {
    let mut folder = Folder::tiny(Arch::Llama);
    folder.config.as_object_mut().unwrap().remove("rope_theta");
    let (report, made) = folder.convert(FloatType::F32).unwrap();
    assert!(report.warnings[0].contains("`rope_theta` is absent; 10000 is assumed"));
    assert_eq!(made.f32("llama.rope.freq_base").unwrap(), 10_000.0);
    folder.config["rope_parameters"] = json!({ "rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0 });
    let (report, made) = folder.convert(FloatType::F32).unwrap();
    assert!(report.warnings.is_empty());
    let rope = Decoder::load(&made).unwrap().config().rope.clone();
    assert_eq!((rope.base, rope.linear_factor), (5000.0, 4.0));
    // Llama 3.1's published settings; the factors are the formula of transformers, computed apart.
    folder.config["head_dim"] = json!(8);
    folder.config["rope_parameters"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
    });
    let (_, made) = folder.convert(FloatType::F32).unwrap();
    let factors = made.dequantize(made.tensor("rope_freqs.weight").unwrap()).unwrap();
    assert_eq!((factors.len(), factors[0], factors[3]), (4, 1.0, 8.0));
    let text = json!({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192 },
    });
    let factors = HfConfig::parse(&text.to_string(), &mut Vec::new()).unwrap().rope_factors().unwrap();
    for (pair, want) in LLAMA31 {
        assert!((f64::from(factors[pair]) - want).abs() < 1e-5 * want, "pair {pair}: {} and {want}", factors[pair]);
    }
}

/// SmolLM2, its first blocks only: the published weights in the layout of the model's authors.
#[test]
fn the_real_model_comes_back_with_equal_logits() {
    const LAYERS: usize = 3;
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let whole = Gguf::open(&path).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let wanted = |name: &str| {
        let layer = name.strip_prefix("blk.").and_then(|r| r.split_once('.')).map(|(l, _)| l.parse::<usize>().unwrap());
        layer.is_none_or(|l| l < LAYERS)
    };
    let mut metadata = whole.metadata().to_vec();
    for (key, value) in &mut metadata {
        if key == "llama.block_count" {
            *value = crate::gguf::Value::U32(LAYERS as u32);
        }
    }
    let cut = dir.path().join("cut.gguf");
    crate::gguf::write(&cut, &metadata, whole.contents().filter(|(s, _)| wanted(&s.name))).unwrap();
    let original = Gguf::open(&cut).unwrap();
    let tensors: Vec<Torch> = original.tensors().iter().map(|t| torch(&original, t, Arch::Llama, 64)).collect();
    folders::write(dir.path(), &config_json(&original, Arch::Llama), &tokenizer_json(), &tensors);
    let made = folders::converted(dir.path(), &dir.path().join("made.gguf"));
    same_tensors(&made, &original);
    let tokens: Vec<u32> = (0..24).map(|i| (i * 977 + 11) % 49_152).collect();
    assert!(logits(&made, &tokens) == logits(&original, &tokens));
}
