//! Tests of the evaluation.

use super::*;
use crate::model::tests::{noise, some_tokens, tiny_file_with};
use crate::model::{Arch, Decoder, GenerateOptions, Scored};
use std::{ops::ControlFlow, time::Duration};

fn go(_: usize, _: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The tiny model with noise added to one matrix.
fn disturbed(scale: f32) -> Decoder {
    let file = tiny_file_with(Arch::Llama, |_, parts| {
        for (w, n) in parts[4].2.iter_mut().zip(noise(24 * 16, 77, scale)) {
            *w += n;
        }
    });
    Decoder::load(&file).unwrap()
}

#[test]
fn perplexity_scores_the_second_half_of_each_window() {
    let model = disturbed(0.0);
    let tokens = some_tokens(75, 2);
    let got = perplexity(&model, &tokens, 30, &mut go).unwrap();
    let items: Vec<_> = tokens.chunks_exact(30).map(|tokens| Scored { tokens, from: 15 }).collect();
    let want: Vec<f64> = model.nll(&items).unwrap().into_iter().flatten().map(f64::from).collect();
    assert_eq!((got.tokens, want.len()), (30, 30));
    let mean = want.iter().sum::<f64>() / 30.0;
    assert!((got.nll - mean).abs() < 1e-12 && (got.perplexity - mean.exp()).abs() < 1e-9);
    assert!(perplexity(&model, &tokens[..20], 30, &mut go).is_err());
}

#[test]
fn divergence_is_zero_against_itself_and_grows_with_the_disturbance() {
    let base = disturbed(0.0);
    let tokens = some_tokens(90, 3);
    let same = divergence(&base, &base, &tokens, 30, &mut go).unwrap();
    assert_eq!((same.kld, same.kld_max, same.top1), (0.0, 0.0, 1.0));
    assert!((same.base.nll - perplexity(&base, &tokens, 30, &mut go).unwrap().nll).abs() < 1e-6);
    let small = divergence(&base, &disturbed(0.1), &tokens, 30, &mut go).unwrap();
    let large = divergence(&base, &disturbed(0.8), &tokens, 30, &mut go).unwrap();
    assert!(0.0 < small.kld && small.kld < large.kld && large.top1 < 1.0);
    assert!(large.kld <= large.kld_p99 && large.kld_p99 <= large.kld_max);
}

#[test]
fn other_vocabularies_are_refused_and_work_can_be_cancelled() {
    let base = disturbed(0.0);
    let wide = tiny_file_with(Arch::Llama, |_, parts| {
        (parts[0].1[1], parts[0].2) = (51, noise(24 * 51, 1, 1.0));
    });
    let tokens = some_tokens(40, 3);
    let other = Decoder::load(&wide).unwrap();
    let text = divergence(&base, &other, &tokens, 20, &mut go).unwrap_err().to_string();
    assert!(text.contains("50") && text.contains("51"));
    assert!(perplexity(&base, &tokens, 20, &mut |_, _| ControlFlow::Break(())).is_err());
}

#[test]
fn texts_are_normalised() {
    for (text, want) in [
        ("  The answer: 45 days! ", "the answer 45 days"),
        ("3.5 kg.", "3.5 kg"),
        ("1,200 W", "1200 w"),
        ("Code AB-12.", "code ab12"),
        ("well-known", "well known"),
        ("Ｆｕｌｌ　ｗｉｄｔｈ", "full width"),
        ("保修24个月。", "保 修 24 个 月"),
        ("…", ""),
    ] {
        assert_eq!(normalize(text), want, "{text}");
    }
}

#[test]
fn rules_judge_answers() {
    use MatchRule::{Contains, Value, Whole};
    for (rule, answer, expected, right) in [
        (Whole, "24 months.", "24 months", true),
        (Whole, "It is 24 months", "24 months", false),
        (Contains, "It is 24 months.", "24 months", true),
        (Contains, "124 months", "24 months", false),
        (Contains, "24 or 36 months", "36", true),
        (Value, "24 or 36 months", "36", false),
        (Value, "It lasts 36 hours", "36 hours", true),
        (Value, "Ask for a blue one", "blue", true),
        (Value, "", "36", false),
        (Value, "保修期为24个月", "24个月", true),
        (Value, "It is 14 days.", "14", true),
        (Value, "The answer is 14.", "14", true),
        (Value, "约14天", "14", true),
        (Value, "140 days", "14", false),
        (Value, "14.5 days", "14", false),
        (Value, "1.14 days", "14", false),
        (Value, "It weighs 1940 grams.", "940", false),
        (Value, "About 1.7 liters", "1.7", true),
        (Value, "About 11.7 liters", "1.7", false),
        (Value, "About 3.1.7", "1.7", false),
        (Value, "The code is 12,500.", "12500", true),
        (Value, "OLIVE green", "olive", true),
        (Value, "olives", "olive", false),
        (Value, "a Descaling  Brush is included", "descaling brush", true),
        (Value, "The Original Box", "original box", true),
        (Value, "x", "", false),
        (Value, "", "", true),
        // a product's name is not the value that is asked for
        (Value, "X1 价格：389 元。", "389", true),
        (Value, "The X1 costs 412, not 389.", "389", false),
        (Value, "In 2 days: code AB-12", "ab12", true),
        (Value, "AB-11 or AB-12", "ab12", false),
    ] {
        assert_eq!(rule.accepts(answer, expected), right, "{rule:?} {answer} {expected}");
    }
}

#[test]
fn answers_come_back_in_order_and_pair_up() {
    let model = disturbed(0.0);
    let decode = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let prompts: Vec<Vec<u32>> = (0..5).map(|i| some_tokens(4 + i, i as u32)).collect();
    let options = GenerateOptions { max_new_tokens: 3, max_batch: 2, ..GenerateOptions::default() };
    let plain = model.generate_batch(&prompts, &options).unwrap();
    let questions = prompts
        .into_iter()
        .zip(&plain)
        .enumerate()
        .map(|(i, (prompt, g))| Question { prompt, expected: if i == 3 { "no".into() } else { decode(&g.tokens) } })
        .collect();
    let set = AnswerSet { questions, rule: MatchRule::Whole, options };
    let results = set.run(&model, &decode, &mut go).unwrap();
    assert_eq!(results.iter().map(|r| r.right).collect::<Vec<_>>(), [true, true, true, false, true]);
    let mut other = results.clone();
    other[0].right = false;
    other[3].right = true;
    let want = Paired { both_right: 3, only_first: 1, only_second: 1, both_wrong: 0 };
    let got = paired(&results, &other);
    assert_eq!(got, want);
    assert_eq!((got.questions(), got.first_right(), got.second_right()), (5, 4, 4));
}

#[test]
fn speed_uses_the_given_clock() {
    let model = disturbed(0.0);
    let mut ticks = 0;
    let mut now = || {
        ticks += 1;
        Duration::from_secs([0, 2, 2, 12][ticks - 1])
    };
    let report = speed(&model, 4, 10, 6, &mut Probes { now: &mut now, peak_rss_bytes: &mut || Some(5) }).unwrap();
    assert_eq!((report.prefill_tokens_per_s, report.decode_tokens_per_s), (20.0, 2.5));
    assert_eq!((report.first_token_ms, report.peak_rss_bytes), (2000.0, Some(5)));
}

#[test]
fn texts_are_scored_as_by_nll_and_bad_logits_are_counted() {
    let model = disturbed(0.0);
    let texts = [some_tokens(30, 1), some_tokens(7, 2), some_tokens(1, 3)];
    let got = score_texts(&model, &texts, &mut go).unwrap();
    let want = model.nll(&[Scored { tokens: &texts[0], from: 1 }, Scored { tokens: &texts[1], from: 1 }]).unwrap();
    assert_eq!((&got[0].nll, &got[1].nll, got[2].nll.len()), (&want[0], &want[1], 0));
    assert_eq!((got[0].top.len(), got[0].non_finite_logits), (29, 0));
    let tail: f64 = want[0][19..].iter().map(|v| f64::from(*v)).sum();
    assert_eq!(got[0].nll_from(20), (tail, 10));
    assert_eq!(got[2].nll_from(1), (0.0, 0));
    assert!(score_texts(&model, &texts, &mut |_, _| ControlFlow::Break(())).is_err());
    assert!(score_texts(&model, &[vec![]], &mut go).is_err());

    let broken = tiny_file_with(Arch::Llama, |_, parts| parts[1].2.fill(3e38));
    let broken = Decoder::load(&broken).unwrap();
    let got = score_texts(&broken, &texts[1..2], &mut go).unwrap();
    assert!(got[0].non_finite_logits > 0 && got[0].non_finite_logits <= 6 * 50);
    assert!(got[0].nll.is_empty(), "no likelihood of what is no number");
    assert!(broken.nll(&[Scored { tokens: &texts[1], from: 1 }]).is_err(), "scoring alone refuses");
}

#[test]
fn identities_see_every_key_that_makes_tokens() {
    use crate::gguf::{Array, Gguf, Value};
    let texts = |v: &[&str]| Value::Array(Array::String(v.iter().map(|t| (*t).to_owned()).collect()));
    let file = |more: &[(&str, Value)]| -> Gguf {
        tiny_file_with(Arch::Llama, |metadata, _| {
            metadata.retain(|(key, _)| !more.iter().any(|(k, _)| k == key));
            metadata.extend(more.iter().map(|(k, v)| ((*k).to_owned(), v.clone())));
        })
    };
    let same = [
        ("tokenizer.ggml.merges", texts(&["a b"])),
        ("tokenizer.ggml.pre", "smollm".into()),
        ("tokenizer.chat_template", "{{ x }}".into()),
    ];
    let base = text_identity(&file(&same));
    let mut turned = same.clone();
    turned.reverse();
    assert_eq!(text_identity(&file(&turned)), base, "the order of keys means nothing");
    let with = |key: &'static str, value: Value| {
        let mut all: Vec<_> = same.iter().filter(|(k, _)| *k != key).cloned().collect();
        all.push((key, value));
        text_identity(&file(&all))
    };
    let vocabulary = with("tokenizer.ggml.tokens", texts(&["b"]));
    assert!(vocabulary.vocabulary_sha256 != base.vocabulary_sha256);
    assert!(vocabulary.tokenizer_sha256 != base.tokenizer_sha256);
    // the same number of tokens, other merges: not the same tokenizer
    let merges = with("tokenizer.ggml.merges", texts(&["b a"]));
    assert!(merges.tokenizer_sha256 != base.tokenizer_sha256);
    assert_eq!(merges.vocabulary_sha256, base.vocabulary_sha256);
    assert!(with("tokenizer.ggml.eos_token_id", 0u32.into()).tokenizer_sha256 != base.tokenizer_sha256);
    let template = with("tokenizer.chat_template", "{{ y }}".into());
    assert_eq!(template.tokenizer_sha256, base.tokenizer_sha256);
    assert!(template.chat_template_sha256.is_some() && template.chat_template_sha256 != base.chat_template_sha256);
    assert_eq!(text_identity(&file(&[])).chat_template_sha256, None);
}

#[test]
fn working_memory_follows_the_formula() {
    let model = disturbed(0.0);
    let m = working_memory(model.config(), 1000, 100, 10);
    // 2 · 2 layers · 16 values · 100 tokens · 2 bytes; 4 bytes · ((3·24 + 64 + 32 + 3·40) · 10 + 50)
    assert_eq!((m.kv_bytes, m.activation_bytes, m.total_bytes()), (12_800, 11_720, 1000 + 12_800 + 11_720));
    assert_eq!(working_memory(model.config(), 0, 5, 10).pass_tokens, 5);
}
