//! Second moments of inputs: `H = Σ x xᵀ / n`, the Hessian of a layer's squared output error (arXiv 2210.17323).

use crate::linalg::{Operand, gemm};

/// `H` of the inputs of a matrix, `n × n`, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Hessian {
    size: usize,
    count: u64,
    /// Sum, not mean.
    sum: Vec<f32>,
}

impl Hessian {
    /// Of rows of `size` values.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self { size, count: 0, sum: vec![0.0; size * size] }
    }
    /// Columns of the inputs.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Adds the outer products of finite rows.
    pub fn add(&mut self, rows: &[f32]) {
        let (n, m) = (self.size, rows.len() / self.size.max(1));
        let mut columns = vec![0.0; rows.len()];
        for (i, row) in rows.chunks_exact(n).enumerate() {
            for (j, v) in row.iter().enumerate() {
                columns[j * m + i] = *v;
            }
        }
        gemm(n, n, m, &columns, m, Operand::rows(rows, n), &mut self.sum, n, true);
        self.count += m as u64;
    }

    /// `Σ x xᵀ / n`; consumes the sums, so that the matrix exists once.
    #[must_use]
    pub fn into_mean(mut self) -> Vec<f32> {
        let scale = 1.0 / self.count.max(1) as f32;
        self.sum.iter_mut().for_each(|v| *v *= scale);
        self.sum
    }
}

/// `(E H Eᵀ)ᵢᵢ` for each row of the `rows × n` matrix `error`: the mean squared error of each output.
#[must_use]
pub fn row_errors(error: &[f32], h: &[f32], n: usize) -> Vec<f64> {
    let rows = error.len() / n.max(1);
    let mut product = vec![0.0; error.len()];
    gemm(rows, n, n, error, n, Operand::rows(h, n), &mut product, n, false);
    let pairs = error.chunks_exact(n).zip(product.chunks_exact(n));
    // Rounding can push a tiny error below zero.
    pairs.map(|(e, p)| f64::from(crate::linalg::dot(e, p)).max(0.0)).collect()
}
