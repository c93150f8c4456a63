//! What a run on calibration texts really did, tensor by tensor and step by step.

use super::budget::Predicted;
use crate::gguf::TensorType;
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
    pub name: String,
    pub from: TensorType,
    pub to: TensorType,
    /// The type that was wanted, where rows are not whole blocks of it.
    pub fallback_from: Option<TensorType>,
    pub method: Method,
    pub weights: u64,
    pub size_bytes: u64,
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
    /// All tensor bytes over all weights.
    #[must_use]
    pub fn bits_per_weight(&self) -> f64 {
        let (bytes, weights) = self.tensors.iter().fold((0, 0), |(b, w), t| (b + t.size_bytes, w + t.weights));
        8.0 * bytes as f64 / (weights as f64).max(1.0)
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
