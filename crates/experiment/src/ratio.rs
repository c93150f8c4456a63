//! Ratio metrics clustered by device: five exact integer sums per arm and phase, the delta-method variance (Deng,
//! Knoblich, Lu, KDD 2018), and the stratified difference over phases.

use serde::{Deserialize, Serialize};

/// Sums over the devices of one arm in one phase. Exact, so the order of devices never matters; mergeable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RatioSums {
    /// Devices with at least one response.
    pub devices: u64,
    /// Of these: with at least one event.
    pub with_event: u64,
    /// Events, Σ S.
    pub events: u64,
    /// Responses, Σ N.
    pub responses: u64,
    pub events_sq: u64,
    pub responses_sq: u64,
    pub product: u64,
}

impl RatioSums {
    /// Adds one device with `events` of `responses`; a device without responses carries no information.
    pub fn add(&mut self, events: u32, responses: u32) {
        if responses == 0 {
            return;
        }
        let (s, n) = (u64::from(events.min(responses)), u64::from(responses));
        self.devices += 1;
        self.with_event += u64::from(s > 0);
        self.events += s;
        self.responses += n;
        self.events_sq += s * s;
        self.responses_sq += n * n;
        self.product += s * n;
    }

    /// Adds the sums of another shard.
    pub fn merge(&mut self, other: &Self) {
        self.devices += other.devices;
        self.with_event += other.with_event;
        self.events += other.events;
        self.responses += other.responses;
        self.events_sq += other.events_sq;
        self.responses_sq += other.responses_sq;
        self.product += other.product;
    }

    /// Events per response, `None` without responses.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        (self.responses > 0).then(|| self.events as f64 / self.responses as f64)
    }

    /// Variance of [`Self::rate`] by the delta method, `None` below two devices. Never below the resolution
    /// `(1 / Σ N)²`: an arm without any event is not known exactly.
    #[must_use]
    pub fn rate_variance(&self) -> Option<f64> {
        let rate = self.rate()?;
        if self.devices < 2 {
            return None;
        }
        let n = self.devices as f64;
        let total = self.responses as f64;
        let squares = self.events_sq as f64 - 2.0 * rate * self.product as f64 + rate * rate * self.responses_sq as f64;
        let variance = squares.max(0.0) * n / ((n - 1.0) * total * total);
        Some(variance.max((1.0 / total).powi(2)))
    }
}

/// Both arms of one phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseSums {
    pub control: RatioSums,
    pub treatment: RatioSums,
}

/// Stratified difference, treatment minus control.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    pub theta: f64,
    pub se: f64,
    /// Effective devices: `Σ 4 n_T n_C / (n_T + n_C)`, the total when the arms are balanced.
    pub effective_devices: f64,
    /// Stratified rates.
    pub control: f64,
    pub treatment: f64,
}

/// Combines phases by stratification (`w_k ∝ n_T n_C / (n_T + n_C)`), never by pooling, so that a baseline that
/// drifts between phases cannot fake an effect. Phases with fewer than `min_devices` in an arm are left out;
/// `None` if none is left.
#[must_use]
pub fn stratified(phases: &[PhaseSums], min_devices: u64) -> Option<Difference> {
    let mut out = Difference { theta: 0.0, se: 0.0, effective_devices: 0.0, control: 0.0, treatment: 0.0 };
    let mut variance = 0.0;
    let mut weight = 0.0;
    for p in usable(phases, min_devices) {
        let (Some(rt), Some(rc)) = (p.treatment.rate(), p.control.rate()) else {
            continue;
        };
        let (Some(vt), Some(vc)) = (p.treatment.rate_variance(), p.control.rate_variance()) else {
            continue;
        };
        let (nt, nc) = (p.treatment.devices as f64, p.control.devices as f64);
        let w = nt * nc / (nt + nc);
        weight += w;
        out.treatment += w * rt;
        out.control += w * rc;
        variance += w * w * (vt + vc);
    }
    if weight <= 0.0 {
        return None;
    }
    out.treatment /= weight;
    out.control /= weight;
    out.theta = out.treatment - out.control;
    out.se = variance.sqrt() / weight;
    out.effective_devices = 4.0 * weight;
    Some(out)
}

/// The phases with at least `min_devices` (and two) in each arm.
pub fn usable(phases: &[PhaseSums], min_devices: u64) -> impl Iterator<Item = &PhaseSums> {
    let least = min_devices.max(2);
    phases.iter().filter(move |p| p.control.devices >= least && p.treatment.devices >= least)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(devices: u64, s: u64, s2: u64, n: u64, n2: u64, sn: u64) -> RatioSums {
        RatioSums {
            devices,
            with_event: devices,
            events: s,
            responses: n,
            events_sq: s2,
            responses_sq: n2,
            product: sn,
        }
    }

    // Reference values: gbstats 0.8.0 `RatioStatistic`, tea-tasting 1.14 agrees.
    #[test]
    fn delta_method_matches_gbstats() {
        let p = PhaseSums {
            control: sums(400, 298, 788, 4083, 45_477, 3367),
            treatment: sums(400, 507, 1561, 4017, 43_943, 5653),
        };
        let d = stratified(&[p], 2).unwrap();
        assert!((d.control - 0.072_985_549_840_803_33).abs() < 1e-15);
        assert!((d.treatment - 0.126_213_592_233_009_7).abs() < 1e-15);
        assert!((d.se - 0.009_176_887_906_189_962).abs() < 1e-14, "{}", d.se);
        assert_eq!(d.effective_devices, 800.0);
    }

    #[test]
    fn strata_are_not_pooled() {
        // No effect in either phase, but the baseline drifts from 5 % to 30 % while the mix changes: pooling would
        // see a difference (Simpson), stratification does not.
        let arm = |devices: u64, rate_num: u32| {
            let mut s = RatioSums::default();
            for i in 0..devices {
                s.add(rate_num + (i % 2) as u32 * 2, 20);
            }
            s
        };
        let phases = [
            PhaseSums { control: arm(1000, 0), treatment: arm(100, 0) },
            PhaseSums { control: arm(200, 5), treatment: arm(1000, 5) },
        ];
        let d = stratified(&phases, 2).unwrap();
        assert!(d.theta.abs() < 1e-12, "{}", d.theta);
        let mut pooled = PhaseSums::default();
        for p in &phases {
            pooled.control.merge(&p.control);
            pooled.treatment.merge(&p.treatment);
        }
        assert!(stratified(&[pooled], 2).unwrap().theta > 0.1);
    }

    #[test]
    fn an_arm_without_events_is_not_known_exactly() {
        let mut s = RatioSums::default();
        (0..500).for_each(|_| s.add(0, 10));
        assert_eq!(s.rate(), Some(0.0));
        assert!((s.rate_variance().unwrap().sqrt() - 1.0 / 5000.0).abs() < 1e-15);
        s.add(3, 0);
        assert_eq!(s.devices, 500, "a device without responses carries nothing");
    }
}
