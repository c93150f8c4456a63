//! Asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas (Annals of Statistics 2024,
//! arXiv 2103.06476): a normal-mixture boundary around an estimate with a standard error.

/// Which side the error probability guards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sides {
    One,
    Two,
}

impl Sides {
    fn tail(self, alpha: f64) -> f64 {
        match self {
            Self::One => 2.0 * alpha,
            Self::Two => alpha,
        }
    }
}

/// Mixture scale `ρ` that makes the interval narrowest at `n_star` units:
/// `ρ² = (-2 ln a + ln(1 - 2 ln a)) / N*` with `a = α` (two-sided) or `2α` (one-sided).
#[must_use]
pub fn rho(alpha: f64, n_star: f64, sides: Sides) -> f64 {
    let x = -2.0 * sides.tail(alpha).ln();
    ((x + (1.0 + x).ln()) / n_star).sqrt()
}

/// Half-width in units of the standard error after `n` units:
/// `√( 2 (nρ² + 1)/(nρ²) · ln(√(nρ² + 1)/α) )`, one-sided `ln(1 + √(nρ² + 1)/(2α))`. Infinite for `n = 0`.
#[must_use]
pub fn multiplier(n: f64, alpha: f64, n_star: f64, sides: Sides) -> f64 {
    let nr = n * rho(alpha, n_star, sides).powi(2);
    if nr <= 0.0 {
        return f64::INFINITY;
    }
    let root = (nr + 1.0).sqrt();
    let log = match sides {
        Sides::Two => (root / alpha).ln(),
        Sides::One => (root / (2.0 * alpha)).ln_1p(),
    };
    (2.0 * (nr + 1.0) / nr * log).sqrt()
}

/// Natural log of the two-sided e-value against "the effect is `theta0`", `z = (theta - theta0) / se`:
/// `-½ ln(nρ² + 1) + nρ² z² / (2 (nρ² + 1))`.
#[must_use]
pub fn ln_e_value(z: f64, n: f64, alpha: f64, n_star: f64) -> f64 {
    let nr = n * rho(alpha, n_star, Sides::Two).powi(2);
    -0.5 * nr.ln_1p() + nr * z * z / (2.0 * (nr + 1.0))
}

/// Anytime-valid p-value of a log e-value, `min(1, 1/e)`.
#[must_use]
pub fn anytime_p(ln_e: f64) -> f64 {
    (-ln_e).exp().min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64, tol: f64) {
        assert!((a - b).abs() <= tol, "{a} is not {b}");
    }

    // Reference values: gbstats 0.8.0.
    #[test]
    fn rho_matches_gbstats() {
        close(rho(0.05, 5000.0, Sides::Two), 0.039_840_066_771_373_68, 1e-12);
        close(rho(0.05, 1000.0, Sides::Two), 0.089_085_097_528_922_12, 1e-12);
        close(rho(0.01, 5000.0, Sides::Two), 0.048_028_619_261_259_68, 1e-12);
        close(rho(0.05, 5000.0, Sides::One), 0.035_577_688_528_897_53, 1e-12);
        close(rho(0.01, 20_000.0, Sides::One), 0.022_362_386_396_670_098, 1e-12);
    }

    #[test]
    fn intervals_match_gbstats() {
        // Means: a = (3000, Σ300, Σ²869), b = (3461, 400, 900).
        let (theta, se) = (0.015_573_533_660_791_672, 0.012_827_666_655_236_752);
        for (n_star, low, high) in [
            (1000.0, -0.025_278_109_634_848_854, 0.056_425_176_956_432_2),
            (5000.0, -0.023_403_555_871_217_695, 0.054_550_623_192_801_04),
        ] {
            let h = se * multiplier(6461.0, 0.05, n_star, Sides::Two);
            close(theta - h, low, 1e-9);
            close(theta + h, high, 1e-9);
        }
        // Proportions 400/5000 and 480/5000.
        let (theta, se) = (0.016, 0.005_663_638_406_536_914);
        let h2 = se * multiplier(1e4, 0.05, 5000.0, Sides::Two);
        close(theta - h2, -0.001_339_099_957_515_316_9, 1e-9);
        let h1 = se * multiplier(1e4, 0.05, 5000.0, Sides::One);
        close(theta - h1, 0.000_134_275_723_006_175_43, 1e-9);
        close(theta + h1, 0.031_865_724_276_993_83, 1e-9);
        let p = anytime_p(ln_e_value(theta / se, 1e4, 0.05, 5000.0));
        close(p, 0.096_223_768_527_339_15, 1e-9);
    }

    #[test]
    fn no_data_is_no_information() {
        assert_eq!(multiplier(0.0, 0.05, 100.0, Sides::One), f64::INFINITY);
        assert_eq!(anytime_p(f64::NEG_INFINITY), 1.0);
    }
}
