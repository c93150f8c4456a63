//! Cholesky factors and triangular inverses of large matrices, in blocks: the products run in the common inner loop.

use super::{Operand, gemm};
use rayon::prelude::*;

const BLOCK: usize = 64;

/// Replaces the lower triangle of the symmetric `n × n` matrix `a` by `L` with `A = L Lᵀ`; what is above the diagonal
/// afterwards means nothing.
///
/// # Errors
/// The row whose pivot is not positive: `a` is not positive definite.
pub(crate) fn cholesky(a: &mut [f32], n: usize) -> Result<(), usize> {
    for from in (0..n).step_by(BLOCK) {
        let size = BLOCK.min(n - from);
        factor_diagonal(a, n, from, size)?;
        let below = from + size;
        let (top, bottom) = a.split_at_mut(below * n);
        let diagonal: Vec<&[f32]> = (0..size).map(|i| &top[(from + i) * n + from..][..size]).collect();
        bottom.par_chunks_exact_mut(n).for_each(|row| substitute(&diagonal, &mut row[from..below]));
        let panel: Vec<f32> = bottom.chunks_exact(n).flat_map(|row| &row[from..below]).copied().collect();
        let minus: Vec<f32> = panel.iter().map(|v| -v).collect();
        let rest = n - below;
        if rest > 0 {
            let columns = Operand::transposed(&panel, size);
            gemm(rest, rest, size, &minus, size, columns, &mut bottom[below..], n, true);
        }
    }
    Ok(())
}

fn factor_diagonal(a: &mut [f32], n: usize, from: usize, size: usize) -> Result<(), usize> {
    for i in from..from + size {
        for j in from..=i {
            let dot: f64 = (from..j).map(|k| f64::from(a[i * n + k]) * f64::from(a[j * n + k])).sum();
            let rest = f64::from(a[i * n + j]) - dot;
            if i == j {
                if !(rest > 0.0 && rest.is_finite()) {
                    return Err(i);
                }
                a[i * n + i] = rest.sqrt() as f32;
            } else {
                a[i * n + j] = (rest / f64::from(a[j * n + j])) as f32;
            }
        }
    }
    Ok(())
}

/// Solves `x Lᵀ = row` in place.
fn substitute(l: &[&[f32]], row: &mut [f32]) {
    for j in 0..row.len() {
        let dot: f64 = (0..j).map(|k| f64::from(row[k]) * f64::from(l[j][k])).sum();
        row[j] = ((f64::from(row[j]) - dot) / f64::from(l[j][j])) as f32;
    }
}

/// `L⁻¹` of the lower triangle of `l`; zero above the diagonal.
pub(crate) fn invert_lower(l: &[f32], n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n * n];
    for from in (0..n).step_by(BLOCK) {
        let size = BLOCK.min(n - from);
        let (done, rows) = out.split_at_mut(from * n);
        let rows = &mut rows[..size * n];
        if from > 0 {
            gemm(size, from, from, &l[from * n..], n, Operand::rows(done, n), rows, n, false);
        }
        // Row i of the result: (unit row - L[i, ..i] · rows above) / L[i][i].
        for i in 0..size {
            let (above, row) = rows.split_at_mut(i * n);
            let row = &mut row[..from + i + 1];
            row[..from].iter_mut().for_each(|v| *v = -*v);
            row[from + i] = 1.0;
            for (k, above) in above.chunks_exact(n).enumerate() {
                let factor = l[(from + i) * n + from + k];
                row.iter_mut().zip(&above[..=from + k]).for_each(|(v, a)| *v -= factor * a);
            }
            let pivot = 1.0 / l[(from + i) * n + from + i];
            row.iter_mut().for_each(|v| *v *= pivot);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `X Xᵀ + 0.1 I` of noise.
    fn positive(n: usize) -> Vec<f32> {
        let mut s = 3u32;
        let x: Vec<f32> = (0..n * n)
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (s >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect();
        let mut a = vec![0.0; n * n];
        gemm(n, n, n, &x, n, Operand::transposed(&x, n), &mut a, n, false);
        (0..n).for_each(|i| a[i * n + i] += 0.1);
        a
    }

    #[test]
    fn factor_and_inverse_give_the_matrix_back() {
        for n in [1, 7, 64, 65, 200] {
            let a = positive(n);
            let mut l = a.clone();
            cholesky(&mut l, n).unwrap();
            for i in 0..n {
                for j in 0..=i {
                    let back: f32 = (0..=j).map(|k| l[i * n + k] * l[j * n + k]).sum();
                    assert!((back - a[i * n + j]).abs() < 2e-4 * n as f32, "{n}: {i} {j}");
                }
            }
            let inverse = invert_lower(&l, n);
            for i in 0..n {
                for j in 0..=i {
                    let one: f64 = (j..=i).map(|k| f64::from(l[i * n + k]) * f64::from(inverse[k * n + j])).sum();
                    assert!((one - f64::from(u8::from(i == j))).abs() < 1e-3, "{n}: {i} {j} {one}");
                }
                assert!(inverse[i * n + i + 1..(i + 1) * n].iter().all(|v| *v == 0.0));
            }
        }
    }

    #[test]
    fn an_indefinite_matrix_is_refused_by_row() {
        let mut a = positive(70);
        a[66 * 70 + 66] = -5.0;
        assert_eq!(cholesky(&mut a, 70), Err(66));
    }
}
