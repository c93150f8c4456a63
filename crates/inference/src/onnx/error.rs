//! Errors of reading, rewriting and writing ONNX graphs.

use std::path::{Path, PathBuf};

/// Why an ONNX file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum OnnxError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The bytes are not a protobuf message of this form (also: a truncated one).
    #[error("not a valid ONNX file, at byte {at} in {place}: {what}")]
    Malformed { at: usize, place: &'static str, what: String },
    /// Valid protobuf, but not a valid graph.
    #[error("not a valid ONNX graph: {what}")]
    Graph { what: String },
    /// Valid, but something this crate does not know; it never guesses.
    #[error("unsupported ONNX: {what}")]
    Unsupported { what: String },
}

impl OnnxError {
    pub(super) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
    pub(super) fn graph(what: impl Into<String>) -> Self {
        Self::Graph { what: what.into() }
    }
    pub(super) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into() }
    }
}
