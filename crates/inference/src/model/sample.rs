//! Choosing the next token from logits.
//!
//! The steps and their order are those of llama.cpp's default chain: repetition penalty, top-k, top-p, min-p,
//! temperature, draw. So top-p and min-p look at the probabilities before the temperature.

use super::ModelError;
use crate::linalg::exp_in_place;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// How the next token is chosen. Each step can be left out; [`Sampling::GREEDY`] leaves out all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0: the most likely token, the lowest id among equals. Else logits are divided by it and a token is drawn.
    pub temperature: f32,
    /// Only this many most likely tokens; 0: all.
    pub top_k: usize,
    /// Only the fewest tokens that together have this probability (nucleus sampling, arXiv 1904.09751); 1: all.
    pub top_p: f32,
    /// Only tokens with this share of the probability of the most likely one (arXiv 2407.01082); 0: all.
    pub min_p: f32,
    /// Logits of tokens among the last `repeat_last` ones are divided by it where positive, multiplied where
    /// negative (arXiv 1909.05858); 1: as they are.
    pub repeat_penalty: f32,
    /// Tokens, of prompt and text, that count as repeated.
    pub repeat_last: usize,
    /// Random numbers come from this seed; every prompt has its own stream of them.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self =
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repeat_penalty: 1.0, repeat_last: 64, seed: 0 };

    /// Whether no random number is used.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// # Errors
    /// [`ModelError::Input`] for a value out of its range.
    pub fn check(&self) -> Result<(), ModelError> {
        let share = |v: f32| (0.0..=1.0).contains(&v);
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(ModelError::input(format!("temperature {} must be 0 or above", self.temperature)));
        }
        if !(share(self.top_p) && self.top_p > 0.0 && share(self.min_p)) {
            let what = format!("top_p {} must be above 0 and at most 1, min_p {} in 0..=1", self.top_p, self.min_p);
            return Err(ModelError::input(what));
        }
        if !(self.repeat_penalty.is_finite() && self.repeat_penalty > 0.0) {
            return Err(ModelError::input(format!("repeat_penalty {} must be above 0", self.repeat_penalty)));
        }
        Ok(())
    }

    /// Tokens and their probabilities, which add up to 1; the tokens before the next one are `history`.
    pub(crate) fn distribution(&self, logits: &mut [f32], history: &[u32]) -> Vec<(u32, f32)> {
        self.penalise(logits, history);
        if self.is_greedy() {
            return vec![(argmax(logits) as u32, 1.0)];
        }
        let mut kept = self.shortlist(logits);
        let peak = kept.iter().fold(f32::NEG_INFINITY, |m, (_, l)| m.max(*l));
        let mut total = 0.0f64;
        for (_, l) in &mut kept {
            *l = ((*l - peak) / self.temperature).exp();
            total += f64::from(*l);
        }
        kept.iter_mut().for_each(|(_, p)| *p = (f64::from(*p) / total) as f32);
        kept
    }

    fn penalise(&self, logits: &mut [f32], history: &[u32]) {
        if self.repeat_penalty == 1.0 {
            return;
        }
        let mut seen = history[history.len().saturating_sub(self.repeat_last)..].to_vec();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            if let Some(l) = logits.get_mut(token as usize) {
                *l = if *l > 0.0 { *l / self.repeat_penalty } else { *l * self.repeat_penalty };
            }
        }
    }

    /// Tokens that pass top-k, top-p and min-p, with their logits; falling, lower ids first among equals, unless all
    /// of them pass.
    fn shortlist(&self, logits: &[f32]) -> Vec<(u32, f32)> {
        let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
        if self.top_k == 0 && self.top_p >= 1.0 && self.min_p == 0.0 {
            return all;
        }
        let falling = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if self.top_k > 0 && self.top_k < all.len() {
            all.select_nth_unstable_by(self.top_k - 1, falling);
            all.truncate(self.top_k);
        }
        let peak = all.iter().fold(f32::NEG_INFINITY, |m, (_, l)| m.max(*l));
        let mut odds: Vec<f32> = all.iter().map(|(_, l)| *l).collect();
        let want = exp_in_place(&mut odds, peak) * self.top_p;
        // A sorted beginning is enough; it is made longer until it has the mass.
        let mut sorted = 0;
        let (mut kept, mut mass) = (0, 0.0);
        while kept < all.len() && (kept == 0 || self.top_p >= 1.0 || mass < want) {
            if kept == sorted {
                sorted = (4 * sorted).max(256).min(all.len());
                if sorted < all.len() {
                    all[kept..].select_nth_unstable_by(sorted - kept - 1, falling);
                }
                all[kept..sorted].sort_unstable_by(falling);
            }
            mass += (all[kept].1 - peak).exp();
            kept += 1;
        }
        all.truncate(kept);
        if self.min_p > 0.0 {
            let least = peak + self.min_p.ln();
            all.retain(|(_, l)| *l >= least || *l == peak);
        }
        all
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// Index of the largest value, the first among equals.
pub(crate) fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best
}

/// One token of a distribution.
pub(crate) fn draw(distribution: &[(u32, f32)], rng: &mut ChaCha8Rng) -> u32 {
    if let [(only, _)] = distribution {
        return *only;
    }
    let mut left = rng.random::<f64>();
    for (token, p) in distribution {
        left -= f64::from(*p);
        if left < 0.0 {
            return *token;
        }
    }
    // Rounding: the last one that can be drawn.
    distribution.iter().rev().find(|(_, p)| *p > 0.0).map_or(0, |(token, _)| *token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn tokens(sampling: Sampling, probabilities: &[f32], history: &[u32]) -> Vec<(u32, f32)> {
        let mut logits: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
        sampling.distribution(&mut logits, history)
    }
    fn close(got: &[(u32, f32)], want: &[(u32, f32)]) {
        assert_eq!(got.len(), want.len(), "{got:?}");
        for (g, w) in got.iter().zip(want) {
            assert!(g.0 == w.0 && (g.1 - w.1).abs() < 1e-5, "{got:?} {want:?}");
        }
    }
    const PLAIN: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };
    const P: [f32; 5] = [0.1, 0.4, 0.05, 0.25, 0.2];

    #[test]
    fn each_step_keeps_what_it_says() {
        close(&tokens(PLAIN, &P, &[]), &[(0, 0.1), (1, 0.4), (2, 0.05), (3, 0.25), (4, 0.2)]);
        close(&tokens(Sampling { top_k: 2, ..PLAIN }, &P, &[]), &[(1, 0.4 / 0.65), (3, 0.25 / 0.65)]);
        close(&tokens(Sampling { top_p: 0.6, ..PLAIN }, &P, &[]), &[(1, 0.4 / 0.65), (3, 0.25 / 0.65)]);
        close(
            &tokens(Sampling { min_p: 0.45, ..PLAIN }, &P, &[]),
            &[(1, 0.4 / 0.85), (3, 0.25 / 0.85), (4, 0.2 / 0.85)],
        );
        // top-p counts after top-k: 0.4 of 0.65 is 0.615
        close(&tokens(Sampling { top_k: 2, top_p: 0.61, ..PLAIN }, &P, &[]), &[(1, 1.0)]);
        // and before the temperature, which would make the first two nearly all
        let cold = tokens(Sampling { temperature: 0.5, top_p: 0.8, ..PLAIN }, &P, &[]);
        let total = 0.16 + 0.0625 + 0.04;
        close(&cold, &[(1, 0.16 / total), (3, 0.0625 / total), (4, 0.04 / total)]);
        assert_eq!(tokens(Sampling::GREEDY, &P, &[]), [(1, 1.0)]);
    }

    #[test]
    fn a_repeated_token_loses_whatever_its_sign_and_only_while_it_is_recent() {
        let penalty = Sampling { repeat_penalty: 2.0, repeat_last: 2, ..PLAIN };
        let mut logits = [3.0f32, 1.0, -1.0, 0.5];
        penalty.distribution(&mut logits, &[3, 0, 2, 0]);
        assert_eq!(logits, [1.5, 1.0, -2.0, 0.5]);
        let greedy = Sampling { temperature: 0.0, repeat_penalty: 4.0, ..penalty };
        assert_eq!(greedy.distribution(&mut [3.0, 1.0], &[0]), [(1, 1.0)]);
    }

    #[test]
    fn a_nucleus_longer_than_the_first_sort_is_the_sorted_beginning() {
        let logits: Vec<f32> = (0..3000u32).map(|i| ((i * 1021) % 3000) as f32 / 3000.0).collect();
        let sampling = Sampling { top_p: 0.5, ..PLAIN };
        let got = sampling.distribution(&mut logits.clone(), &[]);
        let mut order: Vec<usize> = (0..3000).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let (mut mass, mut n) = (0.0, 0);
        while mass < 0.5 * total {
            mass += f64::from(logits[order[n]]).exp();
            n += 1;
        }
        assert!(got.len().abs_diff(n) <= 1 && n > 1000, "{} {n}", got.len());
        assert!(got.iter().zip(&order).all(|(g, o)| g.0 as usize == *o));
    }

    #[test]
    fn draws_have_the_odds_of_the_distribution() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let distribution = tokens(Sampling { top_p: 0.9, ..PLAIN }, &[0.6, 0.301, 0.0495, 0.0495], &[]);
        let n = 4000;
        let first = (0..n).filter(|_| draw(&distribution, &mut rng) == 0).count() as f64 / f64::from(n);
        assert!((first - 0.6 / 0.901).abs() < 0.03, "{first}");
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_senseless_options_are_refused() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
        for bad in [
            Sampling { temperature: -1.0, ..PLAIN },
            Sampling { temperature: f32::NAN, ..PLAIN },
            Sampling { top_p: 0.0, ..PLAIN },
            Sampling { top_p: 1.5, ..PLAIN },
            Sampling { min_p: -0.1, ..PLAIN },
            Sampling { repeat_penalty: 0.0, ..PLAIN },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        assert!(PLAIN.check().is_ok() && Sampling::GREEDY.check().is_ok());
    }
}
