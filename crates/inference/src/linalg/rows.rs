//! The left-hand side of a product: rows rearranged for the inner loop, and f16 values widened.

use super::aligned::Aligned;
use half::f16;
use rayon::prelude::*;

/// Most rows that one tile can have (24 accumulators of 16 lanes: all that AVX-512 has registers for).
pub(crate) const MAX_ROWS: usize = 12;

/// Fewer values than this are packed by one thread.
const PARALLEL_VALUES: usize = 1 << 17;

/// Instantiates a tile function for each number of rows and calls the right one.
macro_rules! by_rows {
    ($rows:expr, $f:ident $args:tt, $($n:literal)*) => {
        match $rows { $($n => $f::<$n> $args,)* _ => unreachable!("tiles have at most {MAX_ROWS} rows") }
    };
}
pub(super) use by_rows;

/// Rows per tile when `m` rows are cut into near-equal tiles.
pub(crate) fn tile_rows(m: usize) -> usize {
    m.div_ceil(m.div_ceil(MAX_ROWS).max(1)).max(1)
}

/// Rows of a left-hand matrix, rearranged for the inner loop: tile by tile, in each tile step by step the
/// values of its rows side by side (one address stream, whatever the number of rows).
pub(crate) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) m: usize,
    pub(super) k: usize,
}

impl<'a> Rows<'a> {
    /// Packs `m` rows of `k` values, `stride` apart, into `buffer`.
    pub fn pack(x: &[f32], stride: usize, m: usize, k: usize, buffer: &'a mut Aligned<f32>) -> Self {
        buffer.reserve(m * k);
        let step = tile_rows(m);
        let pack = |(i, tile): (usize, &mut [f32])| {
            let x = &x[i * step * stride..];
            by_rows!(tile.len() / k, interleave(x, stride, k, tile), 1 2 3 4 5 6 7 8 9 10 11 12);
        };
        let tiles = &mut buffer[..m * k];
        if k == 0 {
            return Self { data: &[], m, k };
        }
        if m * k < PARALLEL_VALUES {
            tiles.chunks_mut(step * k).enumerate().for_each(pack);
        } else {
            let grain = (PARALLEL_VALUES / 4).div_ceil(step * k);
            tiles.par_chunks_mut(step * k).with_min_len(grain).enumerate().for_each(pack);
        }
        Self { data: &buffer[..m * k], m, k }
    }
    /// Packs the transpose of a `k × m` matrix, whose rows are `stride` apart: its columns become the rows.
    pub fn pack_columns(x: &[f32], stride: usize, m: usize, k: usize, buffer: &'a mut Aligned<f32>) -> Self {
        buffer.reserve(m * k);
        assert!(k == 0 || x.len() >= (k - 1) * stride + m, "the matrix is too short");
        let step = tile_rows(m);
        buffer[..m * k].par_chunks_mut(step * k).enumerate().for_each(|(i, tile)| {
            let x = &x[i * step..];
            by_rows!(tile.len() / k, copy_columns(x, stride, tile), 1 2 3 4 5 6 7 8 9 10 11 12);
        });
        Self { data: &buffer[..m * k], m, k }
    }
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.m
    }
}

/// Copies the first `R` values of each row.
fn copy_columns<const R: usize>(x: &[f32], stride: usize, out: &mut [f32]) {
    for (out, row) in out.as_chunks_mut::<R>().0.iter_mut().zip(x.chunks(stride)) {
        if let Some(row) = row.first_chunk::<R>() {
            *out = *row;
        }
    }
}

/// Writes `R` rows of `k` values side by side, step by step.
fn interleave<const R: usize>(x: &[f32], stride: usize, k: usize, out: &mut [f32]) {
    const BLOCK: usize = 16;
    let whole = k / BLOCK * BLOCK;
    let (body, tail) = out.split_at_mut(whole * R);
    for (i, out) in body.chunks_exact_mut(BLOCK * R).enumerate() {
        let mut block = [[0.0f32; BLOCK]; R];
        for (r, block) in block.iter_mut().enumerate() {
            block.copy_from_slice(&x[r * stride + i * BLOCK..][..BLOCK]);
        }
        for (j, out) in out.chunks_exact_mut(R).enumerate() {
            for r in 0..R {
                out[r] = block[r][j];
            }
        }
    }
    for (j, out) in tail.chunks_exact_mut(R).enumerate() {
        for r in 0..R {
            out[r] = x[r * stride + whole + j];
        }
    }
}

/// Widens f16 values.
pub(crate) fn widen(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "widening into another length");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: both features were detected.
        return unsafe { widen_avx2(from, to) };
    }
    from.iter().zip(to).for_each(|(f, t)| *t = f.to_f32());
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn widen_avx2(from: &[f16], to: &mut [f32]) {
    use std::arch::x86_64::*;
    let (a, b) = (from.chunks_exact(8), to.chunks_exact_mut(8));
    for (f, t) in a.zip(b) {
        // SAFETY: both chunks have 8 values.
        unsafe { _mm256_storeu_ps(t.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(f.as_ptr().cast()))) }
    }
    let whole = from.len() / 8 * 8;
    from[whole..].iter().zip(&mut to[whole..]).for_each(|(f, t)| *t = f.to_f32());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_is_exact() {
        let narrow: Vec<f16> = (0..1021).map(|i| f16::from_bits(i * 57)).filter(|v| !v.is_nan()).collect();
        let mut wide = vec![0.0; narrow.len()];
        widen(&narrow, &mut wide);
        assert!(narrow.iter().zip(&wide).all(|(n, w)| n.to_f32() == *w));
    }
}
