//! Logits of real models beside stock: float weights, and every block type.

use super::{Difference, Window, compare, there, windows};
use crate::gguf::Gguf;
use crate::model::Decoder;
use crate::quantize::{Profile, QuantizeOptions, quantize};
use crate::testing::{data_file, model_file};
use crate::tokenizer::Tokenizer;
use std::{ops::ControlFlow, path::Path};

const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const QWEN: &str = "qwen2.5-coder-1.5b/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf";

/// The limits of a comparison: mean KL, and the share of equal most likely tokens.
const FLOAT: (f64, f64) = (1e-3, 0.99);
/// Stock rounds activations to 8 bits before it multiplies them with quantised weights, which by itself moves its predictions
/// as far as this.
const QUANTIZED: (f64, f64) = (5e-3, 0.96);

/// Where both sides round, each with errors that the other does not have.
const ROUNDED: (f64, f64) = (1e-2, 0.94);

fn made(base: &Gguf, profile: Profile, out: &Path) -> Gguf {
    let options = QuantizeOptions { allow_requantize: true, ..QuantizeOptions::new(profile) };
    quantize(base, out, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    Gguf::open(out).unwrap()
}

/// Half of the positions from an encyclopedia, half from word problems with their answers.
fn text_windows(file: &Gguf, len: usize, positions: usize) -> Option<Vec<Window>> {
    let tokenizer = Tokenizer::from_gguf(file).unwrap();
    let cut = |text: &str| -> Vec<Window> {
        let text: String = text.chars().take(positions * 12).collect();
        windows(&tokenizer.encode(&text, false), len, positions / 2)
    };
    let mut all = cut(&std::fs::read_to_string(data_file("text/wiki.dev.raw")?).unwrap());
    let lines = std::fs::read_to_string(data_file("text/gsm8k_test.jsonl")?).unwrap();
    let item = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
    let words =
        |v: serde_json::Value| format!("{}\n{}\n\n", v["question"].as_str().unwrap(), v["answer"].as_str().unwrap());
    all.extend(cut(&lines.lines().map(|line| words(item(line))).collect::<String>()));
    Some(all)
}

fn within(name: &str, d: &Difference, limit: (f64, f64)) {
    assert!(show(name, d, limit), "{name}: {d:?}");
}

/// Prints a comparison; whether it is within the limit.
fn show(name: &str, d: &Difference, limit: (f64, f64)) -> bool {
    println!(
        "{name}: {} positions, KLD {:.6} (most {:.4}), same top token {:.2} %, largest difference of likely tokens {:.3}",
        d.positions,
        d.kld,
        d.kld_max,
        100.0 * d.top1,
        d.worst
    );
    d.kld <= limit.0 && d.top1 >= limit.1
}

#[test]
fn smollm2_has_the_logits_of_stock() {
    let Some(path) = model_file(SMOLLM2).filter(|_| there()) else { return };
    let base = Gguf::open(&path).unwrap();
    let Some(windows) = text_windows(&base, 128, 96) else { return };
    let folder = tempfile::tempdir().unwrap();
    let float = folder.path().join("f16.gguf");
    let ours = Decoder::load(&made(&base, Profile::F16, &float)).unwrap();
    let d = compare(&float, &ours, &windows).unwrap();
    assert_eq!(d.positions, 2 * 96);
    // one position in a hundred may be a tie
    within("SmolLM2 F16", &d, (FLOAT.0, 0.98));
}

/// `cargo test -p flywheel-inference --lib -- --ignored --nocapture stock_tests::logits::smollm2`
#[test]
#[ignore = "a measurement of minutes"]
fn smollm2_on_two_thousand_positions() {
    let Some(path) = model_file(SMOLLM2).filter(|_| there()) else { return };
    let base = Gguf::open(&path).unwrap();
    let Some(windows) = text_windows(&base, 256, 2000) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (float_path, path) = (folder.path().join("f16.gguf"), folder.path().join("q.gguf"));
    let float = made(&base, Profile::F16, &float_path);
    within("F16", &compare(&float_path, &Decoder::load(&float).unwrap(), &windows).unwrap(), FLOAT);
    let mut far = Vec::new();
    for profile in [
        Profile::Q4_0,
        Profile::Q4_1,
        Profile::Q5_0,
        Profile::Q5_1,
        Profile::Q8_0,
        Profile::Q4KM,
        Profile::Q5KM,
        Profile::Q6K,
    ] {
        let decoder = Decoder::load(&made(&float, profile, &path)).unwrap();
        let d = compare(&path, &decoder.exact(), &windows).unwrap();
        assert!(d.positions >= 2000);
        if !show(profile.name(), &d, QUANTIZED) {
            far.push(profile);
        }
        let d = compare(&path, &decoder, &windows).unwrap();
        show(&format!("{}, activations rounded on both sides", profile.name()), &d, ROUNDED);
        assert!(d.kld <= ROUNDED.0 && d.top1 >= ROUNDED.1, "{d:?}");
    }
    // the weights are the same: stock on their F16 form, where it rounds no activation, agrees with us on the blocks
    let blocks = made(&float, Profile::Q4_0, &path);
    let ours = Decoder::load(&blocks).unwrap().exact();
    made(&blocks, Profile::F16, &float_path);
    within("Q4_0, stock on its F16 form", &compare(&float_path, &ours, &windows).unwrap(), FLOAT);
    assert!(far.is_empty(), "too far from stock: {far:?}");
}

/// `cargo test -p flywheel-inference --lib -- --ignored --nocapture stock_tests::logits::qwen`; the model is fetched by
/// `cargo xtask model large`.
#[test]
#[ignore = "a measurement of many minutes that needs 8 GB of memory and 4 GB of disk"]
fn qwen_of_the_phones_class_on_two_thousand_positions() {
    let Some(path) = model_file(QWEN).filter(|_| there()) else { return };
    let base = Gguf::open(&path).unwrap();
    let Some(windows) = text_windows(&base, 256, 2000) else { return };
    let d = compare(&path, &Decoder::load(&base).unwrap().exact(), &windows).unwrap();
    within("Qwen2.5-Coder-1.5B Q4_K_M", &d, QUANTIZED);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f16.gguf");
    let float = made(&base, Profile::F16, &path);
    let d = compare(&path, &Decoder::load(&float).unwrap(), &windows).unwrap();
    within("Qwen2.5-Coder-1.5B F16", &d, FLOAT);
}
