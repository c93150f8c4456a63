//! What can go wrong on the device, with a stable word for reports.

use super::fetch::FetchError;
use super::store::StoreError;
use crate::manifest::ManifestError;
use crate::tuf::{MetadataError, Role};
use chrono::{DateTime, Utc};
use flywheel_types::Digest;

/// Why a refresh did not succeed. What was verified before stays in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    #[error("{path} is missing from the repository")]
    Missing { path: String },
    #[error("{path} is larger than {limit} bytes")]
    TooLarge { path: String, limit: u64 },
    #[error("{path} does not have the announced length and digest")]
    WrongContent { path: String },
    #[error("more than {0} new roots in one refresh; run it again to go on")]
    TooManyRoots(u64),
    #[error("assignment: {0}")]
    Assignment(String),
    #[error("assignment serial {offered} is older than {trusted}, which was accepted before")]
    AssignmentRollback { trusted: u64, offered: u64 },
    #[error("catalog: {0}")]
    Catalog(String),
    #[error("{0}")]
    Fetch(#[from] FetchError),
    #[error("trust records cannot be read: {0}")]
    Store(#[from] StoreError),
    #[error("no request is open: call `begin` first")]
    NoOpenRequest,
}

impl VerifyError {
    /// Stable word for device reports: `stale`, `rollback`, `bad_signature`, `mismatch`, `missing`, `malformed`,
    /// `network`, `storage`, `misuse`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        use MetadataError as M;
        match self {
            Self::Metadata(M::Expired { .. }) => "stale",
            Self::Metadata(M::Rollback { .. } | M::NotListed { .. }) | Self::AssignmentRollback { .. } => "rollback",
            Self::Metadata(M::BelowThreshold { .. } | M::BadDelegation { .. }) => "bad_signature",
            Self::Metadata(M::WrongContent { .. } | M::WrongVersion { .. }) | Self::WrongContent { .. } => "mismatch",
            Self::Metadata(M::Malformed { .. } | M::TooLarge { .. })
            | Self::TooLarge { .. }
            | Self::TooManyRoots(_)
            | Self::Assignment(_)
            | Self::Catalog(_) => "malformed",
            Self::Missing { .. } => "missing",
            Self::Fetch(_) => "network",
            Self::Store(_) => "storage",
            Self::NoOpenRequest => "misuse",
        }
    }
}

/// Why nothing new may be installed. An installed bundle keeps running in every one of these cases.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallBlocked {
    #[error("nothing has been verified yet: refresh first")]
    NothingVerified,
    #[error("{role} metadata expired at {expires}: refresh first")]
    Stale { role: Role, expires: DateTime<Utc> },
    #[error("newer metadata was seen but not completely fetched: refresh again")]
    RefreshUnfinished,
    #[error("the trust record could not be stored ({0}): free some space")]
    TrustNotStored(String),
    #[error("bundle {0} is not in the catalog")]
    NotListed(Digest),
    #[error("bundle {0} has been revoked")]
    Revoked(Digest),
    #[error("security epoch {epoch} is below the floor {floor}")]
    BelowFloor { epoch: u64, floor: u64 },
    #[error("manifest does not match the catalog: {0}")]
    ManifestMismatch(String),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

impl InstallBlocked {
    /// Stable word for device reports.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NothingVerified => "nothing_verified",
            Self::Stale { .. } => "stale",
            Self::RefreshUnfinished => "refresh_unfinished",
            Self::TrustNotStored(_) => "trust_not_stored",
            Self::NotListed(_) => "not_listed",
            Self::Revoked(_) => "revoked",
            Self::BelowFloor { .. } => "below_floor",
            Self::ManifestMismatch(_) => "manifest_mismatch",
            Self::Manifest(_) => "bad_manifest",
        }
    }
}
