//! How long answers take: a log-normal around a median per device class, as measured on-device latencies are skewed.

use flywheel_types::Digest;
use rand::Rng as _;
use rand::RngCore;
use std::collections::BTreeMap;

/// Speed of a device class with the reference bundle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClassSpeed {
    /// Median prompt processing, tokens per second.
    pub prefill_tokens_per_s: f64,
    /// Median generation, tokens per second.
    pub decode_tokens_per_s: f64,
    /// Median time to load the model, ms.
    pub load_ms: f64,
    /// Median peak memory, bytes.
    pub peak_memory_bytes: f64,
}

/// Latency of one answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    pub ttft_ms: f64,
    pub decode_tokens_per_s: f64,
    pub peak_memory_bytes: u64,
}

/// Latency of a fleet.
#[derive(Debug, Clone, PartialEq)]
pub struct LatencyModel {
    pub classes: BTreeMap<&'static str, ClassSpeed>,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
    /// Factor on times for bundles that are slower (above 1) or faster.
    pub slowdown: BTreeMap<Digest, f64>,
}

impl Default for LatencyModel {
    fn default() -> Self {
        let c = |prefill, decode, load_ms, memory_mib: f64| ClassSpeed {
            prefill_tokens_per_s: prefill,
            decode_tokens_per_s: decode,
            load_ms,
            peak_memory_bytes: memory_mib * 1_048_576.0,
        };
        Self {
            classes: BTreeMap::from([
                ("low-4gb", c(90.0, 9.0, 1400.0, 310.0)),
                ("mid-6gb", c(180.0, 18.0, 800.0, 320.0)),
                ("high-8gb", c(420.0, 34.0, 450.0, 330.0)),
                ("flagship-12gb", c(600.0, 48.0, 350.0, 330.0)),
            ]),
            sigma: 0.25,
            slowdown: BTreeMap::new(),
        }
    }
}

/// A standard normal draw (Box & Muller 1958).
pub fn normal(rng: &mut dyn RngCore) -> f64 {
    let u: f64 = 1.0 - rng.random::<f64>();
    let v: f64 = rng.random();
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

impl LatencyModel {
    fn speed(&self, class: &str) -> ClassSpeed {
        let unknown = ClassSpeed {
            prefill_tokens_per_s: 150.0,
            decode_tokens_per_s: 15.0,
            load_ms: 900.0,
            peak_memory_bytes: 3.3e8,
        };
        self.classes.get(class).copied().unwrap_or(unknown)
    }

    fn factor(&self, bundle: &Digest, rng: &mut dyn RngCore) -> f64 {
        self.slowdown.get(bundle).copied().unwrap_or(1.0) * (self.sigma * normal(rng)).exp()
    }

    /// Draws the timing of one answer.
    #[must_use]
    pub fn answer(&self, class: &str, bundle: &Digest, input_tokens: u32, rng: &mut dyn RngCore) -> Timing {
        let speed = self.speed(class);
        let ttft_ms = 1000.0 * f64::from(input_tokens.max(1)) / speed.prefill_tokens_per_s * self.factor(bundle, rng);
        let decode_tokens_per_s = speed.decode_tokens_per_s / self.factor(bundle, rng);
        let memory = speed.peak_memory_bytes * (0.02 * normal(rng)).exp();
        Timing { ttft_ms, decode_tokens_per_s, peak_memory_bytes: memory as u64 }
    }

    /// Draws the time of one load, ms.
    #[must_use]
    pub fn load_ms(&self, class: &str, bundle: &Digest, rng: &mut dyn RngCore) -> f64 {
        self.speed(class).load_ms * self.factor(bundle, rng)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::stream;

    #[test]
    fn median_and_spread_are_those_of_the_model() {
        let mut model = LatencyModel::default();
        let (plain, slow) = (Digest::of(b"plain"), Digest::of(b"slow"));
        model.slowdown.insert(slow, 2.0);
        let mut rng = stream(1, 0, "t");
        let mut draw = |b: &Digest| {
            let mut v: Vec<f64> = (0..4001).map(|_| model.answer("mid-6gb", b, 180, &mut rng).ttft_ms).collect();
            v.sort_by(f64::total_cmp);
            (v[2000], v[3365])
        };
        let (median, upper) = draw(&plain);
        assert!((median - 1000.0).abs() < 40.0, "{median}");
        // One standard deviation of the logarithm above the median lies at the 84.13 % quantile.
        assert!((upper / median - 0.25f64.exp()).abs() < 0.04, "{upper}");
        assert!((draw(&slow).0 / median - 2.0).abs() < 0.1);
    }
}
