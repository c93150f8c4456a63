//! What a run on calibration texts really did, tensor by tensor and step by step.

use super::budget::Predicted;
use super::report::{TensorRow, bits_per_weight};
use serde::{Deserialize, Serialize};

/// How a tensor's levels were chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// A float type: stored as it is.
    Stored,
    /// Nearest level.
    Rounded,
    /// With compensation, columns as stored; `damping` is the share of the mean diagonal that was added.
    Compensated { damping: f32 },
    /// With compensation, columns by falling diagonal and scales fixed before.
    CompensatedByDiagonal { damping: f32 },
}

/// Mean squared output error over mean squared output, on the calibration texts, after each step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StepErrors {
    /// Nearest levels, unweighted scales.
    pub rounded: f64,
    /// Scales weighted by importance.
    pub weighted: f64,
    /// The same after folding; equal to `weighted` where nothing was folded.
    pub folded: f64,
    /// The same with the better of nearest and compensated levels.
    pub compensated: f64,
    /// What is in the file: after the descent.
    pub stored: f64,
}

/// One tensor of the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TunedTensor {
    #[serde(flatten)]
    pub row: TensorRow,
    pub method: Method,
    /// Of matrices that the calibration texts go through.
    pub errors: Option<StepErrors>,
    /// Input channels that were always zero.
    pub dead_channels: usize,
    /// Compensation was asked for and not possible: the inputs have no usable second moments.
    pub not_compensated: bool,
}

/// The whole result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TuneReport {
    pub size_bytes: u64,
    pub tensors: Vec<TunedTensor>,
    /// Expected rise of the loss by the chosen types and by the smallest uniform type, under a budget.
    pub predicted: Option<Predicted>,
}

impl TuneReport {
    /// All tensor bytes over all weights, times 8.
    #[must_use]
    pub fn bits_per_weight(&self) -> f64 {
        bits_per_weight(self.tensors.iter().map(|t| &t.row))
    }
    /// Mean of the relative errors over all calibrated matrices, by step.
    #[must_use]
    pub fn steps(&self) -> StepErrors {
        let all: Vec<StepErrors> = self.tensors.iter().filter_map(|t| t.errors).collect();
        let mean = |f: fn(&StepErrors) -> f64| all.iter().map(f).sum::<f64>() / all.len().max(1) as f64;
        StepErrors {
            rounded: mean(|e| e.rounded),
            weighted: mean(|e| e.weighted),
            folded: mean(|e| e.folded),
            compensated: mean(|e| e.compensated),
            stored: mean(|e| e.stored),
        }
    }
}
