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

/// The whole part of a level in `0..=max`. A block of subnormal numbers has an infinite inverse, whose products are kept inside,
/// too.
#[inline(always)]
fn whole(level: f32, max: f32) -> u8 {
    let level = if level < max { level } else { max };
    let level = if level > 0.0 { level } else { 0.0 };
    // SAFETY: between 0 and `max`, which a byte holds; a NaN became `max`.
    (unsafe { level.to_int_unchecked::<i32>() }) as u8
}

/// The whole part of a level in -127..=127, in two's complement.
#[inline(always)]
fn whole_signed(level: f32) -> u8 {
    let level = if level < 127.0 { level } else { 127.0 };
    let level = if level > -127.0 { level } else { -127.0 };
    // SAFETY: between -127 and 127; a NaN became 127.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{decode_block, quantize};

    const TYPES: [TensorType; 5] =
        [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q5_0, TensorType::Q5_1, TensorType::Q8_0];

    /// Values of a block after coding.
    fn round_trip(ty: TensorType, x: &[f32; N]) -> [f32; N] {
        let (mut bytes, mut back) = (vec![0; ty.block_bytes()], [0.0; N]);
        assert!(encode(ty, x, &mut bytes));
        decode_block(ty, &bytes, &mut back);
        back
    }

    #[test]
    fn what_lies_on_the_grid_of_the_largest_magnitude_stays() {
        // -8..=7 halves twice: every level of Q4_0, all of Q5_0 at half the step
        let x: [f32; N] = std::array::from_fn(|i| (i % 16) as f32 / 2.0 - 4.0);
        assert_eq!(round_trip(TensorType::Q4_0, &x), x);
        assert_eq!(round_trip(TensorType::Q4_1, &x), x);
        let x: [f32; N] = std::array::from_fn(|i| i as f32 / 4.0 - 4.0);
        assert_eq!((round_trip(TensorType::Q5_0, &x), round_trip(TensorType::Q5_1, &x)), (x, x));
        let x: [f32; N] = std::array::from_fn(|i| 127.0 - 8.0 * i as f32);
        assert_eq!(round_trip(TensorType::Q8_0, &x), x);
        assert!(!encode(TensorType::Q4K, &x, &mut [0; 144]));
    }

    #[test]
    fn blocks_of_zeros_and_of_the_smallest_numbers_are_finite() {
        let tiny = f32::from_bits(1);
        let mixed = std::array::from_fn(|i| [tiny, -tiny, 0.0][i % 3]);
        for ty in TYPES {
            for x in [[0.0; N], [tiny; N], [-tiny; N], mixed] {
                assert!(round_trip(ty, &x).iter().all(|v| v.abs() < 1e-3), "{ty} {x:?}");
            }
            assert!(quantize(ty, &mixed, N, None).is_ok());
        }
    }
}
