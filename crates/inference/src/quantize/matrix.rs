//! How one matrix is stored: the ways that were asked for are tried, and the one with the least measured error is kept.

use super::QuantizeError;
use super::coded::Coded;
use super::error::{Damage, round_trip, sample};
use super::gptq::{Compensation, Order};
use super::inputs::Input;
use super::profile::is_matrix;
use super::report::TensorRow;
use super::run::Run;
use super::tuned::{Method, StepErrors, TunedTensor};
use crate::codec::{self, CodecError};
use crate::gguf::{TensorInfo, TensorType};
use std::borrow::Cow;

/// By how much correlations of inputs are taken to be smaller than on the calibration texts: other texts share the sizes of
/// inputs more than what goes with what.
const SHRINKAGE: f32 = 0.3;

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
        let mut damped: Vec<f32> = input.h.iter().map(|v| v * (1.0 - SHRINKAGE)).collect();
        (0..n).for_each(|j| damped[j * n + j] = input.h[j * n + j]);
        let both = [Order::Stored, Order::Diagonal].into_iter();
        let compensations: Vec<_> =
            both.filter_map(|order| Some((order, Compensation::new(&damped, n, order)?))).collect();
        if let Some((_, first)) = compensations.first() {
            let mean = (0..n).map(|j| f64::from(damped[j * n + j])).sum::<f64>() / n as f64;
            (0..n).for_each(|j| damped[j * n + j] += first.damping * mean as f32);
        }
        if compensations.is_empty() {
            damped.clear();
        }
        Self { compensations, damped }
    }
}

/// Rows of a matrix on which the ways are compared, spread evenly.
const ROWS: usize = 128;
/// Rows that are coded at once: what is kept of them meanwhile is several times their size.
const SLAB: usize = 8192;

impl Run<'_> {
    /// The best of the ways to store a matrix, by the error of some of its rows.
    pub fn matrix(&self, work: &Work<'_>) -> Result<(Vec<u8>, TunedTensor), QuantizeError> {
        let (tensor, aids) = (work.tensor, work.aids);
        let ty = self.choices[&tensor.name].actual;
        if !ty.is_quantized() {
            return self.plain(tensor, work.values, None);
        }
        let fail = |source| QuantizeError::Codec { tensor: tensor.name.clone(), source };
        codec::check_weights(ty, work.values).map_err(fail)?;
        let n = work.input.importance.len();
        let ruler = Ruler::new(work.values, &work.input.h, n);
        let mut errors = unfolded_errors(ty, work).map_err(fail)?;
        let way = self.choose(ty, work, &ruler, &mut errors);
        let mut bytes = Vec::with_capacity(work.values.len() / ty.block_len() * ty.block_bytes());
        for rows in work.values.chunks(SLAB * n) {
            bytes.extend(way.code(ty, rows, work).pack());
        }
        let report = TunedTensor {
            method: way.method(),
            errors: Some(errors),
            dead_channels: work.unfolded.stats.dead_channels().len(),
            not_compensated: self.options.compensate && aids.compensations.is_empty(),
            ..self.described(tensor)
        };
        Ok((bytes, report))
    }

    /// The way with the least error of the sampled rows; fills in the errors after folding.
    fn choose<'w>(&self, ty: TensorType, work: &Work<'w>, ruler: &Ruler<'_>, errors: &mut StepErrors) -> Way<'w> {
        let importance = &work.input.importance;
        let rows = ruler.sample(work.values);
        let nearest = Coded::nearest(ty, &rows, importance);
        let error = |coded: &Coded| ruler.error(&rows, &coded.values());
        let mut best = (error(&nearest), nearest.clone(), Way { compensation: None, refine: false });
        for compensation in &work.aids.compensations {
            let coded = compensation.1.quantize(&nearest, &rows, importance);
            let error = error(&coded);
            if error < best.0 {
                best = (error, coded, Way { compensation: Some(compensation), refine: false });
            }
        }
        errors.folded = error(&nearest);
        let (compensated, mut coded, mut way) = best;
        (errors.compensated, errors.stored) = (compensated, compensated);
        if self.options.refine && !work.aids.damped.is_empty() {
            coded.refine(&rows, &work.aids.damped);
            let refined = error(&coded);
            if refined < compensated {
                (errors.stored, way.refine) = (refined, true);
            }
        }
        way
    }

    /// The report of a tensor that is not measured.
    fn described(&self, tensor: &TensorInfo) -> TunedTensor {
        let choice = self.choices[&tensor.name];
        let row_bytes = choice.actual.row_bytes(tensor.row_len()).unwrap_or(0);
        TunedTensor {
            row: TensorRow::new(tensor, choice, tensor.n_elements() / tensor.row_len() * row_bytes),
            method: if choice.actual.is_quantized() { Method::Rounded } else { Method::Stored },
            errors: None,
            dead_channels: 0,
            not_compensated: false,
        }
    }

    /// Nearest levels on scales weighted by `importance`.
    pub fn plain(
        &self,
        tensor: &TensorInfo,
        values: &[f32],
        importance: Option<&[f32]>,
    ) -> Result<(Vec<u8>, TunedTensor), QuantizeError> {
        let importance = importance.filter(|_| is_matrix(tensor));
        let bytes = codec::quantize(self.choices[&tensor.name].actual, values, tensor.row_len(), importance)
            .map_err(|source| QuantizeError::Codec { tensor: tensor.name.clone(), source })?;
        Ok((bytes, self.described(tensor)))
    }
}

/// How levels are found.
#[derive(Clone, Copy)]
struct Way<'a> {
    compensation: Option<&'a (Order, Compensation)>,
    refine: bool,
}

impl Way<'_> {
    fn code(self, ty: TensorType, rows: &[f32], work: &Work<'_>) -> Coded {
        let importance = &work.input.importance;
        let nearest = Coded::nearest(ty, rows, importance);
        let mut coded = match self.compensation {
            Some((_, compensation)) => compensation.quantize(&nearest, rows, importance),
            None => nearest,
        };
        if self.refine {
            coded.refine(rows, &work.aids.damped);
        }
        coded
    }

    fn method(self) -> Method {
        match self.compensation {
            None => Method::Rounded,
            Some((Order::Stored, c)) => Method::Compensated { damping: c.damping },
            Some((Order::Diagonal, c)) => Method::CompensatedByDiagonal { damping: c.damping },
        }
    }
}

/// Measures errors of some rows, relative to the outputs of the weights it was made for.
struct Ruler<'a> {
    h: &'a [f32],
    columns: usize,
    power: f64,
}

impl<'a> Ruler<'a> {
    fn new(values: &[f32], h: &'a [f32], columns: usize) -> Self {
        let rows = sample(values, columns, ROWS).0;
        let power = Damage::between(&rows, &vec![0.0; rows.len()], h, columns).error().max(f64::MIN_POSITIVE);
        Self { h, columns, power }
    }
    fn sample<'v>(&self, values: &'v [f32]) -> Cow<'v, [f32]> {
        sample(values, self.columns, ROWS).0
    }
    /// Of sampled rows.
    fn error(&self, wanted: &[f32], back: &[f32]) -> f64 {
        Damage::between(wanted, back, self.h, self.columns).error() / self.power
    }
}

/// What rounding does without folds: with unweighted and with weighted scales.
fn unfolded_errors(ty: TensorType, work: &Work<'_>) -> Result<StepErrors, CodecError> {
    let (n, importance) = (work.unfolded.importance.len(), &work.unfolded.importance);
    let ruler = Ruler::new(work.original, &work.unfolded.h, n);
    let rows = ruler.sample(work.original);
    let error = |importance: Option<&[f32]>| -> Result<f64, CodecError> {
        Ok(ruler.error(&rows, &round_trip(ty, &rows, n, importance)?))
    };
    Ok(StepErrors { rounded: error(None)?, weighted: error(Some(importance))?, ..StepErrors::default() })
}
