//! May the re-embedded version replace the frozen one? Offline, on logged queries: (a) accepted queries must not get
//! worse, (b) on rejected queries the corrected chunk must rank better (or leave, where it was wrongly retrieved),
//! (c) the dense ranking must agree with words and vectors fused. Part (d), the failure rate on devices, is the
//! canary's.

use super::{fuse, hit, ndcg};
use serde::{Deserialize, Serialize};

/// Why a query is in the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseKind {
    /// Answered to the user's content before; `relevant` are the chunks that answered it.
    Accepted,
    /// Rejected because of this chunk; `relevant` are the chunks that should answer it.
    Rejected,
}

/// One logged query with the rankings (best first) of the old and the new index.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReembedCase {
    pub kind: CaseKind,
    pub relevant: Vec<u32>,
    /// Dense rankings with the old and with the new vector.
    pub before: Vec<u32>,
    pub after: Vec<u32>,
    /// Lexical ranking over the new texts.
    pub lexical: Vec<u32>,
}

/// Limits of the verification.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReembedPolicyV1 {
    /// Ranks that count.
    pub k: u32,
    /// Largest tolerated mean loss of nDCG on accepted queries (at the confidence bound).
    pub max_ndcg_loss: f64,
    /// Accepted queries needed for a verdict.
    pub min_accepted: u32,
    /// Share of decided rejected queries that must improve.
    pub min_improved: f64,
    /// Share of queries whose first fused hit is among the first `k` dense hits.
    pub min_agreement: f64,
    /// Resamples of the paired bootstrap.
    pub resamples: u32,
}

impl Default for ReembedPolicyV1 {
    fn default() -> Self {
        Self { k: 10, max_ndcg_loss: 0.02, min_accepted: 10, min_improved: 0.5, min_agreement: 0.8, resamples: 2_000 }
    }
}

/// Outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReembedVerdict {
    Pass,
    Fail,
    /// Too little data; never success.
    Inconclusive,
}

/// Numbers behind the verdict. `None` means no data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReembedReport {
    pub verdict: ReembedVerdict,
    pub accepted: u32,
    pub rejected: u32,
    pub ndcg_before: Option<f64>,
    pub ndcg_after: Option<f64>,
    /// Mean paired difference (after − before) and its one-sided 95 % lower bound.
    pub ndcg_change: Option<f64>,
    pub ndcg_change_low: Option<f64>,
    pub hit_before: Option<f64>,
    pub hit_after: Option<f64>,
    /// Rejected queries where a right chunk rose, fell, stayed.
    pub improved: u32,
    pub worsened: u32,
    pub unchanged: u32,
    pub agreement: Option<f64>,
    /// What failed or is missing, in plain words.
    pub reasons: Vec<String>,
}

fn mean(v: &[f64]) -> Option<f64> {
    (!v.is_empty()).then(|| v.iter().sum::<f64>() / v.len() as f64)
}

/// One-sided 95 % lower bound of the mean by a paired bootstrap; the resampling is a fixed permutation stream, so
/// that the same cases always give the same bound.
fn bootstrap_low(diffs: &[f64], resamples: u32) -> Option<f64> {
    let n = diffs.len();
    if n == 0 || resamples == 0 {
        return None;
    }
    let mut state = 0u64;
    let mut means: Vec<f64> = (0..resamples)
        .map(|_| {
            let sum: f64 = (0..n)
                .map(|_| {
                    state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
                    diffs[(crate::hash::mix(state) % n as u64) as usize]
                })
                .sum();
            sum / n as f64
        })
        .collect();
    means.sort_by(f64::total_cmp);
    means.get((means.len() / 20).min(means.len() - 1)).copied()
}

/// Best rank (0-based) of a relevant chunk; `len` when absent.
fn best_rank(ranking: &[u32], relevant: &[u32]) -> usize {
    ranking.iter().position(|id| relevant.contains(id)).unwrap_or(usize::MAX)
}

/// Verifies a re-embedded chunk on logged queries.
#[must_use]
pub fn reembed_verify(policy: &ReembedPolicyV1, cases: &[ReembedCase]) -> ReembedReport {
    let k = policy.k as usize;
    let accepted: Vec<&ReembedCase> =
        cases.iter().filter(|c| c.kind == CaseKind::Accepted && !c.relevant.is_empty()).collect();
    let rejected: Vec<&ReembedCase> =
        cases.iter().filter(|c| c.kind == CaseKind::Rejected && !c.relevant.is_empty()).collect();
    let quality = |of: fn(&ReembedCase) -> &[u32]| -> Vec<f64> {
        accepted.iter().filter_map(|c| ndcg(of(c), &c.relevant, k)).collect()
    };
    let hits = |of: fn(&ReembedCase) -> &[u32]| -> Vec<f64> {
        accepted.iter().filter_map(|c| hit(of(c), &c.relevant, k)).map(f64::from).collect()
    };
    let (before, after) = (quality(|c| &c.before), quality(|c| &c.after));
    let diffs: Vec<f64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
    let (mut improved, mut worsened, mut unchanged) = (0, 0, 0);
    for c in &rejected {
        match best_rank(&c.after, &c.relevant).cmp(&best_rank(&c.before, &c.relevant)) {
            std::cmp::Ordering::Less => improved += 1,
            std::cmp::Ordering::Greater => worsened += 1,
            // First before and after: the text was wrong, not its place.
            std::cmp::Ordering::Equal => unchanged += 1,
        }
    }
    let agree: Vec<f64> = cases
        .iter()
        .filter(|c| !c.after.is_empty() && !c.lexical.is_empty())
        .map(|c| {
            let first = fuse(&[&c.after, &c.lexical], 1)[0].0;
            f64::from(c.after.iter().take(k).any(|id| *id == first))
        })
        .collect();
    let mut report = ReembedReport {
        verdict: ReembedVerdict::Pass,
        accepted: accepted.len() as u32,
        rejected: rejected.len() as u32,
        ndcg_before: mean(&before),
        ndcg_after: mean(&after),
        ndcg_change: mean(&diffs),
        ndcg_change_low: bootstrap_low(&diffs, policy.resamples),
        hit_before: mean(&hits(|c| &c.before)),
        hit_after: mean(&hits(|c| &c.after)),
        improved,
        worsened,
        unchanged,
        agreement: mean(&agree),
        reasons: Vec::new(),
    };
    judge(policy, &mut report);
    report
}

fn judge(policy: &ReembedPolicyV1, r: &mut ReembedReport) {
    let mut fail = Vec::new();
    let mut missing = Vec::new();
    if r.accepted < policy.min_accepted {
        missing.push(format!("{} accepted queries, {} are needed", r.accepted, policy.min_accepted));
    } else if let (Some(low), Some(change)) = (r.ndcg_change_low, r.ndcg_change)
        && low < -policy.max_ndcg_loss
    {
        fail.push(format!(
            "accepted queries lose {:.3} nDCG (bound {low:.3}, limit {:.3})",
            -change, policy.max_ndcg_loss
        ));
    }
    if let (Some(before), Some(after)) = (r.hit_before, r.hit_after)
        && after + 1e-12 < before - policy.max_ndcg_loss
    {
        fail.push(format!("hit@{} falls from {before:.3} to {after:.3}", policy.k));
    }
    let decided = r.improved + r.worsened;
    if r.rejected == 0 {
        missing.push("no rejected query to improve".to_owned());
    } else if decided > 0 && f64::from(r.improved) < policy.min_improved * f64::from(decided) {
        fail.push(format!("the right chunk rises on {} and falls on {} rejected queries", r.improved, r.worsened));
    }
    match r.agreement {
        None => missing.push("no query with both rankings".to_owned()),
        Some(a) if a < policy.min_agreement => {
            fail.push(format!(
                "words and vectors agree on {a:.2} of the queries, {:.2} are needed",
                policy.min_agreement
            ));
        }
        Some(_) => {}
    }
    r.verdict = if !fail.is_empty() {
        ReembedVerdict::Fail
    } else if missing.is_empty() {
        ReembedVerdict::Pass
    } else {
        ReembedVerdict::Inconclusive
    };
    r.reasons = fail.into_iter().chain(missing).collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(kind: CaseKind, relevant: u32, before: &[u32], after: &[u32]) -> ReembedCase {
        ReembedCase {
            kind,
            relevant: vec![relevant],
            before: before.to_vec(),
            after: after.to_vec(),
            lexical: vec![relevant, 9],
        }
    }

    #[test]
    fn a_better_vector_passes_and_a_worse_one_fails_with_numbers() {
        let mut good: Vec<ReembedCase> = (0..20).map(|_| case(CaseKind::Accepted, 1, &[1, 2, 3], &[1, 2, 3])).collect();
        good.extend((0..10).map(|_| case(CaseKind::Rejected, 5, &[1, 2, 5], &[5, 1, 2])));
        let r = reembed_verify(&ReembedPolicyV1::default(), &good);
        assert_eq!((r.verdict, r.improved, r.ndcg_change), (ReembedVerdict::Pass, 10, Some(0.0)), "{:?}", r.reasons);

        let mut bad = good.clone();
        bad.iter_mut().take(10).for_each(|c| c.after = vec![2, 3, 1]);
        let r = reembed_verify(&ReembedPolicyV1::default(), &bad);
        assert_eq!(r.verdict, ReembedVerdict::Fail);
        assert!(r.ndcg_change_low.unwrap() < -0.1 && r.reasons[0].contains("nDCG"), "{:?}", r.reasons);
    }

    #[test]
    fn corrected_text_that_stays_first_is_no_failure_and_missing_data_is_no_success() {
        let mut cases: Vec<ReembedCase> = (0..20).map(|_| case(CaseKind::Accepted, 1, &[1, 2], &[1, 2])).collect();
        cases.push(case(CaseKind::Rejected, 1, &[1, 2], &[1, 2]));
        assert_eq!(reembed_verify(&ReembedPolicyV1::default(), &cases).verdict, ReembedVerdict::Pass);
        let r = reembed_verify(&ReembedPolicyV1::default(), &cases[..5]);
        assert_eq!(r.verdict, ReembedVerdict::Inconclusive);
        assert_eq!(reembed_verify(&ReembedPolicyV1::default(), &[]).agreement, None);
    }
}
