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
    assert_eq!(paired(&results, &other), want);
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
