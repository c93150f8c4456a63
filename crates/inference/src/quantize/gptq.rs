//! GPTQ (arXiv 2210.17323) in GGUF block formats: columns are rounded one after the other, and what rounding did to a
//! row's output is compensated in the columns that are not rounded yet.
//!
//! Two orders: as stored, where each block's scales are fitted to the compensated weights when its first column is
//! reached; or by falling diagonal of H, where all scales are fitted before ("static groups"), since a GGUF file
//! stores no permutation.

use super::coded::{Coded, CodedRow};
use crate::codec;
use crate::gguf::TensorType;
use crate::linalg::{Operand, cholesky, gemm, invert_lower};
use rayon::prelude::*;

/// Shares of the mean diagonal that are added to it, tried in turn.
const DAMPING: [f32; 3] = [0.02, 0.2, 2.0];
/// Columns between two updates of everything behind them.
const STEP: usize = 64;

/// In which order columns are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Stored,
    Diagonal,
}

/// What compensation needs of `H`: the upper factor `U` of `(H + damping)⁻¹ = Uᵀ U`, in processing order.
#[derive(Debug)]
pub(super) struct Compensation {
    n: usize,
    upper: Vec<f32>,
    /// Column that is processed at each step.
    order: Vec<usize>,
    fixed_scales: bool,
    pub damping: f32,
}

impl Compensation {
    /// `None` when no damping makes the matrix positive definite.
    pub fn new(h: &[f32], n: usize, order: Order) -> Option<Self> {
        let mut columns: Vec<usize> = (0..n).collect();
        if order == Order::Diagonal {
            columns.sort_by(|a, b| h[b * n + b].total_cmp(&h[a * n + a]).then(a.cmp(b)));
        }
        let fixed_scales = order == Order::Diagonal;
        DAMPING.iter().find_map(|&damping| {
            let upper = upper_factor(h, n, &columns, damping)?;
            Some(Self { n, upper, order: columns.clone(), fixed_scales, damping })
        })
    }

    /// Codes `values` (rows of `n`) with the type of `nearest`, and with its scales where the order needs fixed ones.
    pub fn quantize(&self, nearest: &Coded, values: &[f32], importance: &[f32]) -> Coded {
        let ty = nearest.ty();
        let n = self.n;
        let rows = values.len() / n;
        let mut work = vec![0.0; values.len()];
        work.par_chunks_exact_mut(n).zip(values.par_chunks_exact(n)).for_each(|(work, row)| {
            work.iter_mut().zip(&self.order).for_each(|(w, j)| *w = row[*j]);
        });
        let scales = |row: &CodedRow| if self.fixed_scales { row.fits.clone() } else { Vec::new() };
        let mut states: Vec<CodedRow> =
            nearest.rows.par_iter().map(|row| CodedRow { levels: vec![0; n], fits: scales(row) }).collect();
        let step = if self.fixed_scales { STEP } else { ty.block_len().max(STEP.next_multiple_of(ty.block_len())) };
        let mut errors = vec![0.0; rows * step.min(n)];
        for from in (0..n).step_by(step) {
            let size = step.min(n - from);
            let parts =
                work.par_chunks_exact_mut(n).zip(&mut states).zip(errors[..rows * size].par_chunks_exact_mut(size));
            parts.for_each(|((work, state), errors)| self.round(ty, from, work, state, errors, importance));
            let (end, rest) = (from + size, n - from - size);
            if rest > 0 {
                let behind = Operand::rows(&self.upper[from * n + end..], n);
                gemm(rows, rest, size, &errors[..rows * size], size, behind, &mut work[end..], n, true);
            }
        }
        Coded::new(ty, n, states)
    }

    /// Rounds the columns from `from` on, one for each of `errors`; these become the negative compensated errors.
    fn round(
        &self,
        ty: TensorType,
        from: usize,
        work: &mut [f32],
        state: &mut CodedRow,
        errors: &mut [f32],
        importance: &[f32],
    ) {
        let (n, block) = (self.n, ty.block_len());
        let end = from + errors.len();
        for at in from..end {
            let column = self.order[at];
            if !self.fixed_scales && column.is_multiple_of(block) {
                state.fits.push(codec::fit(ty, &work[at..at + block], Some(&importance[at..at + block])));
            }
            let grid = &state.fits[column / block].grid;
            let level = grid.level(column % block, work[at]);
            state.levels[column] = level;
            let factors = &self.upper[at * n + at..at * n + end];
            let error = (grid.value(column % block, level) - work[at]) / factors[0];
            errors[at - from] = error;
            work[at + 1..end].iter_mut().zip(&factors[1..]).for_each(|(w, u)| *w += error * u);
        }
    }
}

/// `U` of the damped matrix in the given order of columns. With rows and columns reversed, the factor of the inverse is
/// the inverse of the factor; unit diagonals before factoring keep channels of very different size apart from rounding.
fn upper_factor(h: &[f32], n: usize, order: &[usize], damping: f32) -> Option<Vec<f32>> {
    let mean = (0..n).map(|j| f64::from(h[j * n + j])).sum::<f64>() / n as f64;
    let add = damping * mean as f32;
    let root: Vec<f32> = order.iter().rev().map(|j| (h[j * n + j] + add).sqrt()).collect();
    if root.iter().any(|r| !(*r > 0.0 && r.is_finite())) {
        return None;
    }
    let mut a = vec![0.0; n * n];
    a.par_chunks_exact_mut(n).enumerate().for_each(|(i, row)| {
        let source = order[n - 1 - i];
        for (k, v) in row.iter_mut().enumerate() {
            let damped = h[source * n + order[n - 1 - k]] + if k == i { add } else { 0.0 };
            *v = damped / (root[i] * root[k]);
        }
    });
    cholesky(&mut a, n).ok()?;
    let mut upper = invert_lower(&a, n);
    upper.par_chunks_exact_mut(n).for_each(|row| row.iter_mut().zip(&root).for_each(|(v, r)| *v /= r));
    upper.reverse();
    upper.iter().all(|v| v.is_finite()).then_some(upper)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::calibrate::{Hessian, row_errors};
    use crate::model::tests::noise;

    /// Second moments of inputs that are strongly correlated.
    pub fn moments(n: usize) -> Vec<f32> {
        let (m, base) = (4 * n, noise(4 * n * 8, 5, 1.0));
        let (mix, own) = (noise(8 * n, 6, 1.0), noise(m * n, 7, 0.3));
        let x: Vec<f32> = (0..m * n)
            .map(|i| own[i] + (0..8).map(|k| base[i / n * 8 + k] * mix[k * n + i % n]).sum::<f32>())
            .collect();
        let mut h = Hessian::new(n);
        h.add(&x);
        h.into_mean()
    }

    fn error(ty: TensorType, values: &[f32], bytes: &[u8], h: &[f32], n: usize) -> f64 {
        let back = codec::dequantize(ty, bytes, values.len()).unwrap();
        let e: Vec<f32> = values.iter().zip(&back).map(|(a, b)| a - b).collect();
        row_errors(&e, h, n).iter().sum()
    }

    #[test]
    fn compensation_beats_rounding_in_every_format_and_order() {
        let n = 512;
        let (h, values) = (moments(n), noise(24 * n, 8, 0.1));
        let importance: Vec<f32> = (0..n).map(|j| h[j * n + j]).collect();
        for order in [Order::Stored, Order::Diagonal] {
            let c = Compensation::new(&h, n, order).unwrap();
            assert_eq!(c.damping, DAMPING[0]);
            for ty in TensorType::ALL.into_iter().filter(|t| t.is_quantized()) {
                let plain = codec::quantize(ty, &values, n, Some(&importance)).unwrap();
                let (rtn, gptq) = (error(ty, &values, &plain, &h, n), {
                    let nearest = Coded::nearest(ty, &values, &importance);
                    let bytes = c.quantize(&nearest, &values, &importance).pack();
                    error(ty, &values, &bytes, &h, n)
                });
                assert!(gptq < 0.6 * rtn, "{ty} {order:?}: {gptq} and {rtn}");
            }
        }
    }

    #[test]
    fn the_factor_is_that_of_the_inverse() {
        let n = 70;
        let h = moments(n);
        for order in [Order::Stored, Order::Diagonal] {
            let c = Compensation::new(&h, n, order).unwrap();
            let mean = (0..n).map(|j| h[j * n + j]).sum::<f32>() / n as f32;
            // (UᵀU)(H + damping) must be the identity, in processing order
            let damped = |i: usize, k: usize| {
                f64::from(h[c.order[i] * n + c.order[k]]) + if i == k { f64::from(c.damping * mean) } else { 0.0 }
            };
            let u = |i: usize, k: usize| f64::from(c.upper[i * n + k]);
            for i in (0..n).step_by(9) {
                let inverse: Vec<f64> = (0..n).map(|k| (0..=i.min(k)).map(|l| u(l, i) * u(l, k)).sum()).collect();
                for k in 0..n {
                    let one: f64 = (0..n).map(|l| inverse[l] * damped(l, k)).sum();
                    assert!((one - f64::from(u8::from(i == k))).abs() < 2e-2, "{i} {k} {one}");
                }
            }
        }
    }

    #[test]
    fn uncorrelated_inputs_leave_nothing_to_compensate() {
        let n = 64;
        let mut h = vec![0.0; n * n];
        (0..n).for_each(|j| h[j * n + j] = 1.0 + j as f32);
        let (values, importance) = (noise(4 * n, 9, 0.1), (0..n).map(|j| h[j * n + j]).collect::<Vec<_>>());
        let plain = codec::quantize(TensorType::Q4_1, &values, n, Some(&importance)).unwrap();
        let nearest = Coded::nearest(TensorType::Q4_1, &values, &importance);
        assert_eq!(nearest.pack(), plain);
        for order in [Order::Stored, Order::Diagonal] {
            let c = Compensation::new(&h, n, order).unwrap();
            assert_eq!(c.quantize(&nearest, &values, &importance).pack(), plain);
        }
    }

    #[test]
    fn what_cannot_be_factored_is_damped_more_or_given_up() {
        let n = 32;
        let mut h = vec![0.0; n * n];
        assert!(Compensation::new(&h, n, Order::Stored).is_none(), "no activation at all");
        (0..n).for_each(|j| h[j * n + j] = 1.0);
        h[1] = 1.1; // not a matrix of second moments: rounding of large sums can do this
        h[n] = 1.1;
        assert_eq!(Compensation::new(&h, n, Order::Stored).unwrap().damping, DAMPING[1]);
        h[0] = f32::NAN;
        assert!(Compensation::new(&h, n, Order::Stored).is_none());
    }
}
