//! Scale and minimum of a sub-block of 32 weights by search and weighted least squares.

use super::search::nearest;

const N: usize = 32;
const LANES: usize = 8;

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
pub(super) fn line(x: &[f32; N], w: &[f32; N], max: f32, offset_not_positive: bool, candidates: Candidates) -> Line {
    let mut lo = x.iter().copied().fold(f32::INFINITY, f32::min);
    let hi = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if offset_not_positive {
        lo = lo.min(0.0);
    }
    if hi <= lo {
        return Line { scale: 0.0, offset: lo };
    }
    let plain = Line { scale: (hi - lo) / max, offset: lo };
    let mut best = (error(x, w, max, plain), plain);
    for k in 0..candidates.count {
        let inverse = (candidates.first + candidates.delta * k as f32 + max) / (hi - lo);
        let Some(line) = refine(x, w, max, inverse, lo, offset_not_positive) else { continue };
        let e = error(x, w, max, line);
        if e < best.0 {
            best = (e, line);
        }
    }
    best.1
}

/// Weighted least-squares line for the levels that `inverse` and `lo` give.
#[inline(always)]
fn refine(x: &[f32; N], w: &[f32; N], max: f32, inverse: f32, lo: f32, offset_not_positive: bool) -> Option<Line> {
    let mut sum = [[0.0f32; LANES]; 5];
    for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            let l = nearest(inverse * (x[i] - lo)).clamp(0.0, max);
            sum[0][i] += w[i];
            sum[1][i] += w[i] * x[i];
            sum[2][i] += w[i] * l;
            sum[3][i] += w[i] * l * l;
            sum[4][i] += w[i] * l * x[i];
        }
    }
    let [sw, sx, sl, sll, slx] = sum.map(|lanes| lanes.iter().sum::<f32>());
    let det = sw * sll - sl * sl;
    if det <= 0.0 {
        return None;
    }
    let line = Line { scale: (sw * slx - sx * sl) / det, offset: (sll * sx - sl * slx) / det };
    let line = if offset_not_positive && line.offset > 0.0 { Line { scale: slx / sll, offset: 0.0 } } else { line };
    (line.scale > 0.0).then_some(line)
}

/// Weighted squared error with the nearest levels on `line`.
#[inline(always)]
fn error(x: &[f32; N], w: &[f32; N], max: f32, line: Line) -> f32 {
    let inverse = 1.0 / line.scale;
    let mut sum = [0.0f32; LANES];
    for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            let l = nearest(inverse * (x[i] - line.offset)).clamp(0.0, max);
            let d = line.scale * l + line.offset - x[i];
            sum[i] += w[i] * d * d;
        }
    }
    sum.iter().sum()
}
