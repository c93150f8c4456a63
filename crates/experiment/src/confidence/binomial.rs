//! Rare events: anytime-valid bounds for a probability, the truncated-Beta e-process of the crash gate, and the
//! beta-binomial mixture.

use crate::special::{ln_add_exp, ln_beta, ln_inc_beta};

/// Log e-value that the success probability is above `p0`, after `s` successes in `n` trials: mixture of likelihood
/// ratios over a Beta(`a`, `b`) prior truncated to `(p0, 1)`. An e-process for every probability at or below `p0`,
/// because each likelihood ratio grows with the number of successes.
#[must_use]
pub fn ln_e_above(s: u64, n: u64, p0: f64, a: f64, b: f64) -> f64 {
    if p0 <= 0.0 || p0 >= 1.0 {
        return 0.0;
    }
    let (s, f) = (s.min(n) as f64, (n - s.min(n)) as f64);
    let posterior = ln_beta(a + s, b + f) + ln_inc_beta(a + s, b + f, p0).1;
    let prior = ln_beta(a, b) + ln_inc_beta(a, b, p0).1;
    posterior - prior - s * p0.ln() - f * (-p0).ln_1p()
}

/// E-process of the crash gate (Lindon and Malek, NeurIPS 2022, arXiv 2011.03567): given that a device failed, the
/// probability that it is a treated one is `π` when the rates are equal. Null: the treatment's rate is at most
/// `1 + margin` times the control's. Prior Beta(`k p0`, `k (1-p0)`) truncated to `(p0, 1)`.
///
/// `treated` of `events` first failures are the treatment's; `share` is the treatment's share of devices at risk.
/// Returns the log e-value; the null is rejected at level `α` when it reaches `ln 1/α`.
#[must_use]
pub fn ln_e_more_failures(treated: u64, events: u64, share: f64, margin: f64, k: f64) -> f64 {
    let p0 = share * (1.0 + margin) / (share * (1.0 + margin) + 1.0 - share);
    ln_e_above(treated, events, p0, k * p0, k * (1.0 - p0))
}

/// Log e-value against "the probability is `p0` or more" (`above`) or "or less": mean of two truncated mixtures, a
/// Jeffreys prior and one close to the edge, which makes "no event yet" as informative as it is.
fn ln_e_beyond(s: u64, n: u64, p0: f64, above: bool) -> f64 {
    let (s, p0) = if above { (s, p0) } else { (n - s, 1.0 - p0) };
    let edge = |x: f64| (8.0 / x).max(1.0);
    let jeffreys = ln_e_above(s, n, p0, 0.5, 0.5);
    // Beta(m, 1) puts its mass near 1 at the scale of the distance 1 - p0.
    let near_edge = ln_e_above(s, n, p0, edge(1.0 - p0), 1.0);
    ln_add_exp(jeffreys, near_edge) - std::f64::consts::LN_2
}

/// Anytime-valid upper bound of a probability after `s` successes in `n` trials: all larger probabilities are ruled
/// out at level `alpha`, at any time. 1 without data.
#[must_use]
pub fn upper_bound(s: u64, n: u64, alpha: f64) -> f64 {
    let s = s.min(n);
    bound(s as f64 / n.max(1) as f64, 1.0, n, alpha, |p| ln_e_beyond(s, n, p, false))
}

/// Anytime-valid lower bound of a probability, as [`upper_bound`]. 0 without data.
#[must_use]
pub fn lower_bound(s: u64, n: u64, alpha: f64) -> f64 {
    let s = s.min(n);
    bound(s as f64 / n.max(1) as f64, 0.0, n, alpha, |p| ln_e_beyond(s, n, p, true))
}

/// Bisection between the estimate (never ruled out) and the end of the range; returns the ruled-out side.
fn bound(estimate: f64, end: f64, n: u64, alpha: f64, ln_e: impl Fn(f64) -> f64) -> f64 {
    if n == 0 || estimate == end {
        return end;
    }
    let threshold = -alpha.ln();
    let (mut kept, mut out) = (estimate, end);
    for _ in 0..32 {
        let mid = 0.5 * (kept + out);
        if ln_e(mid) < threshold { kept = mid } else { out = mid }
    }
    out
}

/// Log of the beta-binomial mixture supermartingale of Howard, Ramdas, McAuliffe, Sekhon (Annals of Statistics
/// 2021, arXiv 1810.08240) at sum `s` and intrinsic time `v`, tuned for `v_opt`; increments lie in `-g..=h`.
#[must_use]
pub fn ln_beta_binomial_mixture(s: f64, v: f64, v_opt: f64, g: f64, h: f64, alpha_opt: f64, one_sided: bool) -> f64 {
    let tail = if one_sided { 2.0 * alpha_opt } else { alpha_opt };
    let log = -2.0 * tail.ln();
    let r = (v_opt / (log + log.ln_1p()) - g * h).max(1e-3 * g * h);
    let unnormalised = |a: f64, b: f64| {
        let x = if one_sided { h / (g + h) } else { 1.0 };
        ln_beta(a, b) + ln_inc_beta(a, b, x).0
    };
    let sum = g + h;
    v / (g * h) * sum.ln() - (v + h * s) / (h * sum) * g.ln() - (v - g * s) / (g * sum) * h.ln()
        + unnormalised((r + v - g * s) / (g * sum), (r + v + h * s) / (h * sum))
        - unnormalised(r / (g * sum), r / (h * sum))
}

/// Two-sided anytime-valid interval of a probability by inverting [`ln_beta_binomial_mixture`], tuned for `t_opt`
/// trials.
#[must_use]
pub fn mixture_interval(s: u64, n: u64, alpha: f64, t_opt: f64) -> (f64, f64) {
    let s = s.min(n);
    let ln_e = |p: f64| {
        let pq = p * (1.0 - p);
        if pq <= 0.0 {
            return f64::INFINITY;
        }
        ln_beta_binomial_mixture(s as f64 - n as f64 * p, n as f64 * pq, t_opt * pq, p, 1.0 - p, 0.05, false)
    };
    let estimate = s as f64 / n.max(1) as f64;
    (bound(estimate, 0.0, n, alpha, ln_e), bound(estimate, 1.0, n, alpha, ln_e))
}
