//! Row operations around the matrix products: norm, activation, softmax, and their derivatives.
//!
//! Each is written once as plain code over fixed lanes and compiled twice, with and without AVX2 + FMA; the
//! compiler vectorises it. Sums use [`SUM_LANES`] partial sums in a fixed pattern, so the width of the
//! machine's vectors does not show in the result.

const SUM_LANES: usize = 16;
/// Whether `mul_add` is one instruction on the compiled target without any detection.
pub(super) const NATIVE: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `a * b + c`, fused where the compiled target has it.
#[inline(always)]
pub(crate) fn fused(a: f32, b: f32, c: f32) -> f32 {
    fma::<NATIVE>(a, b, c)
}

/// Defines a function compiled for the plain target and for AVX2 + FMA, chosen at run time.
macro_rules! wide {
    ($(#[$doc:meta])* $vis:vis fn $name:ident[$fma:ident]($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<const $fma: bool>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body::<true>($($arg),*) }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: both features were detected on this CPU.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body::<{ $crate::linalg::ops::NATIVE }>($($arg),*)
        }
    };
}
pub(super) use wide;

/// Adds up the partial sums in a fixed tree.
#[inline(always)]
fn fold(mut lanes: [f32; SUM_LANES]) -> f32 {
    let mut width = SUM_LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn dot_body<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; SUM_LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(SUM_LANES), b.chunks_exact(SUM_LANES));
    let tail = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (x, y) in a_chunks.zip(b_chunks) {
        for i in 0..SUM_LANES {
            lanes[i] = fma::<FMA>(x[i], y[i], lanes[i]);
        }
    }
    for (i, (x, y)) in tail.enumerate() {
        lanes[i] = fma::<FMA>(*x, *y, lanes[i]);
    }
    fold(lanes)
}

/// `e^x` to about 2 units in the last place: argument reduction by ln 2 in two parts and the degree-6
/// polynomial of Cephes `expf` (<https://www.netlib.org/cephes/>). Below -87.3 the result is 0, above 88.3 it
/// stays at e^88.3 (softmax and sigmoid never need more).
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the published coefficients")]
fn exp<const FMA: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    let clamped = x.clamp(-87.3, 88.3);
    let shifted = fma::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, 2.121_944_40e-4, fma::<FMA>(n, -0.693_359_375, clamped));
    let mut p = 1.987_569_15e-4f32;
    for c in [1.398_199_95e-3, 8.333_451_91e-3, 4.166_579_59e-2, 1.666_666_55e-1, 5.000_000_12e-1] {
        p = fma::<FMA>(p, r, c);
    }
    let e = fma::<FMA>(p, r * r, r + 1.0);
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127); // 1..=254
    let scaled = e * f32::from_bits(exponent << 23);
    if x < -87.3 { 0.0 } else { scaled }
}

wide! {
    /// Dot product of equal-length slices.
    pub(crate) fn dot[FMA](a: &[f32], b: &[f32]) -> f32 { dot_body::<FMA>(a, b) }
}

wide! {
    /// Transposes a 32 × 32 block.
    pub(crate) fn transpose_block[FMA](from: &[f32; 1024], to: &mut [f32; 1024]) {
        let _ = FMA;
        const STEP: usize = 8;
        for i in (0..32).step_by(STEP) {
            for j in (0..32).step_by(STEP) {
                let mut block = [[0.0f32; STEP]; STEP];
                for r in 0..STEP {
                    block[r].copy_from_slice(&from[(i + r) * 32 + j..][..STEP]);
                }
                let mut turned = [[0.0f32; STEP]; STEP];
                for c in 0..STEP {
                    for r in 0..STEP {
                        turned[c][r] = block[r][c];
                    }
                }
                for c in 0..STEP {
                    to[(j + c) * 32 + i..][..STEP].copy_from_slice(&turned[c]);
                }
            }
        }
    }
}

wide! {
    /// `a += b`.
    pub(crate) fn add[FMA](a: &mut [f32], b: &[f32]) {
        let _ = FMA;
        for (a, b) in a.iter_mut().zip(b) {
            *a += b;
        }
    }
}

wide! {
    /// RMSNorm of one row (arXiv 1910.07467): `out = x / sqrt(mean(x^2) + eps) * weight`.
    pub(crate) fn rms_norm[FMA](x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let inv = 1.0 / (dot_body::<FMA>(x, x) / x.len() as f32 + eps).sqrt();
        for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
            *o = x * inv * w;
        }
    }
}

wide! {
    /// Adds the derivative of [`rms_norm`] with respect to `x` to `dx`:
    /// `inv * (w*dy) - x * inv^3 / n * sum(w * dy * x)`.
    pub(crate) fn rms_norm_backward[FMA](x: &[f32], weight: &[f32], eps: f32, dy: &[f32], dx: &mut [f32]) {
        let n = x.len() as f32;
        let inv = 1.0 / (dot_body::<FMA>(x, x) / n + eps).sqrt();
        let mut lanes = [0.0f32; SUM_LANES];
        for (i, ((x, w), d)) in x.iter().zip(weight).zip(dy).enumerate() {
            lanes[i % SUM_LANES] = fma::<FMA>(x * w, *d, lanes[i % SUM_LANES]);
        }
        let pull = fold(lanes) * inv * inv * inv / n;
        for (((o, x), w), d) in dx.iter_mut().zip(x).zip(weight).zip(dy) {
            *o += inv * w * d - x * pull;
        }
    }
}

wide! {
    /// Adds the derivative of [`rms_norm`] with respect to `weight` to `dw`: `dy * x * inv`.
    pub(crate) fn rms_norm_weight_backward[FMA](x: &[f32], eps: f32, dy: &[f32], dw: &mut [f32]) {
        let inv = 1.0 / (dot_body::<FMA>(x, x) / x.len() as f32 + eps).sqrt();
        for ((w, x), d) in dw.iter_mut().zip(x).zip(dy) {
            *w = fma::<FMA>(x * inv, *d, *w);
        }
    }
}

wide! {
    /// SwiGLU (arXiv 2002.05202): `out = gate * sigmoid(gate) * up`.
    pub(crate) fn swiglu[FMA](gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = g / (1.0 + exp::<FMA>(-g)) * u;
        }
    }
}

wide! {
    /// Derivatives of [`swiglu`]: `dgate` and `dup` are overwritten.
    pub(crate) fn swiglu_backward[FMA](gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        for ((((g, u), d), dg), du) in gate.iter().zip(up).zip(dy).zip(dgate).zip(dup) {
            let s = 1.0 / (1.0 + exp::<FMA>(-g));
            *dg = d * u * s * (1.0 + g * (1.0 - s));
            *du = d * g * s;
        }
    }
}

wide! {
    /// Replaces each value by `exp(value - shift)` and returns the sum.
    pub(crate) fn exp_in_place[FMA](row: &mut [f32], shift: f32) -> f32 {
        let mut lanes = [0.0f32; SUM_LANES];
        let mut chunks = row.chunks_exact_mut(SUM_LANES);
        for chunk in &mut chunks {
            for i in 0..SUM_LANES {
                chunk[i] = exp::<FMA>(chunk[i] - shift);
                lanes[i] += chunk[i];
            }
        }
        for (x, lane) in chunks.into_remainder().iter_mut().zip(&mut lanes) {
            *x = exp::<FMA>(*x - shift);
            *lane += *x;
        }
        fold(lanes)
    }
}

wide! {
    fn max[FMA](row: &[f32]) -> f32 {
        let _ = FMA;
        let mut lanes = [f32::NEG_INFINITY; SUM_LANES];
        for chunk in row.chunks(SUM_LANES) {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                // Not `f32::max`, which would hide a NaN in the second place only.
                *lane = if *x > *lane { *x } else { *lane };
            }
        }
        lanes.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }
}

wide! {
    fn exp_sum[FMA](row: &[f32], shift: f32) -> f32 {
        let mut lanes = [0.0f32; SUM_LANES];
        let chunks = row.chunks_exact(SUM_LANES);
        let tail = chunks.remainder();
        for chunk in chunks {
            for i in 0..SUM_LANES {
                lanes[i] += exp::<FMA>(chunk[i] - shift);
            }
        }
        for (x, lane) in tail.iter().zip(&mut lanes) {
            *lane += exp::<FMA>(*x - shift);
        }
        fold(lanes)
    }
}

/// Softmax over the first `len` values; the rest of the row becomes 0.
pub(crate) fn softmax_prefix(row: &mut [f32], len: usize) {
    let (live, masked) = row.split_at_mut(len);
    masked.fill(0.0);
    let peak = max(live);
    let scale = 1.0 / exp_in_place(live, peak);
    live.iter_mut().for_each(|p| *p *= scale);
}

/// `ln(sum(exp(row)))`.
pub(crate) fn log_sum_exp(row: &[f32]) -> f32 {
    let peak = max(row);
    peak + exp_sum(row, peak).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0.0f64;
        for i in -870..882 {
            let mut x = [i as f32 / 10.0 + 0.037];
            let want = f64::from(x[0]).exp();
            exp_in_place(&mut x, 0.0);
            worst = worst.max((f64::from(x[0]) / want - 1.0).abs());
        }
        assert!(worst < 3e-7, "relative error {worst}");
        let mut x = [-200.0, 0.0, f32::NAN];
        exp_in_place(&mut x, 0.0);
        assert_eq!(&x[..2], &[0.0, 1.0]);
        assert!(x[2].is_nan(), "a NaN must not disappear");
    }

    #[test]
    fn softmax_ignores_what_is_masked() {
        let mut row = [1.0, 2.0, 3.0, 1e30, f32::NAN];
        softmax_prefix(&mut row, 3);
        let e: Vec<f32> = [1.0f32, 2.0, 3.0].iter().map(|x| x.exp()).collect();
        let sum: f32 = e.iter().sum();
        for i in 0..3 {
            assert!((row[i] - e[i] / sum).abs() < 1e-6);
        }
        assert_eq!(&row[3..], &[0.0, 0.0]);
    }

    #[test]
    fn softmax_of_a_longer_masked_row_is_bit_equal() {
        let base: Vec<f32> = (0..77).map(|i| ((i * 37) % 19) as f32 / 7.0).collect();
        let mut short = base.clone();
        softmax_prefix(&mut short, 77);
        let mut long = base;
        long.resize(128, 5.0);
        softmax_prefix(&mut long, 77);
        assert_eq!(short[..], long[..77]);
    }

    #[test]
    fn derivatives_match_finite_differences() {
        let n = 21;
        let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin() * 1.3).collect();
        let w: Vec<f32> = (0..n).map(|i| 1.0 + (i as f32 * 0.3).cos() * 0.5).collect();
        let dy: Vec<f32> = (0..n).map(|i| (i as f32 * 1.1).cos()).collect();
        let loss = |x: &[f32]| -> f64 {
            let mut y = vec![0.0; n];
            rms_norm(x, &w, 1e-5, &mut y);
            y.iter().zip(&dy).map(|(a, b)| f64::from(a * b)).sum()
        };
        let mut dx = vec![0.0; n];
        rms_norm_backward(&x, &w, 1e-5, &dy, &mut dx);
        for i in 0..n {
            let (mut hi, mut lo) = (x.clone(), x.clone());
            hi[i] += 1e-2;
            lo[i] -= 1e-2;
            let want = (loss(&hi) - loss(&lo)) / 2e-2;
            assert!((f64::from(dx[i]) - want).abs() < 2e-3, "{i}: {} {want}", dx[i]);
        }
        let mut dw = vec![0.25; n];
        rms_norm_weight_backward(&x, 1e-5, &dy, &mut dw);
        let mut plain = vec![0.0; n];
        rms_norm(&x, &vec![1.0; n], 1e-5, &mut plain);
        for i in 0..n {
            // linear in the weight: the slope is the product itself
            assert!((dw[i] - 0.25 - plain[i] * dy[i]).abs() < 1e-6, "{i}: {}", dw[i]);
        }
        let (mut dg, mut du) = (vec![0.0; n], vec![0.0; n]);
        swiglu_backward(&x, &w, &dy, &mut dg, &mut du);
        let silu = |g: f64| g / (1.0 + (-g).exp());
        for i in 0..n {
            let (g, u, d) = (f64::from(x[i]), f64::from(w[i]), f64::from(dy[i]));
            let want = d * u * (silu(g + 1e-4) - silu(g - 1e-4)) / 2e-4;
            assert!((f64::from(dg[i]) - want).abs() < 1e-5);
            assert!((f64::from(du[i]) - d * silu(g)).abs() < 1e-5);
        }
    }

    #[test]
    fn log_sum_exp_survives_large_logits() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f32.ln())).abs() < 1e-3);
    }
}
