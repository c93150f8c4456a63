//! The one inner loop: a tile of up to `MAX_ROWS` rows times a panel of [`LANES`] columns.
//!
//! A panel holds, for each step `k`, the 32 column values side by side, so the loop is one broadcast and two
//! (AVX-512) or four (AVX2) fused multiply-adds per row and step. Every output element is accumulated over `k`
//! in rising order in all variants.

use super::rows::{MAX_ROWS, Rows, by_rows, tile_rows};
use half::f16;
use std::ops::Range;

/// Columns of a panel.
pub(crate) const LANES: usize = 32;

/// A panel in memory: `k * LANES` values.
#[derive(Clone, Copy)]
pub(crate) enum Panel<'a> {
    F16(&'a [f16]),
    F32(&'a [f32]),
    I8(&'a [i8]),
}

impl Panel<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F16(p) => p.len(),
            Self::F32(p) => p.len(),
            Self::I8(p) => p.len(),
        }
    }
}

/// A mutable buffer that several threads write at places that never overlap.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<T = f32> {
    data: *mut T,
    len: usize,
}
// SAFETY: the constructor takes the buffer exclusively; users write disjoint ranges (see `tiles`, `row`).
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    pub fn new(buffer: &mut [T]) -> Self {
        Self { data: buffer.as_mut_ptr(), len: buffer.len() }
    }
    /// Where value `from` is; `len` values from there are inside the buffer.
    pub fn address(&self, from: usize, len: usize) -> *mut T {
        assert!(from.checked_add(len).is_some_and(|end| end <= self.len), "range outside the buffer");
        self.data.wrapping_add(from)
    }
    /// A part of the buffer.
    ///
    /// # Safety
    /// No other thread may touch the same range meanwhile, and the buffer must outlive the result.
    pub unsafe fn slice<'a>(&self, from: usize, len: usize) -> &'a mut [T] {
        assert!(from.checked_add(len).is_some_and(|end| end <= self.len), "range outside the buffer");
        // SAFETY: in bounds (checked), exclusive (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.data.add(from), len) }
    }
}

/// Where a product goes: column `at` of a row-major matrix of `stride` values per row.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub c: SharedMut,
    pub at: usize,
    pub stride: usize,
    /// Columns written, 1..=32.
    pub cols: usize,
    /// Continue the sums from what is there.
    pub add: bool,
}

/// `c[r, ..cols] (+)= sum_k x[r, from + k] * panel[k, ..cols]` over the `steps` steps of `panel`, for some rows of `x`, which
/// begin with a tile.
///
/// # Safety
/// No other thread may touch these columns of `out` meanwhile.
pub(crate) unsafe fn tiles(x: &Rows<'_>, rows: Range<usize>, from: usize, steps: usize, panel: Panel<'_>, out: Target) {
    // SAFETY: the caller's promise.
    unsafe { tiles_with(Isa::detect(), x, rows, from, steps, panel, out) }
}

unsafe fn tiles_with(
    isa: Isa,
    x: &Rows<'_>,
    rows: Range<usize>,
    from: usize,
    steps: usize,
    panel: Panel<'_>,
    out: Target,
) {
    let step = tile_rows(x.m);
    if rows.is_empty() {
        return;
    }
    assert!(rows.end <= x.m && rows.start.is_multiple_of(step), "rows outside the matrix, or inside a tile");
    assert!(from + steps <= x.k, "steps outside the rows");
    assert!(panel.len() >= steps * LANES && (1..=LANES).contains(&out.cols), "panel is too short");
    assert!(out.at + (rows.end - 1) * out.stride + out.cols <= out.c.len, "the result is too short");
    for first in rows.clone().step_by(step) {
        let rows = step.min(x.m - first);
        // SAFETY: all ranges were checked above; exclusivity of `c` is the caller's promise.
        unsafe {
            let job = Job {
                k: steps,
                x: x.data.as_ptr().add(first * x.k + from * rows),
                c: out.c.data.add(out.at + first * out.stride),
                x_step: rows,
                c_stride: out.stride,
                cols: out.cols,
                add: out.add,
            };
            match panel {
                Panel::F16(p) => run_f16(isa, rows, &job, p.as_ptr()),
                Panel::F32(p) => run_f32(isa, rows, &job, p.as_ptr()),
                Panel::I8(p) => run_i8(isa, rows, &job, p.as_ptr()),
            }
        }
    }
}

/// Addresses of one tile.
struct Job {
    k: usize,
    /// `[step][row]`.
    x: *const f32,
    c: *mut f32,
    /// Values of `x` from step to step: the rows of the whole tile.
    x_step: usize,
    c_stride: usize,
    cols: usize,
    add: bool,
}

impl Job {
    /// Reads row `r` of `c` into a full-width buffer (zero unless `add`).
    unsafe fn load(&self, r: usize, out: &mut [f32; LANES]) {
        *out = [0.0; LANES];
        if self.add {
            // SAFETY: `cols` values of row `r` are in bounds, checked by `tiles`.
            unsafe { std::ptr::copy_nonoverlapping(self.c.add(r * self.c_stride), out.as_mut_ptr(), self.cols) }
        }
    }
    unsafe fn store(&self, r: usize, from: &[f32; LANES]) {
        // SAFETY: as for `load`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.c.add(r * self.c_stride), self.cols) }
    }
}

/// Which variant of the loop this CPU can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain,
}

impl Isa {
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                return Self::Avx2;
            }
        }
        Self::Plain
    }
}

unsafe fn run_f32(isa: Isa, rows: usize, job: &Job, panel: *const f32) {
    // SAFETY: the features were detected; ranges are the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => by_rows!(rows, tile512_f32(job, panel), 1 2 3 4 5 6 7 8 9 10 11 12),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => halves(rows, job, panel, |r, j, p| by_rows!(r, tile256_f32(j, p), 1 2 3 4 5 6)),
            Isa::Plain => {
                by_rows!(rows, tile_plain(job, |i| *panel.add(i)), 1 2 3 4 5 6 7 8 9 10 11 12)
            }
        }
    }
}

unsafe fn run_f16(isa: Isa, rows: usize, job: &Job, panel: *const f16) {
    // SAFETY: the features were detected; ranges are the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => by_rows!(rows, tile512_f16(job, panel), 1 2 3 4 5 6 7 8 9 10 11 12),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => halves(rows, job, panel, |r, j, p| by_rows!(r, tile256_f16(j, p), 1 2 3 4 5 6)),
            Isa::Plain => {
                by_rows!(rows, tile_plain(job, |i| (*panel.add(i)).to_f32()), 1 2 3 4 5 6 7 8 9 10 11 12)
            }
        }
    }
}

unsafe fn run_i8(isa: Isa, rows: usize, job: &Job, panel: *const i8) {
    // SAFETY: the features were detected; ranges are the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => by_rows!(rows, tile512_i8(job, panel), 1 2 3 4 5 6 7 8 9 10 11 12),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => halves(rows, job, panel, |r, j, p| by_rows!(r, tile256_i8(j, p), 1 2 3 4 5 6)),
            Isa::Plain => {
                by_rows!(rows, tile_plain(job, |i| f32::from(*panel.add(i))), 1 2 3 4 5 6 7 8 9 10 11 12)
            }
        }
    }
}

/// AVX2 has half the registers of AVX-512: at most 6 rows and 16 columns at a time.
#[cfg(target_arch = "x86_64")]
unsafe fn halves<T>(rows: usize, job: &Job, panel: *const T, f: impl Fn(usize, &Job, *const T)) {
    const HALF: usize = LANES / 2;
    for (at, cols) in [(0, job.cols.min(HALF)), (HALF, job.cols.saturating_sub(HALF))] {
        for from in (0..rows).step_by(MAX_ROWS / 2) {
            if cols == 0 {
                continue;
            }
            // SAFETY: a part of the tile that the caller vouches for.
            let (x, c) = unsafe { (job.x.add(from), job.c.add(from * job.c_stride + at)) };
            let part = Job { x, c, cols, ..*job };
            // SAFETY: `at < LANES`, and a panel has at least one step whenever `k > 0`.
            f((rows - from).min(MAX_ROWS / 2), &part, unsafe { panel.add(at) });
        }
    }
}

macro_rules! tile512 {
    ($name:ident, $t:ty, $at:ident => $load:expr) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f")]
        unsafe fn $name<const R: usize>(job: &Job, panel: *const $t) {
            use std::arch::x86_64::*;
            // SAFETY: every address is inside the ranges that `tiles` checked.
            unsafe {
                let full = job.cols == LANES;
                let mut acc = [[_mm512_setzero_ps(); 2]; R];
                if job.add {
                    let mut row = [0.0f32; LANES];
                    for r in 0..R {
                        job.load(r, &mut row);
                        acc[r] = [_mm512_loadu_ps(row.as_ptr()), _mm512_loadu_ps(row.as_ptr().add(16))];
                    }
                }
                let (mut $at, mut x_at) = (panel, job.x);
                for _ in 0..job.k {
                    let w: [__m512; 2] = $load;
                    for r in 0..R {
                        let x = _mm512_set1_ps(*x_at.add(r));
                        acc[r][0] = _mm512_fmadd_ps(x, w[0], acc[r][0]);
                        acc[r][1] = _mm512_fmadd_ps(x, w[1], acc[r][1]);
                    }
                    ($at, x_at) = ($at.add(LANES), x_at.add(R));
                }
                for r in 0..R {
                    if full {
                        _mm512_storeu_ps(job.c.add(r * job.c_stride), acc[r][0]);
                        _mm512_storeu_ps(job.c.add(r * job.c_stride + 16), acc[r][1]);
                    } else {
                        let mut row = [0.0f32; LANES];
                        _mm512_storeu_ps(row.as_mut_ptr(), acc[r][0]);
                        _mm512_storeu_ps(row.as_mut_ptr().add(16), acc[r][1]);
                        job.store(r, &row);
                    }
                }
            }
        }
    };
}
tile512!(tile512_f32, f32, p => [_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16))]);
tile512!(tile512_f16, f16, p => [
    _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())),
    _mm512_cvtph_ps(_mm256_loadu_si256(p.add(16).cast())),
]);

tile512!(tile512_i8, i8, p => [
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))),
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(16).cast()))),
]);

macro_rules! tile256 {
    ($name:ident, $t:ty, $at:ident => $load:expr) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $name<const R: usize>(job: &Job, panel: *const $t) {
            use std::arch::x86_64::*;
            // SAFETY: every address is inside the ranges that `tiles` checked.
            unsafe {
                let mut acc = [[_mm256_setzero_ps(); 2]; R];
                let mut row = [0.0f32; LANES];
                if job.add {
                    for r in 0..R {
                        job.load(r, &mut row);
                        acc[r] = [_mm256_loadu_ps(row.as_ptr()), _mm256_loadu_ps(row.as_ptr().add(8))];
                    }
                }
                let (mut $at, mut x_at) = (panel, job.x);
                for _ in 0..job.k {
                    let w: [__m256; 2] = $load;
                    for r in 0..R {
                        let x = _mm256_set1_ps(*x_at.add(r));
                        acc[r][0] = _mm256_fmadd_ps(x, w[0], acc[r][0]);
                        acc[r][1] = _mm256_fmadd_ps(x, w[1], acc[r][1]);
                    }
                    ($at, x_at) = ($at.wrapping_add(LANES), x_at.wrapping_add(job.x_step));
                }
                for r in 0..R {
                    _mm256_storeu_ps(row.as_mut_ptr(), acc[r][0]);
                    _mm256_storeu_ps(row.as_mut_ptr().add(8), acc[r][1]);
                    job.store(r, &row);
                }
            }
        }
    };
}
tile256!(tile256_f32, f32, p => [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))]);
tile256!(tile256_f16, f16, p => [
    _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
    _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
]);

tile256!(tile256_i8, i8, p => [
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))),
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()))),
]);

/// The same sum without vector intrinsics: other CPUs, and the reference of the tests.
unsafe fn tile_plain<const R: usize>(job: &Job, panel: impl Fn(usize) -> f32) {
    let mut acc = [[0.0f32; LANES]; R];
    for (r, row) in acc.iter_mut().enumerate() {
        // SAFETY: `r < R` rows exist.
        unsafe { job.load(r, row) };
    }
    for k in 0..job.k {
        let mut w = [0.0f32; LANES];
        w.iter_mut().enumerate().for_each(|(i, w)| *w = panel(k * LANES + i));
        for (r, row) in acc.iter_mut().enumerate() {
            // SAFETY: row `r`, step `k` of `x` is in bounds.
            let x = unsafe { *job.x.add(k * job.x_step + r) };
            for (a, w) in row.iter_mut().zip(w) {
                *a = super::ops::fused(x, w, *a);
            }
        }
    }
    for (r, row) in acc.iter().enumerate() {
        // SAFETY: as for `load`.
        unsafe { job.store(r, row) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::aligned::Aligned;
    use super::*;

    fn variants() -> Vec<Isa> {
        #[allow(unused_mut, reason = "more variants on x86-64")]
        let mut all = vec![Isa::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                all.push(Isa::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(Isa::Avx512);
            }
        }
        all
    }

    /// Every variant, number of rows and width gives the sum in rising order of `k`; nothing else is written.
    #[test]
    fn all_variants_give_the_same_sums() {
        let value = |i: usize| f16::from_f32(((i * 7919) % 251) as f32 / 125.0 - 1.0);
        let (k, from, pad) = (37, 5, 3);
        for isa in variants() {
            for m in 1..=14 {
                for (cols, add) in [(1, false), (15, true), (17, false), (31, true), (32, false), (32, true)] {
                    let x: Vec<f32> = (0..m * (k + from)).map(|i| value(i + 11).to_f32()).collect();
                    let narrow: Vec<f16> = (0..k * LANES).map(value).collect();
                    let wide: Vec<f32> = narrow.iter().map(|v| v.to_f32()).collect();
                    let stride = LANES + pad;
                    let start: Vec<f32> = (0..m * stride).map(|i| i as f32 / 64.0).collect();
                    let mut want = start.clone();
                    for r in 0..m {
                        for c in 0..cols {
                            let mut sum = if add { start[r * stride + c] } else { 0.0 };
                            for i in 0..k {
                                let (a, b) = (x[r * (k + from) + from + i], wide[i * LANES + c]);
                                sum = if isa == Isa::Plain {
                                    super::super::ops::fused(a, b, sum)
                                } else {
                                    a.mul_add(b, sum)
                                };
                            }
                            want[r * stride + c] = sum;
                        }
                    }
                    let mut buffer = Aligned::default();
                    let rows = Rows::pack(&x, k + from, m, k + from, &mut buffer);
                    // Small integers, which both other panels hold exactly.
                    let bytes: Vec<i8> = (0..k * LANES).map(|i| ((i * 7919) % 251) as i8).collect();
                    let of_bytes: Vec<f32> = bytes.iter().map(|b| f32::from(*b)).collect();
                    let (mut a, mut b) = (start.clone(), start.clone());
                    for (panel, out) in [(Panel::I8(&bytes), &mut a), (Panel::F32(&of_bytes), &mut b)] {
                        let out = Target { c: SharedMut::new(out), at: 0, stride, cols, add };
                        // SAFETY: `a` and `b` belong to this test.
                        unsafe { tiles_with(isa, &rows, 0..m, from, k, panel, out) }
                    }
                    assert_eq!(a, b, "{isa:?} {m} rows, {cols} columns, {add}, 8 bits");
                    for panel in [Panel::F16(&narrow), Panel::F32(&wide)] {
                        let mut got = start.clone();
                        let out = Target { c: SharedMut::new(&mut got), at: 0, stride, cols, add };
                        // SAFETY: `got` belongs to this test.
                        unsafe { tiles_with(isa, &rows, 0..m, from, k, panel, out) }
                        assert_eq!(got, want, "{isa:?} {m} rows, {cols} columns, {add}");
                    }
                }
            }
        }
    }
}
