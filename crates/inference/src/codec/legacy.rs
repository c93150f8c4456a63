//! Scales of the formats with blocks of 32: Q4_0, Q5_0 (symmetric), Q4_1, Q5_1 (affine), Q8_0.

use super::{
    Fit, MAX_HEADER,
    affine::{self, Candidates},
    lanes::Lanes,
    search::{self, Grid},
};
use half::f16;

const N: usize = 32;

/// Fine and wide: these formats keep two free half-precision numbers per block, so the search decides all.
const CANDIDATES: Candidates = Candidates { first: -1.0, delta: 0.1, count: 20 };

#[inline(always)]
fn prepared(x: &[f32], importance: Option<&[f32]>) -> ([f32; N], [f32; N]) {
    let (mut block, mut w) = ([0.0; N], [0.0; N]);
    for (b, x) in block.iter_mut().zip(x) {
        *b = *x;
    }
    search::error_weights(&block, importance, search::sigma2(&block), &mut w);
    (block, w)
}

/// A half-precision number that is never infinite.
pub(super) fn half(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Q4_0 (`bits` 4) and Q5_0 (`bits` 5).
#[inline(always)]
pub(super) fn symmetric<V: Lanes>(x: &[f32], importance: Option<&[f32]>, bits: u32) -> Fit {
    let (block, w) = prepared(x, importance);
    let n = 1i32 << (bits - 1);
    let scale = half(search::symmetric::<V, _>(&block, &w, n));
    let mut grid = Grid::new(N, n, 0, 2 * n - 1);
    grid.step[0] = scale.to_f32();
    let mut header = [0; MAX_HEADER];
    header[..2].copy_from_slice(&scale.to_le_bytes());
    Fit { grid, header }
}

/// Q4_1 (`max` 15) and Q5_1 (`max` 31).
#[inline(always)]
pub(super) fn affine<V: Lanes>(x: &[f32], importance: Option<&[f32]>, max: i32) -> Fit {
    let (block, w) = prepared(x, importance);
    let line = affine::line::<V>(&block, &w, max as f32, false, CANDIDATES);
    let (scale, offset) = (half(line.scale), half(line.offset));
    let mut grid = Grid::new(N, 0, 0, max);
    grid.step[0] = scale.to_f32();
    grid.min[0] = -offset.to_f32();
    let mut header = [0; MAX_HEADER];
    header[..2].copy_from_slice(&scale.to_le_bytes());
    header[2..4].copy_from_slice(&offset.to_le_bytes());
    Fit { grid, header }
}

/// Q8_0: at 8 bits the scale of the largest magnitude is as good as any search.
#[inline(always)]
pub(super) fn q8_0(x: &[f32]) -> Fit {
    let top = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let scale = half(top / 127.0);
    let mut grid = Grid::new(N, 0, -127, 127);
    grid.step[0] = scale.to_f32();
    let mut header = [0; MAX_HEADER];
    header[..2].copy_from_slice(&scale.to_le_bytes());
    Fit { grid, header }
}
