//! Okapi BM25 over words and CJK bigrams.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use unicode_normalization::UnicodeNormalization;
use unicode_segmentation::UnicodeSegmentation;

/// Saturation and length normalisation (Robertson & Zaragoza 2009; usual values).
const K1: f64 = 1.2;
const B: f64 = 0.75;

fn is_cjk(c: char) -> bool {
    matches!(c, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}')
}

/// Search terms: lower-case words (NFKC); runs of CJK become overlapping bigrams, a single character stays alone.
#[must_use]
pub fn terms(text: &str) -> Vec<String> {
    let text: String = text.nfkc().flat_map(char::to_lowercase).collect();
    let mut out = Vec::new();
    let mut run: Vec<char> = Vec::new();
    let flush = |run: &mut Vec<char>, out: &mut Vec<String>| {
        match run.as_slice() {
            [] => {}
            [one] => out.push(one.to_string()),
            many => out.extend(many.windows(2).map(|w| w.iter().collect())),
        }
        run.clear();
    };
    for word in text.unicode_words() {
        if word.chars().all(is_cjk) {
            run.extend(word.chars());
            continue;
        }
        flush(&mut run, &mut out);
        out.push(word.to_owned());
    }
    flush(&mut run, &mut out);
    out
}

/// An index over documents, addressed by position.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Bm25 {
    /// Term → (document, count), ascending.
    postings: BTreeMap<String, Vec<(u32, u32)>>,
    lengths: Vec<u32>,
    total: u64,
}

impl Bm25 {
    /// Indexes `documents`; document `i` keeps the number `i`.
    #[must_use]
    pub fn new<'a>(documents: impl IntoIterator<Item = &'a str>) -> Self {
        let mut it = Self::default();
        for text in documents {
            let id = it.lengths.len() as u32;
            let terms = terms(text);
            it.lengths.push(terms.len() as u32);
            it.total += terms.len() as u64;
            for t in terms {
                let list = it.postings.entry(t).or_default();
                match list.last_mut() {
                    Some(last) if last.0 == id => last.1 += 1,
                    _ => list.push((id, 1)),
                }
            }
        }
        it
    }

    /// Documents with a positive score, best first; ties to the smaller number.
    #[must_use]
    pub fn search(&self, query: &str, top: usize) -> Vec<(u32, f64)> {
        let n = self.lengths.len() as f64;
        let mean = (self.total as f64 / n.max(1.0)).max(1.0);
        let mut scores: BTreeMap<u32, f64> = BTreeMap::new();
        for t in terms(query) {
            let Some(list) = self.postings.get(&t) else {
                continue;
            };
            let df = list.len() as f64;
            let idf = ((n - df + 0.5) / (df + 0.5) + 1.0).ln();
            for &(doc, count) in list {
                let (tf, len) = (f64::from(count), f64::from(self.lengths[doc as usize]));
                *scores.entry(doc).or_default() += idf * tf * (K1 + 1.0) / (tf + K1 * (1.0 - B + B * len / mean));
            }
        }
        super::ranked(scores.into_iter().collect(), top)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chinese_runs_become_bigrams() {
        assert_eq!(terms("电池续航 Battery-Life 水"), ["电池", "池续", "续航", "battery", "life", "水"]);
    }

    #[test]
    fn scores_match_a_hand_computation() {
        let index = Bm25::new(["a b", "a c c d"]);
        // idf(c) = ln((2 − 1 + .5)/(1 + .5) + 1) = ln 2; tf = 2, len 4, mean 3.
        let want = 2f64.ln() * 2.0 * 2.2 / (2.0 + 1.2 * (0.25 + 0.75 * 4.0 / 3.0));
        let got = index.search("c", 5);
        assert_eq!(got.len(), 1);
        assert!((got[0].1 - want).abs() < 1e-12);
        assert!(index.search("zzz", 5).is_empty());
    }
}
