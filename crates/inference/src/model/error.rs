//! Errors of loading, running, training and evaluating a decoder.

use crate::gguf::GgufError;

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file is valid, but asks for something this decoder does not do; it never guesses.
    #[error("unsupported model: {what}")]
    Unsupported { what: String },
    /// A weight cannot be used.
    #[error("tensor `{tensor}`: {what}")]
    Weight { tensor: String, what: String },
    /// The caller's tokens or options cannot be run.
    #[error("cannot run: {what}")]
    Input { what: String },
    /// A computation left the range of numbers.
    #[error("{place} is not finite: {hint}")]
    NotFinite { place: String, hint: &'static str },
    /// The adapter does not fit, or not this base.
    #[error("adapter: {what}")]
    Adapter { what: String },
    /// Bytes of a saved training state are not what was saved.
    #[error("training state: {what}")]
    State { what: String },
    /// The caller's callback asked to stop.
    #[error("cancelled")]
    Cancelled,
}

impl ModelError {
    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into() }
    }
    pub(crate) fn input(what: impl Into<String>) -> Self {
        Self::Input { what: what.into() }
    }
    pub(crate) fn adapter(what: impl Into<String>) -> Self {
        Self::Adapter { what: what.into() }
    }
    pub(crate) fn state(what: impl Into<String>) -> Self {
        Self::State { what: what.into() }
    }
    pub(crate) fn weight(tensor: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Weight { tensor: tensor.into(), what: what.into() }
    }
}
