//! The offline gate.

use flywheel_experiment::offline::{
    CandidateChange, DivergenceV1, DocumentNllV1, IdentityV1, MemoryV1, NumericsV1, OfflineCheck, OfflineInputV1,
    OfflineReportV1, OfflineSpecV1, PairedItemV1, RooflineV1, SafetySetV1, evaluate_offline,
};
use flywheel_types::Verdict as V;

fn items(both: usize, gained: usize, lost: usize, neither: usize) -> Vec<PairedItemV1> {
    let kinds = [(both, true, true), (gained, false, true), (lost, true, false), (neither, false, false)];
    let mut out = Vec::new();
    for (n, incumbent_correct, candidate_correct) in kinds {
        for _ in 0..n {
            out.push(PairedItemV1 { cluster: format!("q{}", out.len()), incumbent_correct, candidate_correct });
        }
    }
    out
}

fn input(change: CandidateChange, items: Vec<PairedItemV1>) -> OfflineInputV1 {
    OfflineInputV1 {
        identity: Some(IdentityV1 {
            tokenizer_equal: true,
            vocabulary_equal: true,
            chat_template_equal: true,
            eval_set_equal: true,
        }),
        numerics: Some(NumericsV1 { non_finite_logits: 0, empty_outputs: 0 }),
        size_bytes: Some(100_000_000),
        items,
        ..OfflineInputV1::new(change)
    }
}

fn judge(input: &OfflineInputV1) -> OfflineReportV1 {
    evaluate_offline(&OfflineSpecV1::default(), input).unwrap()
}

fn verdict(r: &OfflineReportV1, check: OfflineCheck) -> V {
    r.results.iter().find(|x| x.check == check).unwrap().verdict
}

#[test]
fn a_lora_that_learns_passes_although_perplexity_rises() {
    let mut i = input(CandidateChange::Tuned, items(30, 24, 1, 5));
    i.documents = (0..40)
        .map(|k| DocumentNllV1 { tokens: 100, incumbent_nll: 300.0, candidate_nll: 308.0 + f64::from(k % 3) })
        .collect();
    let r = judge(&i);
    assert_eq!(r.verdict, V::Pass, "{}", r.reason);
    assert_eq!(verdict(&r, OfflineCheck::Perplexity), V::Warn);
    assert_eq!(r.warnings.len(), 1);
    let a = r.accuracy.unwrap();
    assert_eq!((a.items, a.incumbent_correct, a.candidate_correct), (60, 31, 54));
    assert!(a.mcnemar_p < 1e-5 && a.lower > 0.2, "{a:?}");
    i.change = CandidateChange::Requantized;
    assert_eq!(judge(&i).verdict, V::Fail, "the same rise fails a re-quantisation");
}

#[test]
fn a_damaging_candidate_fails() {
    let r = judge(&input(CandidateChange::Tuned, items(20, 1, 25, 14)));
    assert_eq!(r.verdict, V::Fail);
    assert!(r.reason.contains("surely worse"), "{}", r.reason);
}

#[test]
fn too_few_items_are_inconclusive_and_identical_models_pass_with_enough() {
    assert_eq!(judge(&input(CandidateChange::Requantized, items(20, 0, 0, 0))).verdict, V::Inconclusive);
    let same = judge(&input(CandidateChange::Requantized, items(300, 0, 0, 120)));
    assert_eq!(same.verdict, V::Pass, "{}", same.reason);
    assert_eq!(same.accuracy.unwrap().mcnemar_p, 1.0);
}

#[test]
fn clusters_widen_the_bounds() {
    let mut clustered = items(300, 40, 20, 40);
    let free = judge(&input(CandidateChange::Tuned, clustered.clone())).accuracy.unwrap();
    for (i, item) in clustered.iter_mut().enumerate() {
        item.cluster = format!("doc{}", i / 20);
    }
    let tied = judge(&input(CandidateChange::Tuned, clustered)).accuracy.unwrap();
    assert_eq!(free.difference, tied.difference);
    assert!(tied.lower < free.lower - 0.02, "{} {}", tied.lower, free.lower);
    // Independent items: √(g + l - (g - l)²/n)/n up to n/(n-1).
    let se = (60.0_f64 - 400.0 / 400.0).sqrt() / 400.0 * (400.0_f64 / 399.0).sqrt();
    assert!((free.difference - free.lower - 1.644_853_627 * se).abs() < 1e-9);
}

#[test]
fn required_input_that_is_missing_blocks() {
    let mut i = input(CandidateChange::Tuned, items(30, 24, 1, 5));
    i.identity = None;
    let r = judge(&i);
    assert_eq!(r.verdict, V::Inconclusive);
    assert!(r.reason.contains("identity is required"), "{}", r.reason);
    assert_eq!(judge(&input(CandidateChange::Tuned, Vec::new())).verdict, V::Inconclusive);
}

/// Everything measured, everything within its limits.
fn complete() -> (OfflineSpecV1, OfflineInputV1) {
    let memory = |metric: &str, bytes| MemoryV1 { metric: metric.into(), bytes };
    let spec = OfflineSpecV1 {
        max_size_bytes: Some(150_000_000),
        max_load_ms: Some(800.0),
        memory_budgets: vec![memory("pss", 400)],
        ..OfflineSpecV1::default()
    };
    let mut i = input(CandidateChange::Requantized, items(300, 30, 5, 60));
    i.load_ms = vec![9000.0, 700.0, 600.0];
    i.peak_memory = vec![memory("pss", 300), memory("rss", 900)];
    i.roofline = vec![RooflineV1 {
        device_class: "low".into(),
        bandwidth_bytes_per_s: 10e9,
        compute_ops_per_s: 1e12,
        bytes_per_token: 100e6,
        ops_per_token: 270e6,
        efficiency: 0.6,
        min_tokens_per_s: 20.0,
    }];
    i.divergence = Some(DivergenceV1 { mean: 0.03, p999: 1.5, same_top: 0.92, incumbent_mean: Some(0.03) });
    i.safety = vec![SafetySetV1 { name: "must_refuse".into(), items: 100, lost: 0, gained: 1 }];
    (spec, i)
}

type Break = fn(&mut OfflineInputV1);

#[test]
fn every_hard_limit_fails_with_its_name() {
    let (spec, ok) = complete();
    assert!((ok.roofline[0].tokens_per_s() - 60.0).abs() < 1e-9, "memory-bound");
    assert_eq!(evaluate_offline(&spec, &ok).unwrap().verdict, V::Pass);
    let breaks: [(&str, Break); 9] = [
        ("tokenizer", |i| i.identity.as_mut().unwrap().tokenizer_equal = false),
        ("non-finite", |i| i.numerics.as_mut().unwrap().non_finite_logits = 1),
        ("size", |i| i.size_bytes = Some(150_000_001)),
        ("load", |i| i.load_ms = vec![900.0; 3]),
        ("peak memory (pss)", |i| i.peak_memory[0].bytes = 401),
        ("tokens/s", |i| i.roofline[0].min_tokens_per_s = 61.0),
        ("KL", |i| i.divergence.as_mut().unwrap().mean = 0.2),
        ("same top", |i| i.divergence.as_mut().unwrap().same_top = 0.8),
        ("must_refuse", |i| i.safety[0].lost = 4),
    ];
    for (what, break_it) in breaks {
        let mut i = ok.clone();
        break_it(&mut i);
        let r = evaluate_offline(&spec, &i).unwrap();
        assert_eq!(r.verdict, V::Fail, "{what}");
        assert!(r.reason.contains(what), "{what}: {}", r.reason);
    }
}

#[test]
fn numbers_that_cannot_be_are_refused() {
    let mut i = input(CandidateChange::Tuned, items(30, 24, 1, 5));
    i.documents = vec![DocumentNllV1 { tokens: 10, incumbent_nll: 1.0, candidate_nll: f64::NAN }];
    let e = evaluate_offline(&OfflineSpecV1::default(), &i).unwrap_err();
    assert!(e.to_string().contains("candidate_nll"), "{e}");
    assert!(serde_json::from_str::<OfflineSpecV1>(r#"{"acuracy_margin":1}"#).is_err());
}
