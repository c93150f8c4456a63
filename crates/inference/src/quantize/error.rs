//! What quantisation does to a matrix's outputs.

use crate::calibrate::row_errors;
use crate::codec::{self, CodecError};
use crate::gguf::TensorType;
use std::borrow::Cow;

/// A matrix and the type it is to get.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a> {
    /// Row-major.
    pub values: &'a [f32],
    pub columns: usize,
    pub ty: TensorType,
}

/// At most `rows` of a matrix, spread evenly: every `.1`-th.
pub(super) fn sample(values: &[f32], columns: usize, rows: usize) -> (Cow<'_, [f32]>, usize) {
    let step = (values.len() / columns.max(1)).div_ceil(rows).max(1);
    if step == 1 {
        return (values.into(), 1);
    }
    (values.chunks_exact(columns).step_by(step).flatten().copied().collect::<Vec<_>>().into(), step)
}

/// Mean squared output error of each row: `(E H Eᵀ)ᵢᵢ`, with `H` the second moments of the inputs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Damage {
    rows: Vec<f64>,
}

impl Damage {
    /// Of `back` in place of `values`.
    pub fn between(values: &[f32], back: &[f32], h: &[f32], columns: usize) -> Self {
        let error: Vec<f32> = values.iter().zip(back).map(|(a, b)| a - b).collect();
        Self { rows: row_errors(&error, h, columns) }
    }
    /// `tr(E H Eᵀ)`.
    pub fn error(&self) -> f64 {
        self.rows.iter().sum()
    }
    /// `½ Σ gᵢ (E H Eᵀ)ᵢᵢ`: the expected rise of the loss when `g` holds the mean squared gradients of the outputs
    /// (diagonal of the empirical Fisher matrix in output space).
    pub fn loss(&self, output_gradients: &[f32]) -> f64 {
        0.5 * self.rows.iter().zip(output_gradients).map(|(e, g)| e * f64::from(*g)).sum::<f64>()
    }
}

/// The values after storing them as `ty`.
pub(super) fn round_trip(
    ty: TensorType,
    values: &[f32],
    columns: usize,
    importance: Option<&[f32]>,
) -> Result<Vec<f32>, CodecError> {
    let bytes = codec::quantize(ty, values, columns, importance)?;
    codec::dequantize(ty, &bytes, values.len())
}
