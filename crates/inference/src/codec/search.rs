//! The grid of representable values of a block, and the weights of the scale search.

use super::lanes::{Lanes, sums};
use super::nonlinear;

/// Most sub-blocks in a block (Q6_K).
const MAX_SUB: usize = 16;

/// Representable values of one block: `step[s] * (level - zero) - min[s]` for a weight of sub-block `s`, or
/// `step[s] * codebook[level]`, evaluated in `f32` exactly as the decoder does.
#[derive(Debug, Clone)]
pub struct Grid {
    /// Weights in a sub-block.
    pub sub_len: usize,
    pub step: [f32; MAX_SUB],
    pub min: [f32; MAX_SUB],
    /// Level that stands for `-min`.
    pub zero: i32,
    pub lowest: i32,
    pub highest: i32,
    /// Rising multiples of the step that the levels stand for, where they are not evenly spaced.
    pub codebook: Option<&'static [i8; 16]>,
}

impl Grid {
    pub(crate) fn new(sub_len: usize, zero: i32, lowest: i32, highest: i32) -> Self {
        Self { sub_len, step: [0.0; MAX_SUB], min: [0.0; MAX_SUB], zero, lowest, highest, codebook: None }
    }
    /// Nearest level of weight `i` with value `x`.
    #[must_use]
    pub fn level(&self, i: usize, x: f32) -> i8 {
        let s = i / self.sub_len;
        let step = self.step[s];
        if let Some(codebook) = self.codebook {
            return nonlinear::nearest_level(codebook, if step == 0.0 { 0.0 } else { x / step });
        }
        let level = if step == 0.0 { 0.0 } else { nearest((x + self.min[s]) / step) } as i32 + self.zero;
        level.clamp(self.lowest, self.highest) as i8
    }
    /// The multiple of its step that a level stands for.
    #[must_use]
    pub fn unit(&self, level: i8) -> f32 {
        match self.codebook {
            Some(codebook) => f32::from(codebook[level as usize & 15]),
            None => (i32::from(level) - self.zero) as f32,
        }
    }
    /// Value of level `level` for weight `i`.
    #[must_use]
    pub fn value(&self, i: usize, level: i8) -> f32 {
        let s = i / self.sub_len;
        let product = self.step[s] * self.unit(level);
        if self.codebook.is_some() { product } else { product - self.min[s] }
    }
    /// Nearest levels of a whole block, the same as [`Grid::level`] for each.
    #[inline(always)]
    pub fn round(&self, x: &[f32], levels: &mut [i8]) {
        if self.codebook.is_some() {
            return levels.iter_mut().zip(x).enumerate().for_each(|(i, (l, x))| *l = self.level(i, *x));
        }
        let (lo, hi) = ((self.lowest - self.zero) as f32, (self.highest - self.zero) as f32);
        let parts = levels.chunks_mut(self.sub_len).zip(x.chunks(self.sub_len));
        for ((levels, x), (&step, &min)) in parts.zip(self.step.iter().zip(&self.min)) {
            for (l, &x) in levels.iter_mut().zip(x) {
                let level = if step == 0.0 { 0.0 } else { nearest((x + min) / step) };
                *l = (level.clamp(lo, hi) as i32 + self.zero) as i8;
            }
        }
    }
}

/// Nearest integer, ties to even, for |x| < 2^22; a form that compilers vectorise without special instructions.
#[inline(always)]
pub(super) fn nearest(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it pushes the fraction out of the mantissa
    (x.clamp(-4.0e6, 4.0e6) + MAGIC) - MAGIC
}

/// Weights of the squared error of a sub-block: importance times `sqrt(sigma² + x²)`, where sigma² is twice the
/// mean square of the whole block. Large weights count more, since their error meets the same activations.
#[inline(always)]
pub(super) fn error_weights(x: &[f32], importance: Option<&[f32]>, sigma2: f32, out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = (sigma2 + x * x).sqrt();
    }
    if let Some(importance) = importance {
        for (o, q) in out.iter_mut().zip(importance) {
            *o *= q;
        }
    }
    // Zero importance (a dead input, or a broken calibration) must not leave the fit undetermined.
    if !out.iter().any(|w| *w > 0.0) {
        out.fill(1.0);
    }
}

/// Twice the mean square.
#[inline(always)]
pub(super) fn sigma2(x: &[f32]) -> f32 {
    2.0 * x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32
}

/// Least-squares scale for `x ≈ scale * level`, levels in `-n..n` (`n` = half the number of levels).
/// Tries 19 scales around the largest magnitude, each with both signs, since the negative side has one level more.
#[inline(always)]
pub(super) fn symmetric<V: Lanes, const N: usize>(x: &[f32; N], w: &[f32; N], n: i32) -> f32 {
    let extreme = x.iter().fold(0.0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
    if extreme.abs() < 1e-15 {
        return 0.0;
    }
    let mut inverse = [0.0f32; SIGNED.next_multiple_of(8)];
    for (i, inverse) in inverse.iter_mut().enumerate() {
        let i = i.min(SIGNED - 1);
        let (sign, k) = (if i < SCALES { -1.0 } else { 1.0 }, (i % SCALES) as f32 - (SCALES / 2) as f32);
        *inverse = sign * (n as f32 + 0.1 * k) / extreme;
    }
    let (lo, hi) = (V::splat(-(n as f32)), V::splat((n - 1) as f32));
    let wx: [f32; N] = std::array::from_fn(|i| w[i] * x[i]);
    let mut best = (-1.0f32, 0.0f32);
    for inverse in inverse.as_chunks::<8>().0 {
        let inverse = V::load(*inverse);
        // `Σ w x l` and `Σ w l²` for the levels `l`
        let [lx, ll] = sums!(V, 2, N, i => {
            let l = inverse.mul(V::splat(x[i])).level(lo, hi);
            [V::splat(wx[i]).mul(l), V::splat(w[i]).mul(l).mul(l)]
        });
        for (lx, ll) in lx.values().into_iter().zip(ll.values()) {
            // Best scale for these levels is lx/ll, and it removes lx²/ll of the error.
            if ll > 0.0 && lx * lx > best.0 * ll {
                best = (lx * lx / ll, lx / ll);
            }
        }
    }
    best.1
}

/// Scales that are tried, and with both signs.
const SCALES: usize = 19;
const SIGNED: usize = 2 * SCALES;

/// Quantises non-negative sub-scales to `0..=max` with one step: weighted least squares over 17 candidates.
/// Returns the step; levels are the nearest ones.
#[inline(always)]
pub(super) fn positive(x: &[f32], w: &[f32], max: f32) -> f32 {
    let top = x.iter().copied().fold(0.0f32, f32::max);
    if top < 1e-15 {
        return 0.0;
    }
    let error = |step: f32| -> f32 {
        x.iter().zip(w).map(|(x, w)| w * (x - step * nearest(x / step).clamp(0.0, max)).powi(2)).sum()
    };
    let mut best = (error(top / max), top / max);
    for k in -8..=8 {
        let inverse = (max + 0.25 * k as f32) / top;
        let (mut lx, mut ll) = (0.0f32, 0.0f32);
        for (x, w) in x.iter().zip(w) {
            let l = nearest(inverse * x).clamp(0.0, max);
            lx += w * x * l;
            ll += w * l * l;
        }
        if ll > 0.0 {
            let step = lx / ll;
            let e = error(step);
            if e < best.0 {
                best = (e, step);
            }
        }
    }
    best.1
}
