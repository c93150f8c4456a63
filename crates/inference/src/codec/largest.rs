//! Blocks whose scale is that of the largest magnitude: what llama.cpp does for formats with blocks of 32 where there is no
//! importance. A single pass, bit-equal to it; the search leaves a third of its divergence.

use super::legacy::half;
use crate::gguf::TensorType;

const N: usize = 32;

/// Codes one block; `false` for types that are always searched.
#[inline(always)]
pub(super) fn encode(ty: TensorType, x: &[f32; N], out: &mut [u8]) -> bool {
    match ty {
        TensorType::Q4_0 => symmetric(x, 8.0, out, |out, levels| nibbles(levels, &mut out[2..])),
        TensorType::Q5_0 => symmetric(x, 16.0, out, |out, levels| {
            high_bits(levels, &mut out[2..6]);
            nibbles(levels, &mut out[6..]);
        }),
        TensorType::Q4_1 => affine(x, 15.0, out, |out, levels| nibbles(levels, &mut out[4..])),
        TensorType::Q5_1 => affine(x, 31.0, out, |out, levels| {
            high_bits(levels, &mut out[4..8]);
            nibbles(levels, &mut out[8..]);
        }),
        TensorType::Q8_0 => eight_bits(x, out),
        _ => return false,
    }
    true
}

/// Levels -127..=127.
#[inline(always)]
fn eight_bits(x: &[f32; N], out: &mut [u8]) {
    let (least, greatest) = ends(x);
    let scale = if greatest > -least { greatest } else { -least } / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out[..2].copy_from_slice(&half(scale).to_le_bytes());
    for (l, x) in out[2..].iter_mut().zip(x) {
        let level = x * inverse;
        // halves go away from zero: the number below 1/2 is added, so that what is less than a half stays so
        *l = whole_signed(level + 0.499_999_97_f32.copysign(level));
    }
}

/// `2 n` levels, the largest magnitude at the end that has one more.
#[inline(always)]
fn symmetric(x: &[f32; N], n: f32, out: &mut [u8], put: impl Fn(&mut [u8], &[u8; N])) {
    let (least, greatest) = ends(x);
    let extreme = if greatest > -least {
        greatest
    } else if greatest < -least {
        least
    } else {
        // the first of equal magnitudes decides the sign
        x.iter().copied().find(|x| x.abs() == greatest).unwrap_or(0.0)
    };
    let scale = extreme / -n;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut levels = [0u8; N];
    for (l, x) in levels.iter_mut().zip(x) {
        *l = whole(x * inverse + (n + 0.5), 2.0 * n - 1.0);
    }
    out[..2].copy_from_slice(&half(scale).to_le_bytes());
    put(out, &levels);
}

/// Levels `0..=max` from the least to the greatest value.
#[inline(always)]
fn affine(x: &[f32; N], max: f32, out: &mut [u8], put: impl Fn(&mut [u8], &[u8; N])) {
    let (least, greatest) = ends(x);
    let scale = (greatest - least) / max;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut levels = [0u8; N];
    for (l, x) in levels.iter_mut().zip(x) {
        *l = whole((x - least) * inverse + 0.5, max);
    }
    out[..2].copy_from_slice(&half(scale).to_le_bytes());
    out[2..4].copy_from_slice(&half(least).to_le_bytes());
    put(out, &levels);
}

/// The least and the greatest value.
#[inline(always)]
fn ends(x: &[f32; N]) -> (f32, f32) {
    let (mut least, mut greatest) = ([f32::MAX; 8], [f32::MIN; 8]);
    for x in x.as_chunks::<8>().0 {
        for i in 0..8 {
            least[i] = if x[i] < least[i] { x[i] } else { least[i] };
            greatest[i] = if x[i] > greatest[i] { x[i] } else { greatest[i] };
        }
    }
    (least.into_iter().fold(f32::MAX, f32::min), greatest.into_iter().fold(f32::MIN, f32::max))
}

/// The whole part of a level, which is at most `max`.
#[inline(always)]
fn whole(level: f32, max: f32) -> u8 {
    let level = if level < max { level } else { max };
    // SAFETY: weights are finite (checked before), and no level of a block is below 0 by more than a rounding error.
    (unsafe { level.to_int_unchecked::<i32>() }) as u8
}

/// The whole part of a level between -128 and 128, in two's complement.
#[inline(always)]
fn whole_signed(level: f32) -> u8 {
    // SAFETY: weights are finite (checked before) and at most 127 scales of their block.
    (unsafe { level.to_int_unchecked::<i32>() }) as u8
}

/// The low four bits: of the first half in the low nibbles, of the second in the high ones.
#[inline(always)]
fn nibbles(levels: &[u8; N], out: &mut [u8]) {
    let (low, high) = levels.split_at(N / 2);
    for ((out, l), h) in out.iter_mut().zip(low).zip(high) {
        *out = (l & 15) | (h & 15) << 4;
    }
}

/// The fifth bits.
#[inline(always)]
fn high_bits(levels: &[u8; N], out: &mut [u8]) {
    let bits = levels.iter().enumerate().fold(0u32, |bits, (i, l)| bits | u32::from(l >> 4) << i);
    out.copy_from_slice(&bits.to_le_bytes());
}
