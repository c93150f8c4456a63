//! Activations in 8 bits: blocks of 32 values with one scale, as the Q8_0 of llama.cpp, laid out for the inner loop.
//!
//! `x ≈ scale · level`, `scale = max|x| / 127` in f32, levels rounded to nearest (ties to even). A block with a value
//! that is not finite gets the scale NaN, so that the fault shows in the result.

use super::kind::BLOCK;
use crate::linalg::{Aligned, kernel::SharedMut, ops::wide, team::parallel};

/// Rows in a tile, the largest that fits first.
const TILES: [usize; 6] = [12, 8, 4, 3, 2, 1];
/// Bytes of a block of one row: 32 levels; scale (f32); minus the sums of the levels of both halves (i32);
/// scale times the sum of all levels (f32).
pub(crate) const ROW_BLOCK: usize = 48;
/// Values from which on other threads are asked for help.
const PARALLEL_FROM: usize = 1 << 14;

/// Rows in 8 bits: tile by tile, in each tile block by block `[step][row][4 levels]`, then the four numbers of each row.
pub(crate) struct Input<'a> {
    pub(super) data: &'a [u8],
    pub(super) rows: usize,
    pub(super) blocks: usize,
}

/// Cuts `m` rows into tiles: `(first row, rows)`.
pub(crate) fn tiles(m: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rows = TILES.into_iter().find(|t| at + t <= m)?;
        at += rows;
        Some((at - rows, rows))
    })
}

impl<'a> Input<'a> {
    /// Quantises `m` rows of `k` values, `stride` apart; a last block that is not full is filled with 0.
    pub fn new(x: &[f32], stride: usize, m: usize, k: usize, buffer: &'a mut Aligned<u8>) -> Self {
        let blocks = k.div_ceil(BLOCK);
        let row = blocks * ROW_BLOCK;
        buffer.reserve(m * row);
        let out = SharedMut::new(&mut buffer[..m * row]);
        let one = |(first, rows): (usize, usize)| {
            // SAFETY: tiles are different places of the buffer.
            let tile = unsafe { out.slice(first * row, rows * row) };
            pack_tile(&x[first * stride..], stride, k, rows, tile);
        };
        if m * k < PARALLEL_FROM {
            tiles(m).for_each(one);
        } else {
            let all: Vec<_> = tiles(m).collect();
            parallel(all.len(), |i| one(all[i]));
        }
        Self { data: &buffer[..m * row], rows: m, blocks }
    }
}

wide! {
    /// Quantises the rows of one tile.
    fn pack_tile[FMA](x: &[f32], stride: usize, k: usize, rows: usize, tile: &mut [u8]) {
        let _ = FMA;
        for (b, out) in tile.chunks_exact_mut(rows * ROW_BLOCK).enumerate() {
            let len = BLOCK.min(k - b * BLOCK);
            for r in 0..rows {
                let mut values = [0.0f32; BLOCK];
                values[..len].copy_from_slice(&x[r * stride + b * BLOCK..][..len]);
                put_block(&values, rows, r, out);
            }
        }
    }
}

#[inline(always)]
fn put_block(x: &[f32; BLOCK], rows: usize, r: usize, out: &mut [u8]) {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    let top = x.iter().fold(0u32, |m, v| m.max(v.to_bits() & 0x7fff_ffff)); // orders NaN above infinity above all else
    let peak = f32::from_bits(top);
    // Below this the inverse of the scale is no number any more; such values are 0 for all purposes.
    let scale = if !peak.is_finite() {
        f32::NAN
    } else if peak < 1e-30 {
        0.0
    } else {
        peak / 127.0
    };
    let inverse = if scale > 0.0 { 127.0 / peak } else { 0.0 };
    let mut levels = [0i32; BLOCK];
    for (l, v) in levels.iter_mut().zip(x) {
        let near = (v * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
        *l = near.clamp(-127, 127);
    }
    for (j, four) in levels.as_chunks::<4>().0.iter().enumerate() {
        let at = (j * rows + r) * 4;
        out[at..at + 4].copy_from_slice(&four.map(|l| l as u8));
    }
    let sums = [&levels[..16], &levels[16..]].map(|half| half.iter().sum::<i32>());
    let mut number = |i: usize, bytes: [u8; 4]| {
        let at = ((8 + i) * rows + r) * 4;
        out[at..at + 4].copy_from_slice(&bytes);
    };
    number(0, scale.to_le_bytes());
    number(1, (-sums[0]).to_le_bytes());
    number(2, (-sums[1]).to_le_bytes());
    number(3, (scale * (sums[0] + sums[1]) as f32).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::super::kind::word;
    use super::*;

    #[test]
    fn tiles_cover_all_rows_once() {
        for m in 0..60 {
            let all: Vec<_> = tiles(m).collect();
            let mut at = 0;
            for (first, rows) in all {
                assert_eq!(first, at);
                at += rows;
            }
            assert_eq!(at, m);
        }
    }

    #[test]
    fn levels_scale_and_sums_are_those_of_the_definition() {
        let (m, k) = (15, 70);
        let x: Vec<f32> = (0..m * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
        let mut buffer = Aligned::default();
        let input = Input::new(&x, k, m, k, &mut buffer);
        for (first, rows) in tiles(m) {
            for b in 0..3 {
                let at = &input.data[(first * 3 + b * rows) * ROW_BLOCK..][..rows * ROW_BLOCK];
                for r in 0..rows {
                    let part = &x[(first + r) * k + b * 32..][..32.min(k - b * 32)];
                    let peak = part.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    let scale = f32::from_bits(word(at, 8 * rows + r));
                    assert_eq!(scale, peak / 127.0);
                    let mut halves = [0i32; 2];
                    for (i, v) in part.iter().enumerate() {
                        let level = i32::from(at[(i / 4 * rows + r) * 4 + i % 4].cast_signed());
                        assert!((f32::from(level as i16) * scale - v).abs() <= scale * 0.5001, "{level} {v}");
                        halves[i / 16] += level;
                    }
                    assert_eq!(word(at, 9 * rows + r).cast_signed(), -halves[0]);
                    assert_eq!(word(at, 10 * rows + r).cast_signed(), -halves[1]);
                    let sum = f32::from_bits(word(at, 11 * rows + r));
                    assert_eq!(sum, scale * (halves[0] + halves[1]) as f32);
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0f32; 32];
            x[9] = bad;
            let mut buffer = Aligned::default();
            let input = Input::new(&x, 32, 1, 32, &mut buffer);
            assert!(f32::from_bits(word(input.data, 8)).is_nan());
        }
    }
}
