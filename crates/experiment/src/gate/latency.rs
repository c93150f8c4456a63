//! Latency gates: the share of slow events, with thresholds frozen from the incumbent's telemetry.
//!
//! The control counts events slower than the baseline quantile `x`, the treatment events slower than
//! `(1 + margin) · x`. "The treatment's p95 is at most 10 % slower" holds exactly when the treatment's share is at
//! most the control's share while the control sits at its baseline. A single huge outlier is one slow event.

use crate::error::ExperimentError;
use crate::gate::spec::check;
use flywheel_types::assign::Arm;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One latency gate on time to first token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatencyGateV1 {
    /// For example `ttft_p95`.
    pub name: String,
    /// Quantile of the baseline, in (0, 1).
    pub quantile: f64,
    /// Tolerated slow-down, relative (0.10 = 10 %).
    pub margin: f64,
    /// Baseline quantile in ms by device class. The class `*`, if present, serves classes not listed.
    pub thresholds_ms: BTreeMap<String, f64>,
    /// Whether the gate must PASS before a step; otherwise it can only stop.
    #[serde(default = "yes")]
    pub required: bool,
}

fn yes() -> bool {
    true
}

impl LatencyGateV1 {
    /// The time in ms above which an event of this device class is slow in this arm; `None` if nothing was
    /// frozen for the class.
    #[must_use]
    pub fn threshold_ms(&self, device_class: &str, arm: Arm) -> Option<f64> {
        let base = self.thresholds_ms.get(device_class).or_else(|| self.thresholds_ms.get("*"))?;
        Some(match arm {
            Arm::Control => *base,
            Arm::Treatment => base * (1.0 + self.margin),
        })
    }

    pub(crate) fn check(&self) -> Result<(), ExperimentError> {
        check("latency.quantile", self.quantile, |q| q > 0.0 && q < 1.0, "a quantile in (0, 1)")?;
        check("latency.margin", self.margin, |m| (0.0..=10.0).contains(&m), "a relative slow-down in 0..=10")?;
        check("latency.thresholds_ms", self.thresholds_ms.len() as f64, |n| n >= 1.0, "at least one device class")?;
        self.thresholds_ms
            .values()
            .try_for_each(|x| check("latency.thresholds_ms", *x, |x| x > 0.0, "a time in ms above 0"))
    }
}

/// Fewest samples for a quantile `p`: `4 · max(p/(1-p), (1-p)/p)`, so that the tail holds some.
#[must_use]
pub fn samples_needed(quantile: f64) -> usize {
    let odds = (quantile / (1.0 - quantile)).max((1.0 - quantile) / quantile);
    (4.0 * odds).ceil() as usize + 1
}

/// The shipped latency gates, p50 (+5 %) and p95 (+10 %) of time to first token, with thresholds from baseline
/// samples in ms by device class. Classes with too few samples share the pooled threshold `*`.
///
/// # Errors
/// [`ExperimentError::TooFewSamples`] if even all classes together are too few.
pub fn freeze_latency_thresholds(
    samples_ms: &BTreeMap<String, Vec<f64>>,
) -> Result<Vec<LatencyGateV1>, ExperimentError> {
    [("ttft_p50", 0.5, 0.05), ("ttft_p95", 0.95, 0.10)]
        .into_iter()
        .map(|(name, quantile, margin)| {
            Ok(LatencyGateV1 {
                name: name.to_owned(),
                quantile,
                margin,
                thresholds_ms: thresholds(samples_ms, quantile)?,
                required: true,
            })
        })
        .collect()
}

fn thresholds(
    samples_ms: &BTreeMap<String, Vec<f64>>,
    quantile: f64,
) -> Result<BTreeMap<String, f64>, ExperimentError> {
    let needed = samples_needed(quantile);
    let usable = |xs: &[f64]| -> Vec<f64> {
        let mut v: Vec<f64> = xs.iter().copied().filter(|x| x.is_finite() && *x > 0.0).collect();
        v.sort_unstable_by(f64::total_cmp);
        v
    };
    let mut pooled = Vec::new();
    let mut out = BTreeMap::new();
    for (class, samples) in samples_ms {
        let sorted = usable(samples);
        pooled.extend_from_slice(&sorted);
        if sorted.len() >= needed {
            out.insert(class.clone(), quantile_of_sorted(&sorted, quantile));
        }
    }
    if pooled.len() < needed {
        return Err(ExperimentError::TooFewSamples { class: "*".into(), quantile, samples: pooled.len(), needed });
    }
    out.insert("*".into(), quantile_of_sorted(&usable(&pooled), quantile));
    Ok(out)
}

/// Quantile by linear interpolation on `n - 1` (type 7); 0 for an empty slice.
fn quantile_of_sorted(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return 0.0;
    };
    let at = q * last as f64;
    let low = at.floor() as usize;
    let high = (low + 1).min(last);
    sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_type_7_quantiles_per_class_with_a_pooled_fallback() {
        let mut samples = BTreeMap::new();
        samples.insert("high".to_owned(), (1..=101).map(f64::from).collect::<Vec<_>>());
        samples.insert("rare".to_owned(), vec![500.0, f64::NAN, -1.0]);
        let gates = freeze_latency_thresholds(&samples).unwrap();
        assert_eq!(gates[0].thresholds_ms["high"], 51.0);
        assert_eq!(gates[1].thresholds_ms["high"], 96.0);
        assert_eq!(gates[1].threshold_ms("high", Arm::Control), Some(96.0));
        let t = gates[1].threshold_ms("high", Arm::Treatment).unwrap();
        assert!((t - 105.6).abs() < 1e-9);
        assert!(!gates[1].thresholds_ms.contains_key("rare"), "two samples make no p95");
        assert_eq!(gates[0].threshold_ms("rare", Arm::Control), Some(51.5));
    }

    #[test]
    fn too_few_samples_are_an_error_not_a_guess() {
        let samples = BTreeMap::from([("a".to_owned(), vec![1.0; 50])]);
        let e = freeze_latency_thresholds(&samples).unwrap_err();
        assert!(e.to_string().contains("77 are needed"), "{e}");
    }
}
