//! A weight matrix packed for the inner loop: panels of 32 outputs, f16 by default.

use super::aligned::{Aligned, Plain};
use super::blocks::Blocks;
use super::dense::{Columns, Diagonal, Operand};
use super::kernel::{LANES, Panel, SharedMut};
use super::product::{Panels, product, with_rows};
use super::rows::widen;
use crate::gguf::TensorType;
use half::f16;
use rayon::prelude::*;

/// From this many rows on, an f16 panel is widened once instead of in every tile.
const WIDEN_FROM: usize = 49;

/// How weights are kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Storage {
    /// Quantised tensors in the blocks of their file, as fast and small as they can be; others as `F16`.
    #[default]
    Blocks,
    /// Two bytes a weight: half the memory and, when decoding few sequences, half the time of `F32`.
    /// Rounds f32 weights to 11 bits, the precision of an F16 GGUF file.
    F16,
    /// Four bytes a weight, exact.
    F32,
}

#[derive(Debug, Clone)]
enum Data {
    F16(Aligned<f16>),
    F32(Aligned<f32>),
    Blocks(Blocks),
}

/// A matrix of `rows × cols` weights (GGUF: `ne = [cols, rows]`), `y = x · Wᵀ` its forward product.
/// Layout: panel `p` holds rows `32p..32p+32` as `[col][row in panel]`; missing rows are 0.
#[derive(Debug, Clone)]
pub struct Packed {
    rows: usize,
    cols: usize,
    data: Data,
}

impl Packed {
    /// Packs the row-major matrices `parts` (each `n × cols`), stacked.
    ///
    /// # Errors
    /// The index (over all parts) of the first weight that is not finite in the wanted storage.
    pub fn stack(parts: &[&[f32]], cols: usize, storage: Storage) -> Result<Self, usize> {
        let rows = parts.iter().map(|p| p.len() / cols.max(1)).sum::<usize>();
        if let Some(at) = parts.iter().flat_map(|p| p.iter()).position(|w| !fits(*w, storage)) {
            return Err(at);
        }
        let all: Vec<&[f32]> = parts.iter().flat_map(|p| p.chunks_exact(cols.max(1))).collect();
        let size = rows.div_ceil(LANES) * LANES * cols;
        let data = match storage {
            Storage::Blocks | Storage::F16 => Data::F16(pack(&all, cols, size, f16::from_f32)),
            Storage::F32 => Data::F32(pack(&all, cols, size, |w| w)),
        };
        Ok(Self { rows, cols, data })
    }

    /// Takes matrices (`(type, bytes)`, rows of `cols` weights, stacked) as the file has them: quantised ones in their
    /// blocks where `storage` wants that, F16 ones as they are. `None` if they have to be decoded first.
    ///
    /// # Errors
    /// The index (over all parts) of the first weight, or of the first one of a block, that is not finite.
    pub(crate) fn of_file(parts: &[(TensorType, &[u8])], cols: usize, storage: Storage) -> Option<Result<Self, usize>> {
        if storage != Storage::F32 && parts.iter().all(|(ty, _)| *ty == TensorType::F16) && cols > 0 {
            let rows: Vec<&[u8]> = parts.iter().flat_map(|(_, bytes)| bytes.chunks_exact(2 * cols)).collect();
            let data = pack_halves(&rows, cols);
            return Some(data.map(|data| Self { rows: rows.len(), cols, data: Data::F16(data) }));
        }
        if storage != Storage::Blocks {
            return None;
        }
        let blocks = Blocks::new(parts, cols)?;
        Some(blocks.map(|blocks| Self { rows: blocks.rows(), cols, data: Data::Blocks(blocks) }))
    }

    /// A matrix without rows.
    pub(crate) fn empty(cols: usize) -> Self {
        Self { rows: 0, cols, data: Data::F32(Aligned::zeroed(0)) }
    }

    /// Outputs of the layer.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Memory of the weights, bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        match &self.data {
            Data::F16(d) => d.len() * 2,
            Data::F32(d) => d.len() * 4,
            Data::Blocks(b) => b.size_bytes(),
        }
    }

    /// Copies row `row` to `out` (`cols` values): the embedding lookup.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let at = row / LANES * LANES * self.cols + row % LANES;
        match &self.data {
            Data::F16(d) => {
                out.iter_mut().zip(d[at..].iter().step_by(LANES)).for_each(|(o, w)| *o = w.to_f32());
            }
            Data::F32(d) => out.iter_mut().zip(d[at..].iter().step_by(LANES)).for_each(|(o, w)| *o = *w),
            Data::Blocks(b) => b.row(row, out),
        }
    }

    /// As [`Packed::forward`], but weights in blocks are multiplied by activations in 8 bits (blocks of 32, one f32
    /// scale each), as stock llama.cpp does: several times faster, with a relative error of some 0.3 % a product.
    pub(crate) fn forward_fast(&self, x: &[f32], m: usize, out: &mut [f32], add: bool) {
        match &self.data {
            Data::Blocks(b) => b.forward(x, m, out, add),
            Data::F16(_) | Data::F32(_) => self.forward(x, m, out, add),
        }
    }

    /// Row-major values of some rows.
    pub(crate) fn to_rows(&self, rows: std::ops::Range<usize>) -> Vec<f32> {
        let mut out = vec![0.0; rows.len() * self.cols];
        let first = rows.start;
        out.par_chunks_exact_mut(self.cols.max(1)).enumerate().for_each(|(i, row)| self.row(first + i, row));
        out
    }

    /// `out[m, rows] (+)= x[m, cols] · Wᵀ`, with activations as they are.
    pub(crate) fn forward(&self, x: &[f32], m: usize, out: &mut [f32], add: bool) {
        self.forward_at(x, m, out, 0, self.rows, add);
    }

    /// The same into columns `at..at + rows` of an output with `stride` values per row.
    pub(crate) fn forward_at(&self, x: &[f32], m: usize, out: &mut [f32], at: usize, stride: usize, add: bool) {
        assert!(x.len() >= m * self.cols && at + self.rows <= stride, "matrix product: wrong sizes");
        let c = SharedMut::new(out);
        let panels = Outputs { of: self, widen: m >= WIDEN_FROM };
        with_rows(x, self.cols, m, self.cols, |x| product(x, self.rows, &panels, (c, at, stride), add));
    }

    /// [`Packed::forward`], and `also[m, n] = x · b`.
    #[allow(clippy::too_many_arguments, reason = "two matrix products that share their left side")]
    pub(crate) fn forward_also(
        &self,
        x: &[f32],
        m: usize,
        out: &mut [f32],
        add: bool,
        b: Operand<'_>,
        n: usize,
        also: &mut [f32],
    ) {
        assert!(x.len() >= m * self.cols && out.len() >= m * self.rows, "matrix product: wrong sizes");
        let (c, also) = (SharedMut::new(out), SharedMut::new(also));
        let panels = Outputs { of: self, widen: m >= WIDEN_FROM };
        with_rows(x, self.cols, m, self.cols, |x| {
            product(x, n, &Columns(b, n), (also, 0, n), false);
            product(x, self.rows, &panels, (c, 0, self.rows), add);
        });
    }

    /// `dx[m, cols] (+)= dy[m, rows] · W`: the gradient of [`Packed::forward`] with respect to its input.
    pub(crate) fn backward(&self, dy: &[f32], m: usize, dx: &mut [f32], add: bool) {
        assert!(dy.len() >= m * self.rows && dx.len() >= m * self.cols, "matrix product: wrong sizes");
        let c = SharedMut::new(dx);
        with_rows(dy, self.rows, m, self.rows, |dy| product(dy, self.cols, &Inputs(self), (c, 0, self.cols), add));
    }

    /// [`Packed::backward`], where `dx` is wanted, and `also = dy · b`.
    pub(crate) fn backward_also(
        &self,
        dy: &[f32],
        m: usize,
        dx: Option<&mut [f32]>,
        add: bool,
        b: &Diagonal<'_>,
        also: &mut [f32],
    ) {
        assert!(dy.len() >= m * self.rows, "matrix product: wrong sizes");
        assert!(dx.as_ref().is_none_or(|dx| dx.len() >= m * self.cols), "matrix product: wrong sizes");
        let also = SharedMut::new(also);
        let dx = dx.map(SharedMut::new);
        with_rows(dy, self.rows, m, self.rows, |dy| {
            product(dy, b.columns(), b, (also, 0, b.columns()), false);
            if let Some(dx) = dx {
                product(dy, self.cols, &Inputs(self), (dx, 0, self.cols), add);
            }
        });
    }

    /// Writes `W[from.., col..col + width]` as a panel `[row][col]`; `from` is a multiple of 32.
    fn transpose(&self, col: usize, width: usize, from: usize, k: usize, out: &mut [f32]) {
        debug_assert!(col.is_multiple_of(LANES), "a panel of inputs starts at a multiple of its width");
        let mut block = [0.0f32; LANES * LANES];
        let (blocks, _) = out.as_chunks_mut::<{ LANES * LANES }>();
        for (i, out) in blocks.iter_mut().take(k.div_ceil(LANES)).enumerate() {
            let at = ((from / LANES + i) * self.cols + col) * LANES;
            let range = at..at + width * LANES;
            match &self.data {
                Data::F16(d) => widen(&d[range], &mut block[..width * LANES]),
                Data::F32(d) => block[..width * LANES].copy_from_slice(&d[range]),
                Data::Blocks(b) => b.panel(from + i * LANES, col, width, &mut block[..width * LANES]),
            }
            super::ops::transpose_block(&block, out);
        }
    }
}

/// Panels of outputs, for the product with inputs.
struct Outputs<'a> {
    of: &'a Packed,
    /// F16 panels are widened once instead of in every tile.
    widen: bool,
}

impl Panels for Outputs<'_> {
    fn panel<'a>(&'a self, p: usize, from: usize, k: usize, wide: &'a mut [f32]) -> Panel<'a> {
        let range = (p * self.of.cols + from) * LANES..(p * self.of.cols + from + k) * LANES;
        let wide = &mut wide[..k * LANES];
        match &self.of.data {
            Data::F16(d) if self.widen => widen(&d[range], wide),
            Data::F16(d) => return Panel::F16(&d[range]),
            Data::F32(d) => return Panel::F32(&d[range]),
            Data::Blocks(b) => b.panel(p * LANES, from, k, wide),
        }
        Panel::F32(wide)
    }
}

/// Panels of inputs, for the product with gradients of outputs.
struct Inputs<'a>(&'a Packed);

impl Panels for Inputs<'_> {
    fn panel<'a>(&'a self, p: usize, from: usize, k: usize, wide: &'a mut [f32]) -> Panel<'a> {
        let cols = LANES.min(self.0.cols - p * LANES);
        self.0.transpose(p * LANES, cols, from, k, wide);
        Panel::F32(&wide[..k * LANES])
    }
}

fn fits(w: f32, storage: Storage) -> bool {
    match storage {
        Storage::Blocks | Storage::F16 => w.abs() < 65_520.0, // the first value that rounds to infinity
        Storage::F32 => w.is_finite(),
    }
}

fn pack<T: Plain>(rows: &[&[f32]], cols: usize, size: usize, f: impl Fn(f32) -> T + Sync) -> Aligned<T> {
    let mut data = Aligned::zeroed(size);
    if cols > 0 {
        data.par_chunks_mut(LANES * cols).zip(rows.par_chunks(LANES)).for_each(|(panel, rows)| {
            for (lane, row) in rows.iter().enumerate() {
                for (step, w) in panel.chunks_exact_mut(LANES).zip(*row) {
                    step[lane] = f(*w);
                }
            }
        });
    }
    data
}

/// [`pack`] of rows of f16 bytes; the index of the first weight that is not finite, if there is one.
fn pack_halves(rows: &[&[u8]], cols: usize) -> Result<Aligned<f16>, usize> {
    let mut data = Aligned::<f16>::zeroed(rows.len().div_ceil(LANES) * LANES * cols);
    let bad = data
        .par_chunks_mut(LANES * cols)
        .zip(rows.par_chunks(LANES))
        .map(|(panel, rows)| pack_halves_panel(rows, panel))
        .position_first(|fine| !fine);
    match bad {
        None => Ok(data),
        Some(panel) => {
            let first = panel * LANES;
            let values = rows[first..].iter().flat_map(|r| r.as_chunks::<2>().0);
            let at = values.map(|v| f16::from_le_bytes(*v)).position(|v| !v.is_finite());
            Err(first * cols + at.unwrap_or(0))
        }
    }
}

/// One panel; whether all values are finite.
fn pack_halves_panel(rows: &[&[u8]], panel: &mut [f16]) -> bool {
    let steps = panel.len() / LANES;
    let whole = if rows.len() == LANES { steps / EIGHT * EIGHT } else { 0 };
    let mut greatest = 0;
    for (i, to) in panel[..whole * LANES].chunks_exact_mut(LANES * EIGHT).enumerate() {
        for (eighth, rows) in rows.chunks_exact(EIGHT).enumerate() {
            let mut values = [[0u16; EIGHT]; EIGHT];
            for (row, values) in rows.iter().zip(&mut values) {
                let bytes = row[2 * i * EIGHT..][..2 * EIGHT].as_chunks::<2>().0;
                values.iter_mut().zip(bytes).for_each(|(v, b)| *v = u16::from_le_bytes(*b));
            }
            let (turned, top) = turn(&values);
            greatest = greatest.max(top);
            for (step, values) in to.chunks_exact_mut(LANES).zip(turned) {
                step[eighth * EIGHT..][..EIGHT].copy_from_slice(&values.map(f16::from_bits));
            }
        }
    }
    for (j, step) in panel.chunks_exact_mut(LANES).enumerate().skip(whole) {
        for (to, row) in step.iter_mut().zip(rows) {
            *to = f16::from_le_bytes([row[2 * j], row[2 * j + 1]]);
            greatest = greatest.max(to.to_bits() & SIZE);
        }
    }
    greatest < f16::INFINITY.to_bits()
}

/// Rows and steps of f16 values that are turned at a time.
const EIGHT: usize = 8;
/// All bits of an f16 but the sign.
const SIZE: u16 = 0x7fff;

/// The transpose of a block of f16 values, and the greatest one without its sign.
fn turn(block: &[[u16; EIGHT]; EIGHT]) -> ([[u16; EIGHT]; EIGHT], u16) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of x86-64; eight values are one register.
    unsafe {
        use std::arch::x86_64::*;
        let mut v: [__m128i; EIGHT] = [_mm_set1_epi16(SIZE.cast_signed()); EIGHT];
        let mut top = _mm_setzero_si128();
        for (v, row) in v.iter_mut().zip(block) {
            let size = *v;
            *v = _mm_loadu_si128(row.as_ptr().cast());
            top = _mm_max_epi16(top, _mm_and_si128(*v, size));
        }
        for _ in 0..3 {
            let from = v;
            for i in 0..EIGHT / 2 {
                v[2 * i] = _mm_unpacklo_epi16(from[i], from[i + EIGHT / 2]);
                v[2 * i + 1] = _mm_unpackhi_epi16(from[i], from[i + EIGHT / 2]);
            }
        }
        let (mut turned, mut tops) = ([[0u16; EIGHT]; EIGHT], [0u16; EIGHT]);
        for (row, v) in turned.iter_mut().zip(v) {
            _mm_storeu_si128(row.as_mut_ptr().cast(), v);
        }
        _mm_storeu_si128(tops.as_mut_ptr().cast(), top);
        (turned, tops.into_iter().fold(0, u16::max))
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let top = block.iter().flatten().fold(0, |top, v| top.max(v & SIZE));
        (std::array::from_fn(|j| std::array::from_fn(|r| block[r][j])), top)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut s = seed.wrapping_mul(2_654_435_761) | 1;
        (0..n)
            .map(|_| {
                s ^= s << 13;
                s ^= s >> 17;
                s ^= s << 5;
                (s >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }
    /// Weights that f16 holds exactly.
    fn weights(n: usize, seed: u32) -> Vec<f32> {
        noise(n, seed).into_iter().map(|w| f16::from_f32(w).to_f32()).collect()
    }

    fn naive(x: &[f32], w: &[f32], m: usize, n: usize, k: usize) -> Vec<f32> {
        let mut out = vec![0.0f32; m * n];
        for i in 0..m {
            for j in 0..n {
                for l in 0..k {
                    out[i * n + j] = x[i * k + l].mul_add(w[j * k + l], out[i * n + j]);
                }
            }
        }
        out
    }

    #[test]
    fn forward_is_the_plain_sum_to_the_bit() {
        let has_fma = cfg!(target_arch = "aarch64") || cfg!(target_arch = "x86_64") && fma_detected();
        for (m, n, k) in [(1, 32, 32), (5, 70, 33), (13, 96, 800), (40, 31, 1600), (12, 1, 7)] {
            let (x, w) = (noise(m * k, 1), weights(n * k, 2));
            let want = naive(&x, &w, m, n, k);
            for storage in [Storage::F16, Storage::F32] {
                let packed = Packed::stack(&[&w], k, storage).unwrap();
                let mut out = vec![9.0; m * n];
                packed.forward(&x, m, &mut out, false);
                if has_fma {
                    assert_eq!(out, want, "{m} {n} {k} {storage:?}");
                } else {
                    assert!(out.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-3));
                }
            }
        }
    }

    fn fma_detected() -> bool {
        #[cfg(target_arch = "x86_64")]
        return is_x86_feature_detected!("fma");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    #[test]
    fn a_row_does_not_depend_on_the_other_rows() {
        let (n, k) = (64, 1000);
        let w = weights(n * k, 3);
        let packed = Packed::stack(&[&w[..40 * k], &w[40 * k..]], k, Storage::F16).unwrap();
        let x = noise(50 * k, 4);
        let mut all = vec![0.0; 50 * n];
        packed.forward(&x, 50, &mut all, false);
        for i in [0, 11, 12, 49] {
            let mut one = vec![0.0; n];
            packed.forward(&x[i * k..(i + 1) * k], 1, &mut one, false);
            assert_eq!(one, all[i * n..(i + 1) * n]);
        }
    }

    #[test]
    fn backward_is_the_transposed_product() {
        let (m, n, k) = (9, 833, 70);
        let (dy, w) = (noise(m * n, 5), weights(n * k, 6));
        let packed = Packed::stack(&[&w], k, Storage::F16).unwrap();
        let mut dx = vec![1.0; m * k];
        packed.backward(&dy, m, &mut dx, true);
        for i in 0..m {
            for c in 0..k {
                let want: f64 = 1.0 + (0..n).map(|j| f64::from(dy[i * n + j]) * f64::from(w[j * k + c])).sum::<f64>();
                assert!((f64::from(dx[i * k + c]) - want).abs() < 1e-3);
            }
        }
    }

    #[test]
    fn bytes_of_halves_are_packed_as_their_values_are() {
        let (n, k) = (70, 45);
        let w = weights(n * k, 8);
        let bytes: Vec<u8> = w.iter().flat_map(|w| f16::from_f32(*w).to_le_bytes()).collect();
        let (a, b) = bytes.split_at(33 * k * 2);
        let parts = [(TensorType::F16, a), (TensorType::F16, b)];
        let packed = Packed::of_file(&parts, k, Storage::Blocks).unwrap().unwrap();
        let want = Packed::stack(&[&w], k, Storage::F16).unwrap();
        let (Data::F16(got), Data::F16(want)) = (&packed.data, &want.data) else { panic!("both are f16") };
        assert!(got[..] == want[..] && packed.rows() == n);
        let mut bad = bytes.clone();
        bad[2 * (40 * k + 7) + 1] = 0x7c;
        bad[2 * (40 * k + 7)] = 0;
        let refused = Packed::of_file(&[(TensorType::F16, &bad)], k, Storage::F16).unwrap().unwrap_err();
        assert_eq!(refused, 40 * k + 7);
        assert!(Packed::of_file(&parts, k, Storage::F32).is_none());
    }

    #[test]
    fn rows_come_back_and_bad_weights_are_named() {
        let w = weights(37 * 5, 7);
        let packed = Packed::stack(&[&w], 5, Storage::F16).unwrap();
        let mut row = [0.0; 5];
        packed.row(33, &mut row);
        assert_eq!(row, w[33 * 5..34 * 5]);
        assert_eq!(packed.to_rows(31..35), w[31 * 5..35 * 5]);
        let mut bad = w;
        bad[17] = 70_000.0;
        assert_eq!(Packed::stack(&[&bad], 5, Storage::F16).unwrap_err(), 17);
        assert!(Packed::stack(&[&bad], 5, Storage::F32).is_ok());
        bad[3] = f32::NAN;
        assert_eq!(Packed::stack(&[&bad], 5, Storage::F32).unwrap_err(), 3);
    }
}
