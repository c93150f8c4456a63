//! Codecs: digests of decoded blocks as the `gguf` Python package decodes them, hand-computed blocks, error
//! bounds, importance, and grids that agree with the decoder.

use super::*;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

const QUANTIZED: [TensorType; 9] = [
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Iq4Nl,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
];

/// Pseudo-random bytes with the top exponent bit of half-precision fields cleared, so that all are finite.
fn noise_blocks(ty: TensorType) -> (Vec<u8>, usize) {
    let halves: &[usize] = match ty {
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => &[0, 2],
        TensorType::Q6K => &[208],
        _ => &[0],
    };
    let (size, n) = (ty.block_bytes(), if ty.is_quantized() { 64 } else { 4096 });
    let mut state = 12345u32;
    let mut bytes: Vec<u8> = (0..n * size)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    for block in bytes.chunks_mut(size) {
        for h in halves {
            block[h + 1] &= 0xbf;
        }
    }
    (bytes, n * ty.block_len())
}

#[test]
fn decoding_is_bit_exact_to_the_reference() {
    // Digests of the same bytes decoded by gguf 0.19 (`gguf.quants.dequantize`, numpy).
    let expected = [
        (TensorType::F16, "a17569fc56edc9dd"),
        (TensorType::BF16, "4aed52821850e3a9"),
        (TensorType::Q4_0, "1b1d7030566af3e4"),
        (TensorType::Q4_1, "fcd20e32f2260160"),
        (TensorType::Q5_0, "607bef2c6e185caa"),
        (TensorType::Q5_1, "2c12bcd1bb76f7ce"),
        (TensorType::Q8_0, "545c185035a5d486"),
        (TensorType::Iq4Nl, "83aaecef81b93ba5"),
        (TensorType::Q4K, "40b1803e7ed1d2ba"),
        (TensorType::Q5K, "008f9e5cb0cc95ab"),
        (TensorType::Q6K, "ffae19d693e216c2"),
    ];
    for (ty, digest) in expected {
        let (bytes, n) = noise_blocks(ty);
        let decoded: Vec<u8> = dequantize(ty, &bytes, n).unwrap().iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(hex::encode(&Sha256::digest(&decoded)[..8]), digest, "{ty}");
    }
}

#[test]
fn hand_made_block_decodes() {
    // d = 0.5, nibbles 0x0f -> levels 15 (first half) and 0 (second): (15-8)/2 and (0-8)/2.
    let mut block = vec![0x00, 0x38];
    block.extend([0x0f; 16]);
    let out = dequantize(TensorType::Q4_0, &block, 32).unwrap();
    assert_eq!((out[0], out[16]), (3.5, -4.0));
}

/// Approximately normal weights, fixed seed.
fn weights(n: usize, seed: u64) -> Vec<f32> {
    use rand::{Rng, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0).map(|x| x * 0.02).collect()
}

fn rmse(ty: TensorType, x: &[f32], row: usize, importance: Option<&[f32]>, weight: &[f32]) -> f64 {
    let back = dequantize(ty, &quantize(ty, x, row, importance).unwrap(), x.len()).unwrap();
    let (mut num, mut den) = (0.0, 0.0);
    for (i, (a, b)) in x.iter().zip(&back).enumerate() {
        let w = f64::from(weight[i % weight.len()]);
        num += w * f64::from(a - b).powi(2);
        den += w * f64::from(*a).powi(2);
    }
    (num / den).sqrt()
}

#[test]
fn relative_error_on_normal_weights_is_that_of_the_format() {
    let x = weights(256 * 64, 1);
    // Upper bounds for normal weights, chosen per format; a wrong scale or layout exceeds them many times.
    for (ty, bound) in [
        (TensorType::F16, 0.0003),
        (TensorType::BF16, 0.002),
        (TensorType::Q4_0, 0.090),
        (TensorType::Q4_1, 0.080),
        (TensorType::Q5_0, 0.045),
        (TensorType::Q5_1, 0.040),
        (TensorType::Q8_0, 0.0062),
        (TensorType::Iq4Nl, 0.082),
        (TensorType::Q4K, 0.078),
        (TensorType::Q5K, 0.039),
        (TensorType::Q6K, 0.020),
    ] {
        let e = rmse(ty, &x, 256, None, &[1.0]);
        assert!(e < bound && e > bound / 3.0, "{ty}: {e}");
    }
}

#[test]
fn importance_lowers_the_weighted_error() {
    let x = weights(256 * 32, 2);
    let importance: Vec<f32> = (0..256).map(|i| if i % 16 == 0 { 100.0 } else { 1.0 }).collect();
    for ty in QUANTIZED.into_iter().filter(|t| *t != TensorType::Q8_0) {
        let with = rmse(ty, &x, 256, Some(&importance), &importance);
        let without = rmse(ty, &x, 256, None, &importance);
        assert!(with < 0.95 * without, "{ty}: {with} with importance, {without} without");
    }
}

#[test]
fn zero_importance_stays_finite_and_close() {
    let x = weights(512, 3);
    let importance = [0.0; 256];
    for ty in QUANTIZED {
        let e = rmse(ty, &x, 256, Some(&importance), &[1.0]);
        assert!(e < 0.12, "{ty}: {e}");
    }
}

#[test]
fn values_on_the_grid_are_kept() {
    // Re-quantising what a format can already represent must not lose anything worth mentioning.
    for ty in [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q5_0, TensorType::Q5_1, TensorType::Q8_0] {
        let x = weights(1024, 4);
        let once = dequantize(ty, &quantize(ty, &x, 1024, None).unwrap(), 1024).unwrap();
        let e = rmse(ty, &once, 1024, None, &[1.0]);
        assert!(e < 2e-3, "{ty}: {e}");
    }
}

#[test]
fn special_blocks() {
    for ty in QUANTIZED {
        for value in [0.0, -0.0, 1e-30, 0.25, -3.0, 60_000.0] {
            let x = [value; 256];
            let back = dequantize(ty, &quantize(ty, &x, 256, None).unwrap(), 256).unwrap();
            let worst = back.iter().map(|b| (b - value).abs()).fold(0.0, f32::max);
            assert!(worst <= value.abs() * 0.08 + 1e-20, "{ty}: {value} came back {worst} off");
        }
    }
}

#[test]
fn bad_input_is_named() {
    let mut x = [0.0; 512];
    x[300] = f32::NAN;
    let e = quantize(TensorType::Q4K, &x, 256, None).unwrap_err();
    assert!(matches!(e, CodecError::NotFinite { index: 300, .. }), "{e}");
    x[300] = 70_000.0;
    let e = quantize(TensorType::Q4_0, &x, 256, None).unwrap_err();
    assert!(matches!(e, CodecError::OutOfRange { index: 300, .. }), "{e}");
    assert!(quantize(TensorType::BF16, &x, 256, None).is_ok());
    x[300] = 0.0;
    let e = quantize(TensorType::Q6K, &x, 128, None).unwrap_err();
    assert_eq!(e.to_string(), "rows of 128 weights are not whole blocks of 256 (Q6_K)");
    assert!(quantize(TensorType::Q4_0, &x, 320, None).is_err(), "512 values are not rows of 320");
    assert!(quantize(TensorType::Q4_0, &x, 0, None).is_err());
    let e = quantize(TensorType::Q4_0, &x, 256, Some(&[1.0; 32])).unwrap_err();
    assert_eq!(e, CodecError::Length { want: 256, got: 32 });
    let mut importance = [1.0; 256];
    importance[7] = f32::NAN;
    let e = quantize(TensorType::Q4_0, &x, 256, Some(&importance)).unwrap_err();
    assert!(matches!(e, CodecError::Importance { column: 7, .. }));
    assert!(dequantize(TensorType::Q4_0, &[0; 17], 32).is_err());
    assert!(dequantize(TensorType::Q4_0, &[0; 18], 31).is_err());
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    let x = weights(256 * 50, 5);
    for ty in QUANTIZED {
        let run = |n| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
            pool.install(|| quantize(ty, &x, 256, None).unwrap())
        };
        assert_eq!(run(1), run(4), "{ty}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// The grid is exactly what the decoder computes, and `round` picks a nearest level.
    #[test]
    fn grid_value_is_the_decoded_value(seed in any::<u64>(), scale in 1e-4f32..100.0, shift in -2.0f32..2.0) {
        let x: Vec<f32> = weights(256, seed).iter().map(|x| (x + 0.02 * shift) * scale).collect();
        for ty in QUANTIZED {
            let n = ty.block_len();
            let fit = fit(ty, &x[..n], None);
            let mut levels = vec![0; n];
            fit.grid.round(&x[..n], &mut levels);
            let mut block = vec![0; ty.block_bytes()];
            pack(ty, &fit, &levels, &mut block);
            let mut back = vec![0.0; n];
            decode_block(ty, &block, &mut back);
            for i in 0..n {
                prop_assert_eq!(levels[i], fit.grid.level(i, x[i]));
                prop_assert_eq!(back[i].to_bits(), fit.grid.value(i, levels[i]).to_bits(), "{} {}", ty, i);
                let near = [levels[i].saturating_sub(1), levels[i].saturating_add(1)];
                for other in near {
                    let other = other.clamp(fit.grid.lowest as i8, fit.grid.highest as i8);
                    let (a, b) = ((back[i] - x[i]).abs(), (fit.grid.value(i, other) - x[i]).abs());
                    prop_assert!(a <= b * 1.0001 + 1e-12, "{} weight {}: {} beats {}", ty, i, b, a);
                }
            }
        }
    }
}

#[test]
fn moved_scales_are_stored_as_they_are_used() {
    for ty in QUANTIZED {
        let n = ty.block_len();
        let x: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 40.0) * (1.0 + (i / 16) as f32)).collect();
        let before = fit(ty, &x, None);
        let (mut after, grid) = (before.clone(), &before.grid);
        for s in 0..n / grid.sub_len {
            after = after.nearest(ty, s, 0.9 * grid.step[s], 0.8 * grid.min[s]);
        }
        let top = |values: &[f32]| values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        for s in 0..n / grid.sub_len {
            let (step, min) = (after.grid.step[s] - 0.9 * grid.step[s], after.grid.min[s] - 0.8 * grid.min[s]);
            assert!(step.abs() < 0.01 * top(&grid.step), "{ty} {s}: {step}");
            assert!(min.abs() <= 0.01 * top(&grid.min), "{ty} {s}: {min}");
        }
        assert_eq!(has_minimum(ty), top(&grid.min) > 0.0, "{ty}");
        let (mut levels, mut bytes, mut back) = (vec![0; n], vec![0; ty.block_bytes()], vec![0.0; n]);
        after.grid.round(&x, &mut levels);
        pack(ty, &after, &levels, &mut bytes);
        decode_block(ty, &bytes, &mut back);
        let used: Vec<f32> = levels.iter().enumerate().map(|(i, l)| after.grid.value(i, *l)).collect();
        assert_eq!(back, used, "{ty}");
    }
}
