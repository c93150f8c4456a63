//! What can go wrong while publishing.

use super::keys::SignError;
use crate::canonical::CanonicalError;
use crate::manifest::ManifestError;
use crate::tuf::{KeyError, MetadataError, Role};
use crate::verify::VerifyError;
use flywheel_types::Digest;

/// Why nothing was published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("repository metadata: {0}")]
    Metadata(#[from] MetadataError),
    #[error("repository content: {0}")]
    Content(#[from] VerifyError),
    #[error("manifest: {0}")]
    Manifest(#[from] ManifestError),
    #[error("cannot write metadata: {0}")]
    Canonical(#[from] CanonicalError),
    #[error("signing as {role}: {source}")]
    Sign { role: Role, source: SignError },
    #[error("key file: {0}")]
    KeyFile(String),
    #[error("key: {0}")]
    Key(#[from] KeyError),
    #[error("cannot read {path}: {why}")]
    Read { path: String, why: String },
    #[error("{path} is missing from the repository")]
    Missing { path: String },
    #[error("keyring: {0}")]
    Keyring(String),
    #[error("bundle {bundle}: {why}")]
    Bundle { bundle: Digest, why: String },
    #[error("assignment: {0}")]
    Assignment(String),
    #[error("{role}: {why}")]
    Role { role: Role, why: String },
}
