//! Adapters in the programs of others: stock llama.cpp applies our adapter file as we merge it, PEFT applies and saves our
//! adapter folder. Each is left out with a line where the program cannot be had.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

use flywheel_inference::gguf::{self, Gguf};
use flywheel_inference::model::{
    Adapter, Arch, Decoder, MergedType, ModelConfig, Pair, RopeConfig, Target, base_digest, merge,
};
use flywheel_inference::tokenizer::learn_bpe;
use flywheel_inference::train::random_model;
use std::path::{Path, PathBuf};
use std::process::Command;

const TOKENS: u32 = 40;

fn config() -> ModelConfig {
    ModelConfig {
        arch: Arch::Llama,
        layers: 2,
        width: 64,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        ffn: 96,
        vocab: 260,
        context: 128,
        rms_eps: 1e-5,
        rope: RopeConfig { base: 10_000.0, dims: 16, linear_factor: 1.0, yarn: None },
        latent: None,
        experts: None,
    }
}

/// A llama with random weights whose vocabulary stock knows how to read.
fn base(path: &Path) -> Gguf {
    let c = config();
    let mut metadata = c.metadata("adapted");
    metadata.extend(learn_bpe(&["aa aa aa ab ab ab ba ba"], c.vocab, "gpt-2").unwrap());
    gguf::write(path, &metadata, random_model(&c, 7).unwrap()).unwrap();
    Gguf::open(path).unwrap()
}

/// Values that change every matrix noticeably; plain arithmetic, the same everywhere.
fn adapter(base: &Gguf) -> Adapter {
    let c = config();
    let values = |n: usize, seed: usize| (0..n).map(|i| ((i * 37 + seed * 101) % 97) as f32 / 97.0 - 0.5).collect();
    let pairs = (0..c.layers).flat_map(|layer| Target::ALL.map(|t| (layer, t))).map(|(layer, t)| {
        let ((outputs, inputs), seed) = (t.shape(&config()), layer * 10 + t as usize);
        ((layer, t), Pair { rank: 4, a: values(4 * inputs, seed), b: values(outputs * 4, seed + 50) })
    });
    Adapter::new(c.arch, 8.0, Some(base_digest(base)), pairs).unwrap()
}

fn merge_into(base: &Gguf, adapter: &Adapter, path: &Path) {
    let merged = merge(base, adapter, MergedType::F32).unwrap();
    gguf::write(path, &merged.metadata, merged.tensors).unwrap();
}

struct Files {
    folder: tempfile::TempDir,
    adapter: Adapter,
}

impl Files {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let base = base(&folder.path().join("base.gguf"));
        let adapter = adapter(&base);
        adapter.write(&folder.path().join("adapter.gguf")).unwrap();
        adapter.write_peft(&folder.path().join("adapter"), &config(), "base").unwrap();
        merge_into(&base, &adapter, &folder.path().join("merged.gguf"));
        let tokens: Vec<u32> = (0..TOKENS).map(|i| i * 71 % 258).collect();
        std::fs::write(folder.path().join("tokens.json"), format!("{tokens:?}")).unwrap();
        Self { folder, adapter }
    }

    /// Runs a script of `tests/interop` on these files; `None`, with a line, where its libraries are missing.
    fn compare(&self, python: &str, needs: &str, script: &str, files: &[&str]) -> Option<serde_json::Value> {
        let there = Command::new(python).args(["-c", needs]).output().is_ok_and(|o| o.status.success());
        if !there {
            println!("skipped: {python} cannot `{needs}`");
            return None;
        }
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop").join(script);
        let out = Command::new(python).arg(script).args(files).current_dir(self.folder.path()).output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{error}");
        Some(serde_json::from_slice(&out.stdout).unwrap())
    }
}

fn python(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| "python3".to_owned())
}

fn check(worst: &serde_json::Value) {
    let of = |key: &str| worst[key].as_f64().unwrap();
    assert!(of("base") > 0.1, "the adapter must show: {worst}");
    assert!(of("merged") <= 1e-3, "{worst}");
}

#[test]
fn stock_applies_the_adapter_file_as_we_merge_it() {
    let files = ["base.gguf", "adapter.gguf", "merged.gguf", "tokens.json"];
    let needs = "import numpy, shutil, sys; sys.exit(shutil.which('npm') is None)";
    if let Some(worst) = Files::new().compare(&python("PYTHON"), needs, "adapter.py", &files) {
        check(&worst);
    }
}

#[test]
fn peft_applies_the_adapter_folder_and_what_it_saves_comes_back() {
    let all = Files::new();
    let files = ["base.gguf", "adapter", "merged.gguf", "tokens.json", "saved"];
    let needs = "import torch, peft, transformers, gguf";
    let Some(worst) = all.compare(&python("PEFT_PYTHON"), needs, "peft_adapter.py", &files) else { return };
    check(&worst);
    let saved = Adapter::from_peft(&all.folder.path().join("saved"), &config()).unwrap();
    assert_eq!(saved.pairs().collect::<Vec<_>>(), all.adapter.pairs().collect::<Vec<_>>());
    assert_eq!((saved.alpha, saved.base_sha256.is_some()), (8.0, false), "PEFT keeps no note of ours");
    let model = Decoder::load(&Gguf::open(&all.folder.path().join("base.gguf")).unwrap()).unwrap();
    assert!(model.with_adapter(&saved).is_ok());
}
