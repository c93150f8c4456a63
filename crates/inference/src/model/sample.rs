//! Choosing the next token from logits.

use crate::linalg::exp_in_place;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Sampling {
    /// The most likely token; the lowest id among equals.
    #[default]
    Greedy,
    /// Random by probability at `temperature`, among the fewest tokens that together have `top_p` (nucleus
    /// sampling, arXiv 1904.09751). Each prompt has its own random stream, derived from `seed` and its index.
    TopP { temperature: f32, top_p: f32, seed: u64 },
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

pub(crate) fn choose(logits: &mut [f32], sampling: &Sampling, rng: Option<&mut ChaCha8Rng>) -> u32 {
    let peak = argmax(logits);
    let (&Sampling::TopP { temperature, top_p, .. }, Some(rng)) = (sampling, rng) else {
        return peak as u32;
    };
    let top = logits[peak] / temperature;
    logits.iter_mut().for_each(|l| *l /= temperature);
    let total = exp_in_place(logits, top);
    let mut order: Vec<u32> = (0..logits.len() as u32).filter(|i| logits[*i as usize] > 0.0).collect();
    order.sort_unstable_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    let (mut kept, mut mass) = (0, 0.0);
    while kept < order.len() && (kept == 0 || mass < top_p * total) {
        mass += logits[order[kept] as usize];
        kept += 1;
    }
    let mut left = rng.random::<f32>() * mass;
    for id in &order[..kept] {
        left -= logits[*id as usize];
        if left <= 0.0 {
            return *id;
        }
    }
    order.get(kept.saturating_sub(1)).copied().unwrap_or(peak as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn the_nucleus_cuts_the_tail_and_keeps_the_odds() {
        let sampling = Sampling::TopP { temperature: 1.0, top_p: 0.9, seed: 0 };
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut counts = [0usize; 4];
        for _ in 0..4000 {
            // probabilities 0.6, 0.3, 0.05, 0.05: the nucleus is the first two... just reached by rounding up
            let mut logits = [0.6f32.ln(), 0.301f32.ln(), 0.0495f32.ln(), 0.0495f32.ln()];
            counts[choose(&mut logits, &sampling, Some(&mut rng)) as usize] += 1;
        }
        assert_eq!(counts[2] + counts[3], 0);
        let share = counts[0] as f64 / 4000.0;
        assert!((share - 0.6 / 0.901).abs() < 0.03, "{share}");
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(choose(&mut [1.0, 3.0, 3.0], &Sampling::Greedy, None), 1);
    }
}
