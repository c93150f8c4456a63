//! Near duplicates by MinHash over character 4-grams with banded lookup.

use crate::hash::{IdMap, mix, text_hash};

const BANDS: usize = 16;
const ROWS: usize = 4;
const HASHES: usize = BANDS * ROWS;
const GRAM: usize = 4;

/// Signature of one text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Signature([u64; HASHES]);

impl Signature {
    /// Letters and digits only, lower case; texts shorter than a gram are one gram.
    pub(crate) fn of(text: &str) -> Self {
        let chars: Vec<char> = text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect();
        let mut mins = [u64::MAX; HASHES];
        let mut add = |gram: &[char]| {
            let h = text_hash(gram.iter().collect::<String>().as_bytes());
            for (i, m) in mins.iter_mut().enumerate() {
                *m = (*m).min(mix(h ^ mix(i as u64)));
            }
        };
        if chars.len() < GRAM {
            add(&chars);
        } else {
            chars.windows(GRAM).for_each(&mut add);
        }
        Self(mins)
    }

    /// Estimated Jaccard similarity.
    pub(crate) fn similarity(&self, other: &Self) -> f64 {
        self.0.iter().zip(&other.0).filter(|(a, b)| a == b).count() as f64 / HASHES as f64
    }

    fn bands(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.chunks(ROWS).enumerate().map(|(i, rows)| rows.iter().fold(mix(i as u64), |h, r| mix(h ^ r)))
    }
}

/// Texts seen so far.
#[derive(Debug, Default)]
pub(crate) struct NearDuplicates {
    bands: IdMap<u64, Vec<u32>>,
    all: Vec<Signature>,
}

impl NearDuplicates {
    /// Index of an earlier text at least `threshold` similar, if any.
    pub(crate) fn find(&self, s: &Signature, threshold: f64) -> Option<u32> {
        s.bands()
            .filter_map(|b| self.bands.get(&b))
            .flatten()
            .copied()
            .filter(|i| self.all[*i as usize].similarity(s) >= threshold)
            .min()
    }

    pub(crate) fn add(&mut self, s: Signature) {
        let id = self.all.len() as u32;
        for b in s.bands() {
            self.bands.entry(b).or_default().push(id);
        }
        self.all.push(s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_copies_are_found_and_other_texts_are_not() {
        let base = "The warranty of the kettle is two years from the day of purchase, batteries are not covered.";
        let mut d = NearDuplicates::default();
        d.add(Signature::of("Something about the router and its antennas, which is quite another matter altogether."));
        d.add(Signature::of(base));
        assert_eq!(d.find(&Signature::of(&base.replace("two years", "two  YEARS")), 0.9), Some(1));
        assert_eq!(
            d.find(&Signature::of("How long does the coffee machine need to heat up in the morning?"), 0.5),
            None
        );
    }
}
