//! How quantised weights lie in a panel of 16 outputs, and how they get there from the blocks of a GGUF file.
//!
//! Levels: for every 32 inputs and 8 steps `j`, the levels of inputs `4j..4j + 4` of the 16 outputs side by side,
//! one byte each (64 bytes, one AVX-512 register). With fewer than 8 bits a level, the low 4 bits of step `j` and
//! step `j + 4` share a byte, and the higher bits of all steps follow in planes of 64 bytes. So unpacking costs a mask
//! or a shift a step, whatever the format. Scales: beside each other for the 16 outputs, as the file has them
//! (half precision, or 6 and 8 bits below a half-precision scale of 256 inputs).

use crate::codec::{CODEBOOK, unpack_six_bits};
use crate::gguf::TensorType;
use crate::linalg::ops::wide;
use half::f16;

/// Outputs of a panel.
pub(crate) const WIDTH: usize = 16;
/// Inputs that share a scale.
pub(crate) const BLOCK: usize = 32;
/// Bytes of one step of levels.
pub(crate) const STEP: usize = 64;
/// Blocks of 32 in a block of 256.
const SUPER: usize = 8;

// Formats of a panel, as numbers so that loops can be made for each of them.
pub(crate) const Q8: u8 = 0;
pub(crate) const Q4: u8 = 1;
pub(crate) const Q4_MIN: u8 = 2;
pub(crate) const Q5: u8 = 3;
pub(crate) const Q5_MIN: u8 = 4;
pub(crate) const Q4_K: u8 = 5;
pub(crate) const Q5_K: u8 = 6;
pub(crate) const Q6_K: u8 = 7;

/// The panel format of a quantised type; `None` for floats.
pub(crate) const fn of(ty: TensorType) -> Option<u8> {
    Some(match ty {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => return None,
        TensorType::Q8_0 | TensorType::Iq4Nl => Q8,
        TensorType::Q4_0 => Q4,
        TensorType::Q4_1 => Q4_MIN,
        TensorType::Q5_0 => Q5,
        TensorType::Q5_1 => Q5_MIN,
        TensorType::Q4K => Q4_K,
        TensorType::Q5K => Q5_K,
        TensorType::Q6K => Q6_K,
    })
}

pub(crate) const fn bits(kind: u8) -> u32 {
    match kind {
        Q8 => 8,
        Q4 | Q4_MIN | Q4_K => 4,
        Q5 | Q5_MIN | Q5_K => 5,
        _ => 6,
    }
}
/// Levels are stored as `level + 2^offset`; 0 when they are not negative anyway.
pub(crate) const fn offset(kind: u8) -> u32 {
    match kind {
        Q8 => 7,
        Q4 => 3,
        Q5 => 4,
        Q6_K => 5,
        _ => 0,
    }
}
/// Whether a minimum is added to (or, in k-quants, taken from) every weight.
pub(crate) const fn has_min(kind: u8) -> bool {
    matches!(kind, Q4_MIN | Q5_MIN | Q4_K | Q5_K)
}
/// Whether scales are shared by 256 inputs on two levels.
pub(crate) const fn is_super(kind: u8) -> bool {
    matches!(kind, Q4_K | Q5_K | Q6_K)
}
/// Bytes of the levels of 32 inputs.
pub(crate) const fn level_bytes(kind: u8) -> usize {
    match bits(kind) {
        8 => 8 * STEP,
        4 => 4 * STEP,
        5 => 5 * STEP,
        _ => 6 * STEP,
    }
}
/// Bytes of the scales of `blocks` blocks.
pub(crate) const fn scale_bytes(kind: u8, blocks: usize) -> usize {
    match kind {
        Q4_K | Q5_K => blocks.div_ceil(SUPER) * (4 * WIDTH + SUPER * 2 * WIDTH),
        Q6_K => blocks.div_ceil(SUPER) * (2 * WIDTH + SUPER * 2 * WIDTH),
        Q4_MIN | Q5_MIN => blocks * 4 * WIDTH,
        _ => blocks * 2 * WIDTH,
    }
}
/// Where the two-level scales of block `b` are: the half-precision ones, and the small ones of the block.
pub(crate) const fn super_at(kind: u8, b: usize) -> (usize, usize) {
    let halves = if kind == Q6_K { 2 * WIDTH } else { 4 * WIDTH };
    let at = b / SUPER * (halves + SUPER * 2 * WIDTH);
    (at, at + halves + b % SUPER * 2 * WIDTH)
}

const LOW: u32 = 0x0f0f_0f0f;
const ONES: u32 = 0x0101_0101;
const THREES: u32 = 0x0303_0303;

pub(super) fn word(bytes: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}
fn put(bytes: &mut [u8], at: usize, word: u32) {
    bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
}
/// Bits `4t..4t + 4` of `all`, one a byte.
fn spread(all: u32, t: usize) -> u32 {
    ((all >> (4 * t)) & 15).wrapping_mul(0x0020_4081) & ONES
}

/// The levels of block `b` (of 32, counted inside `raw`, one block of the file), offset included, 4 a word.
#[inline(always)]
fn levels(ty: TensorType, raw: &[u8], b: usize) -> [u32; 8] {
    let nibbles =
        |from: usize| -> [u32; 8] { std::array::from_fn(|t| (word(&raw[from..], t % 4) >> (t / 4 * 4)) & LOW) };
    match ty {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => [0; 8],
        TensorType::Q4_0 => nibbles(2),
        TensorType::Q4_1 => nibbles(4),
        TensorType::Q5_0 | TensorType::Q5_1 => {
            let from = if ty == TensorType::Q5_0 { 2 } else { 4 };
            let (low, high) = (nibbles(from + 4), word(&raw[from..], 0));
            std::array::from_fn(|t| low[t] | spread(high, t) << 4)
        }
        TensorType::Q8_0 => std::array::from_fn(|t| word(&raw[2..], t) ^ 0x8080_8080),
        TensorType::Iq4Nl => nibbles(2)
            .map(|w| u32::from_le_bytes(w.to_le_bytes().map(|n| CODEBOOK[usize::from(n & 15)].cast_unsigned() ^ 0x80))),
        TensorType::Q4K | TensorType::Q5K => {
            let five = ty == TensorType::Q5K;
            let from = if five { 48 } else { 16 } + b / 2 * 32;
            std::array::from_fn(|t| {
                let low = (word(&raw[from..], t) >> (b % 2 * 4)) & LOW;
                if five { low | ((word(&raw[16..], t) >> b) & ONES) << 4 } else { low }
            })
        }
        TensorType::Q6K => {
            let (half, group) = (b / 4, b % 4);
            std::array::from_fn(|t| {
                let low = (word(&raw[half * 64 + group % 2 * 32..], t) >> (group / 2 * 4)) & LOW;
                low | ((word(&raw[128 + half * 32..], t) >> (2 * group)) & THREES) << 4
            })
        }
    }
}

/// The planes of one block, as they are stored one after the other, of `N` outputs with 8 words of levels each.
#[inline(always)]
fn planes<const N: usize>(kind: u8, w: &[[u32; N]; 8]) -> [[u32; N]; 8] {
    if bits(kind) == 8 {
        return *w;
    }
    let mut out = [[0; N]; 8];
    for n in 0..N {
        for j in 0..4 {
            out[j][n] = (w[j][n] & LOW) | (w[j + 4][n] & LOW) << 4;
        }
        for j in 0..8 {
            let high = (w[j][n] >> 4) & LOW;
            match bits(kind) {
                5 => out[4][n] |= high << j,
                6 => out[4 + j / 4][n] |= high << (j % 4 * 2),
                _ => {}
            }
        }
    }
    out
}

/// Stores the levels of output `lane` in the level bytes of one block of a panel.
pub(super) fn put_levels(kind: u8, out: &mut [u8], lane: usize, w: [u32; 8]) {
    let planes = planes(kind, &w.map(|w| [w]));
    for (step, [word]) in out.chunks_exact_mut(STEP).zip(planes) {
        put(step, 4 * lane, word);
    }
}

/// Stores those of all outputs.
#[inline(always)]
fn put_all_levels(kind: u8, out: &mut [u8], w: &[[u32; WIDTH]; 8]) {
    for (step, plane) in out.chunks_exact_mut(STEP).zip(planes(kind, w)) {
        for (bytes, word) in step.as_chunks_mut::<4>().0.iter_mut().zip(plane) {
            *bytes = word.to_le_bytes();
        }
    }
}

/// The levels of step `j` of output `lane`, offset included: the inverse of [`put_levels`].
#[inline(always)]
pub(super) fn step_levels(kind: u8, bytes: &[u8], lane: usize, j: usize) -> u32 {
    let at = |step: usize| word(bytes, step * WIDTH + lane);
    if bits(kind) == 8 {
        return at(j);
    }
    let low = (at(j % 4) >> (j / 4 * 4)) & LOW;
    match bits(kind) {
        5 => low | ((at(4) >> j) & ONES) << 4,
        6 => low | ((at(4 + j / 4) >> (j % 4 * 2)) & THREES) << 4,
        _ => low,
    }
}

fn put_half(scales: &mut [u8], at: usize, from: &[u8]) -> bool {
    scales[at..at + 2].copy_from_slice(&from[..2]);
    f16::from_le_bytes([from[0], from[1]]).is_finite()
}

wide! {
    /// Packs at most 16 rows of the file as a panel; answers the first row, and its first block, whose scale is not a finite
    /// number.
    pub(super) fn put_rows[FMA](
        ty: TensorType,
        rows: &[u8],
        row_bytes: usize,
        quants: &mut [u8],
        scales: &mut [u8],
    ) -> Option<(usize, usize)> {
        let _ = FMA;
        // one loop for each type
        match ty {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => None,
            TensorType::Q4_0 => put_rows_of(TensorType::Q4_0, rows, row_bytes, quants, scales),
            TensorType::Q4_1 => put_rows_of(TensorType::Q4_1, rows, row_bytes, quants, scales),
            TensorType::Q8_0 => put_rows_of(TensorType::Q8_0, rows, row_bytes, quants, scales),
            TensorType::Q4K => put_rows_of(TensorType::Q4K, rows, row_bytes, quants, scales),
            TensorType::Q6K => put_rows_of(TensorType::Q6K, rows, row_bytes, quants, scales),
            other => put_rows_of(other, rows, row_bytes, quants, scales),
        }
    }
}

#[inline(always)]
fn put_rows_of(
    ty: TensorType,
    rows: &[u8],
    row_bytes: usize,
    quants: &mut [u8],
    scales: &mut [u8],
) -> Option<(usize, usize)> {
    let kind = of(ty)?;
    let (size, per, raw_size) = (level_bytes(kind), ty.block_len() / BLOCK, ty.block_bytes());
    let mut bad: Option<(usize, usize)> = None;
    for (i, quants) in quants.chunks_mut(size * per).enumerate() {
        let raw = i * raw_size..(i + 1) * raw_size;
        for (b, quants) in quants.chunks_exact_mut(size).enumerate() {
            let mut words = [[0; WIDTH]; 8];
            for (lane, row) in rows.chunks_exact(row_bytes).enumerate().take(WIDTH) {
                let w = levels(ty, &row[raw.clone()], b);
                (0..8).for_each(|t| words[t][lane] = w[t]);
            }
            put_all_levels(kind, quants, &words);
        }
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate().take(WIDTH) {
            if !put_scales(kind, &row[raw.clone()], i, per, lane, scales) {
                bad = Some(bad.map_or((lane, i), |b| b.min((lane, i))));
            }
        }
    }
    bad
}

/// Stores the scales of block `i` of the file for output `lane`; whether they are finite.
#[inline(always)]
fn put_scales(kind: u8, raw: &[u8], i: usize, per: usize, lane: usize, scales: &mut [u8]) -> bool {
    match kind {
        Q4_K | Q5_K => {
            let (at, _) = super_at(kind, i * per);
            for b in 0..per {
                let (_, small) = super_at(kind, i * per + b);
                (scales[small + lane], scales[small + WIDTH + lane]) = unpack_six_bits(&raw[4..16], b);
            }
            put_half(scales, at + 2 * lane, raw) & put_half(scales, at + 2 * (WIDTH + lane), &raw[2..])
        }
        Q6_K => {
            let (at, _) = super_at(kind, i * per);
            for b in 0..per {
                let (_, small) = super_at(kind, i * per + b);
                scales[small + lane] = raw[192 + 2 * b];
                scales[small + WIDTH + lane] = raw[192 + 2 * b + 1];
            }
            put_half(scales, at + 2 * lane, &raw[208..])
        }
        Q4_MIN | Q5_MIN => {
            let at = i * 4 * WIDTH + 2 * lane;
            put_half(scales, at, raw) & put_half(scales, at + 2 * WIDTH, &raw[2..])
        }
        _ => put_half(scales, i * 2 * WIDTH + 2 * lane, raw),
    }
}

/// Scales of one output in one block: of the first and the last 16 inputs, and the minimum that is added.
pub(super) fn scales_of(kind: u8, scales: &[u8], lane: usize, b: usize) -> ([f32; 2], f32) {
    let half = |at: usize| f16::from_le_bytes([scales[at], scales[at + 1]]).to_f32();
    match kind {
        Q4_K | Q5_K => {
            let (at, small) = super_at(kind, b);
            let scale = half(at + 2 * lane) * f32::from(scales[small + lane]);
            let min = half(at + 2 * (WIDTH + lane)) * f32::from(scales[small + WIDTH + lane]);
            ([scale; 2], -min)
        }
        Q6_K => {
            let (at, small) = super_at(kind, b);
            let d = half(at + 2 * lane);
            ([0, WIDTH].map(|s| d * f32::from(scales[small + s + lane].cast_signed())), 0.0)
        }
        Q4_MIN | Q5_MIN => {
            let at = b * 4 * WIDTH + 2 * lane;
            ([half(at); 2], half(at + 2 * WIDTH))
        }
        _ => ([half(b * 2 * WIDTH + 2 * lane); 2], 0.0),
    }
}
