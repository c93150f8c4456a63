//! Safetensors models to GGUF: `config.json`, `tokenizer.json` and the weights of a folder become one file that this
//! crate and stock llama.cpp load.
//!
//! One tensor is in memory at a time. A tensor, setting or tokenizer that has no place in the file is refused by name:
//! a model that lost something still talks, only worse.

mod config;
mod deepseek;
mod source;
mod tensors;

pub use crate::safetensors_file::SafetensorsError;
pub(crate) use tensors::interleave;

use crate::codec::{self, CodecError};
use crate::gguf::{GgufError, TensorSpec, TensorType, Writer};
use crate::tokenizer::{HfTokenizer, TokenizerError};
use config::HfConfig;
use source::Weights;
use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};
use tensors::Entry;

/// Why a model could not be converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// A file of the model is missing, broken, or asks for something that has no GGUF form here.
    #[error("{}: {what}", path.display())]
    Model { path: PathBuf, what: String },
    #[error(transparent)]
    Weights(#[from] SafetensorsError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A value does not fit into the type of the file.
    #[error("tensor `{tensor}`: {source}; convert to BF16 or F32 instead")]
    Value {
        tensor: String,
        #[source]
        source: CodecError,
    },
    #[error(transparent)]
    Write(#[from] GgufError),
    /// The caller's callback asked to stop.
    #[error("cancelled")]
    Cancelled,
}

/// Type of the matrices in the file; vectors stay F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatType {
    F32,
    F16,
    BF16,
}

impl FloatType {
    fn tensor_type(self) -> TensorType {
        match self {
            Self::F32 => TensorType::F32,
            Self::F16 => TensorType::F16,
            Self::BF16 => TensorType::BF16,
        }
    }
    /// Value of `general.file_type`.
    fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::BF16 => 32,
        }
    }
}

/// A tensor that is about to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    pub done: usize,
    pub total: usize,
    pub tensor: &'a str,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertReport {
    pub architecture: &'static str,
    pub tensors: usize,
    pub size_bytes: u64,
    /// What had to be assumed, for the log.
    pub warnings: Vec<String>,
}

/// Converts the model in `folder` to the file `out`, which appears only when complete. `progress` is called before
/// every tensor and may stop the work.
///
/// # Errors
/// [`ConvertError`]; nothing is left behind.
pub fn convert(
    folder: &Path,
    out: &Path,
    ty: FloatType,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<ConvertReport, ConvertError> {
    let mut warnings = Vec::new();
    let config = HfConfig::open(folder, &mut warnings)?;
    let weights = Weights::open(folder)?;
    let tokenizer = HfTokenizer::open(folder)?;
    let entries = tensors::plan(&config, &weights)?;
    let mut metadata = config.metadata(folder, ty.file_type());
    metadata.extend(tokenizer.metadata(config.vocab_size)?);
    let specs: Vec<TensorSpec> = entries.iter().map(|e| e.spec(ty.tensor_type())).collect();
    let mut writer = Writer::create(out, &metadata, &specs)?;
    let total = specs.len();
    for (done, (entry, spec)) in entries.iter().zip(&specs).enumerate() {
        if progress(Progress { done, total, tensor: &spec.name }).is_break() {
            return Err(ConvertError::Cancelled);
        }
        writer.push(&encoded(entry, spec, &weights)?)?;
    }
    let size_bytes = writer.finish()?;
    Ok(ConvertReport { architecture: config.arch.name(), tensors: total, size_bytes, warnings })
}

fn encoded(entry: &Entry, spec: &TensorSpec, weights: &Weights) -> Result<Vec<u8>, ConvertError> {
    let values = entry.values(weights)?;
    codec::quantize(spec.ty, &values, entry.row_len(), None)
        .map_err(|source| ConvertError::Value { tensor: spec.name.clone(), source })
}

#[cfg(test)]
pub(crate) mod folders;
#[cfg(test)]
mod tests;
