//! Files of our writers in stock: split, converted, without a rotation base, and a fact far back in a long text.

use super::{Window, compare, there, windows};
use crate::gguf::{self, Gguf};
use crate::model::tests::{some_tokens, tiny_file_with};
use crate::model::{Arch, Decoder, Storage};
use crate::testing::{data_file, model_file};
use crate::tokenizer::Tokenizer;
use std::path::Path;

/// A tiny model that stock can load: it has token ids and no texts.
fn tiny(arch: Arch, context: u32, without: &str) -> Gguf {
    tiny_file_with(arch, |metadata, _| {
        metadata.retain(|(key, _)| !key.starts_with("tokenizer.") && key != without);
        for (key, value) in metadata.iter_mut() {
            if key.ends_with(".context_length") {
                *value = context.into();
            }
        }
        metadata.push(("tokenizer.ggml.model".into(), "none".into()));
        metadata.push((format!("{}.vocab_size", arch.name()), 50u32.into()));
    })
}

fn write(file: &Gguf, path: &Path) {
    gguf::write(path, file.metadata(), file.contents()).unwrap();
}

#[test]
fn tiny_models_of_every_architecture_have_the_logits_of_stock() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    // stock wants the query heads of qwen2 to be as wide as the residual stream; the real model is compared in `logits`
    for arch in [Arch::Llama, Arch::Qwen3] {
        let file = tiny(arch, 256, "");
        write(&file, &path);
        let ours = Decoder::load_with(&file, Storage::F32).unwrap();
        let Some(d) = compare(&path, &ours, &windows(&some_tokens(256, 5), 64, 150)) else { return };
        assert!(d.positions >= 150 && d.kld < 1e-4 && d.top1 >= 0.99 && d.worst < 0.1, "{arch:?} {d:?}");
    }
}

#[test]
fn a_file_without_a_rotation_base_is_run_as_stock_runs_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    for arch in [Arch::Llama, Arch::Qwen3] {
        let file = tiny(arch, 8192, &format!("{}.rope.freq_base", arch.name()));
        write(&file, &path);
        let ours = Decoder::load_with(&file, Storage::F32).unwrap();
        assert_eq!(ours.warnings().len(), 1, "{:?}", ours.warnings());
        assert!(ours.warnings()[0].contains("10000 is assumed"));
        let window = Window { tokens: some_tokens(4096, 2), first: 4000 };
        let Some(d) = compare(&path, &ours, &[window]) else { return };
        // stock sums thousands of values in half precision; heads of 8 feel that
        assert!(d.positions == 96 && d.kld < 5e-3 && d.top1 >= 0.9, "{arch:?} {d:?}");
        // another base is another model, so the agreement means something
        let other = Decoder::load_with(&tiny(arch, 8192, ""), Storage::F32).unwrap();
        let window = Window { tokens: some_tokens(4096, 2), first: 4000 };
        let other = compare(&path, &other, &[window]).unwrap();
        assert!(other.kld > 4.0 * d.kld && other.top1 < d.top1, "{other:?} {d:?}");
    }
}

#[test]
fn a_fact_four_thousand_tokens_back_is_found_as_stock_finds_it() {
    let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf").filter(|_| there()) else { return };
    let Some(text) = data_file("text/wiki.dev.raw") else { return };
    let file = Gguf::open(&path).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let text: String = std::fs::read_to_string(text).unwrap().chars().take(40_000).collect();
    let encode = |text: &str| tokenizer.encode(text, false);
    let fact = encode("\nThe secret code of the old vault is 7.\n");
    let question = encode("\nThe secret code of the old vault is");
    let filler = 4096 - fact.len() - question.len();
    let tokens = [fact, encode(&text)[..filler].to_vec(), question].concat();
    let ours = Decoder::load(&file).unwrap();
    let d = compare(&path, &ours, &[Window { tokens, first: 4095 }]).unwrap();
    let [stock, own] = d.last[0];
    assert_eq!(stock, own, "stock says `{}`, we `{}`", tokenizer.decode(&[stock]), tokenizer.decode(&[own]));
    assert!(d.kld < 0.02, "{d:?}");
}

#[test]
fn stock_opens_our_shards() {
    let folder = tempfile::tempdir().unwrap();
    let file = tiny(Arch::Llama, 256, "");
    let prefix = folder.path().join("tiny");
    let written = gguf::write_shards(&prefix, file.metadata(), file.contents(), 16_384).unwrap();
    let paths: Vec<_> = written.into_iter().map(|(path, _)| path).collect();
    assert!(paths.len() > 2, "{paths:?}");
    let ours = Decoder::load_with(&Gguf::open(&paths[0]).unwrap(), Storage::F32).unwrap();
    let Some(d) = compare(&paths[0], &ours, &windows(&some_tokens(64, 5), 64, 48)) else { return };
    assert!(d.kld < 1e-4 && d.top1 >= 0.97, "{d:?}");
    assert!(file.get("split.count").is_none());
}
