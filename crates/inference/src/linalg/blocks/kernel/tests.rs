//! Every variant of the loop against its definition.

#[cfg(target_arch = "x86_64")]
#[path = "layout.rs"]
mod layout;

use super::super::Blocks;
use super::super::tests::{TYPES, noise};
use super::*;
use crate::codec;
use crate::linalg::Aligned;

/// Bits are equal for every format, tile size, width and way of storing; nothing else is written.
#[test]
fn all_variants_give_the_same_bits() {
    let k = 512;
    for ty in TYPES {
        let bytes = codec::quantize(ty, &noise(16 * k, 7), k, None).unwrap();
        let blocks = Blocks::new(&[(ty, &bytes)], k).unwrap().unwrap();
        let panel = blocks.parts[0].panel(0, k / BLOCK);
        for (m, cols, add) in
            [(1, 16, false), (2, 3, true), (3, 16, false), (4, 8, false), (8, 9, true), (12, 16, true), (23, 15, false)]
        {
            let x = noise(m * k, m as u32);
            let mut buffer = Aligned::default();
            let input = Input::new(&x, k, m, k, &mut buffer);
            let stride = WIDTH + 3;
            let run = |isa: Isa| {
                let mut out: Vec<f32> = (0..m * stride).map(|i| i as f32).collect();
                let to = Place { c: SharedMut::new(&mut out), at: 1, stride, cols, add };
                // SAFETY: `out` belongs to this test.
                unsafe { multiply(isa, &input, panel, to) }
                out
            };
            let want = run(Isa::Plain);
            assert!((0..m * stride).all(|i| (1..=cols).contains(&(i % stride)) || want[i] == i as f32));
            for isa in Isa::available() {
                assert_eq!(run(isa), want, "{ty} {isa:?} {m} {cols} {add}");
            }
        }
    }
}

/// The extremes of 8 bits, where 16-bit sums of AVX2 would overflow.
#[test]
fn the_largest_levels_do_not_overflow() {
    for level in [-128i8, -127, 127] {
        let mut bytes = vec![0u8; 16 * 34];
        for row in bytes.chunks_exact_mut(34) {
            row[..2].copy_from_slice(&half::f16::ONE.to_le_bytes());
            row[2..].fill(level.cast_unsigned());
        }
        let blocks = Blocks::new(&[(crate::gguf::TensorType::Q8_0, &bytes)], 32).unwrap().unwrap();
        for x in [127.0f32, -127.0] {
            let mut buffer = Aligned::default();
            let input = Input::new(&[x; 32], 32, 1, 32, &mut buffer);
            for isa in Isa::available() {
                let mut out = [0.0; 16];
                let to = Place { c: SharedMut::new(&mut out), at: 0, stride: 16, cols: 16, add: false };
                // SAFETY: `out` belongs to this test.
                unsafe { multiply(isa, &input, blocks.parts[0].panel(0, 1), to) }
                assert_eq!(out, [32.0 * x * f32::from(level); 16], "{isa:?}");
            }
        }
    }
}
