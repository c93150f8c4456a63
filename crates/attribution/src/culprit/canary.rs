//! The causal proof: on a random share of devices the chunk is hidden (or, after re-embedding, shown), and the
//! failures of the two groups are compared with e-processes for two Bernoulli streams.
//!
//! Blocks of fixed sizes `(m_s shown, m_h hidden)` are formed in order of arrival. For an alternative `(a, b)` and a
//! convex null set of `(θ_s, θ_h)`, the block's e-variable is the likelihood ratio against the null point `(s, h)`
//! nearest in Kullback-Leibler divergence (Turner, Ly & Grünwald 2024). It is valid by three lines: its mean is
//! `(1 + (θ_s − s) A)^{m_s} (1 + (θ_h − h) B)^{m_h}` with `A = (a − s)/(s(1 − s))`, `B` likewise; its log is at most
//! `m_s (θ_s − s) A + m_h (θ_h − h) B`; and that is ≤ 0 by the optimality of `(s, h)`.

use super::report::CanaryReport;
use super::suspect::log_mean_exp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Alternatives (shown, hidden) for "hiding helps".
const HELPS: [(f64, f64); 14] = [
    (0.2, 0.05),
    (0.2, 0.1),
    (0.35, 0.1),
    (0.35, 0.2),
    (0.5, 0.1),
    (0.5, 0.2),
    (0.5, 0.35),
    (0.7, 0.1),
    (0.7, 0.35),
    (0.7, 0.5),
    (0.9, 0.1),
    (0.9, 0.2),
    (0.9, 0.5),
    (0.9, 0.75),
];
/// Alternatives for "hiding does not help".
const NO_HELP: [(f64, f64); 11] = [
    (0.05, 0.05),
    (0.1, 0.1),
    (0.2, 0.2),
    (0.35, 0.35),
    (0.5, 0.5),
    (0.7, 0.7),
    (0.9, 0.9),
    (0.1, 0.3),
    (0.1, 0.7),
    (0.3, 0.6),
    (0.5, 0.9),
];
const LARGEST_BLOCK: u32 = 9;

/// Evidence of one canary epoch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Canary {
    pub epoch: u32,
    pub since_hour: u32,
    /// Devices per block: (shown, hidden).
    block: (u32, u32),
    users: BTreeSet<u32>,
    waiting_shown: Vec<bool>,
    waiting_hidden: Vec<bool>,
    log_helps: Vec<f64>,
    log_no_help: Vec<f64>,
    counts: [u64; 4],
}

/// Likelihood ratios of one alternative: log factors for failure and success in each group.
#[derive(Debug, Clone, Copy)]
struct Bet {
    shown: (f64, f64),
    hidden: (f64, f64),
}

fn bet(alternative: (f64, f64), null: (f64, f64)) -> Bet {
    let pair = |a: f64, s: f64| ((a / s).ln(), ((1.0 - a) / (1.0 - s)).ln());
    Bet { shown: pair(alternative.0, null.0), hidden: pair(alternative.1, null.1) }
}

/// Point on the line `θ_s − θ_h = delta` nearest to `(a, b)`: the root of the derivative of
/// `m_s KL(a‖s) + m_h KL(b‖s − delta)`, which is convex in `s`.
fn project((a, b): (f64, f64), (ms, mh): (f64, f64), delta: f64) -> (f64, f64) {
    let (mut lo, mut hi) = (delta.max(0.0) + 1e-9, 1.0 - 1e-9);
    for _ in 0..80 {
        let s = f64::midpoint(lo, hi);
        let h = s - delta;
        let slope = ms * (s - a) / (s * (1.0 - s)) + mh * (h - b) / (h * (1.0 - h)).max(1e-12);
        if slope > 0.0 { hi = s } else { lo = s }
    }
    let s = f64::midpoint(lo, hi);
    (s, s - delta)
}

/// The bets of one canary, made once per step.
pub(crate) struct Bets {
    helps: Vec<Bet>,
    no_help: Vec<Bet>,
}

impl Canary {
    /// `hidden_share` of the devices hide the chunk.
    pub(crate) fn new(epoch: u32, since_hour: u32, hidden_share: f64) -> Self {
        let h = hidden_share.clamp(0.01, 0.99);
        let many = |ratio: f64| (ratio.round() as u32).clamp(1, LARGEST_BLOCK);
        let block = if h <= 0.5 { (many((1.0 - h) / h), 1) } else { (1, many(h / (1.0 - h))) };
        Self {
            epoch,
            since_hour,
            block,
            log_helps: vec![0.0; HELPS.len()],
            log_no_help: vec![0.0; NO_HELP.len()],
            ..Self::default()
        }
    }

    /// `delta`: smallest difference worth hiding for.
    pub(crate) fn bets(&self, delta: f64) -> Bets {
        let m = (f64::from(self.block.0), f64::from(self.block.1));
        Bets {
            helps: HELPS.iter().map(|a| bet(*a, project(*a, m, 0.0))).collect(),
            no_help: NO_HELP.iter().map(|a| bet(*a, project(*a, m, delta))).collect(),
        }
    }

    /// Adds the first outcome of a person since the canary began; later ones do not count.
    pub(crate) fn add(&mut self, user: u32, hidden: bool, failed: bool, bets: &Bets) {
        if !self.users.insert(user) {
            return;
        }
        let at = usize::from(hidden) * 2;
        self.counts[at] += 1;
        self.counts[at + 1] += u64::from(failed);
        if hidden {
            self.waiting_hidden.push(failed)
        } else {
            self.waiting_shown.push(failed)
        }
        let (ms, mh) = (self.block.0 as usize, self.block.1 as usize);
        while self.waiting_shown.len() >= ms && self.waiting_hidden.len() >= mh {
            let shown: Vec<bool> = self.waiting_shown.drain(..ms).collect();
            let hidden: Vec<bool> = self.waiting_hidden.drain(..mh).collect();
            let grow = |log: &mut Vec<f64>, bets: &[Bet]| {
                for (l, b) in log.iter_mut().zip(bets) {
                    *l += shown.iter().map(|f| if *f { b.shown.0 } else { b.shown.1 }).sum::<f64>();
                    *l += hidden.iter().map(|f| if *f { b.hidden.0 } else { b.hidden.1 }).sum::<f64>();
                }
            };
            grow(&mut self.log_helps, &bets.helps);
            grow(&mut self.log_no_help, &bets.no_help);
        }
    }

    /// The same evidence with people renumbered.
    pub(crate) fn with_users(&self, user: impl Fn(u32) -> u32) -> Self {
        Self { users: self.users.iter().map(|u| user(*u)).collect(), ..self.clone() }
    }

    pub(crate) fn report(&self) -> CanaryReport {
        let [shown, shown_failures, hidden, hidden_failures] = self.counts;
        CanaryReport {
            shown,
            shown_failures,
            hidden,
            hidden_failures,
            log_e_helps: log_mean_exp(self.log_helps.iter().copied()),
            log_e_no_help: log_mean_exp(self.log_no_help.iter().copied()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean of one block's e-variable under rates (s, h).
    fn mean(b: &Bet, (ms, mh): (u32, u32), s: f64, h: f64) -> f64 {
        let one = |p: f64, (f, ok): (f64, f64)| p * f.exp() + (1.0 - p) * ok.exp();
        one(s, b.shown).powi(ms as i32) * one(h, b.hidden).powi(mh as i32)
    }

    #[test]
    fn every_bet_is_an_e_variable_on_the_whole_null() {
        for share in [0.1, 0.5, 0.9] {
            let c = Canary::new(0, 0, share);
            let bets = c.bets(0.1);
            for i in 1..40 {
                for j in 1..40 {
                    let (s, h) = (f64::from(i) / 40.0, f64::from(j) / 40.0);
                    if s <= h {
                        assert!(bets.helps.iter().all(|b| mean(b, c.block, s, h) <= 1.0 + 1e-6), "{s} {h}");
                    }
                    if s - h >= 0.1 {
                        assert!(bets.no_help.iter().all(|b| mean(b, c.block, s, h) <= 1.0 + 1e-6), "{s} {h}");
                    }
                }
            }
        }
    }

    #[test]
    fn clear_harm_is_confirmed_and_clear_innocence_refuted() {
        let run = |fail_shown: u32, fail_hidden: u32| {
            let mut c = Canary::new(1, 0, 0.1);
            let bets = c.bets(0.1);
            for u in 0..1500u32 {
                let hidden = u % 10 == 3;
                let failed = (u / 10) % 20 < if hidden { fail_hidden } else { fail_shown };
                c.add(u, hidden, failed, &bets);
                c.add(u, !hidden, true, &bets); // the second outcome of a person is ignored
            }
            c.report()
        };
        let guilty = run(18, 3);
        assert_eq!((guilty.shown, guilty.hidden), (1350, 150));
        assert!(guilty.log_e_helps > 100f64.ln() && guilty.log_e_no_help < 0.0, "{guilty:?}");
        let innocent = run(3, 3);
        assert!(innocent.log_e_helps < 0.0 && innocent.log_e_no_help > 20f64.ln(), "{innocent:?}");
    }
}
