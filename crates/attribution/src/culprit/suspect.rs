//! Fresh evidence against one suspect: an e-process that starts at the screening and sees each person once, the
//! Byzantine trim, the adjuster for decisions that cannot be undone, and e-BH.
//!
//! Under "this subject adds nothing" each factor has conditional mean ≤ 1, because the prediction without the
//! subject comes from a model fitted before the row, times a margin. Dropping the B largest positive terms leaves
//! at most the value of the honest people alone if at most B people are hostile, so the trimmed value is still
//! an e-value whatever they send.

use flywheel_types::TrustClass;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Largest trim that can be asked for later: so many top terms are kept per effect size and trust class.
pub(crate) const MAX_TRIM: usize = 64;
/// Failures kept as examples.
const EXAMPLES: usize = 5;

/// The largest positive terms, in descending order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Top(Vec<f64>);

impl Top {
    fn push(&mut self, g: f64) {
        if g <= 0.0 || (self.0.len() == MAX_TRIM && self.0.last().is_some_and(|l| *l >= g)) {
            return;
        }
        let at = self.0.partition_point(|x| *x >= g);
        self.0.insert(at, g);
        self.0.truncate(MAX_TRIM);
    }
    fn sum(&self, b: usize) -> f64 {
        self.0.iter().take(b).sum()
    }
}

/// Example of a failure the subject is held responsible for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Example {
    pub interaction: String,
    pub share: f64,
    pub rank: u32,
}

/// Evidence against one subject.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Suspect {
    pub since_hour: u32,
    /// Sum of log factors per effect size.
    log_sum: Vec<f64>,
    top_keyed: Vec<Top>,
    top_attested: Vec<Top>,
    /// People whose first outcome since the screening was counted.
    users: BTreeSet<u32>,
    days: BTreeSet<u32>,
    classes: BTreeSet<u32>,
    /// Locale → (counted people, failures among them).
    locales: Vec<(u32, u32, u32)>,
    /// Running maximum of the trimmed log e-value: per the class rule, and per the stricter freeze trim.
    pub max_log_e: f64,
    pub max_log_e_strict: f64,
    pub examples: Vec<Example>,
}

/// One outcome as the e-process sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub user: u32,
    pub trust: TrustClass,
    pub day: u32,
    pub device_class: u32,
    pub locale: u32,
    pub failed: bool,
    /// Predicted failure rate without the subject (before the margin).
    pub p_without: f64,
    pub weight: f64,
}

impl Suspect {
    pub(crate) fn new(since_hour: u32, grid: usize) -> Self {
        Self {
            since_hour,
            log_sum: vec![0.0; grid],
            top_keyed: vec![Top::default(); grid],
            top_attested: vec![Top::default(); grid],
            ..Self::default()
        }
    }

    /// Adds the first outcome of a person; later ones of the same person do not count.
    pub(crate) fn add(&mut self, o: &Outcome, grid: &[f64], gamma: f64) {
        if !self.users.insert(o.user) {
            return;
        }
        self.days.insert(o.day);
        self.classes.insert(o.device_class);
        match self.locales.iter_mut().find(|l| l.0 == o.locale) {
            Some(l) => {
                l.1 += 1;
                l.2 += u32::from(o.failed);
            }
            None => self.locales.push((o.locale, 1, u32::from(o.failed))),
        }
        let p = (gamma * o.p_without).clamp(1e-4, 0.95);
        let top = if o.trust == TrustClass::Attested { &mut self.top_attested } else { &mut self.top_keyed };
        for (i, lambda) in grid.iter().enumerate() {
            let survive = 1.0 - lambda * o.weight; // (1 − p1) / (1 − p)
            let g = if o.failed { ((1.0 - (1.0 - p) * survive) / p).ln() } else { survive.ln() };
            self.log_sum[i] += g;
            top[i].push(g);
        }
    }

    /// Keeps the failures for which the subject is most responsible.
    pub(crate) fn example(&mut self, interaction: &str, share: f64, rank: u32) {
        if self.examples.len() == EXAMPLES && self.examples.last().is_some_and(|e| e.share >= share) {
            return;
        }
        let at = self.examples.partition_point(|e| e.share >= share);
        self.examples.insert(at, Example { interaction: interaction.to_owned(), share, rank });
        self.examples.truncate(EXAMPLES);
    }

    /// Natural log of the mixture e-value without the `keyed` and `attested` most incriminating people.
    pub(crate) fn log_e(&self, keyed: u32, attested: u32) -> f64 {
        let logs = self
            .log_sum
            .iter()
            .enumerate()
            .map(|(i, s)| s - self.top_keyed[i].sum(keyed as usize) - self.top_attested[i].sum(attested as usize));
        log_mean_exp(logs)
    }

    /// Log e-value after dropping the `b` most incriminating people of all classes together.
    pub(crate) fn log_e_strict(&self, b: u32) -> f64 {
        let logs = self.log_sum.iter().enumerate().map(|(i, s)| {
            let mut all: Vec<f64> = self.top_keyed[i].0.iter().chain(&self.top_attested[i].0).copied().collect();
            all.sort_by(|a, b| b.total_cmp(a));
            s - all.iter().take(b as usize).sum::<f64>()
        });
        log_mean_exp(logs)
    }

    pub(crate) fn update_maxima(&mut self, keyed: u32, attested: u32, strict: u32) {
        self.max_log_e = self.max_log_e.max(self.log_e(keyed, attested));
        self.max_log_e_strict = self.max_log_e_strict.max(self.log_e_strict(strict));
    }

    pub(crate) fn grid_len(&self) -> usize {
        self.log_sum.len()
    }
    pub(crate) fn users(&self) -> u32 {
        self.users.len() as u32
    }
    pub(crate) fn days(&self) -> u32 {
        self.days.len() as u32
    }
    pub(crate) fn classes(&self) -> u32 {
        self.classes.len() as u32
    }
    pub(crate) fn locales(&self) -> u32 {
        self.locales.len() as u32
    }

    /// All failures come from one locale although at least a fifth of the people used another one.
    pub(crate) fn one_locale_only(&self) -> bool {
        let people: u32 = self.locales.iter().map(|l| l.1).sum();
        let mut failing = self.locales.iter().filter(|l| l.2 > 0);
        match (failing.next(), failing.next()) {
            (Some(only), None) => (people - only.1) * 5 >= people && people > 0,
            _ => false,
        }
    }

    /// Adds the evidence of another shard; its people must be different ones.
    pub(crate) fn merge(&mut self, other: &Self, user: impl Fn(u32) -> u32) -> bool {
        if self.log_sum.len() != other.log_sum.len() || other.users.iter().any(|u| self.users.contains(&user(*u))) {
            return false;
        }
        for i in 0..self.log_sum.len() {
            self.log_sum[i] += other.log_sum[i];
            other.top_keyed[i].0.iter().for_each(|g| self.top_keyed[i].push(*g));
            other.top_attested[i].0.iter().for_each(|g| self.top_attested[i].push(*g));
        }
        self.since_hour = self.since_hour.min(other.since_hour);
        self.users.extend(other.users.iter().map(|u| user(*u)));
        self.days.extend(other.days.iter().copied());
        for e in &other.examples {
            self.example(&e.interaction, e.share, e.rank);
        }
        true
    }

    pub(crate) fn merge_places(&mut self, other: &Self, class: impl Fn(u32) -> u32, locale: impl Fn(u32) -> u32) {
        self.classes.extend(other.classes.iter().map(|c| class(*c)));
        for &(l, n, f) in &other.locales {
            let l = locale(l);
            match self.locales.iter_mut().find(|x| x.0 == l) {
                Some(x) => {
                    x.1 += n;
                    x.2 += f;
                }
                None => self.locales.push((l, n, f)),
            }
        }
    }
}

/// `ln(mean(exp(x)))` without overflow.
pub(crate) fn log_mean_exp(logs: impl Iterator<Item = f64> + Clone) -> f64 {
    let (max, n) = logs.clone().fold((f64::NEG_INFINITY, 0u32), |(m, n), x| (m.max(x), n + 1));
    if n == 0 || max == f64::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    max + (logs.map(|x| (x - max).exp()).sum::<f64>() / f64::from(n)).ln()
}

/// Natural log of the adjuster `A(E) = (E − 1 − ln E) / (ln E)²` at a running maximum `E = exp(log_max)`: an
/// e-value for the maximum over all times, so that a freeze stays covered after the evidence has fallen again.
/// Its limit at E = 1 is 1/2.
pub(crate) fn log_adjusted(log_max: f64) -> f64 {
    if log_max <= 1e-3 {
        return 0.5f64.ln();
    }
    if log_max > 30.0 {
        return log_max - 2.0 * log_max.ln(); // 1 + ln E is lost in rounding
    }
    ((log_max.exp() - 1.0 - log_max) / (log_max * log_max)).ln()
}

/// e-BH (Wang & Ramdas 2022): rejects the `k*` largest, `k* = max{k : E_(k) >= m / (alpha k)}`; false-discovery
/// rate ≤ alpha under any dependence. Input natural logs; output one flag per input.
pub(crate) fn e_bh(log_e: &[f64], alpha: f64) -> Vec<bool> {
    let m = log_e.len() as f64;
    let mut order: Vec<usize> = (0..log_e.len()).collect();
    order.sort_by(|a, b| log_e[*b].total_cmp(&log_e[*a]));
    let mut rejected = 0;
    for (k, &i) in order.iter().enumerate() {
        if log_e[i] >= (m / (alpha * (k + 1) as f64)).ln() {
            rejected = k + 1;
        }
    }
    let mut out = vec![false; log_e.len()];
    order.iter().take(rejected).for_each(|i| out[*i] = true);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(user: u32, failed: bool, p: f64) -> Outcome {
        Outcome {
            user,
            trust: TrustClass::Keyed,
            day: user % 5,
            device_class: user % 2,
            locale: 0,
            failed,
            p_without: p,
            weight: 1.0,
        }
    }

    #[test]
    fn each_factor_has_mean_at_most_one_under_the_null() {
        let grid = [0.05, 0.1, 0.2, 0.35];
        for p in [0.02, 0.1, 0.3, 0.7] {
            for q in [p, p * 0.5] {
                let value = |failed| {
                    let mut s = Suspect::new(0, 4);
                    s.add(&outcome(1, failed, p), &grid, 1.0);
                    s.log_e(0, 0).exp()
                };
                assert!(q * value(true) + (1.0 - q) * value(false) <= 1.0 + 1e-12, "p={p} q={q}");
            }
        }
    }

    #[test]
    fn growth_matches_the_published_table() {
        // Expected log growth per exposure at rank 1 on base 0.10 for the best single effect size.
        for (q, want) in [(0.10, 0.037), (0.20, 0.127), (0.35, 0.338)] {
            let grid = [q];
            let one = |failed| {
                let mut s = Suspect::new(0, 1);
                s.add(&outcome(1, failed, 0.1), &grid, 1.0);
                s.log_e(0, 0)
            };
            let p1 = 1.0 - 0.9 * (1.0 - q);
            let growth: f64 = p1 * one(true) + (1.0 - p1) * one(false);
            assert!((growth - want).abs() < 0.001, "{q}: {growth}");
        }
    }

    #[test]
    fn a_person_counts_once_and_the_trim_beats_any_b_colluders() {
        let grid = [0.05, 0.1, 0.2, 0.35];
        let mut honest = Suspect::new(0, 4);
        let mut attacked = Suspect::new(0, 4);
        for u in 0..200 {
            let o = outcome(u, u % 10 == 0, 0.1);
            honest.add(&o, &grid, 1.0);
            attacked.add(&o, &grid, 1.0);
        }
        for u in 1000..1020 {
            for _ in 0..40 {
                attacked.add(&outcome(u, true, 0.1), &grid, 1.0);
            }
        }
        assert_eq!(attacked.users(), 220);
        assert!(attacked.log_e(0, 0) > honest.log_e(0, 0) + 2.0);
        assert!(attacked.log_e(20, 3) <= honest.log_e(0, 0) + 1e-9);
        assert!(attacked.log_e_strict(20) <= honest.log_e(0, 0) + 1e-9);
    }

    #[test]
    fn e_bh_reference() {
        // m = 4, alpha = 0.1: thresholds 40, 20, 13.3, 10.
        let e = [50f64, 15.0, 14.0, 1.0].map(f64::ln);
        assert_eq!(e_bh(&e, 0.1), vec![true, true, true, false]);
        let e = [39f64, 15.0, 12.0, 9.0].map(f64::ln);
        assert_eq!(e_bh(&e, 0.1), vec![false; 4]);
        assert!(e_bh(&[], 0.1).is_empty());
    }

    #[test]
    fn adjuster_reference() {
        let a = |e: f64| log_adjusted(e.ln()).exp();
        assert!((a(100.0) - 4.450).abs() < 1e-3, "{}", a(100.0));
        assert!((a(1000.0) - 20.791).abs() < 0.001);
        assert!((a(1.0) - 0.5).abs() < 1e-3);
        assert!((log_adjusted(30.0001) - log_adjusted(29.9999)).abs() < 1e-3);
    }
}
