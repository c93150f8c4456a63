//! The inner loop over quantised weights: a tile of rows in 8 bits times a panel of 16 outputs.
//!
//! Products of levels are summed in 32-bit integers, exactly; a block of 32 inputs (16 in Q6_K) then adds
//! `level sum × (scale of weights × scale of activations)` to the f32 sum of its output with one fused multiply-add, in
//! rising order of blocks. So all variants and tile sizes give the same bits.

use super::input::{Input, ROW_BLOCK, tiles};
use super::kind::{
    self, BLOCK, STEP, WIDTH, bits, has_min, is_super, level_bytes, offset, scales_of, step_levels, super_at,
};
use crate::linalg::kernel::SharedMut;

/// A panel in memory.
#[derive(Clone, Copy)]
pub(crate) struct Panel<'a> {
    pub kind: u8,
    pub blocks: usize,
    pub levels: &'a [u8],
    pub scales: &'a [u8],
}

/// Where a product goes: column `at` of a row-major matrix of `stride` values per row.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub c: SharedMut,
    pub at: usize,
    pub stride: usize,
    /// Columns written, 1..=16.
    pub cols: usize,
    /// Add to what is there.
    pub add: bool,
}

/// Which variant of the loop this CPU can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni512,
    /// AVX2 with AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni256,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain,
}

impl Isa {
    /// The variants that this CPU has, the fastest first.
    pub fn available() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512bw") {
                all.push(Self::Vnni512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                if is_x86_feature_detected!("avxvnni") {
                    all.push(Self::Vnni256);
                }
                all.push(Self::Avx2);
            }
        }
        all.push(Self::Plain);
        all
    }
    pub fn detect() -> Self {
        static BEST: std::sync::OnceLock<Isa> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| Self::available().first().copied().unwrap_or(Self::Plain))
    }
}

/// Addresses of one tile.
#[derive(Clone, Copy)]
struct Job {
    blocks: usize,
    levels: *const u8,
    scales: *const u8,
    x: *const u8,
    /// Rows of the tile, and the first of them to do.
    rows: usize,
    from: usize,
    c: *mut f32,
    stride: usize,
    cols: usize,
    add: bool,
}

/// `c[r, ..cols] (+)= x[r] · panel` for all rows.
///
/// # Safety
/// No other thread may touch these columns of `c` meanwhile.
pub(crate) unsafe fn multiply(isa: Isa, x: &Input<'_>, panel: Panel<'_>, to: Place) {
    if x.rows == 0 {
        return;
    }
    assert!(x.blocks == panel.blocks && (1..=WIDTH).contains(&to.cols), "panel of another shape");
    assert!(panel.levels.len() >= panel.blocks * level_bytes(panel.kind), "levels are too short");
    assert!(panel.scales.len() >= kind::scale_bytes(panel.kind, panel.blocks), "scales are too short");
    for (first, rows) in tiles(x.rows) {
        // SAFETY: bounds of the result; `x` and the panel were checked above. Exclusivity is the caller's promise.
        let job = unsafe {
            let c = to.c.address(to.at + first * to.stride, (rows - 1) * to.stride + to.cols);
            Job {
                blocks: panel.blocks,
                levels: panel.levels.as_ptr(),
                scales: panel.scales.as_ptr(),
                x: x.data.as_ptr().add(first * x.blocks * ROW_BLOCK),
                rows,
                from: 0,
                c,
                stride: to.stride,
                cols: to.cols,
                add: to.add,
            }
        };
        // SAFETY: as above; the features of `isa` were detected.
        unsafe {
            match panel.kind {
                kind::Q8 => run::<{ kind::Q8 }>(isa, &job),
                kind::Q4 => run::<{ kind::Q4 }>(isa, &job),
                kind::Q4_MIN => run::<{ kind::Q4_MIN }>(isa, &job),
                kind::Q5 => run::<{ kind::Q5 }>(isa, &job),
                kind::Q5_MIN => run::<{ kind::Q5_MIN }>(isa, &job),
                kind::Q4_K => run::<{ kind::Q4_K }>(isa, &job),
                kind::Q5_K => run::<{ kind::Q5_K }>(isa, &job),
                _ => run::<{ kind::Q6_K }>(isa, &job),
            }
        }
    }
}

unsafe fn run<const KIND: u8>(isa: Isa, job: &Job) {
    // SAFETY: the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Vnni512 => match job.rows {
                12 => x86::tile512::<KIND, 12>(job),
                8 => x86::tile512::<KIND, 8>(job),
                4 => x86::tile512::<KIND, 4>(job),
                3 => x86::tile512::<KIND, 3>(job),
                2 => x86::tile512::<KIND, 2>(job),
                _ => x86::tile512::<KIND, 1>(job),
            },
            #[cfg(target_arch = "x86_64")]
            Isa::Vnni256 => in_fours(job, |rows, job| match rows {
                4 => x86::tile_vnni256::<KIND, 4>(job),
                3 => x86::tile_vnni256::<KIND, 3>(job),
                2 => x86::tile_vnni256::<KIND, 2>(job),
                _ => x86::tile_vnni256::<KIND, 1>(job),
            }),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => in_fours(job, |rows, job| match rows {
                4 => x86::tile_avx2::<KIND, 4>(job),
                3 => x86::tile_avx2::<KIND, 3>(job),
                2 => x86::tile_avx2::<KIND, 2>(job),
                _ => x86::tile_avx2::<KIND, 1>(job),
            }),
            Isa::Plain => plain::<KIND>(job),
        }
    }
}

/// AVX2 has registers for four rows at a time.
#[cfg(target_arch = "x86_64")]
fn in_fours(job: &Job, tile: impl Fn(usize, &Job)) {
    for from in (0..job.rows).step_by(4) {
        tile(job.rows.min(4), &Job { from, ..*job });
    }
}

/// The definition: one output after the other.
unsafe fn plain<const KIND: u8>(job: &Job) {
    // SAFETY: lengths follow from the numbers of blocks and rows, which the caller vouches for.
    let (levels, scales, x) = unsafe {
        (
            std::slice::from_raw_parts(job.levels, job.blocks * level_bytes(KIND)),
            std::slice::from_raw_parts(job.scales, kind::scale_bytes(KIND, job.blocks)),
            std::slice::from_raw_parts(job.x, job.blocks * job.rows * ROW_BLOCK),
        )
    };
    for r in 0..job.rows {
        for lane in 0..job.cols {
            let mut sum = 0.0f32;
            for b in 0..job.blocks {
                let row = &x[b * job.rows * ROW_BLOCK..][..job.rows * ROW_BLOCK];
                let number = |i: usize| kind::word(row, (8 + i) * job.rows + r);
                let mut dots = [0i32; 2];
                for j in 0..BLOCK / 4 {
                    let w = step_levels(KIND, &levels[b * level_bytes(KIND)..], lane, j).to_le_bytes();
                    let a = &row[(j * job.rows + r) * 4..][..4];
                    for (w, a) in w.iter().zip(a) {
                        dots[j / 4] += i32::from(*w) * i32::from(a.cast_signed());
                    }
                }
                let shift = offset(KIND);
                if shift > 0 {
                    dots[0] += number(1).cast_signed() << shift;
                    dots[1] += number(2).cast_signed() << shift;
                }
                let ([first, second], min) = scales_of(KIND, scales, lane, b);
                let scale = f32::from_bits(number(0));
                if KIND == kind::Q6_K {
                    sum = (dots[0] as f32).mul_add(first * scale, sum);
                    sum = (dots[1] as f32).mul_add(second * scale, sum);
                } else {
                    sum = ((dots[0] + dots[1]) as f32).mul_add(first * scale, sum);
                }
                if has_min(KIND) {
                    sum = min.mul_add(f32::from_bits(number(3)), sum);
                }
            }
            // SAFETY: row `r`, column `lane` of the target.
            unsafe {
                let c = job.c.add(r * job.stride + lane);
                *c = if job.add { *c + sum } else { sum };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    /// Levels of step `J`, one byte each.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn levels512<const KIND: u8, const J: usize>(at: *const u8) -> __m512i {
        // SAFETY: a whole block of levels lies at `at`.
        unsafe {
            if bits(KIND) == 8 {
                return _mm512_loadu_si512(at.add(J * STEP).cast());
            }
            let both = _mm512_loadu_si512(at.add(J % 4 * STEP).cast());
            let both = if J < 4 { both } else { _mm512_srli_epi16::<4>(both) };
            let low = _mm512_and_si512(both, _mm512_set1_epi8(15));
            match bits(KIND) {
                5 => {
                    let plane = _mm512_loadu_si512(at.add(4 * STEP).cast());
                    let moved = if J < 4 {
                        _mm512_sll_epi16(plane, _mm_cvtsi32_si128(4 - (J % 4) as i32))
                    } else {
                        _mm512_srl_epi16(plane, _mm_cvtsi32_si128((J % 4) as i32))
                    };
                    _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(16)))
                }
                6 => {
                    let plane = _mm512_loadu_si512(at.add((4 + J / 4) * STEP).cast());
                    let moved = if J % 4 < 2 {
                        _mm512_sll_epi16(plane, _mm_cvtsi32_si128(4 - 2 * (J % 4) as i32))
                    } else {
                        _mm512_srl_epi16(plane, _mm_cvtsi32_si128(2 * (J % 4) as i32 - 4))
                    };
                    _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(48)))
                }
                _ => low,
            }
        }
    }

    /// Scales of the first and last 16 inputs of block `b`, and its minimum.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales512<const KIND: u8>(at: *const u8, b: usize) -> ([__m512; 2], __m512) {
        // SAFETY: the scales of all blocks lie at `at`.
        unsafe {
            let halves = |at: *const u8| _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
            if is_super(KIND) {
                let (big, small) = super_at(KIND, b);
                let bytes = |i: usize| _mm_loadu_si128(at.add(small + i * WIDTH).cast());
                let d = halves(at.add(big));
                if KIND == kind::Q6_K {
                    let scale = |i| _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(i))));
                    return ([scale(0), scale(1)], _mm512_setzero_ps());
                }
                let unsigned = |i| _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(i)));
                let min = _mm512_mul_ps(halves(at.add(big + 2 * WIDTH)), unsigned(1));
                let scale = _mm512_mul_ps(d, unsigned(0));
                return ([scale; 2], _mm512_sub_ps(_mm512_set1_ps(-0.0), min));
            }
            if has_min(KIND) {
                let at = at.add(b * 4 * WIDTH);
                return ([halves(at); 2], halves(at.add(2 * WIDTH)));
            }
            ([halves(at.add(b * 2 * WIDTH)); 2], _mm512_setzero_ps())
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub unsafe fn tile512<const KIND: u8, const R: usize>(job: &Job) {
        // SAFETY: every address is inside the ranges that `multiply` checked.
        unsafe {
            let mut sums = [_mm512_setzero_ps(); R];
            let (mut levels, mut x) = (job.levels, job.x);
            for b in 0..job.blocks {
                let (scales, min) = scales512::<KIND>(job.scales, b);
                let int = |i: usize, r: usize| x.add((i * R + r) * 4).cast::<i32>().read_unaligned();
                let number = |i: usize, r: usize| x.add(((8 + i) * R + r) * 4).cast::<f32>().read_unaligned();
                let mut dots = [_mm512_setzero_si512(); R];
                macro_rules! start {
                    ($i:expr) => {
                        for r in 0..R {
                            let sum = _mm512_set1_epi32(int(8 + $i, r));
                            dots[r] = _mm512_sll_epi32(sum, _mm_cvtsi32_si128(offset(KIND) as i32));
                        }
                    };
                }
                macro_rules! step {
                    ($($j:literal)*) => { $(
                        let w = levels512::<KIND, $j>(levels);
                        for r in 0..R {
                            dots[r] = _mm512_dpbusd_epi32(dots[r], w, _mm512_set1_epi32(int($j, r)));
                        }
                    )* };
                }
                macro_rules! finish {
                    ($scale:expr) => {
                        for r in 0..R {
                            let scale = _mm512_mul_ps($scale, _mm512_set1_ps(number(0, r)));
                            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), scale, sums[r]);
                        }
                    };
                }
                if KIND == kind::Q6_K {
                    start!(1);
                    step!(0 1 2 3);
                    finish!(scales[0]);
                    start!(2);
                    step!(4 5 6 7);
                    finish!(scales[1]);
                } else {
                    if offset(KIND) > 0 {
                        for (r, dot) in dots.iter_mut().enumerate() {
                            let sum = _mm512_set1_epi32(int(9, r).wrapping_add(int(10, r)));
                            *dot = _mm512_sll_epi32(sum, _mm_cvtsi32_si128(offset(KIND) as i32));
                        }
                    }
                    step!(0 1 2 3 4 5 6 7);
                    finish!(scales[0]);
                }
                if has_min(KIND) {
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm512_fmadd_ps(min, _mm512_set1_ps(number(3, r)), *sum);
                    }
                }
                (levels, x) = (levels.add(level_bytes(KIND)), x.add(R * ROW_BLOCK));
            }
            let mask = (0xffffu32 >> (WIDTH - job.cols)) as u16;
            for (r, sum) in sums.into_iter().enumerate() {
                let c = job.c.add(r * job.stride);
                let old = if job.add { _mm512_maskz_loadu_ps(mask, c) } else { _mm512_setzero_ps() };
                let new = if job.add { _mm512_add_ps(old, sum) } else { sum };
                _mm512_mask_storeu_ps(c, mask, new);
            }
        }
    }

    /// As [`levels512`], of 8 outputs.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn levels256<const KIND: u8, const J: usize>(at: *const u8) -> __m256i {
        // SAFETY: a whole block of levels lies at `at`.
        unsafe {
            if bits(KIND) == 8 {
                return _mm256_loadu_si256(at.add(J * STEP).cast());
            }
            let both = _mm256_loadu_si256(at.add(J % 4 * STEP).cast());
            let both = if J < 4 { both } else { _mm256_srli_epi16::<4>(both) };
            let low = _mm256_and_si256(both, _mm256_set1_epi8(15));
            match bits(KIND) {
                5 => {
                    let plane = _mm256_loadu_si256(at.add(4 * STEP).cast());
                    let moved = if J < 4 {
                        _mm256_sll_epi16(plane, _mm_cvtsi32_si128(4 - (J % 4) as i32))
                    } else {
                        _mm256_srl_epi16(plane, _mm_cvtsi32_si128((J % 4) as i32))
                    };
                    _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(16)))
                }
                6 => {
                    let plane = _mm256_loadu_si256(at.add((4 + J / 4) * STEP).cast());
                    let moved = if J % 4 < 2 {
                        _mm256_sll_epi16(plane, _mm_cvtsi32_si128(4 - 2 * (J % 4) as i32))
                    } else {
                        _mm256_srl_epi16(plane, _mm_cvtsi32_si128(2 * (J % 4) as i32 - 4))
                    };
                    _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(48)))
                }
                _ => low,
            }
        }
    }

    /// As [`scales512`], of outputs `half..half + 8`.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn scales256<const KIND: u8>(at: *const u8, b: usize, half: usize) -> ([__m256; 2], __m256) {
        // SAFETY: the scales of all blocks lie at `at`.
        unsafe {
            let halves = |at: *const u8| _mm256_cvtph_ps(_mm_loadu_si128(at.add(2 * half).cast()));
            if is_super(KIND) {
                let (big, small) = super_at(KIND, b);
                let bytes = |i: usize| _mm_loadl_epi64(at.add(small + i * WIDTH + half).cast());
                let d = halves(at.add(big));
                if KIND == kind::Q6_K {
                    let scale = |i| _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(i))));
                    return ([scale(0), scale(1)], _mm256_setzero_ps());
                }
                let unsigned = |i| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes(i)));
                let min = _mm256_mul_ps(halves(at.add(big + 2 * WIDTH)), unsigned(1));
                let scale = _mm256_mul_ps(d, unsigned(0));
                return ([scale; 2], _mm256_sub_ps(_mm256_set1_ps(-0.0), min));
            }
            if has_min(KIND) {
                let at = at.add(b * 4 * WIDTH);
                return ([halves(at); 2], halves(at.add(2 * WIDTH)));
            }
            ([halves(at.add(b * 2 * WIDTH)); 2], _mm256_setzero_ps())
        }
    }

    /// Sums of four products of levels; AVX2 alone multiplies to 16 bits first, which levels of at most 6 bits cannot
    /// overflow. Levels of 8 bits go by magnitude, the sign moved to the activations: `128 · 127 · 2 < 2^15`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn dot_avx2<const KIND: u8>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        let pairs = if bits(KIND) == 8 {
            let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
        } else {
            _mm256_maddubs_epi16(w, x)
        };
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
    #[inline]
    #[target_feature(enable = "avx2,avxvnni")]
    fn dot_vnni<const KIND: u8>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        _mm256_dpbusd_avx_epi32(sum, w, x)
    }

    macro_rules! tile256 {
        ($d:tt $name:ident, $features:literal, $dot:ident, $offset:expr) => {
            #[target_feature(enable = $features)]
            pub unsafe fn $name<const KIND: u8, const R: usize>(job: &Job) {
                // SAFETY: every address is inside the ranges that `multiply` checked.
                unsafe {
                    let rows = job.rows;
                    let shift = _mm_cvtsi32_si128(offset(KIND) as i32);
                    let shifted: bool = offset(KIND) > 0 && ($offset || bits(KIND) < 8);
                    for half in [0, WIDTH / 2] {
                        let mut sums = [_mm256_setzero_ps(); R];
                        let (mut levels, mut x) = (job.levels.add(half * 4), job.x.add(job.from * 4));
                        for b in 0..job.blocks {
                            let (scales, min) = scales256::<KIND>(job.scales, b, half);
                            let int = |i: usize, r: usize| x.add((i * rows + r) * 4).cast::<i32>().read_unaligned();
                            let number = |i: usize, r: usize| f32::from_bits(int(8 + i, r).cast_unsigned());
                            let mut dots = [_mm256_setzero_si256(); R];
                            macro_rules! start {
                                ($sum:expr) => {
                                    if shifted {
                                        for r in 0..R {
                                            let sum: i32 = $sum(r);
                                            dots[r] = _mm256_sll_epi32(_mm256_set1_epi32(sum), shift);
                                        }
                                    } else {
                                        dots = [_mm256_setzero_si256(); R];
                                    }
                                };
                            }
                            macro_rules! step {
                                ($d($d j:literal)*) => { $d(
                                    let w = levels256::<KIND, $d j>(levels);
                                    for r in 0..R {
                                        dots[r] = $dot::<KIND>(dots[r], w, _mm256_set1_epi32(int($d j, r)));
                                    }
                                )* };
                            }
                            macro_rules! finish {
                                ($scale:expr) => {
                                    for r in 0..R {
                                        let scale = _mm256_mul_ps($scale, _mm256_set1_ps(number(0, r)));
                                        sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, sums[r]);
                                    }
                                };
                            }
                            if KIND == kind::Q6_K {
                                start!(|r| int(9, r));
                                step!(0 1 2 3);
                                finish!(scales[0]);
                                start!(|r| int(10, r));
                                step!(4 5 6 7);
                                finish!(scales[1]);
                            } else {
                                start!(|r| int(9, r).wrapping_add(int(10, r)));
                                step!(0 1 2 3 4 5 6 7);
                                finish!(scales[0]);
                            }
                            if has_min(KIND) {
                                for r in 0..R {
                                    sums[r] = _mm256_fmadd_ps(min, _mm256_set1_ps(number(3, r)), sums[r]);
                                }
                            }
                            (levels, x) = (levels.add(level_bytes(KIND)), x.add(rows * ROW_BLOCK));
                        }
                        for (r, sum) in sums.iter().enumerate() {
                            let mut out = [0.0f32; WIDTH / 2];
                            _mm256_storeu_ps(out.as_mut_ptr(), *sum);
                            let c = job.c.add((job.from + r) * job.stride + half);
                            for (i, v) in out.iter().enumerate().take(job.cols.saturating_sub(half)) {
                                let c = c.add(i);
                                *c = if job.add { *c + v } else { *v };
                            }
                        }
                    }
                }
            }
        };
    }
    tile256!($ tile_avx2, "avx2,fma,f16c", dot_avx2, false);
    tile256!($ tile_vnni256, "avx2,fma,f16c,avxvnni", dot_vnni, true);
}

#[cfg(test)]
mod tests;
