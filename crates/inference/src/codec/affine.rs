//! Scale and minimum of a sub-block of 32 weights by search and weighted least squares.

use super::lanes::{Lanes, sums};

const N: usize = 32;

/// How the candidates of the inverse scale are spread: `(first + delta * k + levels) / range`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidates {
    pub first: f32,
    pub delta: f32,
    pub count: u32,
}

/// `x ≈ scale * level + offset`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Line {
    pub scale: f32,
    pub offset: f32,
}

/// Best line for levels `0..=max`. With `offset_not_positive` the offset is at most zero (k-quants store its
/// negative as an unsigned number).
#[inline(always)]
pub(super) fn line<V: Lanes>(
    x: &[f32; N],
    w: &[f32; N],
    max: f32,
    offset_not_positive: bool,
    candidates: Candidates,
) -> Line {
    let mut lo = x.iter().copied().fold(f32::INFINITY, f32::min);
    let hi = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if offset_not_positive {
        lo = lo.min(0.0);
    }
    if hi <= lo {
        return Line { scale: 0.0, offset: lo };
    }
    let plain = Line { scale: (hi - lo) / max, offset: lo };
    let mut best = (errors::<V>(x, w, max, &[plain; 8])[0], plain);
    for first in (0..candidates.count).step_by(8) {
        let inverse = std::array::from_fn(|i| {
            let k = (first + i as u32).min(candidates.count - 1);
            (candidates.first + candidates.delta * k as f32 + max) / (hi - lo)
        });
        let lines = refine::<V>(x, w, max, inverse, lo, offset_not_positive);
        let errors = errors::<V>(x, w, max, &lines.map(|line| line.unwrap_or(plain)));
        for (line, e) in lines.into_iter().zip(errors) {
            if let Some(line) = line.filter(|_| e < best.0) {
                best = (e, line);
            }
        }
    }
    best.1
}

/// Weighted least-squares lines for the levels that each `inverse` and `lo` give.
#[inline(always)]
fn refine<V: Lanes>(
    x: &[f32; N],
    w: &[f32; N],
    max: f32,
    inverse: [f32; 8],
    lo: f32,
    offset_not_positive: bool,
) -> [Option<Line>; 8] {
    let (inverse, zero, top) = (V::load(inverse), V::splat(0.0), V::splat(max));
    let sums = sums!(V, 5, N, i => {
        let (x, w) = (V::splat(x[i]), V::splat(w[i]));
        let l = inverse.mul(x.sub(V::splat(lo))).level(zero, top);
        let wl = w.mul(l);
        [w, w.mul(x), wl, wl.mul(l), wl.mul(x)]
    });
    let [sw, sx, sl, sll, slx] =
        [sums[0].values(), sums[1].values(), sums[2].values(), sums[3].values(), sums[4].values()];
    std::array::from_fn(|i| {
        let (sw, sx, sl, sll, slx) = (sw[i], sx[i], sl[i], sll[i], slx[i]);
        let det = sw * sll - sl * sl;
        if det <= 0.0 {
            return None;
        }
        let line = Line { scale: (sw * slx - sx * sl) / det, offset: (sll * sx - sl * slx) / det };
        let line = if offset_not_positive && line.offset > 0.0 { Line { scale: slx / sll, offset: 0.0 } } else { line };
        (line.scale > 0.0).then_some(line)
    })
}

/// Weighted squared errors with the nearest levels on each line.
#[inline(always)]
fn errors<V: Lanes>(x: &[f32; N], w: &[f32; N], max: f32, lines: &[Line; 8]) -> [f32; 8] {
    let (scale, offset) = (V::load(lines.map(|l| l.scale)), V::load(lines.map(|l| l.offset)));
    let (inverse, zero, top) = (V::load(lines.map(|l| 1.0 / l.scale)), V::splat(0.0), V::splat(max));
    let [sum] = sums!(V, 1, N, i => {
        let x = V::splat(x[i]);
        let l = inverse.mul(x.sub(offset)).level(zero, top);
        let d = scale.mul(l).add(offset).sub(x);
        [V::splat(w[i]).mul(d).mul(d)]
    });
    sum.values()
}
