//! Failures of the lake for the operator's log; callers of the interface get [`flywheel_types::Error`].

use flywheel_telemetry::TelemetryError;

/// What failed.
#[derive(Debug, thiserror::Error)]
pub enum LakeError {
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    #[error("delta table: {0}")]
    Delta(Box<deltalake::DeltaTableError>),
    #[error("query engine: {0}")]
    Query(Box<datafusion::error::DataFusionError>),
    #[error("arrow: {0}")]
    Arrow(#[from] arrow::error::ArrowError),
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
    /// The folder or the table is not what this program expects.
    #[error("{0}")]
    Unexpected(String),
}

impl From<deltalake::DeltaTableError> for LakeError {
    fn from(e: deltalake::DeltaTableError) -> Self {
        Self::Delta(Box::new(e))
    }
}
impl From<datafusion::error::DataFusionError> for LakeError {
    fn from(e: datafusion::error::DataFusionError) -> Self {
        Self::Query(Box::new(e))
    }
}
impl From<LakeError> for flywheel_types::Error {
    fn from(e: LakeError) -> Self {
        flywheel_types::Error::internal(e)
    }
}
