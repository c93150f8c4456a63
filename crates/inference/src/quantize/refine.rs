//! Descent on the measured error of a coded matrix: rounding in one pass leaves scales that were fitted before the levels
//! and levels that were chosen before those behind them.
//!
//! Sub-block by sub-block the scale (and minimum) with the least `e H eᵀ` for the levels is solved for, then each level is
//! moved to the nearest of the value at which the error is least given all others (coordinate descent, as in QuantEase,
//! arXiv 2309.01885). Each change lowers the error; the format's own rounding of scales is part of it.

use super::coded::{Coded, CodedRow};
use crate::codec::{Fit, has_minimum};
use crate::gguf::TensorType;
use crate::linalg::{Operand, gemm};
use rayon::prelude::*;

/// Passes over a matrix.
const SWEEPS: usize = 2;
/// Passes over a sub-block before what changed is carried to the rest of the row.
const ROUNDS: usize = 2;
/// Rows whose changes are carried on together, by one matrix product.
const GROUP: usize = 32;
/// Longest sub-block.
const MAX_SUB: usize = 32;

impl Coded {
    /// Lowers `tr(E H Eᵀ)` with `E = target − values`; `h` is symmetric and positive definite.
    pub fn refine(&mut self, target: &[f32], h: &[f32]) {
        let (n, ty) = (self.columns(), self.ty());
        for _ in 0..SWEEPS {
            let error: Vec<f32> = target.iter().zip(self.values()).map(|(t, v)| t - v).collect();
            let mut slopes = vec![0.0; error.len()];
            gemm(self.rows.len(), n, n, &error, n, Operand::rows(h, n), &mut slopes, n, false);
            let groups = self.rows.par_chunks_mut(GROUP).zip(slopes.par_chunks_mut(GROUP * n));
            groups.for_each(|(rows, slopes)| refine_rows(ty, rows, slopes, h, n));
        }
    }
}

/// One sweep over some rows; `slopes` holds `e H` of each.
fn refine_rows(ty: TensorType, rows: &mut [CodedRow], slopes: &mut [f32], h: &[f32], n: usize) {
    let Some(sub) = rows.first().and_then(|r| r.fits.first()).map(|f| f.grid.sub_len) else { return };
    let mut fallen = [[0.0f32; MAX_SUB]; GROUP];
    for from in (0..n).step_by(sub) {
        let local = Local { ty, from, sub, h, n };
        for ((row, slope), fallen) in rows.iter_mut().zip(slopes.chunks_exact_mut(n)).zip(&mut fallen) {
            local.descend(row, &slope[from..from + sub], fallen);
        }
        let behind = Operand::rows(&h[from * n..], n);
        gemm(rows.len(), n, sub, fallen.as_flattened(), MAX_SUB, behind, slopes, n, true);
    }
}

/// A sub-block of a row.
struct Local<'a> {
    ty: TensorType,
    from: usize,
    sub: usize,
    h: &'a [f32],
    n: usize,
}

impl Local<'_> {
    /// `H` between weight `i` and all weights of the sub-block.
    fn h_row(&self, i: usize) -> &[f32] {
        &self.h[(self.from + i) * self.n + self.from..][..self.sub]
    }

    /// Changes scales and levels; `fallen` becomes by how much each value fell.
    fn descend(&self, row: &mut CodedRow, slope: &[f32], fallen: &mut [f32; MAX_SUB]) {
        let block = self.ty.block_len();
        let (fit, at) = (&mut row.fits[self.from / block], self.from % block);
        let levels = &mut row.levels[self.from..self.from + self.sub];
        let mut local = [0.0f32; MAX_SUB];
        local[..self.sub].copy_from_slice(slope);
        fallen.fill(0.0);
        for _ in 0..ROUNDS {
            let scaled = self.rescale(fit, at, levels, &mut local, fallen);
            let relevelled = self.relevel(fit, at, levels, &mut local, fallen);
            if !(scaled || relevelled) {
                break;
            }
        }
    }

    fn relevel(
        &self,
        fit: &Fit,
        at: usize,
        levels: &mut [i8],
        slope: &mut [f32; MAX_SUB],
        fallen: &mut [f32; MAX_SUB],
    ) -> bool {
        let mut any = false;
        for i in 0..self.sub {
            let h = self.h_row(i);
            if h[i] <= 0.0 {
                continue;
            }
            let now = fit.grid.value(at + i, levels[i]);
            let level = fit.grid.level(at + i, now + slope[i] / h[i]);
            if level != levels[i] {
                let by = fit.grid.value(at + i, level) - now;
                levels[i] = level;
                fallen[i] -= by;
                slope.iter_mut().zip(h).for_each(|(s, h)| *s -= by * h);
                any = true;
            }
        }
        any
    }

    /// Solves for the scale and the minimum for fixed levels; keeps what the format can store if it is better.
    fn rescale(
        &self,
        fit: &mut Fit,
        at: usize,
        levels: &[i8],
        slope: &mut [f32; MAX_SUB],
        fallen: &mut [f32; MAX_SUB],
    ) -> bool {
        let s = at / self.sub;
        let mut units = [0.0f32; MAX_SUB];
        units.iter_mut().zip(levels).for_each(|(u, l)| *u = fit.grid.unit(*l));
        let sums = self.sums(&units, slope);
        let (step, min) = (fit.grid.step[s], fit.grid.min[s]);
        let Some((d_step, d_min)) = sums.solve(has_minimum(self.ty)) else { return false };
        let stepped = fit.nearest(self.ty, s, step + d_step, min + d_min);
        let d_step = stepped.grid.step[s] - step;
        let next = stepped.nearest(self.ty, s, stepped.grid.step[s], min + sums.best_minimum(d_step, d_min));
        let (d_step, d_min) = (next.grid.step[s] - step, next.grid.min[s] - min);
        if sums.change(d_step, d_min) >= 0.0 {
            return false;
        }
        *fit = next;
        for i in 0..self.sub {
            let by = d_step * units[i] - d_min;
            fallen[i] -= by;
            slope.iter_mut().zip(self.h_row(i)).for_each(|(s, h)| *s -= by * h);
        }
        true
    }

    fn sums(&self, units: &[f32; MAX_SUB], slope: &[f32; MAX_SUB]) -> Sums {
        let mut sums = Sums::default();
        for i in 0..self.sub {
            let (mut with_units, mut with_ones) = (0.0, 0.0);
            for (h, u) in self.h_row(i).iter().zip(units) {
                with_units += h * u;
                with_ones += h;
            }
            sums.uu += units[i] * with_units;
            sums.u1 += units[i] * with_ones;
            sums.ones += with_ones;
            sums.slope_u += units[i] * slope[i];
            sums.slope_1 += slope[i];
        }
        sums
    }
}

/// The error as a function of a sub-block's scale and minimum: `H` and the slope along both directions.
#[derive(Default)]
struct Sums {
    uu: f32,
    u1: f32,
    ones: f32,
    slope_u: f32,
    slope_1: f32,
}

impl Sums {
    /// By how much the error changes when the scale rises by `s` and the minimum by `m`.
    fn change(&self, s: f32, m: f32) -> f32 {
        2.0 * (m * self.slope_1 - s * self.slope_u) + s * s * self.uu - 2.0 * s * m * self.u1 + m * m * self.ones
    }

    /// The change with the least error; `None` where it is not determined.
    fn solve(&self, minimum: bool) -> Option<(f32, f32)> {
        let det = if minimum { self.uu * self.ones - self.u1 * self.u1 } else { self.uu };
        // rounding makes a singular system look slightly regular
        if det <= 1e-6 * self.uu * if minimum { self.ones } else { 1.0 } {
            return None;
        }
        if !minimum {
            return Some((self.slope_u / det, 0.0));
        }
        let (a, b) = (self.slope_u, self.slope_1);
        Some(((a * self.ones - b * self.u1) / det, (a * self.u1 - b * self.uu) / det))
    }

    /// The change of the minimum that is best for this change of the scale; formats without one keep 0.
    fn best_minimum(&self, s: f32, otherwise: f32) -> f32 {
        if otherwise == 0.0 || self.ones <= 0.0 { otherwise } else { (s * self.u1 - self.slope_1) / self.ones }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::row_errors;
    use crate::codec;
    use crate::model::tests::noise;
    use crate::quantize::gptq::{Compensation, Order, tests::moments};

    fn error(values: &[f32], coded: &Coded, h: &[f32]) -> f64 {
        let e: Vec<f32> = values.iter().zip(coded.values()).map(|(a, b)| a - b).collect();
        row_errors(&e, h, coded.columns()).iter().sum()
    }

    #[test]
    fn descent_helps_after_rounding_and_after_compensation() {
        let n = 512;
        let (h, values) = (moments(n), noise(20 * n, 8, 0.1));
        let importance: Vec<f32> = (0..n).map(|j| h[j * n + j]).collect();
        let compensation = Compensation::new(&h, n, Order::Stored).unwrap();
        for ty in TensorType::ALL.into_iter().filter(|t| t.is_quantized()) {
            let nearest = Coded::nearest(ty, &values, &importance);
            let compensated = compensation.quantize(&nearest, &values, &importance);
            for (mut coded, at_most) in [(nearest, 0.6), (compensated, 0.97)] {
                let before = error(&values, &coded, &h);
                coded.refine(&values, &h);
                let after = error(&values, &coded, &h);
                assert!(after < at_most * before, "{ty}: {after} and {before}");
                assert_eq!(codec::dequantize(ty, &coded.pack(), values.len()).unwrap(), coded.values(), "{ty}");
            }
        }
    }

    #[test]
    fn the_predicted_change_of_a_scale_is_the_measured_one() {
        let n = 64;
        let (h, values) = (moments(n), noise(n, 3, 0.1));
        let ones = vec![1.0; n];
        let coded = Coded::nearest(TensorType::Q4_1, &values, &ones);
        let slope: Vec<f32> = {
            let e: Vec<f32> = values.iter().zip(coded.values()).map(|(a, b)| a - b).collect();
            (0..n).map(|j| (0..n).map(|i| e[i] * h[i * n + j]).sum()).collect()
        };
        let local = Local { ty: TensorType::Q4_1, from: 32, sub: 32, h: &h, n };
        let (fit, levels) = (&coded.rows[0].fits[1], &coded.rows[0].levels[32..]);
        let units: [f32; MAX_SUB] = std::array::from_fn(|i| fit.grid.unit(levels[i]));
        let sums = local.sums(&units, slope[32..].try_into().unwrap());
        let (step, min) = sums.solve(true).unwrap();
        let moved = |step: f32, min: f32| {
            let mut coded = coded.clone();
            let grid = &mut coded.rows[0].fits[1].grid;
            grid.step[0] += step;
            grid.min[0] += min;
            error(&values, &coded, &h)
        };
        let now = moved(0.0, 0.0);
        for (s, m) in [(step, min), (0.5 * step, 2.0 * min), (1e-3, 0.0), (0.0, -2e-3)] {
            let (change, predicted) = (moved(s, m) - now, f64::from(sums.change(s, m)));
            assert!((change - predicted).abs() < 1e-3 * now, "{s} {m}: {change} and {predicted}");
            assert!(change >= moved(step, min) - now - 1e-5 * now, "{s} {m}");
        }
        assert!((sums.best_minimum(step, 1.0) - min).abs() < 1e-3 * min.abs());
    }

    #[test]
    fn dead_inputs_are_left_alone() {
        let n = 64;
        let (h, values) = (vec![0.0; n * n], noise(2 * n, 3, 0.1));
        let before = Coded::nearest(TensorType::Q4_0, &values, &vec![1.0; n]);
        let mut after = before.clone();
        after.refine(&values, &h);
        assert_eq!(after.pack(), before.pack());
    }
}
