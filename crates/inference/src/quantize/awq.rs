//! Search for the channel scales of a fold (AWQ, arXiv 2306.00978) by the error that really results.

use super::error::{Damage, Matrix};
use super::fold;
use crate::calibrate::InputStats;
use crate::model::{ModelConfig, Site};

/// Steps of the exponent between 0 and 1.
const STEPS: u32 = 10;
/// Rows of a matrix that the search looks at, spread evenly.
const ROWS: usize = 256;
/// Largest and smallest scale: beyond, half-precision block scales of the divided rows lose digits.
const LIMIT: f32 = 64.0;

/// The scales of the channels at `site` with the least error, `None` when no scaling is better than all others.
///
/// Candidates are `s = a^α / w^(δ(1-α))` with `a` the mean magnitude of the channel's input, `w` the root mean square
/// of its weights, α in 0, 0.1 … 1 and δ in {0, 1}; the error is `Σ tr(E H Eᵀ)` over the matrices that share the input.
pub(super) fn search(
    site: Site,
    config: &ModelConfig,
    stats: &InputStats,
    h: &[f32],
    matrices: &[Matrix<'_>],
) -> Option<Vec<f32>> {
    let samples: Vec<Vec<f32>> = matrices.iter().map(sample).collect();
    let samples: Vec<Matrix<'_>> = matrices.iter().zip(&samples).map(|(m, values)| Matrix { values, ..*m }).collect();
    let importance = stats.mean_square();
    let error = |scales: &[f32]| -> f64 {
        let columns = fold::columns(site, config, scales);
        samples.iter().map(|m| scaled_error(m, &columns, &importance, h)).sum()
    };
    let ones = vec![1.0; fold::channels(site, config)];
    let mut best = (error(&ones), None);
    for scales in candidates(site, config, stats, matrices) {
        let e = error(&scales);
        if e < best.0 {
            best = (e, Some(scales));
        }
    }
    best.1
}

/// Error of the matrix when its columns are scaled before quantisation and scaled back after.
fn scaled_error(m: &Matrix<'_>, columns: &[f32], importance: &[f32], h: &[f32]) -> f64 {
    let mut scaled = m.values.to_vec();
    fold::multiply_columns(&mut scaled, columns);
    let importance: Vec<f32> = importance.iter().zip(columns).map(|(i, s)| i / (s * s)).collect();
    let Ok(mut back) = super::error::round_trip(m.ty, &scaled, m.columns, Some(&importance)) else {
        return f64::INFINITY; // beyond half precision: not a candidate
    };
    let inverse: Vec<f32> = columns.iter().map(|s| 1.0 / s).collect();
    fold::multiply_columns(&mut back, &inverse);
    Damage::between(m.values, &back, h, m.columns).error()
}

fn candidates(site: Site, c: &ModelConfig, stats: &InputStats, matrices: &[Matrix<'_>]) -> Vec<Vec<f32>> {
    let input = fold::shared_mean(site, c, &stats.mean_abs());
    let square = mean_squares(matrices, stats.mean_abs().len());
    let weight: Vec<f32> = fold::shared_mean(site, c, &square).into_iter().map(f32::sqrt).collect();
    let mut out = Vec::new();
    for by_weight in [false, true] {
        for step in 0..=STEPS {
            let alpha = step as f32 / STEPS as f32;
            let exponent = if by_weight { 1.0 - alpha } else { 0.0 };
            if alpha == 0.0 && exponent == 0.0 {
                continue; // no scaling
            }
            let raw = input.iter().zip(&weight).map(|(a, w)| log_of(*a) * alpha - log_of(*w) * exponent);
            out.push(centred(&raw.collect::<Vec<f32>>()));
        }
    }
    out
}

/// Logarithm; channels without any magnitude are not scaled.
fn log_of(x: f32) -> f32 {
    if x > 0.0 { libm::logf(x) } else { 0.0 }
}

/// Scales with these logarithms, their geometric mean 1.
fn centred(logs: &[f32]) -> Vec<f32> {
    let mean = logs.iter().sum::<f32>() / logs.len().max(1) as f32;
    logs.iter().map(|l| libm::expf(l - mean).clamp(1.0 / LIMIT, LIMIT)).collect()
}

/// Mean square of the weights of each column, over all matrices.
fn mean_squares(matrices: &[Matrix<'_>], columns: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; columns];
    let rows = matrices.iter().flat_map(|m| m.values.chunks_exact(columns));
    let mut n = 0usize;
    for row in rows {
        sums.iter_mut().zip(row).for_each(|(s, w)| *s += f64::from(*w).powi(2));
        n += 1;
    }
    sums.into_iter().map(|s| (s / n.max(1) as f64) as f32).collect()
}

fn sample(m: &Matrix<'_>) -> Vec<f32> {
    let rows = m.values.len() / m.columns;
    let step = rows.div_ceil(ROWS).max(1);
    m.values.chunks_exact(m.columns).step_by(step).flatten().copied().collect()
}
