//! llama.cpp as a back end beside our decoder, on a real model with float weights. Skipped where the model is absent.

use super::*;
use crate::eval::{Base, RecordedBase, perplexity, position_scores, record_base, speed};
use crate::gguf::Gguf;
use crate::model::Decoder;
use crate::model::tests::some_adapter;
use crate::quantize::{Profile, QuantizeOptions, quantize};
use crate::testing::model_file;
use crate::tokenizer::Tokenizer;
use std::ops::ControlFlow;
use std::time::Duration;
use tempfile::TempDir;

const TEXT: &str = "The lighthouse keeper climbed the stairs every evening to light the lamp. From the top he could see the \
    harbour, the fishing boats coming home, and the long grey line of the coast. When a storm came, he stayed awake all \
    night and listened to the wind. In the morning he wrote down what he had seen: the ships, the weather, the height of \
    the waves. His daughter asked him once why he did it, and he said that somebody would want to know.";

struct Both {
    folder: TempDir,
    ours: Decoder,
    theirs: LlamaCpp,
    tokenizer: Tokenizer,
}

/// The model in half precision, which both keep as it is.
fn both() -> Option<Both> {
    let packed = Gguf::open(&model_file("SmolLM2-135M-Instruct.Q4_1.gguf")?).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f16.gguf");
    let options = QuantizeOptions { allow_requantize: true, ..QuantizeOptions::new(Profile::F16) };
    quantize(&packed, &path, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let file = Gguf::open(&path).unwrap();
    Some(Both {
        ours: Decoder::load(&file).unwrap(),
        theirs: LlamaCpp::open(&path, None).unwrap(),
        tokenizer: Tokenizer::from_gguf(&file).unwrap(),
        folder,
    })
}

fn go(_: usize, _: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn scores_of_texts_are_those_of_our_decoder() {
    let Some(Both { folder, ours, theirs, tokenizer }) = both() else { return };
    let tokens = tokenizer.encode(&TEXT.repeat(3), false);
    let [a, b] = [&ours as &dyn Engine, &theirs].map(|e| perplexity(e, &tokens, 64, &mut go).unwrap());
    assert!(a.tokens == b.tokens && a.tokens >= 96, "{a:?}");
    assert!((a.nll - b.nll).abs() < 2e-3 && a.perplexity > 1.5, "{a:?} {b:?}");
    let d = position_scores(Base::Model(&theirs), &ours, &tokens, 64, &mut go).unwrap().summary();
    assert!(d.kld < 1e-3 && d.top1 >= 0.97, "{d:?}");
    assert_eq!(ours.base_digest(), theirs.base_digest());
    // what one engine recorded, the other is measured against
    let record = folder.path().join("base.predictions");
    record_base(&theirs, &tokens, 64, &record, &mut go).unwrap();
    let record = RecordedBase::open(&record).unwrap();
    let again = position_scores(Base::Recorded(&record), &ours, &tokens, 64, &mut go).unwrap().summary();
    assert!((again.kld - d.kld).abs() < 1e-5 && again.top1 == d.top1, "{again:?} {d:?}");
}

#[test]
fn options_have_the_likelihoods_of_our_decoder() {
    let Some(Both { ours, theirs, tokenizer, .. }) = both() else { return };
    let encode = |text: &str| tokenizer.encode(text, false);
    let prompt = encode("The capital of France is");
    let options = [" Paris", " the city of Paris", " Berlin", " a small fishing village in the north"].map(encode);
    let [a, b] = [&ours as &dyn Engine, &theirs].map(|e| e.option_log_likelihoods(&prompt, &options).unwrap());
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 0.05), "{a:?} {b:?}");
    assert!(b[0] > b[2] + 1.0, "{b:?}");
}

#[test]
fn answers_are_greedy_and_do_not_depend_on_the_batch() {
    let Some(Both { ours, theirs, tokenizer, .. }) = both() else { return };
    let encode = |text: &str| tokenizer.encode(text, false);
    let prompts = ["The capital of France is", "One, two, three, four,", "Water boils at"].map(encode);
    let run = |engine: &dyn Engine, options: &GenerateOptions| {
        engine.generate(&prompts, options, &mut |_, _| ControlFlow::Continue(())).unwrap()
    };
    let options = GenerateOptions { max_new_tokens: 12, cache: KvType::F16, ..GenerateOptions::default() };
    let own = run(&ours, &options);
    let all = run(&theirs, &options);
    assert_eq!(own, all);
    assert!(all.iter().all(|g| (g.tokens.len(), g.stop) == (12, Stop::Length)), "{all:?}");
    assert_eq!(run(&theirs, &GenerateOptions { max_batch: 1, ..options.clone() }), all);
    // a stop token ends the text before it
    let stop = all[1].tokens[4];
    let at = all[1].tokens.iter().position(|t| *t == stop).unwrap();
    let stopped = run(&theirs, &GenerateOptions { stop_ids: vec![stop], ..options });
    assert_eq!((stopped[1].tokens.as_slice(), stopped[1].stop), (&all[1].tokens[..at], Stop::Token(stop)));
}

#[test]
fn an_adapter_counts() {
    let Some(Both { folder, ours, theirs, tokenizer }) = both() else { return };
    let adapter = some_adapter(&ours, 4);
    let path = folder.path().join("adapter.gguf");
    adapter.write(&path).unwrap();
    let adapted = LlamaCpp::open(&folder.path().join("f16.gguf"), Some(&path)).unwrap();
    let tokens = tokenizer.encode(TEXT, false);
    let far = |base: &dyn Engine, other: &dyn Engine| {
        position_scores(Base::Model(base), other, &tokens, 64, &mut go).unwrap().summary().kld
    };
    let (same, changed) = (far(&adapted, &ours.with_adapter(&adapter).unwrap()), far(&adapted, &theirs));
    assert!(same < 2e-3 && changed > 20.0 * same, "{same} {changed}");
}

#[test]
fn speed_is_measured_by_the_given_clock() {
    let Some(Both { theirs, .. }) = both() else { return };
    let mut ticks = 0;
    let mut now = || {
        ticks += 1;
        Duration::from_secs([0, 2, 10, 17][ticks - 1])
    };
    let mut probes = crate::eval::Probes { now: &mut now, peak_rss_bytes: &mut || None };
    let s = speed(&theirs, 2, 16, 6, &mut probes).unwrap();
    assert_eq!((s.prefill_tokens_per_s, s.decode_tokens_per_s, s.first_token_ms), (16.0, 2.0, 2000.0));
}

#[test]
fn what_cannot_be_run_is_refused_by_its_name() {
    let Some(Both { folder, ours, theirs, .. }) = both() else { return };
    let refused = |result: Result<Vec<Generated>, ModelError>| result.unwrap_err().to_string();
    let mut go = |_: usize, _: &Generated| ControlFlow::Continue(());
    let drawn = Sampling { temperature: 0.7, ..Sampling::GREEDY };
    let drawn = GenerateOptions { sampling: drawn, ..GenerateOptions::default() };
    assert!(refused(theirs.generate(&[vec![1]], &drawn, &mut go)).contains("greedily"));
    let none = GenerateOptions { max_new_tokens: 0, ..GenerateOptions::default() };
    assert!(refused(theirs.generate(&[vec![1]], &none, &mut go)).contains("at least 1"));
    let plain = GenerateOptions::default();
    assert!(refused(theirs.generate(&[vec![1], vec![]], &plain, &mut go)).contains("prompt 1 has no tokens"));
    assert!(refused(theirs.generate(&[vec![u32::MAX]], &plain, &mut go)).contains("vocabulary"));
    assert!(refused(theirs.generate(&[vec![1; 1 << 20]], &plain, &mut go)).contains("context is"));
    let e = theirs.visit_logits(&[1, 2], 0..3, &mut |_, _| Ok(())).unwrap_err().to_string();
    assert!(e.contains("position 2 of a text of 2"), "{e}");
    let file = folder.path().join("f16.gguf");
    let e = LlamaCpp::open(&file, Some(folder.path())).unwrap_err().to_string();
    assert!(e.contains("adapters as GGUF files"), "{e}");
    assert!(LlamaCpp::open(&file, Some(&file)).unwrap_err().to_string().starts_with("adapter: "), "a model is none");
    let mut other = some_adapter(&ours, 2);
    other.base_sha256 = Some("00".repeat(32));
    let path = folder.path().join("other.gguf");
    other.write(&path).unwrap();
    let e = LlamaCpp::open(&file, Some(&path)).unwrap_err().to_string();
    assert!(e.contains("trained on base 0000"), "{e}");
}
