//! Fixed-sample inference for proportions and pairs: McNemar exact, Wilson, Clopper-Pearson, Newcombe, and the
//! paired difference. For data that are looked at once (offline evaluation); the online gates use
//! [`crate::confidence`].

use crate::special::{inv_inc_beta, ln_inc_beta, normal_quantile};

/// A two-sided interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
}

/// Exact two-sided McNemar p-value: `b` and `c` are the discordant counts. No discordant pair gives 1.
#[must_use]
pub fn mcnemar_exact(b: u64, c: u64) -> f64 {
    let n = b + c;
    if b == c {
        return 1.0;
    }
    // P(X ≤ k), X ~ Binomial(n, ½), equals I_½(n - k, k + 1).
    let k = b.min(c);
    let tail = ln_inc_beta((n - k) as f64, (k + 1) as f64, 0.5).0.exp();
    (2.0 * tail).min(1.0)
}

/// Clopper-Pearson interval of `k` successes in `n` trials at level `1 - alpha`; `0..1` when `n` is 0.
#[must_use]
pub fn clopper_pearson(k: u64, n: u64, alpha: f64) -> Interval {
    Interval { low: clopper_pearson_lower(k, n, alpha / 2.0), high: clopper_pearson_upper(k, n, alpha / 2.0) }
}

/// One-sided Clopper-Pearson lower bound.
#[must_use]
pub fn clopper_pearson_lower(k: u64, n: u64, alpha: f64) -> f64 {
    let k = k.min(n);
    if k == 0 { 0.0 } else { inv_inc_beta(k as f64, (n - k + 1) as f64, alpha) }
}

/// One-sided Clopper-Pearson upper bound.
#[must_use]
pub fn clopper_pearson_upper(k: u64, n: u64, alpha: f64) -> f64 {
    let k = k.min(n);
    if k == n { 1.0 } else { inv_inc_beta((k + 1) as f64, (n - k) as f64, 1.0 - alpha) }
}

/// Wilson score interval of `k` successes in `n` trials at level `1 - alpha`; `0..1` when `n` is 0.
#[must_use]
pub fn wilson(k: u64, n: u64, alpha: f64) -> Interval {
    if n == 0 {
        return Interval { low: 0.0, high: 1.0 };
    }
    let (k, n) = (k.min(n) as f64, n as f64);
    let z = normal_quantile(1.0 - alpha / 2.0);
    let z2 = z * z;
    let p = k / n;
    let centre = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = z / (1.0 + z2 / n) * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
    Interval { low: (centre - half).max(0.0), high: (centre + half).min(1.0) }
}

/// Newcombe's hybrid score interval for `p1 - p2` of two independent proportions (method 10).
#[must_use]
pub fn newcombe(k1: u64, n1: u64, k2: u64, n2: u64, alpha: f64) -> Interval {
    if n1 == 0 || n2 == 0 {
        return Interval { low: -1.0, high: 1.0 };
    }
    let (p1, p2) = (k1 as f64 / n1 as f64, k2 as f64 / n2 as f64);
    let (w1, w2) = (wilson(k1, n1, alpha), wilson(k2, n2, alpha));
    let d = p1 - p2;
    Interval {
        low: d - ((p1 - w1.low).powi(2) + (w2.high - p2).powi(2)).sqrt(),
        high: d + ((w1.high - p1).powi(2) + (p2 - w2.low).powi(2)).sqrt(),
    }
}

/// Paired difference `(gained - lost) / n` with its standard error
/// `sqrt(gained + lost - (gained - lost)² / n) / n` (items as independent).
#[must_use]
pub fn paired_difference(gained: u64, lost: u64, n: u64) -> (f64, f64) {
    if n == 0 {
        return (0.0, 0.0);
    }
    let (g, l, n) = (gained as f64, lost as f64, n as f64);
    let d = g - l;
    (d / n, (g + l - d * d / n).max(0.0).sqrt() / n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64, tol: f64) {
        assert!((a - b).abs() <= tol, "{a} is not {b}");
    }

    // Reference values: statsmodels 0.15 `proportion_confint`, `mcnemar(exact=True)`, `confint_proportions_2indep`.
    #[test]
    fn mcnemar_matches_statsmodels() {
        close(mcnemar_exact(25, 10), 0.016_673_847_800_120_715, 1e-12);
        close(mcnemar_exact(9, 1), 0.021_484_375, 1e-12);
        close(mcnemar_exact(60, 30), 0.002_060_265_680_963_074_5, 1e-12);
        close(mcnemar_exact(10, 25), mcnemar_exact(25, 10), 0.0);
        assert_eq!(mcnemar_exact(0, 0), 1.0);
        assert_eq!(mcnemar_exact(12, 12), 1.0);
        close(mcnemar_exact(0, 8), 2.0 / 256.0, 1e-15);
    }

    #[test]
    fn intervals_match_statsmodels() {
        for (k, n, wl, wh, bl, bh) in [
            (0, 20, 0.0, 0.161_125_158_052_819_4, 0.0, 0.168_433_470_983_085_34),
            (0, 1, 0.0, 0.793_450_685_622_762_7, 0.0, 0.975),
            (
                3,
                20,
                0.052_368_745_896_216_595,
                0.360_418_864_740_756_96,
                0.032_070_937_185_463_7,
                0.378_926_826_545_313_96,
            ),
            (20, 20, 0.838_874_841_947_180_4, 1.0, 0.831_566_529_016_914_6, 1.0),
            (
                1,
                1000,
                0.000_176_546_370_626_077_65,
                0.005_642_558_597_957_937,
                2.531_748_749_129_404_5e-5,
                0.005_558_924_279_826_673,
            ),
        ] {
            let (w, b) = (wilson(k, n, 0.05), clopper_pearson(k, n, 0.05));
            close(w.low, wl, 1e-9);
            close(w.high, wh, 1e-9);
            close(b.low, bl, 1e-10);
            close(b.high, bh, 1e-10);
        }
        assert_eq!(wilson(0, 0, 0.05), Interval { low: 0.0, high: 1.0 });
    }

    #[test]
    fn newcombe_matches_statsmodels() {
        let i = newcombe(480, 5000, 400, 5000, 0.05);
        close(i.low, 0.004_895_385_315_448_874, 1e-9);
        close(i.high, 0.027_123_955_370_689_83, 1e-9);
    }

    #[test]
    fn paired_difference_matches_the_reference() {
        let (d, se) = paired_difference(30, 60, 1000);
        close(d, -0.03, 1e-15);
        close(se, 0.009_439_279_633_531_363, 1e-15);
    }
}
