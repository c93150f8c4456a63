//! How far a chunk's guilt reaches: with every prompt template, or with some only. A template that makes the model fail
//! on certain questions looks like guilt of the chunks behind these questions; a chunk that is wrong fails under every
//! template that uses it. Randomness of who asks what is not needed to tell them apart: the same chunk under other
//! templates is the comparison.

use serde::{Deserialize, Serialize};

/// One-sided 95 % normal quantile.
const Z95: f64 = 1.645;
/// Rows under a template below which nothing is said about it.
const MIN_ROWS: u64 = 20;
/// A template is fine when the effect under it is surely less than this share of that under the worst template. Well below
/// a half, because a chunk at the lower ranks of a longer list does less harm than the rank weights say.
const MUCH_LESS: f64 = 0.25;

/// What a chunk did under one template within the model's window, all other causes held fixed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Split {
    pub template: u32,
    pub exposures: u64,
    pub failures: u64,
    /// Failures beyond the expected ones.
    pub excess: f64,
    /// Causal power at rank 1 under this template, and its standard error where there is none.
    pub q: f64,
    pub q_se: f64,
}

/// Templates to which the chunk's failures are limited; empty when the chunk fails wherever it is used, or when too little
/// is known. Limited means: under at least as many templates as it surely fails under, it surely does (next to) no harm.
/// A chunk that is wrong in most places is therefore never excused by one template that ignores it.
pub(crate) fn limited_to(splits: &[Split]) -> Vec<u32> {
    let Some(worst) = splits.iter().max_by(|a, b| a.excess.total_cmp(&b.excess)).filter(|w| w.excess > 0.0) else {
        return Vec::new();
    };
    let known = |s: &&Split| s.exposures >= MIN_ROWS && s.template != worst.template;
    let fine = splits.iter().filter(known).filter(|s| s.q + Z95 * s.q_se <= MUCH_LESS * worst.q).count();
    let also = splits.iter().filter(known).filter(|s| s.q - Z95 * s.q_se > 0.0 && s.q > MUCH_LESS * worst.q);
    let mut bad: Vec<u32> = also.map(|s| s.template).collect();
    bad.push(worst.template);
    bad.sort_unstable();
    if fine >= bad.len() { bad } else { Vec::new() }
}

/// Whether too few rows lie outside of `templates` to say whether the chunk fails there, too.
pub(crate) fn hardly_outside(splits: &[Split], templates: impl Fn(u32) -> bool) -> bool {
    splits.iter().any(|s| templates(s.template))
        && splits.iter().filter(|s| !templates(s.template)).map(|s| s.exposures).sum::<u64>() < MIN_ROWS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(template: u32, exposures: u64, q: f64) -> Split {
        // rank 1 on a base rate of 0.1: information 9 a row
        let q_se = 1.0 / (9.0 * exposures as f64).sqrt();
        Split { template, exposures, failures: 0, excess: 0.9 * q * exposures as f64, q, q_se }
    }

    #[test]
    fn one_template_that_holds_the_excess_is_named() {
        assert_eq!(limited_to(&[split(0, 100, 0.0), split(1, 100, 0.02), split(2, 50, 0.9)]), [2]);
        assert_eq!(
            limited_to(&[split(0, 40, 0.0), split(2, 10, 0.9)]),
            [2],
            "a short life is enough for the guilty one"
        );
        let two_of_four = [split(0, 100, 0.0), split(1, 100, 0.0), split(2, 50, 0.9), split(3, 50, 0.8)];
        assert_eq!(limited_to(&two_of_four), [2, 3]);
    }

    #[test]
    fn a_chunk_that_fails_everywhere_is_not_excused() {
        assert!(limited_to(&[split(0, 100, 0.8), split(1, 100, 0.85), split(2, 50, 0.9)]).is_empty());
        let one_ignores_it = [split(0, 100, 0.8), split(1, 100, 0.85), split(2, 50, 0.0)];
        assert!(limited_to(&one_ignores_it).is_empty());
        assert!(limited_to(&[split(0, 5, 0.0), split(2, 50, 0.9)]).is_empty(), "five rows say nothing");
        assert!(limited_to(&[split(0, 100, 0.0)]).is_empty());
        assert!(limited_to(&[]).is_empty());
    }

    #[test]
    fn rows_outside_are_counted_over_all_other_templates() {
        let s = [split(0, 12, 0.0), split(1, 9, 0.0), split(2, 50, 0.9)];
        assert!(!hardly_outside(&s, |t| t == 2));
        assert!(hardly_outside(&s, |t| t == 2 || t == 1));
        assert!(!hardly_outside(&s[..2], |t| t == 2), "it is not used there at all");
    }
}
