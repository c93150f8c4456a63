//! The single checks of the offline gate.

use super::{
    AccuracyV1, CandidateChange, DocumentNllV1, OfflineCheck, OfflineInputV1, OfflineResult, OfflineSpecV1,
    PairedItemV1,
};
use crate::error::ExperimentError;
use crate::exact::{clopper_pearson_lower, clopper_pearson_upper, mcnemar_exact};
use crate::gate::spec::check;
use crate::special::normal_quantile;
use flywheel_types::Verdict;
use std::collections::BTreeMap;

/// Discordant pairs below which the paired interval is exact (Clopper-Pearson on both counts) instead of normal.
const FEW_DISCORDANT: u64 = 25;

/// Refuses numbers that cannot be measurements.
pub(super) fn check_input(input: &OfflineInputV1) -> Result<(), ExperimentError> {
    for d in &input.documents {
        check("documents.incumbent_nll", d.incumbent_nll, |x| x >= 0.0, "a sum of nats, 0 or more")?;
        check("documents.candidate_nll", d.candidate_nll, |x| x >= 0.0, "a sum of nats, 0 or more")?;
    }
    if let Some(d) = &input.divergence {
        check("divergence.mean", d.mean, |x| x > -0.1, "a mean divergence in nats")?;
        check("divergence.p999", d.p999, |x| x > -0.1, "a divergence in nats")?;
        check("divergence.same_top", d.same_top, |x| (0.0..=1.0).contains(&x), "a share in 0..=1")?;
    }
    for s in &input.safety {
        let sum = (s.lost + s.gained) as f64;
        check("safety.lost", sum, |x| x <= s.items as f64, "lost and gained together are at most the items")?;
    }
    for ms in &input.load_ms {
        check("load_ms", *ms, |x| x >= 0.0, "a time in ms, 0 or more")?;
    }
    for r in &input.roofline {
        for x in [r.bandwidth_bytes_per_s, r.compute_ops_per_s, r.bytes_per_token, r.ops_per_token] {
            check("roofline", x, |x| x > 0.0, "bandwidth, compute and costs per token are above 0")?;
        }
        check("roofline.efficiency", r.efficiency, |x| x > 0.0 && x <= 1.0, "a share in (0, 1]")?;
    }
    Ok(())
}

/// Every check that has input, in a fixed order.
pub(super) fn all(spec: &OfflineSpecV1, input: &OfflineInputV1, accuracy: Option<&AccuracyV1>) -> Vec<OfflineResult> {
    let mut out = Vec::new();
    out.extend(identity(input));
    out.extend(numerics(input));
    out.extend(accuracy.map(|a| judge_accuracy(spec, a)));
    out.extend(perplexity(spec, input));
    out.extend(divergence(spec, input));
    out.extend(safety(spec, input));
    out.extend(budgets(spec, input));
    out.extend(speed(input));
    out
}

/// Result of a required check without input.
pub(super) fn missing(check: OfflineCheck) -> OfflineResult {
    let mut out = result(check, Verdict::Inconclusive, String::new());
    let name = serde_json::to_value(check).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
    out.reason = format!("{name} is required but was not measured");
    out
}

fn result(check: OfflineCheck, verdict: Verdict, reason: String) -> OfflineResult {
    OfflineResult {
        check,
        subject: None,
        verdict,
        value: None,
        lower: None,
        upper: None,
        limit: None,
        p_value: None,
        reason,
    }
}

fn pass_or_fail(ok: bool) -> Verdict {
    if ok { Verdict::Pass } else { Verdict::Fail }
}

fn identity(input: &OfflineInputV1) -> Option<OfflineResult> {
    let id = input.identity?;
    let different: Vec<&str> = [
        (id.tokenizer_equal, "tokenizer"),
        (id.vocabulary_equal, "vocabulary"),
        (id.chat_template_equal, "chat template"),
        (id.eval_set_equal, "evaluation set"),
    ]
    .into_iter()
    .filter(|(equal, _)| !equal)
    .map(|(_, name)| name)
    .collect();
    let reason = if different.is_empty() {
        "tokenizer, vocabulary, chat template and evaluation set are the incumbent's".to_owned()
    } else {
        format!("not the incumbent's: {}; no number of this report can be compared", different.join(", "))
    };
    Some(result(OfflineCheck::Identity, pass_or_fail(different.is_empty()), reason))
}

fn numerics(input: &OfflineInputV1) -> Option<OfflineResult> {
    let n = input.numerics?;
    let ok = n.non_finite_logits == 0 && n.empty_outputs == 0;
    let reason = format!("{} non-finite logits, {} empty outputs", n.non_finite_logits, n.empty_outputs);
    Some(result(OfflineCheck::Numerics, pass_or_fail(ok), reason))
}

/// Paired accuracy with clustered bounds; `None` without items.
pub(super) fn accuracy_figures(spec: &OfflineSpecV1, items: &[PairedItemV1]) -> Option<AccuracyV1> {
    if items.is_empty() {
        return None;
    }
    let n = items.len() as u64;
    let count = |f: &dyn Fn(&PairedItemV1) -> bool| items.iter().filter(|i| f(i)).count() as u64;
    let gained = count(&|i| i.candidate_correct && !i.incumbent_correct);
    let lost = count(&|i| i.incumbent_correct && !i.candidate_correct);
    let mut clusters: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for i in items {
        let c = clusters.entry(&i.cluster).or_default();
        c.0 += f64::from(i8::from(i.candidate_correct) - i8::from(i.incumbent_correct));
        c.1 += 1.0;
    }
    let (difference, se) = clustered_ratio(clusters.values().copied());
    let (lower, upper) = match se {
        Some(se) if gained + lost >= FEW_DISCORDANT => {
            let half = normal_quantile(1.0 - spec.alpha) * se;
            (difference - half, difference + half)
        }
        _ => {
            let half = spec.alpha / 2.0;
            (
                clopper_pearson_lower(gained, n, half) - clopper_pearson_upper(lost, n, half),
                clopper_pearson_upper(gained, n, half) - clopper_pearson_lower(lost, n, half),
            )
        }
    };
    Some(AccuracyV1 {
        items: n,
        incumbent_correct: count(&|i| i.incumbent_correct),
        candidate_correct: count(&|i| i.candidate_correct),
        gained,
        lost,
        mcnemar_p: mcnemar_exact(gained, lost),
        difference,
        lower,
        upper,
    })
}

/// `Σ d / Σ n` over clusters `(d, n)` with its delta-method standard error (`None` below two clusters).
fn clustered_ratio(clusters: impl Iterator<Item = (f64, f64)> + Clone) -> (f64, Option<f64>) {
    let (d, n, g) = clusters.clone().fold((0.0, 0.0, 0.0), |a, c| (a.0 + c.0, a.1 + c.1, a.2 + 1.0));
    let theta = if n > 0.0 { d / n } else { 0.0 };
    if g < 2.0 {
        return (theta, None);
    }
    let squares: f64 = clusters.map(|(d, n)| (d - theta * n).powi(2)).sum();
    (theta, Some((squares * g / (g - 1.0)).sqrt() / n))
}

fn judge_accuracy(spec: &OfflineSpecV1, a: &AccuracyV1) -> OfflineResult {
    let flips = (a.gained + a.lost) as f64 / a.items as f64;
    let seen = format!(
        "exact match {} → {} of {} ({:+.1} pp, at least {:+.1} pp, McNemar p {:.2e})",
        a.incumbent_correct,
        a.candidate_correct,
        a.items,
        100.0 * a.difference,
        100.0 * a.lower,
        a.mcnemar_p
    );
    let allowed = format!("a loss of {:.1} pp", 100.0 * spec.accuracy_margin);
    let (verdict, reason) = if a.mcnemar_p < spec.alpha_fail && a.difference < -spec.accuracy_margin {
        (Verdict::Fail, format!("{seen}: surely worse, more than {allowed}"))
    } else if a.lower < -spec.accuracy_margin {
        (Verdict::Inconclusive, format!("{seen}: {allowed} is not ruled out; more held-out items are needed"))
    } else if a.difference <= 0.0 && flips > spec.flips_warn {
        (Verdict::Warn, format!("{seen}: same accuracy, but {:.1} % of the answers flipped", 100.0 * flips))
    } else {
        (Verdict::Pass, format!("{seen}: {allowed} is ruled out"))
    };
    OfflineResult {
        value: Some(a.difference),
        lower: Some(a.lower),
        upper: Some(a.upper),
        limit: Some(-spec.accuracy_margin),
        p_value: Some(a.mcnemar_p),
        ..result(OfflineCheck::Accuracy, verdict, reason)
    }
}

/// A check of the re-quantisation kind only warns for a tuned candidate.
fn soften(change: CandidateChange, verdict: Verdict) -> Verdict {
    match (change, verdict) {
        (CandidateChange::Tuned, Verdict::Fail | Verdict::Inconclusive) => Verdict::Warn,
        (_, v) => v,
    }
}

fn perplexity(spec: &OfflineSpecV1, input: &OfflineInputV1) -> Option<OfflineResult> {
    let documents: Vec<&DocumentNllV1> = input.documents.iter().filter(|d| d.tokens > 0).collect();
    if documents.is_empty() {
        return None;
    }
    let pairs = documents.iter().map(|d| (d.candidate_nll - d.incumbent_nll, d.tokens as f64));
    let (theta, se) = clustered_ratio(pairs);
    let mut out = result(OfflineCheck::Perplexity, Verdict::Inconclusive, String::new());
    out.value = Some(theta);
    out.limit = Some(spec.ln_ppl_pass);
    let Some(se) = se else {
        out.verdict = soften(input.change, Verdict::Inconclusive);
        out.reason = format!("ln perplexity ratio {theta:+.4} from one document has no error bar; pass several");
        return Some(out);
    };
    let half = normal_quantile(1.0 - spec.alpha) * se;
    out.lower = Some(theta - half);
    out.upper = Some(theta + half);
    let seen = format!("ln perplexity ratio {theta:+.4} ± {half:.4} over {} documents", documents.len());
    let (verdict, text) = if theta - half > spec.ln_ppl_fail {
        (Verdict::Fail, format!("surely above {:.3}", spec.ln_ppl_fail))
    } else if theta + half <= spec.ln_ppl_pass {
        (Verdict::Pass, format!("surely at most {:.3}", spec.ln_ppl_pass))
    } else {
        (Verdict::Warn, format!("not surely at most {:.3}", spec.ln_ppl_pass))
    };
    out.verdict = soften(input.change, verdict);
    out.reason = format!("{seen}: {text}");
    Some(out)
}

fn divergence(spec: &OfflineSpecV1, input: &OfflineInputV1) -> Vec<OfflineResult> {
    let Some(d) = &input.divergence else {
        return Vec::new();
    };
    // Stored probabilities are rounded, so equal models can measure slightly below 0.
    let mean = d.mean.max(0.0);
    let relative = d.incumbent_mean.map(|i| i.max(0.0) * spec.kld_over_incumbent + 1e-4);
    let limit = relative.map_or(spec.kld_pass, |r| r.min(spec.kld_pass));
    let verdict = if mean > spec.kld_fail || d.p999 > spec.kld_p999_fail {
        Verdict::Fail
    } else if mean > limit {
        Verdict::Warn
    } else {
        Verdict::Pass
    };
    let reason = format!("mean KL divergence {mean:.4} nats (limit {limit:.4}), 99.9 % quantile {:.2}", d.p999);
    let kld = OfflineResult {
        value: Some(mean),
        limit: Some(limit),
        ..result(OfflineCheck::Divergence, soften(input.change, verdict), reason)
    };
    let verdict = if d.same_top < spec.same_top_fail {
        Verdict::Fail
    } else if d.same_top < spec.same_top_pass {
        Verdict::Warn
    } else {
        Verdict::Pass
    };
    let reason = format!("same top token {:.1} % (limit {:.1} %)", 100.0 * d.same_top, 100.0 * spec.same_top_pass);
    let top = OfflineResult {
        value: Some(d.same_top),
        limit: Some(spec.same_top_pass),
        ..result(OfflineCheck::SameTop, soften(input.change, verdict), reason)
    };
    vec![kld, top]
}

fn safety(spec: &OfflineSpecV1, input: &OfflineInputV1) -> Vec<OfflineResult> {
    let sets = input.safety.iter().filter(|s| s.items > 0);
    sets.map(|s| {
        let difference = (s.gained as f64 - s.lost as f64) / s.items as f64;
        let verdict = if difference < -spec.safety_margin {
            Verdict::Fail
        } else if s.lost > 0 {
            Verdict::Warn
        } else {
            Verdict::Pass
        };
        let reason = format!("safety set {}: {} lost, {} gained of {}", s.name, s.lost, s.gained, s.items);
        OfflineResult {
            subject: Some(s.name.clone()),
            value: Some(difference),
            limit: Some(-spec.safety_margin),
            p_value: Some(mcnemar_exact(s.gained, s.lost)),
            ..result(OfflineCheck::Safety, verdict, reason)
        }
    })
    .collect()
}

fn budgets(spec: &OfflineSpecV1, input: &OfflineInputV1) -> Vec<OfflineResult> {
    let mut out = Vec::new();
    let mut add = |check, subject: Option<String>, value: f64, limit: Option<f64>, what: &str, unit: &str| {
        let (ok, text) = match limit {
            Some(l) => (value <= l, format!("{what} {value:.0} {unit} (budget {l:.0})")),
            None => (true, format!("{what} {value:.0} {unit} (no budget set)")),
        };
        out.push(OfflineResult { subject, value: Some(value), limit, ..result(check, pass_or_fail(ok), text) });
    };
    if let Some(size) = input.size_bytes {
        add(OfflineCheck::Size, None, size as f64, spec.max_size_bytes.map(|b| b as f64), "size", "bytes");
    }
    if let Some(ms) = median(&input.load_ms) {
        add(OfflineCheck::Load, None, ms, spec.max_load_ms, "median load time", "ms");
    }
    for m in &input.peak_memory {
        let budget = spec.memory_budgets.iter().find(|b| b.metric == m.metric).map(|b| b.bytes as f64);
        let what = format!("peak memory ({})", m.metric);
        add(OfflineCheck::Memory, Some(m.metric.clone()), m.bytes as f64, budget, &what, "bytes");
    }
    out
}

fn median(values: &[f64]) -> Option<f64> {
    let mut v = values.to_vec();
    v.sort_unstable_by(f64::total_cmp);
    let high = *v.get(v.len() / 2)?;
    Some(if v.len() % 2 == 1 { high } else { 0.5 * (v[v.len() / 2 - 1] + high) })
}

fn speed(input: &OfflineInputV1) -> Vec<OfflineResult> {
    let one = |r: &super::RooflineV1| {
        let speed = r.tokens_per_s();
        let reason =
            format!("{}: predicted {speed:.1} tokens/s (at least {:.1} needed)", r.device_class, r.min_tokens_per_s);
        OfflineResult {
            subject: Some(r.device_class.clone()),
            value: Some(speed),
            limit: Some(r.min_tokens_per_s),
            ..result(OfflineCheck::Speed, pass_or_fail(speed >= r.min_tokens_per_s), reason)
        }
    };
    input.roofline.iter().map(one).collect()
}
