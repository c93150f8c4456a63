//! How one matrix is stored: the ways that were asked for are tried, and the one with the least measured error is kept.

use super::QuantizeError;
use super::coded::Coded;
use super::error::{Damage, round_trip};
use super::gptq::{Compensation, Order};
use super::inputs::Input;
use super::profile::is_matrix;
use super::run::Run;
use super::tuned::{Method, StepErrors, TunedTensor};
use crate::codec;
use crate::gguf::{TensorInfo, TensorType};
use crate::linalg::{Operand, gemm};
use std::borrow::Cow;

/// Share of the regression on the changed input that is used: all of it would fit the calibration texts.
const CORRECTION: f32 = 0.5;

/// A matrix with what enters it.
pub(super) struct Work<'a> {
    pub tensor: &'a TensorInfo,
    /// As in the base, and what entered it there.
    pub original: &'a [f32],
    pub unfolded: &'a Input,
    /// After folding.
    pub values: &'a [f32],
    pub input: &'a Input,
    pub aids: &'a Aids,
}

/// What is computed once for the matrices that share an input; empty without compensation.
#[derive(Default)]
pub(super) struct Aids {
    /// Both orders, as far as the input allows.
    compensations: Vec<(Order, Compensation)>,
    /// `H` with the damping of the first.
    damped: Vec<f32>,
}

impl Aids {
    pub fn of(input: &Input) -> Self {
        let n = input.importance.len();
        let both = [Order::Stored, Order::Diagonal].into_iter();
        let compensations: Vec<_> =
            both.filter_map(|order| Some((order, Compensation::new(&input.h, n, order)?))).collect();
        let mut damped = Vec::new();
        if let Some((_, first)) = compensations.first() {
            damped.clone_from(&input.h);
            let mean = (0..n).map(|j| f64::from(damped[j * n + j])).sum::<f64>() / n as f64;
            (0..n).for_each(|j| damped[j * n + j] += first.damping * mean as f32);
        }
        Self { compensations, damped }
    }

    /// Weights whose outputs on the changed input are nearest to those of `values` on the input of the base model:
    /// `W + c · W D (H + damping)⁻¹` with `D` the drift (the asymmetric calibration of GPTAQ, arXiv 2504.02692, as a
    /// regression).
    fn corrected(&self, values: &[f32], input: &Input) -> Option<Vec<f32>> {
        let drift = input.drift.as_ref()?;
        let (_, stored) = self.compensations.iter().find(|(order, _)| *order == Order::Stored)?;
        let n = input.importance.len();
        let rows = values.len() / n;
        let mut product = vec![0.0; values.len()];
        gemm(rows, n, n, values, n, Operand::rows(drift, n), &mut product, n, false);
        let change = stored.solve(&product);
        let c = std::env::var("FW_ALPHA").ok().and_then(|v| v.parse().ok()).unwrap_or(CORRECTION);
        Some(values.iter().zip(change).map(|(w, d)| w + c * d).collect())
    }
}

impl Run<'_> {
    /// The best of the ways to store a matrix.
    pub fn matrix(&self, work: &Work<'_>) -> Result<(Vec<u8>, TunedTensor), QuantizeError> {
        let (bytes, mut report) = self.plain(work.tensor, work.values, Some(&work.input.importance))?;
        let (ty, n) = (report.to, work.tensor.row_len());
        if !ty.is_quantized() {
            return Ok((bytes, report));
        }
        let fail = |source| QuantizeError::Codec { tensor: work.tensor.name.clone(), source };
        let power = |values: &[f32], input: &Input| {
            Damage::between(values, &vec![0.0; values.len()], &input.h, n).error().max(f64::MIN_POSITIVE)
        };
        let (before, after) = (power(work.original, work.unfolded), power(work.values, work.input));
        let unfolded = |importance: Option<&[f32]>| -> Result<f64, QuantizeError> {
            let back = round_trip(ty, work.original, n, importance).map_err(fail)?;
            Ok(Damage::between(work.original, &back, &work.unfolded.h, n).error() / before)
        };
        let back = codec::dequantize(ty, &bytes, work.values.len()).map_err(fail)?;
        let folded = Damage::between(work.values, &back, &work.input.h, n).error() / after;
        let mut errors = StepErrors {
            rounded: unfolded(None)?,
            weighted: unfolded(Some(&work.unfolded.importance))?,
            folded,
            compensated: folded,
            stored: folded,
        };
        report.dead_channels = work.unfolded.stats.dead_channels().len();
        report.not_compensated = self.options.compensate && work.aids.compensations.is_empty();
        if work.aids.compensations.is_empty() {
            report.errors = Some(errors);
            return Ok((bytes, report));
        }
        let (coded, method) = self.compensated(work, ty, after, &mut errors);
        (report.errors, report.method) = (Some(errors), method);
        Ok((coded.pack(), report))
    }

    /// The better of nearest and compensated levels, and what the descent makes of it; errors over `power`.
    fn compensated(&self, work: &Work<'_>, ty: TensorType, power: f64, errors: &mut StepErrors) -> (Coded, Method) {
        let (n, input) = (work.tensor.row_len(), work.input);
        let corrected = if self.options.correct { work.aids.corrected(work.values, input) } else { None };
        let target: Cow<'_, [f32]> = corrected.map_or(Cow::Borrowed(work.values), Cow::Owned);
        let error = |coded: &Coded| Damage::between(&target, &coded.values(), &input.h, n).error() / power;
        let nearest = Coded::nearest(ty, &target, &input.importance);
        let mut best = (error(&nearest), nearest, Method::Rounded);
        for (order, compensation) in &work.aids.compensations {
            let coded = compensation.quantize(ty, &target, &input.importance);
            let (error, damping) = (error(&coded), compensation.damping);
            if error < best.0 {
                let method = match order {
                    Order::Stored => Method::Compensated { damping },
                    Order::Diagonal => Method::CompensatedByDiagonal { damping },
                };
                best = (error, coded, method);
            }
        }
        (errors.compensated, errors.stored) = (best.0, best.0);
        if self.options.refine {
            let mut refined = best.1.clone();
            refined.refine(&target, &work.aids.damped);
            let error = error(&refined);
            if error < best.0 {
                errors.stored = error;
                best.1 = refined;
            }
        }
        (best.1, best.2)
    }

    /// Nearest levels on scales weighted by `importance`.
    pub fn plain(
        &self,
        tensor: &TensorInfo,
        values: &[f32],
        importance: Option<&[f32]>,
    ) -> Result<(Vec<u8>, TunedTensor), QuantizeError> {
        let choice = self.choices[&tensor.name];
        let importance = importance.filter(|_| is_matrix(tensor));
        let bytes = codec::quantize(choice.actual, values, tensor.row_len(), importance)
            .map_err(|source| QuantizeError::Codec { tensor: tensor.name.clone(), source })?;
        let report = TunedTensor {
            name: tensor.name.clone(),
            from: tensor.ty,
            to: choice.actual,
            fallback_from: (choice.wanted != choice.actual).then_some(choice.wanted),
            method: if choice.actual.is_quantized() { Method::Rounded } else { Method::Stored },
            weights: tensor.n_elements() as u64,
            size_bytes: bytes.len() as u64,
            errors: None,
            dead_channels: 0,
            not_compensated: false,
        };
        Ok((bytes, report))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::{Hessian, InputStats};
    use crate::model::tests::noise;

    #[test]
    fn corrected_weights_are_nearer_to_the_outputs_of_the_base() {
        let (n, m, rows) = (64, 1000, 5);
        let base = noise(m * n, 1, 1.0);
        let (pull, own) = (noise(n * n, 2, 0.04), noise(m * n, 3, 0.2));
        // the changed input: a linear change of the base's, which can be made up for, and noise, which cannot
        let changed: Vec<f32> = (0..m * n)
            .map(|i| base[i] + own[i] + (0..n).map(|k| base[i / n * n + k] * pull[k * n + i % n]).sum::<f32>())
            .collect();
        let (mut stats, mut h, mut drift) = (InputStats::new(n), Hessian::new(n), Hessian::new(n));
        stats.add(&changed).unwrap();
        h.add(&changed);
        let away: Vec<f32> = base.iter().zip(&changed).map(|(b, x)| b - x).collect();
        drift.add_products(&away, &changed);
        let importance = stats.mean_square();
        let input = Input { stats, h: h.into_mean(), importance, drift: Some(drift.into_mean()) };
        let weights = noise(rows * n, 4, 0.1);
        let corrected = Aids::of(&input).corrected(&weights, &input).unwrap();
        let output = |w: &[f32], x: &[f32]| -> Vec<f32> {
            let dot = |t: usize, r: usize| (0..n).map(|j| w[r * n + j] * x[t * n + j]).sum::<f32>();
            (0..m * rows).map(|i| dot(i / rows, i % rows)).collect()
        };
        let wanted = output(&weights, &base);
        let away = |w: &[f32]| -> f32 { output(w, &changed).iter().zip(&wanted).map(|(a, b)| (a - b).powi(2)).sum() };
        assert!(away(&corrected) < 0.75 * away(&weights), "{} and {}", away(&corrected), away(&weights));
        let same = Input { drift: None, ..input };
        assert!(Aids::of(&same).corrected(&weights, &same).is_none(), "nothing changed before this block");
    }
}
