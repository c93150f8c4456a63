//! What can go wrong inside this crate. What a caller of the HTTP interface may read is
//! [`flywheel_types::Error`]; this type is for the operator's log and for start-up.

use std::path::PathBuf;

/// Failure of the log, the duplicate state or an encoder.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// A file operation failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried, for example `cannot open`.
        what: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// A stored file does not have the form it must have.
    #[error("{} is damaged at byte {offset}: {detail}", path.display())]
    Damaged { path: PathBuf, offset: u64, detail: String },
    /// Another process holds the log.
    #[error("{} is in use by another process; one ingest process owns one log folder", path.display())]
    InUse { path: PathBuf },
    /// Arrow refused to build or read a batch: a bug or a damaged record.
    #[error("arrow: {0}")]
    Arrow(#[from] arrow::error::ArrowError),
    /// The writer thread is gone.
    #[error("the log writer has stopped")]
    Stopped,
}

impl TelemetryError {
    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { what, path: path.into(), source }
    }
}

impl From<TelemetryError> for flywheel_types::Error {
    fn from(e: TelemetryError) -> Self {
        flywheel_types::Error::internal(e)
    }
}
