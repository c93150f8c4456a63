//! Sequential test of the sample ratio (Lindon and Malek, NeurIPS 2022, arXiv 2011.03567): a Dirichlet-multinomial
//! Bayes factor against the designed shares. It may be looked at after every device; a chi-square test may not.

/// Running test of one phase.
#[derive(Debug, Clone)]
pub struct RatioTest {
    shares: [f64; 2],
    strength: f64,
    counts: [u64; 2],
    ln_bayes_factor: f64,
}

impl RatioTest {
    /// `share` is the designed probability of the first arm, `strength` the Dirichlet concentration.
    #[must_use]
    pub fn new(share: f64, strength: f64) -> Self {
        Self { shares: [share, 1.0 - share], strength, counts: [0, 0], ln_bayes_factor: 0.0 }
    }

    /// Adds one device in arm 0 or 1: the factor grows by its predictive probability over the designed one.
    pub fn add(&mut self, first_arm: bool) {
        let arm = usize::from(!first_arm);
        let seen = (self.counts[0] + self.counts[1]) as f64;
        let weight = self.strength * self.shares[arm];
        let predictive = (weight + self.counts[arm] as f64) / (self.strength + seen);
        self.ln_bayes_factor += (predictive / self.shares[arm]).ln();
        self.counts[arm] += 1;
    }

    /// Devices per arm.
    #[must_use]
    pub fn counts(&self) -> [u64; 2] {
        self.counts
    }

    /// Log Bayes factor against the designed shares; an e-process.
    #[must_use]
    pub fn ln_e(&self) -> f64 {
        self.ln_bayes_factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Reference values: ssrm-test 0.1.5 (`sequential_bayes_factors`).
    #[test]
    fn matches_ssrm_test() {
        let increments = [(52, 48), (110, 90), (260, 240), (530, 470), (1050, 950)];
        for (k, want) in [
            (
                100.0,
                [
                    0.735_194_506_707_834_8,
                    1.027_590_501_013_18,
                    0.976_624_859_730_485,
                    3.953_699_732_249_522_6,
                    33.280_571_211_974_18,
                ],
            ),
            (
                10_000.0,
                [
                    0.995_825_482_331_201_6,
                    1.013_271_065_078_282_6,
                    1.052_486_863_010_457,
                    1.455_848_407_608_011_4,
                    3.845_646_212_512_785_5,
                ],
            ),
        ] {
            let mut t = RatioTest::new(0.5, k);
            for ((a, b), want) in increments.iter().zip(want) {
                (0..*a).for_each(|_| t.add(true));
                (0..*b).for_each(|_| t.add(false));
                assert!((t.ln_e().exp() / want - 1.0).abs() < 1e-9, "{} is not {want}", t.ln_e().exp());
            }
        }
    }

    #[test]
    fn an_arm_without_devices_alarms() {
        let mut t = RatioTest::new(0.5, 1000.0);
        (0..500).for_each(|_| t.add(true));
        assert!(t.ln_e() > 1000_f64.ln(), "{}", t.ln_e());
    }
}
