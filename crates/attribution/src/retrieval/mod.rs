//! How chunks are ranked for a query, by words, by vectors and by late interaction, how good a ranking is, and
//! whether a re-embedded chunk may go back into service.

mod bm25;
mod verify;

pub use bm25::{Bm25, terms};
pub use verify::{CaseKind, ReembedCase, ReembedPolicyV1, ReembedReport, ReembedVerdict, reembed_verify};

use std::collections::BTreeMap;

/// Constant of reciprocal rank fusion (Cormack, Clarke & Büttcher 2009).
const RRF_K: f64 = 60.0;

/// Sorts by score, best first, ties to the smaller id, and cuts at `top`.
pub(crate) fn ranked(mut scored: Vec<(u32, f64)>, top: usize) -> Vec<(u32, f64)> {
    scored.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    scored.truncate(top);
    scored
}

/// Cosine of two vectors; 0 when one has no length or the dimensions differ.
#[must_use]
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return 0.0;
    }
    let (mut dot, mut aa, mut bb) = (0.0f64, 0.0f64, 0.0f64);
    for (x, y) in a.iter().zip(b) {
        let (x, y) = (f64::from(*x), f64::from(*y));
        dot += x * y;
        aa += x * x;
        bb += y * y;
    }
    if aa == 0.0 || bb == 0.0 { 0.0 } else { dot / (aa.sqrt() * bb.sqrt()) }
}

/// The `top` nearest of `vectors` to `query` by cosine, best first.
#[must_use]
pub fn dense(query: &[f32], vectors: &[&[f32]], top: usize) -> Vec<(u32, f64)> {
    ranked(vectors.iter().enumerate().map(|(i, v)| (i as u32, cosine(query, v))).collect(), top)
}

/// Reciprocal rank fusion of rankings (best first): `Σ 1 / (60 + rank)`, rank 1 first.
#[must_use]
pub fn fuse(rankings: &[&[u32]], top: usize) -> Vec<(u32, f64)> {
    let mut scores: BTreeMap<u32, f64> = BTreeMap::new();
    for list in rankings {
        for (rank0, id) in list.iter().enumerate() {
            *scores.entry(*id).or_default() += 1.0 / (RRF_K + rank0 as f64 + 1.0);
        }
    }
    ranked(scores.into_iter().collect(), top)
}

/// Late interaction (ColBERT's MaxSim): for every query token the best cosine among the document's tokens, summed.
/// `candidates` are (id, token vectors); meant for a short candidate list.
#[must_use]
pub fn max_sim(query: &[Vec<f32>], candidates: &[(u32, Vec<Vec<f32>>)]) -> Vec<(u32, f64)> {
    let score = |tokens: &Vec<Vec<f32>>| -> f64 {
        query.iter().map(|q| tokens.iter().map(|t| cosine(q, t)).fold(0.0, f64::max)).sum()
    };
    ranked(candidates.iter().map(|(id, tokens)| (*id, score(tokens))).collect(), usize::MAX)
}

/// nDCG at `k` with binary relevance; `None` when nothing is relevant (no data is not zero).
#[must_use]
pub fn ndcg(ranking: &[u32], relevant: &[u32], k: usize) -> Option<f64> {
    if relevant.is_empty() {
        return None;
    }
    let gain = |rank0: usize| 1.0 / (2.0 + rank0 as f64).log2();
    let ideal: f64 = (0..relevant.len().min(k)).map(gain).sum();
    let dcg: f64 =
        ranking.iter().take(k).enumerate().filter(|(_, id)| relevant.contains(id)).map(|(r, _)| gain(r)).sum();
    Some(dcg / ideal)
}

/// Whether a relevant id is among the first `k`; `None` when nothing is relevant.
#[must_use]
pub fn hit(ranking: &[u32], relevant: &[u32], k: usize) -> Option<bool> {
    (!relevant.is_empty()).then(|| ranking.iter().take(k).any(|id| relevant.contains(id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fusion_and_quality_reference_values() {
        let f = fuse(&[&[1, 2, 3], &[3, 1]], 10);
        assert_eq!(f.iter().map(|x| x.0).collect::<Vec<_>>(), [1, 3, 2]);
        assert!((f[0].1 - (1.0 / 61.0 + 1.0 / 62.0)).abs() < 1e-15);
        // Relevant at ranks 1 and 3 of two relevant: (1 + 0.5) / (1 + 0.63093)
        assert!((ndcg(&[7, 1, 8], &[7, 8], 10).unwrap() - 1.5 / 1.630_929_753_571_457_5).abs() < 1e-12);
        assert_eq!(ndcg(&[1], &[], 10), None);
        assert_eq!((hit(&[1, 2], &[2], 1), hit(&[1, 2], &[2], 2), hit(&[1], &[], 1)), (Some(false), Some(true), None));
    }

    #[test]
    fn max_sim_prefers_the_document_that_covers_every_query_token() {
        let (x, y) = (vec![1.0f32, 0.0], vec![0.0f32, 1.0]);
        let q = vec![x.clone(), y.clone()];
        let r = max_sim(&q, &[(0, vec![x.clone(), x.clone()]), (1, vec![x, y])]);
        assert_eq!(r[0].0, 1);
        assert!((r[0].1 - 2.0).abs() < 1e-12);
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 0.0]), 0.0);
        assert_eq!(dense(&[1.0, 0.0], &[&[0.0, 1.0], &[1.0, 0.1]], 1)[0].0, 1);
    }
}
