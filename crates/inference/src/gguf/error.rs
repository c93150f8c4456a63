//! Errors of reading and writing GGUF files: each says what was wrong and where.

use std::path::{Path, PathBuf};

/// Why a GGUF file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The bytes are not a valid GGUF file (also: a truncated one).
    #[error("not a valid GGUF file, at byte {at}: {what}")]
    Malformed { at: u64, what: String },
    /// Valid, but something this crate does not know; it never guesses.
    #[error("unsupported GGUF: {what}")]
    Unsupported { what: String },
    /// A metadata key that the caller needs is not in the file.
    #[error("the GGUF file has no metadata key `{key}`")]
    MissingKey { key: String },
    /// A metadata key has another type than the caller needs.
    #[error("metadata key `{key}` is {found}, expected {expected}")]
    WrongType { key: String, expected: &'static str, found: String },
    /// A tensor that the caller needs is not in the file.
    #[error("the GGUF file has no tensor `{name}`")]
    MissingTensor { name: String },
    /// A tensor does not have the shape, type or values that the caller needs.
    #[error("tensor `{name}`: {what}")]
    Tensor { name: String, what: String },
    /// A model in several files is not one whole set.
    #[error("{}: {what}", path.display())]
    Shards { path: PathBuf, what: String },
    /// The caller asked to write something that would not be a valid file.
    #[error("cannot write GGUF: {what}")]
    Write { what: String },
}

impl GgufError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
    pub(crate) fn malformed(at: usize, what: impl Into<String>) -> Self {
        Self::Malformed { at: at as u64, what: what.into() }
    }
    pub(super) fn shards(path: &Path, what: impl Into<String>) -> Self {
        Self::Shards { path: path.to_owned(), what: what.into() }
    }
    /// A complaint about one tensor, for code that builds on this module.
    pub fn tensor(name: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Tensor { name: name.into(), what: what.into() }
    }
}
