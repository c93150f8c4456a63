//! Matrices in blocks against the codec: values to the bit, products to the rounding of activations.

use super::*;
use crate::codec;

pub(super) const TYPES: [TensorType; 9] = [
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Iq4Nl,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
];

pub(super) fn noise(n: usize, seed: u32) -> Vec<f32> {
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

/// Two stacked matrices of different types, 37 and 20 rows of 512.
fn stacked(a: TensorType, b: TensorType) -> (Blocks, Vec<f32>) {
    let cols = 512;
    let bytes = |ty, rows: usize, seed| codec::quantize(ty, &noise(rows * cols, seed), cols, None).unwrap();
    let (a, b) = ((a, bytes(a, 37, 1)), (b, bytes(b, 20, 2)));
    let mut plain = codec::dequantize(a.0, &a.1, 37 * cols).unwrap();
    plain.extend(codec::dequantize(b.0, &b.1, 20 * cols).unwrap());
    (Blocks::new(&[(a.0, &a.1), (b.0, &b.1)], cols).unwrap().unwrap(), plain)
}

#[test]
fn rows_and_panels_are_what_the_codec_decodes() {
    for (i, ty) in TYPES.into_iter().enumerate() {
        let (blocks, plain) = stacked(ty, TYPES[(i + 1) % TYPES.len()]);
        assert_eq!(blocks.rows(), 57);
        let mut row = vec![0.0; 512];
        for r in [0, 15, 16, 36, 37, 56] {
            blocks.row(r, &mut row);
            assert_eq!(row, plain[r * 512..(r + 1) * 512], "{ty} row {r}");
        }
        for (first, from, k) in [(0, 0, 512), (32, 96, 64), (32, 32, 7), (57, 0, 32)] {
            let mut panel = vec![9.0; k * LANES];
            blocks.panel(first, from, k, &mut panel);
            for (at, got) in panel.iter().enumerate() {
                let (input, r) = (from + at / LANES, first + at % LANES);
                let want = if r < 57 { plain[r * 512 + input] } else { 0.0 };
                assert_eq!(got.to_bits(), want.to_bits(), "{ty} {first} {from} {at}");
            }
        }
    }
}

#[test]
fn products_differ_by_the_rounding_of_activations_only() {
    for (i, ty) in TYPES.into_iter().enumerate() {
        let (blocks, plain) = stacked(ty, TYPES[(i + 1) % TYPES.len()]);
        let (m, k, n) = (15, 512, 57);
        let x = noise(m * k, 3);
        let mut out = vec![1.0; m * n];
        blocks.forward(&x, m, &mut out, true);
        for r in 0..m {
            for c in 0..n {
                let (mut sum, mut bound) = (1.0f64, 1e-4);
                for (block, w) in x[r * k..(r + 1) * k].chunks(32).zip(plain[c * k..(c + 1) * k].chunks(32)) {
                    let step = f64::from(block.iter().fold(0.0f32, |m, v| m.max(v.abs()))) / 127.0;
                    sum += block.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
                    bound += w.iter().map(|w| f64::from(w.abs()) * 0.51 * step).sum::<f64>();
                }
                let got = f64::from(out[r * n + c]);
                // The bound is the worst case; errors of both signs stay far below it.
                assert!((got - sum).abs() < bound * 0.25, "{ty} {r} {c}: {got} {sum} ± {bound}");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_other_rows() {
    let (blocks, _) = stacked(TensorType::Q4_0, TensorType::Q6K);
    let x = noise(31 * 512, 4);
    let mut all = vec![0.0; 31 * 57];
    blocks.forward(&x, 31, &mut all, false);
    for r in 0..31 {
        let mut one = vec![0.0; 57];
        blocks.forward(&x[r * 512..(r + 1) * 512], 1, &mut one, false);
        assert_eq!(one, all[r * 57..(r + 1) * 57]);
    }
}

#[test]
fn a_scale_that_is_not_finite_is_named_and_floats_are_declined() {
    let mut bytes = codec::quantize(TensorType::Q8_0, &noise(20 * 64, 5), 64, None).unwrap();
    bytes[34 * 7..34 * 7 + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
    assert_eq!(Blocks::new(&[(TensorType::Q8_0, &bytes)], 64).unwrap().unwrap_err(), 7 * 32);
    assert!(Blocks::new(&[(TensorType::F16, &[0; 128])], 64).is_none());
    assert!(Blocks::new(&[(TensorType::Q4K, &[0; 144])], 64).is_none());
}
