//! Search for the channel scales of a fold (AWQ, arXiv 2306.00978) by the error that really results.

use super::error::{Damage, Matrix, sample};
use super::fold;
use crate::calibrate::InputStats;
use crate::model::{ModelConfig, Site};

/// Steps of the exponent between 0 and 1: every other one is tried, then those beside the best.
const STEPS: u32 = 10;
/// Rows of a matrix that the search looks at, spread evenly.
const ROWS: usize = 64;
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
    let samples: Vec<_> = matrices.iter().map(|m| sample(m.values, m.columns, ROWS).0).collect();
    let samples: Vec<Matrix<'_>> = matrices.iter().zip(&samples).map(|(m, values)| Matrix { values, ..*m }).collect();
    let importance = stats.mean_square();
    let error = |scales: &[f32]| -> f64 {
        let columns = fold::columns(site, config, scales);
        samples.iter().map(|m| scaled_error(m, &columns, &importance, h)).sum()
    };
    let family = Family::new(site, config, stats, matrices);
    let ones = vec![1.0; fold::channels(site, config)];
    let mut best = (error(&ones), None);
    let attempt = |by_weight: bool, step: u32, best: &mut (f64, Option<(bool, u32)>)| {
        let e = family.scales(by_weight, step).map_or(f64::INFINITY, |scales| error(&scales));
        if e < best.0 {
            *best = (e, Some((by_weight, step)));
        }
    };
    for by_weight in [false, true] {
        (0..=STEPS).step_by(2).for_each(|step| attempt(by_weight, step, &mut best));
    }
    if let Some((by_weight, step)) = best.1 {
        [step.saturating_sub(1), (step + 1).min(STEPS)]
            .into_iter()
            .for_each(|step| attempt(by_weight, step, &mut best));
    }
    best.1.and_then(|(by_weight, step)| family.scales(by_weight, step))
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

/// Logarithms of the candidates' factors, one for each channel.
struct Family {
    input: Vec<f32>,
    weight: Vec<f32>,
}

impl Family {
    fn new(site: Site, c: &ModelConfig, stats: &InputStats, matrices: &[Matrix<'_>]) -> Self {
        let input = stats.mean_abs();
        let square = mean_squares(matrices, input.len());
        let logs = |values: Vec<f32>| values.into_iter().map(log_of).collect();
        let weight = fold::shared_mean(site, c, &square).into_iter().map(f32::sqrt).collect();
        Self { input: logs(fold::shared_mean(site, c, &input)), weight: logs(weight) }
    }

    /// With α = `step` / 10; `None` for no scaling at all.
    fn scales(&self, by_weight: bool, step: u32) -> Option<Vec<f32>> {
        let alpha = step as f32 / STEPS as f32;
        let exponent = if by_weight { 1.0 - alpha } else { 0.0 };
        let raw = self.input.iter().zip(&self.weight).map(|(a, w)| a * alpha - w * exponent);
        (alpha != 0.0 || exponent != 0.0).then(|| centred(&raw.collect::<Vec<f32>>()))
    }
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
