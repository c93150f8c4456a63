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

/// 12 windows of 20 tokens.
fn many_windows() -> Vec<u32> {
    some_tokens(240, 5)
}

#[test]
fn every_figure_of_a_divergence_has_its_interval() {
    let (base, tokens) = (disturbed(0.0), many_windows());
    let scores = position_scores(Base::Model(&base), &disturbed(0.2), &tokens, 20, &mut go).unwrap();
    let d = scores.summary();
    assert_eq!((scores.kld().len(), d.base.tokens), (120, 120));
    assert!(d.kld <= d.kld_p99 && d.kld_p99 <= d.kld_p999 && d.kld_p999 <= d.kld_max);
    // Δp straight from the two models' likelihoods
    let nll = |m: &Decoder| -> Vec<f64> {
        let items: Vec<_> = tokens.chunks_exact(20).map(|tokens| Scored { tokens, from: 10 }).collect();
        m.nll(&items).unwrap().into_iter().flatten().map(f64::from).collect()
    };
    let (b, o) = (nll(&base), nll(&disturbed(0.2)));
    let dp: Vec<f64> = b.iter().zip(&o).map(|(b, o)| (-o).exp() - (-b).exp()).collect();
    let rms = (dp.iter().map(|d| d * d).sum::<f64>() / 120.0).sqrt();
    assert!((d.dp_rms - rms).abs() < 1e-6 && (d.dp_mean - dp.iter().sum::<f64>() / 120.0).abs() < 1e-6);
    let i = d.intervals.unwrap();
    for (interval, value) in [
        (i.kld, d.kld),
        (i.kld_p99, d.kld_p99),
        (i.top1, d.top1),
        (i.dp_rms, d.dp_rms),
        (i.nll_difference, d.other.nll - d.base.nll),
    ] {
        assert!(interval.contains(value) && interval.low < interval.high, "{interval:?} {value}");
    }
    assert!(i.kld_p999.high <= d.kld_max);
    let few = position_scores(Base::Model(&base), &base, &tokens[..140], 20, &mut go).unwrap().summary();
    assert_eq!(few.intervals, None, "seven windows say too little");
}

#[test]
fn two_models_are_compared_in_pairs() {
    let (base, tokens) = (disturbed(0.0), many_windows());
    let of = |scale: f32, n: usize| {
        position_scores(Base::Model(&base), &disturbed(scale), &tokens[..n], 20, &mut go).unwrap()
    };
    let (far, near) = (of(0.5, 240), of(0.1, 240));
    let c = PositionScores::compare(&far, &near).unwrap();
    let (a, b) = (far.summary(), near.summary());
    assert!((c.kld.value - (b.kld - a.kld)).abs() < 1e-12 && (c.kld_ratio.value - b.kld / a.kld).abs() < 1e-12);
    assert!(
        (c.top1.value - (b.top1 - a.top1)).abs() < 1e-12 && (c.nll.value - (b.other.nll - a.other.nll)).abs() < 1e-12
    );
    assert!(c.kld.interval.unwrap().high < 0.0 && c.kld_ratio.interval.unwrap().high < 1.0);
    let same = PositionScores::compare(&far, &far).unwrap();
    assert_eq!((same.kld.value, same.kld_ratio.value), (0.0, 1.0));
    assert_eq!(same.kld.interval, Some(Interval { low: 0.0, high: 0.0 }));
    assert!(PositionScores::compare(&far, &of(0.1, 200)).is_err());
}

#[test]
fn a_recorded_base_stands_for_the_model_on_the_same_tokens_only() {
    let (base, other, tokens) = (disturbed(0.0), disturbed(0.3), many_windows());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("base");
    record_base(&base, &tokens, 20, &path, &mut go).unwrap();
    let record = RecordedBase::open(&path).unwrap();
    assert_eq!((record.head().vocab, record.head().windows), (50, 12));
    let with = |base: Base<'_>, other: &Decoder, tokens: &[u32], window| {
        position_scores(base, other, tokens, window, &mut go).map(|s| s.summary())
    };
    let (live, kept) = (
        with(Base::Model(&base), &other, &tokens, 20).unwrap(),
        with(Base::Recorded(&record), &other, &tokens, 20).unwrap(),
    );
    assert!((live.kld - kept.kld).abs() < 1e-6 && (live.kld_max - kept.kld_max).abs() < 1e-4, "{live:?} {kept:?}");
    assert!(live.top1 == kept.top1 && (live.base.nll - kept.base.nll).abs() < 1e-6);
    let itself = with(Base::Recorded(&record), &base, &tokens, 20).unwrap();
    assert!(itself.kld.abs() < 1e-6 && itself.top1 == 1.0, "{itself:?}");
    // the same windows in another order, another text, other windows
    let mut permuted = tokens.clone();
    permuted.rotate_left(20);
    let text = with(Base::Recorded(&record), &base, &permuted, 20).unwrap_err().to_string();
    assert!(text.contains("another order"), "{text}");
    assert!(with(Base::Recorded(&record), &base, &tokens[..220], 20).is_err());
    assert!(with(Base::Recorded(&record), &base, &tokens, 24).unwrap_err().to_string().contains("windows of 20"));
    // damaged files
    let bytes = std::fs::read(&path).unwrap();
    for bad in [&bytes[..bytes.len() - 1], &bytes[..10], &[], b"{}\n", &[&bytes[..], b"x"].concat()] {
        std::fs::write(&path, bad).unwrap();
        assert!(RecordedBase::open(&path).is_err());
    }
    assert!(record_base(&base, &tokens, 20, &path, &mut |_, _| ControlFlow::Break(())).is_err());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "a cancelled record leaves nothing");
}

#[test]
fn shares_and_paired_differences_have_the_published_intervals() {
    let wilson = share(8, 10);
    let i = wilson.interval.unwrap();
    assert!(
        (wilson.value, (i.low - 0.4902).abs() < 1e-4, (i.high - 0.9433).abs() < 1e-4) == (0.8, true, true),
        "{i:?}"
    );
    assert_eq!(share(0, 5).interval.unwrap().low, 0.0);
    assert!(share(0, 0).interval.is_none());
    let pairs = Paired { both_right: 60, only_first: 4, only_second: 12, both_wrong: 24 };
    let d = pairs.difference();
    let i = d.interval.unwrap();
    // (12.5 − 4.5)/102 ± 1.96·√(17 − 64/102)/102
    assert!(
        (d.value - 0.08).abs() < 1e-12 && (i.low - 0.000_68).abs() < 1e-4 && (i.high - 0.156_18).abs() < 1e-4,
        "{i:?}"
    );
}

#[test]
fn questions_get_options_and_the_likeliest_is_chosen() {
    let lines = "{\"question\":\"How many?\",\"answer\":\"Some.\\n#### 1,234\"}\n\n{\"question\":\"And now?\",\"answer\":\"#### 0\"}\n";
    let items = gsm8k_choices(lines, 7).unwrap();
    assert_eq!(items, gsm8k_choices(lines, 7).unwrap());
    assert_ne!(items, gsm8k_choices(lines, 8).unwrap());
    for (item, right) in items.iter().zip([" 1234", " 0"]) {
        let mut options = item.options.clone();
        options.sort();
        options.dedup();
        assert_eq!((options.len(), item.options[item.right].as_str()), (4, right));
    }
    assert!(items[0].prompt.ends_with("How many?\nAnswer: The final answer is"));
    let bad = gsm8k_choices("{\"question\":\"?\",\"answer\":\"#### x\"}", 1).unwrap_err().to_string();
    assert!(bad.contains("line 1") && bad.contains("whole number"), "{bad}");

    let model = disturbed(0.0);
    let encode = |text: &str| -> Vec<u32> { text.bytes().map(|b| u32::from(b) % 50).collect() };
    let results = multiple_choice(&model, &items, &encode, &mut go).unwrap();
    for (item, result) in items.iter().zip(&results) {
        let by_hand = item.options.iter().map(|o| {
            let tokens = [encode(&item.prompt), encode(o)].concat();
            let from = item.prompt.len();
            -model.nll(&[Scored { tokens: &tokens, from }]).unwrap()[0].iter().map(|v| f64::from(*v)).sum::<f64>()
        });
        let best = by_hand.enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert_eq!((result.chosen, result.right), (best.0, best.0 == item.right));
        assert!((result.log_likelihoods[best.0] - best.1).abs() < 1e-4);
        assert_eq!(result.answer(item).answer, item.options[best.0]);
    }
    assert!(multiple_choice(&model, &[ChoiceItem { right: 4, ..items[0].clone() }], &encode, &mut go).is_err());
}

#[test]
fn safety_sets_are_judged_by_the_rule_of_the_fleet() {
    use flywheel_attribution::refusal::{AnswerKind, detect};
    let judge = |text: &str| match detect(text).kind {
        AnswerKind::Refused => Says::Refusal,
        AnswerKind::Answered => Says::Answer,
        AnswerKind::Abstained | AnswerKind::Unknown => Says::Unclear,
    };
    let items = own_safety_set().unwrap();
    for (language, must) in [("en", Must::Refuse), ("en", Must::Answer), ("zh", Must::Refuse), ("zh", Must::Answer)] {
        assert_eq!(items.iter().filter(|i| i.language == language && i.must == must).count(), 16);
    }
    // a model that always refuses, in the language of the question
    let sorry = |item: &SafetyItem| match item.language.as_str() {
        "zh" => "很抱歉，我无法帮助您完成这个请求。".to_owned(),
        _ => "I'm sorry, but I can't help with that.".to_owned(),
    };
    let report = judged(&items, items.iter().map(sorry).collect(), &judge);
    assert_eq!(report.refusal_rate.value, 1.0);
    assert_eq!(report.groups["must_refuse.zh"].right.value, 1.0);
    assert_eq!(report.groups["must_answer.en"].right.value, 0.0);
    // and one that is silent once, refuses once and answers the rest
    let mixed = |(i, item): (usize, &SafetyItem)| match i {
        0 => String::new(),
        1 => sorry(item),
        _ => "Sure: first open the lid, then press the button for two seconds.".to_owned(),
    };
    let report = judged(&items, items.iter().enumerate().map(mixed).collect(), &judge);
    let en = &report.groups["must_refuse.en"];
    assert_eq!((en.items, en.unclear, en.refused.value, en.right.value), (16, 1, 1.0 / 16.0, 1.0 / 16.0));
    assert_eq!(report.groups["must_answer.zh"].right.value, 1.0);
    assert!((report.refusal_rate.value - 1.0 / 64.0).abs() < 1e-12);
    let twice = format!("{0}\n{0}", serde_json::to_string(&items[0]).unwrap());
    assert!(read_safety_set(&twice).unwrap_err().to_string().contains("line 2"));
    assert!(read_safety_set("{\"id\":1}").is_err());

    let model = disturbed(0.0);
    let options = GenerateOptions { max_new_tokens: 2, ..GenerateOptions::default() };
    let encode = |text: &str| -> Vec<u32> { text.bytes().take(9).map(|b| u32::from(b) % 50).collect() };
    let decode = |ids: &[u32]| format!("{ids:?}");
    let report = safety(&model, &items[..3], &options, &encode, &decode, &judge, &mut go).unwrap();
    assert_eq!((report.results.len(), report.refusal_rate.value), (3, 0.0));
}

#[test]
fn every_question_of_gsm8k_makes_four_options() {
    let Some(path) = crate::testing::data_file("text/gsm8k_test.jsonl") else { return };
    let items = gsm8k_choices(&std::fs::read_to_string(path).unwrap(), 1).unwrap();
    assert_eq!(items.len(), 1319);
    assert!(items.iter().all(|i| i.options.len() == 4 && i.right < 4));
    assert_eq!(items[0].options[items[0].right], " 18");
    // the right one is at no favoured place
    for place in 0..4 {
        assert!((250..410).contains(&items.iter().filter(|i| i.right == place).count()));
    }
}

/// Prints what SmolLM2 chooses and refuses.
#[test]
#[ignore = "a measurement of some minutes"]
fn smollm2_chooses_better_than_chance_and_is_asked_about_safety() {
    use crate::tokenizer::{ChatTemplate, Message, Tokenizer};
    use flywheel_attribution::refusal::{AnswerKind, detect};
    let (Some(path), Some(text)) = (
        crate::testing::model_file("SmolLM2-135M-Instruct.Q4_1.gguf"),
        crate::testing::data_file("text/gsm8k_test.jsonl"),
    ) else {
        return;
    };
    let gguf = crate::gguf::Gguf::open(&path).unwrap();
    let (model, tokenizer) = (Decoder::load(&gguf).unwrap(), Tokenizer::from_gguf(&gguf).unwrap());
    let items = gsm8k_choices(&std::fs::read_to_string(text).unwrap(), 1).unwrap();
    let items = &items[..100];
    let results = multiple_choice(&model, items, &|t| tokenizer.encode(t, false), &mut go).unwrap();
    let right = results.iter().filter(|r| r.right).count();
    let by_mean = results.iter().filter(|r| r.right_by_mean).count();
    println!("GSM8K, 4 options: {:?}, by mean {:?}", share(right, items.len()), share(by_mean, items.len()));
    assert!(share(right.max(by_mean), items.len()).interval.unwrap().low > 0.25);

    let template = ChatTemplate::from_gguf(&gguf).unwrap();
    let encode = |prompt: &str| tokenizer.encode_chat(&template, &[Message::user(prompt)], true).unwrap();
    let judge = |text: &str| match detect(text).kind {
        AnswerKind::Refused => Says::Refusal,
        AnswerKind::Answered => Says::Answer,
        AnswerKind::Abstained | AnswerKind::Unknown => Says::Unclear,
    };
    let ends = (0..model.config().vocab as u32).filter(|id| tokenizer.is_end(*id)).collect();
    let options = GenerateOptions { max_new_tokens: 48, stop_ids: ends, ..GenerateOptions::default() };
    let set = own_safety_set().unwrap();
    let report = safety(&model, &set, &options, &encode, &|ids| tokenizer.decode(ids), &judge, &mut go).unwrap();
    println!("refusal rate {:?}", report.refusal_rate);
    for (group, s) in &report.groups {
        println!("{group}: right {:.2}, refused {:.2}, unclear {}", s.right.value, s.refused.value, s.unclear);
    }
}
