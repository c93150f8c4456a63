//! Products of plain f32 matrices, packed on the way: adapter weights, attention gradients.

use super::kernel::{LANES, Panel, SharedMut};
use super::product::{self, Panels, with_columns, with_rows};
use super::rows::{MAX_ROWS, Rows};
use rayon::prelude::*;

/// Fewer values of the left-hand side than this are not shared out by rows.
const NARROW: usize = 1 << 15;

/// The right-hand side of a product, row-major with `stride` values from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    data: &'a [f32],
    stride: usize,
    transposed: bool,
}

impl<'a> Operand<'a> {
    /// `B` is stored `k × n`.
    pub fn rows(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride, transposed: false }
    }
    /// `B` is stored `n × k`, so the product is `A · Bᵀ` of what is stored.
    pub fn transposed(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride, transposed: true }
    }

    /// Panel `[k][32]` of columns `col..col + width`, steps `from..from + k`.
    fn panel(&self, col: usize, width: usize, from: usize, k: usize, out: &mut [f32]) {
        if self.transposed {
            out.fill(0.0);
            for lane in 0..width {
                let row = &self.data[(col + lane) * self.stride + from..][..k];
                for (step, v) in out.chunks_exact_mut(LANES).zip(row) {
                    step[lane] = *v;
                }
            }
        } else {
            for (i, step) in out.as_chunks_mut::<LANES>().0.iter_mut().take(k).enumerate() {
                let row = &self.data[(from + i) * self.stride + col..][..width];
                if let Some(row) = row.first_chunk::<LANES>() {
                    *step = *row; // a copy of known size is two instructions
                } else {
                    step[..width].copy_from_slice(row);
                    step[width..].fill(0.0);
                }
            }
        }
    }
}

/// `c[m, n] (+)= a[m, k] · B`, with `a_stride` and `c_stride` values from row to row.
#[allow(clippy::too_many_arguments, reason = "the shape of a matrix product; a struct would only rename them")]
pub(crate) fn gemm(
    m: usize,
    n: usize,
    k: usize,
    a: &[f32],
    a_stride: usize,
    b: Operand<'_>,
    c: &mut [f32],
    c_stride: usize,
    add: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        return fill_rows(m, n, c, c_stride, add);
    }
    let rows = m.div_ceil(rayon::current_num_threads()).next_multiple_of(MAX_ROWS);
    if n > LANES || rows >= m || m * k < NARROW {
        return with_rows(a, a_stride, m, k, |a| product(a, n, b, c, c_stride, add));
    }
    // One panel: share the rows out instead. An element's sum stays what it is.
    c.par_chunks_mut(rows * c_stride).zip(a.par_chunks(rows * a_stride)).enumerate().for_each(|(i, (c, a))| {
        let m = rows.min(m.saturating_sub(i * rows));
        if m > 0 {
            with_rows(a, a_stride, m, k, |a| product(a, n, b, c, c_stride, add));
        }
    });
}

/// `c[m, n] (+)= Aᵀ · B` for `a` stored `k × m`: the gradient of a matrix, summed over `k` rows.
#[allow(clippy::too_many_arguments, reason = "the shape of a matrix product; a struct would only rename them")]
pub(crate) fn gemm_columns(
    m: usize,
    n: usize,
    k: usize,
    a: &[f32],
    a_stride: usize,
    b: Operand<'_>,
    c: &mut [f32],
    c_stride: usize,
    add: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        return fill_rows(m, n, c, c_stride, add);
    }
    with_columns(a, a_stride, m, k, |a| product(a, n, b, c, c_stride, add));
}

/// What is left of a product without inner steps.
fn fill_rows(m: usize, n: usize, c: &mut [f32], c_stride: usize, add: bool) {
    if !add {
        (0..m).for_each(|r| c[r * c_stride..r * c_stride + n].fill(0.0));
    }
}

fn product(a: &Rows<'_>, n: usize, b: Operand<'_>, c: &mut [f32], c_stride: usize, add: bool) {
    assert!((a.m - 1) * c_stride + n <= c.len(), "matrix product: the result does not fit");
    product::product(a, n, &Columns(b, n), (SharedMut::new(c), 0, c_stride), add);
}

/// An operand of so many columns.
pub(super) struct Columns<'a>(pub Operand<'a>, pub usize);

impl Panels for Columns<'_> {
    fn panel<'a>(&'a self, p: usize, from: usize, k: usize, wide: &'a mut [f32]) -> Panel<'a> {
        let wide = &mut wide[..k * LANES];
        self.0.panel(p * LANES, LANES.min(self.1 - p * LANES), from, k, wide);
        Panel::F32(wide)
    }
}

/// Matrices of `rank` columns each side by side, where each has its own rows (its first one, and the values transposed, `rank ×
/// rows`); everything else is 0.
pub(crate) struct Diagonal<'a> {
    pub rank: usize,
    pub parts: Vec<(usize, &'a [f32])>,
}

impl Diagonal<'_> {
    pub fn columns(&self) -> usize {
        self.rank * self.parts.len()
    }
}

impl Panels for Diagonal<'_> {
    fn panel<'a>(&'a self, p: usize, from: usize, k: usize, wide: &'a mut [f32]) -> Panel<'a> {
        let wide = &mut wide[..k * LANES];
        wide.fill(0.0);
        for lane in 0..LANES.min(self.columns() - p * LANES) {
            let column = p * LANES + lane;
            let (first, values) = self.parts[column / self.rank];
            let rows = values.len() / self.rank;
            let column = &values[column % self.rank * rows..][..rows];
            let (begin, end) = (first.max(from), (first + rows).min(from + k));
            for row in begin..end {
                wide[(row - from) * LANES + lane] = column[row - first];
            }
        }
        Panel::F32(wide)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_and_strides_agree_with_the_plain_sum() {
        let (m, n, k, pad) = (7, 45, 901, 3);
        let a: Vec<f32> = (0..m * (k + pad)).map(|i| ((i * 31) % 17) as f32 - 8.0).collect();
        let b: Vec<f32> = (0..k * (n + pad)).map(|i| ((i * 13) % 11) as f32 - 5.0).collect();
        let mut bt = vec![0.0; n * (k + pad)];
        for i in 0..k {
            for j in 0..n {
                bt[j * (k + pad) + i] = b[i * (n + pad) + j];
            }
        }
        let mut want = vec![0.5f32; m * (n + 1)];
        for i in 0..m {
            for j in 0..n {
                want[i * (n + 1) + j] += (0..k).map(|l| a[i * (k + pad) + l] * b[l * (n + pad) + j]).sum::<f32>();
            }
        }
        for op in [Operand::rows(&b, n + pad), Operand::transposed(&bt, k + pad)] {
            let mut c = vec![0.5f32; m * (n + 1)];
            gemm(m, n, k, &a, k + pad, op, &mut c, n + 1, true);
            assert_eq!(c, want); // small integers: exact
        }
        let at: Vec<f32> = (0..k * (m + 1))
            .map(|i| if i % (m + 1) < m { a[i % (m + 1) * (k + pad) + i / (m + 1)] } else { 9.0 })
            .collect();
        let mut c = vec![0.5f32; m * (n + 1)];
        gemm_columns(m, n, k, &at, m + 1, Operand::rows(&b, n + pad), &mut c, n + 1, true);
        assert_eq!(c, want);
        let mut c = vec![7.0f32; 6];
        gemm(2, 2, 0, &a, 5, Operand::rows(&b, 2), &mut c, 3, false);
        assert_eq!(c, [0.0, 0.0, 7.0, 0.0, 0.0, 7.0]);
    }

    #[test]
    fn a_narrow_product_is_the_same_for_any_number_of_threads() {
        let (m, n, k) = (701, 16, 90);
        let a: Vec<f32> = (0..m * (k + 2)).map(|i| ((i * 31) % 177) as f32 / 177.0).collect();
        let b: Vec<f32> = (0..n * k).map(|i| ((i * 13) % 111) as f32 / 111.0).collect();
        let run = |threads: usize| {
            let mut c = vec![0.25f32; m * 40 - 3];
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| gemm(m, n, k, &a, k + 2, Operand::transposed(&b, k), &mut c, 40, true));
            c
        };
        let one = run(1);
        assert!((1..6).all(|threads| run(threads) == one));
        let sum: f32 = (0..k).map(|l| a[700 * (k + 2) + l] * b[15 * k + l]).sum();
        assert!((one[700 * 40 + 15] - 0.25 - sum).abs() < 1e-3 && one[700 * 40 + 16] == 0.25);
    }

    #[test]
    fn a_block_is_transposed() {
        let from: [f32; LANES * LANES] = std::array::from_fn(|i| i as f32);
        let mut to = [0.0; LANES * LANES];
        super::super::ops::transpose_block(&from, &mut to);
        assert!((0..LANES * LANES).all(|i| to[i % LANES * LANES + i / LANES] == from[i]));
    }
}
