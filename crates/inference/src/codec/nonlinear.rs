//! Scale of IQ4_NL: 16 levels that lie closer together near zero, as weights do.

use super::{Fit, Grid, MAX_HEADER, legacy::half, search};

const N: usize = 32;

/// The levels, as multiples of the block's scale (a constant of the format).
pub(crate) const CODEBOOK: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Index of the nearest entry; in the middle between two, the lower.
pub(super) fn nearest_level(codebook: &[i8; 16], x: f32) -> i8 {
    let above = |i: usize| x > 0.5 * (f32::from(codebook[i]) + f32::from(codebook[i + 1]));
    (0..15).map(|i| i8::from(above(i))).sum()
}

/// Twenty-odd candidate scales of either sign around that of the largest magnitude, each refined by weighted least
/// squares for the levels it gives.
#[inline(always)]
pub(super) fn iq4_nl(x: &[f32], importance: Option<&[f32]>) -> Fit {
    let mut w = [0.0; N];
    search::error_weights(x, importance, search::sigma2(x), &mut w);
    let extreme = x.iter().fold(0.0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
    let mut best = (-1.0f32, 0.0f32);
    if extreme.abs() >= 1e-15 {
        for sign in [-1.0, 1.0] {
            for k in -9..=9 {
                let inverse = sign * (f32::from(CODEBOOK[0]) + 3.0 * k as f32) / extreme;
                let (xl, ll) = project(x, &w, inverse);
                // Best scale for these levels is xl/ll, and it removes xl²/ll of the error.
                if ll > 0.0 && xl * xl > best.0 * ll {
                    best = (xl * xl / ll, xl / ll);
                }
            }
        }
    }
    let scale = half(best.1);
    let mut grid = Grid { codebook: Some(&CODEBOOK), ..Grid::new(N, 0, 0, 15) };
    grid.step[0] = scale.to_f32();
    let mut header = [0; MAX_HEADER];
    header[..2].copy_from_slice(&scale.to_le_bytes());
    Fit { grid, header }
}

/// `Σ w x l` and `Σ w l²` for the entries `l` nearest to `inverse * x`.
#[inline(always)]
fn project(x: &[f32], w: &[f32; N], inverse: f32) -> (f32, f32) {
    const LANES: usize = 8;
    let (mut xl, mut ll) = ([0.0f32; LANES], [0.0f32; LANES]);
    for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
        // The entry as a sum of the steps that lie below: no table look-ups, so that lanes run side by side.
        let mut l = [f32::from(CODEBOOK[0]); LANES];
        for pair in CODEBOOK.windows(2) {
            let (low, high) = (f32::from(pair[0]), f32::from(pair[1]));
            let (middle, step) = (0.5 * (low + high), high - low);
            for i in 0..LANES {
                l[i] += if inverse * x[i] > middle { step } else { 0.0 };
            }
        }
        for i in 0..LANES {
            xl[i] += w[i] * x[i] * l[i];
            ll[i] += w[i] * l[i] * l[i];
        }
    }
    (xl.iter().sum(), ll.iter().sum())
}
