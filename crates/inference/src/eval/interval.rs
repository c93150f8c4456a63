//! 95 % intervals of what an evaluation measured.

use super::Paired;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

/// Resamples of the bootstrap.
const RESAMPLES: usize = 1000;
/// Fewer groups than this say too little about the spread between groups.
const MIN_GROUPS: usize = 8;
/// Normal quantile of 97.5 %.
const Z: f64 = 1.959_963_984_540_054;

/// A 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
}

impl Interval {
    /// Whether `value` is inside.
    #[must_use]
    pub fn contains(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }
}

/// A figure and its interval, where there is enough data for one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    pub value: f64,
    pub interval: Option<Interval>,
}

/// Percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13) over whole groups:
/// positions of one window are not independent of each other, windows are taken to be. `statistic` gets how often each
/// group was drawn. The draws depend on the number of groups alone, so results repeat and figures are paired.
/// `None` below 8 groups.
pub(super) fn bootstrap(groups: usize, statistic: &dyn Fn(&[u32]) -> f64) -> Option<Interval> {
    if groups < MIN_GROUPS {
        return None;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(groups as u64);
    let mut drawn = vec![0u32; groups];
    let mut values: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            drawn.fill(0);
            (0..groups).for_each(|_| drawn[rng.random_range(0..groups)] += 1);
            statistic(&drawn)
        })
        .collect();
    values.sort_unstable_by(f64::total_cmp);
    let at = |q: f64| values[((RESAMPLES - 1) as f64 * q).round() as usize];
    Some(Interval { low: at(0.025), high: at(0.975) })
}

/// A share of `hits` in `n` with the score interval of Wilson (JASA 22, 1927).
#[must_use]
pub fn share(hits: usize, n: usize) -> Estimate {
    if n == 0 {
        return Estimate { value: f64::NAN, interval: None };
    }
    let (n, p) = (n as f64, hits as f64 / n as f64);
    let (z2, centre) = (Z * Z / n, p + Z * Z / (2.0 * n));
    let half = Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    let bound = |v: f64| (v / (1.0 + z2)).clamp(0.0, 1.0);
    Estimate { value: p, interval: Some(Interval { low: bound(centre - half), high: bound(centre + half) }) }
}

impl Paired {
    /// Share right of the second model minus that of the first on the same questions, with the normal interval of Agresti
    /// and Min (Statistics in Medicine 24, 2005): one half is added to each of the four counts.
    #[must_use]
    pub fn difference(&self) -> Estimate {
        let n = self.questions() as f64;
        if n == 0.0 {
            return Estimate { value: f64::NAN, interval: None };
        }
        let (gained, lost) = (self.only_second as f64, self.only_first as f64);
        let (b, c, m) = (gained + 0.5, lost + 0.5, n + 2.0);
        let (centre, half) = ((b - c) / m, Z * (b + c - (b - c).powi(2) / m).sqrt() / m);
        let interval = Interval { low: (centre - half).max(-1.0), high: (centre + half).min(1.0) };
        Estimate { value: (gained - lost) / n, interval: Some(interval) }
    }
}
