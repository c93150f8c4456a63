//! What the layout is worth: panels against the same integers row by row on the blocks as the file has them.

use crate::codec;
use crate::gguf::TensorType;
use crate::linalg::blocks::{Blocks, tests::noise};
use half::f16;
use std::arch::x86_64::*;
use std::time::Instant;

/// A row of activations as stock llama.cpp keeps it: scale and 32 levels, block after block.
fn rows_of(x: &[f32]) -> Vec<(f32, [i8; 32])> {
    x.chunks(32)
        .map(|block| {
            let scale = block.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            (scale, std::array::from_fn(|i| (block[i] * inverse).round_ties_even() as i8))
        })
        .collect()
}

/// The dot product of stock llama.cpp (`ggml_vec_dot_q8_0_q8_0`, `ggml_vec_dot_q4_0_q8_0`) with VNNI.
#[target_feature(enable = "avx2,fma,f16c,avx512vnni,avx512vl")]
unsafe fn dot_row<const FOUR_BITS: bool>(row: &[u8], x: &[(f32, [i8; 32])]) -> f32 {
    let mut sum = _mm256_setzero_ps();
    for (block, (scale, levels)) in row.chunks_exact(if FOUR_BITS { 18 } else { 34 }).zip(x) {
        // SAFETY: a block has its 16 or 32 bytes of levels behind the scale, `levels` has 32.
        unsafe {
            let w = if FOUR_BITS {
                let bytes = _mm_loadu_si128(block[2..].as_ptr().cast());
                let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
                _mm256_sub_epi8(_mm256_and_si256(both, _mm256_set1_epi8(15)), _mm256_set1_epi8(8))
            } else {
                _mm256_loadu_si256(block[2..].as_ptr().cast())
            };
            let x = _mm256_loadu_si256(levels.as_ptr().cast());
            let dot = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            let d = f16::from_le_bytes([block[0], block[1]]).to_f32() * scale;
            sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(d), sum);
        }
    }
    let mut lanes = [0.0f32; 8];
    // SAFETY: eight values.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) }
    lanes.iter().sum()
}

/// Least seconds of `f`.
fn best(mut f: impl FnMut()) -> f64 {
    let time = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    (0..7).map(|_| time(&mut f)).fold(f64::INFINITY, f64::min)
}

/// Prints seconds of both layouts on one thread, for one row (decoding) and 128 (a prompt).
#[test]
#[ignore = "a measurement: needs an idle machine, run it alone with --ignored --nocapture"]
fn panels_against_rows_of_the_file() {
    if !is_x86_feature_detected!("avx512vnni") || !is_x86_feature_detected!("avx512vl") {
        return;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for (ty, rows, m) in [
        (TensorType::Q8_0, 1 << 16, 1),
        (TensorType::Q4_0, 1 << 16, 1),
        (TensorType::Q8_0, 1 << 12, 128),
        (TensorType::Q4_0, 1 << 12, 128),
    ] {
        let cols = 1024;
        let part = codec::quantize(ty, &noise(64 * cols, 1), cols, None).unwrap();
        let bytes: Vec<u8> = part.iter().copied().cycle().take(part.len() * rows / 64).collect();
        let blocks = Blocks::new(&[(ty, &bytes)], cols).unwrap().unwrap();
        let x = noise(m * cols, 2);
        let (mut a, mut b) = (vec![0.0; m * rows], vec![0.0; m * rows]);
        let panels = pool.install(|| best(|| blocks.forward(&x, m, &mut a, false)));
        let row_bytes = bytes.len() / rows;
        let plain = best(|| {
            let x: Vec<_> = x.chunks(cols).map(rows_of).collect();
            for (i, row) in bytes.chunks(row_bytes).enumerate() {
                for (r, x) in x.iter().enumerate() {
                    // SAFETY: the features were detected.
                    b[r * rows + i] = unsafe {
                        if ty == TensorType::Q4_0 { dot_row::<true>(row, x) } else { dot_row::<false>(row, x) }
                    };
                }
            }
        });
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-2), "{ty}: the same product");
        println!(
            "{ty}, {m} rows: panels {panels:.5} s, rows of the file {plain:.5} s: {:.2} times faster",
            plain / panels
        );
    }
}
