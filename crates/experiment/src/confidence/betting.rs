//! Exact betting confidence sequence for the difference of two arms with outcomes in `0..=1` (Waudby-Smith and
//! Ramdas, JRSS-B 2024, arXiv 2010.09686), for fleets too small for a normal approximation.
//!
//! Each unit gives the pseudo outcome `X = (Y - m)(A/π - (1-A)/(1-π))` with a predictable centre `m`; its mean is
//! the difference of the arms. Wealth grows by bets against a candidate difference `v`; candidates against which
//! the wealth ever reached `1/α` are ruled out (Ville). It estimates the *device average*, not the
//! response-weighted ratio: label it so.

/// One unit in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// In `0..=1`; values outside are clamped.
    pub value: f64,
    pub treated: bool,
    /// Probability of treatment for this unit, by design, in (0, 1).
    pub propensity: f64,
}

/// Prepared units: pseudo outcomes scaled to `0..=1` and the variance estimates the bets use.
#[derive(Debug, Clone)]
pub struct BettingSequence {
    /// Scaled pseudo outcomes and predictable variances before each.
    units: Vec<(f64, f64)>,
    /// Pseudo outcomes lie in `-reach..=reach`.
    reach: f64,
    sum: f64,
}

/// Largest bet as a share of what keeps the wealth positive.
const CAUTION: f64 = 0.5;

impl BettingSequence {
    /// Prepares `units` in order of arrival.
    #[must_use]
    pub fn new(units: &[Outcome]) -> Self {
        let propensity = |u: &Outcome| u.propensity.clamp(1e-3, 1.0 - 1e-3);
        let reach = units.iter().map(|u| 1.0 / propensity(u).min(1.0 - propensity(u))).fold(2.0, f64::max);
        let (mut seen, mut total) = (0.0, 0.0);
        // Predictable mean and variance of the scaled outcomes, started at those of one uniform draw's bounds.
        let (mut count, mut sum_z, mut sum_dev) = (0.0, 0.0, 0.0);
        let mut out = Vec::with_capacity(units.len());
        let mut sum = 0.0;
        for u in units {
            let y = u.value.clamp(0.0, 1.0);
            let centre = if seen > 0.0 { total / seen } else { 0.5 };
            let p = propensity(u);
            let x = (y - centre) * if u.treated { 1.0 / p } else { -1.0 / (1.0 - p) };
            seen += 1.0;
            total += y;
            sum += x;
            let z = (x + reach) / (2.0 * reach);
            out.push((z, (0.25 + sum_dev) / (count + 1.0)));
            count += 1.0;
            sum_z += z;
            let mean = (0.5 + sum_z) / (count + 1.0);
            sum_dev += (z - mean).powi(2);
        }
        Self { units: out, reach, sum }
    }

    /// Mean pseudo outcome: the estimated difference, treatment minus control; 0 without data.
    #[must_use]
    pub fn estimate(&self) -> f64 {
        if self.units.is_empty() { 0.0 } else { self.sum / self.units.len() as f64 }
    }

    /// Lower bound of the difference; with probability `1 - alpha` never above it at any time.
    #[must_use]
    pub fn lower(&self, alpha: f64) -> f64 {
        self.search(alpha, true)
    }

    /// Upper bound of the difference; with probability `1 - alpha` never below it at any time.
    #[must_use]
    pub fn upper(&self, alpha: f64) -> f64 {
        self.search(alpha, false)
    }

    /// The wealth against `v` is monotone in `v`, so the bound is found by bisection.
    fn search(&self, alpha: f64, lower: bool) -> f64 {
        let threshold = -alpha.ln();
        let (mut kept, mut out) = (0.5, if lower { 0.0 } else { 1.0 });
        // Start inside: the scaled mean is the last candidate to be ruled out.
        if !self.units.is_empty() {
            kept = (self.estimate() + self.reach) / (2.0 * self.reach);
        }
        let bets = self.bets(alpha);
        if self.peak(out, &bets, lower) < threshold {
            return if lower { -1.0 } else { 1.0 };
        }
        for _ in 0..30 {
            let mid = 0.5 * (kept + out);
            if self.peak(mid, &bets, lower) < threshold { kept = mid } else { out = mid }
        }
        ((2.0 * out - 1.0) * self.reach).clamp(-1.0, 1.0)
    }

    fn bets(&self, alpha: f64) -> Vec<f64> {
        self.units
            .iter()
            .enumerate()
            .map(|(i, (_, variance))| {
                let t = (i + 1) as f64;
                (-2.0 * alpha.ln() / (variance * t * t.ln_1p())).sqrt()
            })
            .collect()
    }

    /// Highest log wealth so far of a bettor who says that the mean is above (`up`) or below the candidate `m`.
    fn peak(&self, m: f64, bets: &[f64], up: bool) -> f64 {
        let room = if up { m } else { 1.0 - m };
        let cap = if room > 0.0 { CAUTION / room } else { f64::INFINITY };
        let sign = if up { 1.0 } else { -1.0 };
        let (mut wealth, mut best) = (0.0_f64, 0.0_f64);
        for ((z, _), bet) in self.units.iter().zip(bets) {
            wealth += (sign * bet.min(cap) * (z - m)).ln_1p();
            best = best.max(wealth);
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference_units() -> Vec<Outcome> {
        // y_i = 1 if (13 i mod 25) < (3 if i odd else 2), treated = i mod 2, i < 4000.
        (0..4000_u32)
            .map(|i| Outcome {
                value: f64::from(u8::from((13 * i) % 25 < if i % 2 == 1 { 3 } else { 2 })),
                treated: i % 2 == 1,
                propensity: 0.5,
            })
            .collect()
    }

    #[test]
    fn matches_the_reference_implementation() {
        // ville 0.1.0 `BettingABTest`: two-sided 0.05 is one-sided 0.025 on each side; grid step 2e-4.
        let s = BettingSequence::new(&reference_units());
        assert!((s.estimate() - 0.039_824_668).abs() < 1e-6, "{}", s.estimate());
        assert!((s.lower(0.025) - 0.002_100).abs() < 4e-4, "{}", s.lower(0.025));
        assert!((s.upper(0.025) - 0.071_304).abs() < 4e-4, "{}", s.upper(0.025));
    }

    #[test]
    fn swapping_the_arms_mirrors_the_interval() {
        let units = reference_units();
        let swapped: Vec<_> = units.iter().map(|u| Outcome { treated: !u.treated, ..*u }).collect();
        let (a, b) = (BettingSequence::new(&units), BettingSequence::new(&swapped));
        assert!((a.lower(0.01) + b.upper(0.01)).abs() < 1e-9);
        assert!((a.upper(0.01) + b.lower(0.01)).abs() < 1e-9);
    }

    #[test]
    fn without_data_nothing_is_ruled_out() {
        let s = BettingSequence::new(&[]);
        assert_eq!((s.lower(0.05), s.upper(0.05), s.estimate()), (-1.0, 1.0, 0.0));
    }
}
