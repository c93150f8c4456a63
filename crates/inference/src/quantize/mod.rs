//! Makes a quantised GGUF from a float one: a type per tensor, stock's fallbacks, an honest report.
//!
//! The result loads in stock llama.cpp, has the metadata of the base in the same order, and does not depend on
//! the number of threads. One tensor is in memory at a time; the file appears only when complete.

mod awq;
mod budget;
mod coded;
mod convert;
mod error;
mod fold;
mod gptq;
mod imatrix;
mod inputs;
mod knapsack;
mod legacy_imatrix;
mod matrix;
pub mod npu;
mod parts;
mod profile;
mod refine;
mod report;
mod run;
mod sensitivity;
mod tune;
mod tuned;

pub use budget::Predicted;
pub use fold::Fold;
pub use imatrix::Imatrix;
pub use profile::{Profile, UnknownProfile};
pub use report::{QuantizeReport, TensorReport, TensorRow};
pub use sensitivity::{Harm, LayerNoise, MatrixSensitivity, Sensitivity, sensitivity};
pub use tune::{Goal, TuneOptions, tune};
pub use tuned::{Method, StepErrors, TuneReport, TunedTensor};

use crate::{
    codec::CodecError,
    gguf::{Gguf, GgufError, TensorInfo, TensorSpec, TensorType, Value, Writer},
    model::ModelError,
};
use convert::convert;
use profile::{Choice, Chooser, is_matrix};
use std::{collections::BTreeMap, ops::ControlFlow, path::Path};

/// What to make.
#[derive(Debug, Clone)]
pub struct QuantizeOptions {
    pub profile: Profile,
    /// Importance of columns; tensors it does not know are quantised unweighted.
    pub imatrix: Option<Imatrix>,
    /// Types of single tensors, by name, instead of the profile's choice.
    pub overrides: BTreeMap<String, TensorType>,
    /// Give input channels without importance the mean one and say so in the report, instead of refusing. Experts that
    /// no token of the calibration reached are always quantised unweighted, and counted as well.
    pub fill_zero_importance: bool,
    /// Accept a base that is already quantised. Its error stays in the result and is not in the report.
    pub allow_requantize: bool,
    /// Refuse instead of falling back where rows are not whole blocks.
    pub strict_types: bool,
    /// Look for the best scale of every block. Without: tensors without importance in formats with blocks of 32 get the scale of
    /// their largest magnitude and the bytes that llama.cpp gives them, several times faster and less exact.
    pub search: bool,
}

impl QuantizeOptions {
    /// A profile without importance, overrides or exceptions.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        Self {
            profile,
            imatrix: None,
            overrides: BTreeMap::new(),
            fill_zero_importance: false,
            allow_requantize: false,
            strict_types: false,
            search: true,
        }
    }
}

/// How far a run is: called before each tensor, and once at the end.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    pub done: usize,
    pub total: usize,
    /// The tensor that is next; empty at the end.
    pub tensor: &'a str,
}

/// Why a model could not be quantised. Nothing is left on disk.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("tensor `{tensor}`: {source}")]
    Codec {
        tensor: String,
        #[source]
        source: CodecError,
    },
    #[error("tensor `{tensor}` is already {ty}: quantise from the F16 or F32 model, or allow re-quantising")]
    AlreadyQuantized { tensor: String, ty: TensorType },
    #[error("tensor `{tensor}`: rows of {row_len} are not whole blocks of {wanted}, and fallbacks are not allowed")]
    Fallback { tensor: String, row_len: usize, wanted: TensorType },
    #[error("tensor `{tensor}`: importance {what}")]
    Importance { tensor: String, what: String },
    #[error("there is no tensor `{tensor}` to override")]
    UnknownOverride { tensor: String },
    /// Running the model on the calibration texts failed.
    #[error(transparent)]
    Model(ModelError),
    #[error("a file of {budget} bytes is not possible: the smallest with these types is {least} bytes")]
    Budget { budget: u64, least: u64 },
    #[error("cancelled")]
    Cancelled,
}

impl From<ModelError> for QuantizeError {
    fn from(e: ModelError) -> Self {
        match e {
            ModelError::Cancelled => Self::Cancelled,
            ModelError::Gguf(e) => Self::Gguf(e),
            other => Self::Model(other),
        }
    }
}

/// Quantises `base` into the file `out`. `progress` may stop the run with `ControlFlow::Break`.
///
/// # Errors
/// [`QuantizeError`]; values that are not finite are refused with the tensor's name.
pub fn quantize(
    base: &Gguf,
    out: &Path,
    options: &QuantizeOptions,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<QuantizeReport, QuantizeError> {
    let choices = plan(base, options)?;
    let specs: Vec<TensorSpec> =
        base.tensors().iter().zip(&choices).map(|(t, c)| TensorSpec { ty: c.actual, ..t.spec() }).collect();
    let from = options.imatrix.as_ref().map(Provenance::of);
    let mut writer = Writer::create(out, &metadata(base, options.profile.file_type(), from.as_ref()), &specs)?;
    let total = specs.len();
    let mut tensors = Vec::with_capacity(total);
    for (done, (tensor, choice)) in base.tensors().iter().zip(&choices).enumerate() {
        if progress(Progress { done, total, tensor: &tensor.name }).is_break() {
            return Err(QuantizeError::Cancelled);
        }
        let importance = importance(options, tensor)?;
        let (bytes, error) = convert(base, tensor, choice.actual, importance.as_deref(), options)?;
        writer.push(&bytes)?;
        tensors.push(TensorReport {
            row: TensorRow::new(tensor, *choice, bytes.len()),
            weighted: importance.is_some() && choice.actual.is_quantized(),
            filled_channels: zero_channels(options, tensor),
            relative_error: error,
        });
    }
    if progress(Progress { done: total, total, tensor: "" }).is_break() {
        return Err(QuantizeError::Cancelled);
    }
    let size_bytes = writer.finish()?;
    Ok(QuantizeReport { profile: options.profile, size_bytes, tensors })
}

/// The type of every tensor, with all refusals that need no data.
fn plan(base: &Gguf, options: &QuantizeOptions) -> Result<Vec<Choice>, QuantizeError> {
    check_overrides(base, &options.overrides)?;
    let chooser = Chooser::new(base, options.profile, options.imatrix.is_some());
    base.tensors()
        .iter()
        .map(|tensor| {
            let choice = chooser.choose_with(tensor, &options.overrides);
            check_choice(tensor, choice, options.strict_types, options.allow_requantize)?;
            Ok(choice)
        })
        .collect()
}

fn check_overrides(base: &Gguf, overrides: &BTreeMap<String, TensorType>) -> Result<(), QuantizeError> {
    match overrides.keys().find(|name| base.find(name).is_none()) {
        Some(tensor) => Err(QuantizeError::UnknownOverride { tensor: tensor.clone() }),
        None => Ok(()),
    }
}

fn check_choice(tensor: &TensorInfo, choice: Choice, strict: bool, requantize: bool) -> Result<(), QuantizeError> {
    let (name, row_len) = (tensor.name.clone(), tensor.row_len());
    if strict && choice.wanted != choice.actual {
        return Err(QuantizeError::Fallback { tensor: name, row_len, wanted: choice.wanted });
    }
    if tensor.ty.is_quantized() && choice.actual != tensor.ty && !requantize {
        return Err(QuantizeError::AlreadyQuantized { tensor: name, ty: tensor.ty });
    }
    Ok(())
}

/// Where importance came from, for the file's metadata.
struct Provenance {
    datasets: String,
    entries: u32,
    chunks: u32,
}

impl Provenance {
    fn of(imatrix: &Imatrix) -> Self {
        let entries = imatrix.tensors().count() as u32;
        Self { datasets: imatrix.datasets.join(", "), entries, chunks: imatrix.chunks }
    }
}

/// Metadata of the base with the keys that describe the file's own form replaced.
fn metadata(base: &Gguf, file_type: u32, importance: Option<&Provenance>) -> Vec<(String, Value)> {
    let mut out: Vec<_> =
        base.metadata().iter().filter(|(k, _)| !k.starts_with("quantize.imatrix.")).cloned().collect();
    let mut set = |key: &str, value: Value| match out.iter_mut().find(|(k, _)| k == key) {
        Some((_, old)) => *old = value,
        None => out.push((key.to_owned(), value)),
    };
    set("general.file_type", Value::U32(file_type));
    set("general.quantization_version", Value::U32(2));
    if let Some(from) = importance {
        set("quantize.imatrix.dataset", Value::String(from.datasets.clone()));
        set("quantize.imatrix.entries_count", Value::U32(from.entries));
        set("quantize.imatrix.chunks_count", Value::U32(from.chunks));
    }
    out
}

/// Importance of a tensor's columns, slice after slice for three dimensions, checked. `None`: unweighted.
fn importance(options: &QuantizeOptions, tensor: &TensorInfo) -> Result<Option<Vec<f32>>, QuantizeError> {
    // importance files also have what is never quantised: routers
    let known = options.imatrix.as_ref().filter(|_| is_matrix(tensor));
    let Some(values) = known.and_then(|m| m.get(&tensor.name)) else { return Ok(None) };
    let refuse = |what: String| Err(QuantizeError::Importance { tensor: tensor.name.clone(), what });
    let slices = tensor.dims.get(2).map_or(1, |n| *n as usize);
    if values.len() != tensor.row_len() * slices {
        return refuse(format!("has {} columns, the tensor {:?}", values.len(), tensor.dims));
    }
    let Some(column) = values.iter().position(|v| *v == 0.0) else { return Ok(Some(values)) };
    if options.fill_zero_importance {
        return Ok(Some(values.chunks(tensor.row_len()).flat_map(|slice| filled(slice.to_vec())).collect()));
    }
    refuse(format!(
        "of column {column} is zero: it never saw an activation; calibrate on more text, leave it out, or allow \
         filling it with the mean"
    ))
}

/// Input channels whose importance is zero, or that belong to experts which no token reached.
fn zero_channels(options: &QuantizeOptions, tensor: &TensorInfo) -> usize {
    let Some(imatrix) = options.imatrix.as_ref().filter(|_| is_matrix(tensor)) else { return 0 };
    let Some(values) = imatrix.get(&tensor.name) else { return 0 };
    values.iter().filter(|v| **v == 0.0).count() + imatrix.unseen(&tensor.name) * tensor.row_len()
}

/// Zeros replaced by the mean of the others; by 1 where there are no others.
fn filled(mut values: Vec<f32>) -> Vec<f32> {
    let (sum, n) = values.iter().filter(|v| **v > 0.0).fold((0.0f64, 0u32), |(s, n), v| (s + f64::from(*v), n + 1));
    let mean = if n > 0 { (sum / f64::from(n)) as f32 } else { 1.0 };
    values.iter_mut().filter(|v| **v == 0.0).for_each(|v| *v = mean);
    values
}

#[cfg(test)]
mod tests;
