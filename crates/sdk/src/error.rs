//! Errors of the device core. Every text says what was wrong, where, and what the app can do.

use crate::transport::TransportError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a call of the device core did not do its work. The installed model keeps running in every case.
#[derive(Debug, thiserror::Error)]
pub enum SdkError {
    /// The file system said no.
    #[error("{what} failed for {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    /// The volume or the app's quota is full. What was downloaded so far is kept.
    #[error("no space left while writing {}; free some storage and call again", path.display())]
    NoSpace { path: PathBuf },
    /// A stored file cannot be read. It is named so that support can ask for it.
    #[error("{} is damaged: {why}", path.display())]
    Corrupt { path: PathBuf, why: String },
    /// Another process of the app holds the data folder.
    #[error("{} is used by another process of this app; call again when it has ended", path.display())]
    Busy { path: PathBuf },
    /// The network failed; the call may be repeated.
    #[error("{what}: {source}")]
    Transport { what: String, source: TransportError },
    /// The server answered with a status that this call cannot use.
    #[error("{what}: the server answered {status}")]
    Status { what: String, status: u16, retry_after_s: Option<u64> },
    /// Signed data did not verify. Nothing was installed.
    #[error("{what} was refused: {why}")]
    Refused {
        what: String,
        why: String,
        /// Stable machine word that also goes into the `refused` report.
        code: &'static str,
    },
    /// Signed metadata is older than its expiry; nothing new is installed until fresh metadata arrives.
    #[error("update metadata has expired ({0}); the installed model keeps running")]
    Expired(String),
    /// An answer of the server is not of the expected form.
    #[error("{what} cannot be read: {why}")]
    Malformed { what: String, why: String },
    /// The app called in the wrong order or with a wrong value.
    #[error("{0}")]
    Usage(String),
}

impl SdkError {
    /// Wraps an I/O error and tells "disk full" apart, whatever the platform calls it.
    pub(crate) fn io(what: &'static str, path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace { path: path.to_path_buf() },
            _ => Self::Io { what, path: path.to_path_buf(), source },
        }
    }

    pub(crate) fn refused(what: impl Into<String>, code: &'static str, why: impl ToString) -> Self {
        Self::Refused { what: what.into(), why: why.to_string(), code }
    }

    /// Whether the same call may succeed later without anybody changing anything on this device.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Transport { .. } | Self::Expired(_) | Self::Busy { .. } | Self::NoSpace { .. } => true,
            Self::Status { status, .. } => *status == 408 || *status == 425 || *status == 429 || *status >= 500,
            Self::Io { .. } | Self::Corrupt { .. } | Self::Refused { .. } | Self::Malformed { .. } | Self::Usage(_) => {
                false
            }
        }
    }
}
