//! The Update Framework, specification 1.0.34 (<https://theupdateframework.github.io/specification/>): roles,
//! file names, keys, signatures and the four metadata documents, as far as one repository per app needs them.
//!
//! Two delegations, both terminating: `catalog` lists every bundle and blob (release key), `rollout` lists the
//! assignment (online key). An online key can choose among released bundles, never add one.

mod envelope;
mod key;
mod metadata;
mod trusted;

pub use envelope::{Envelope, Signature};
pub use key::{KeyError, PublicKey};
pub use metadata::{
    DelegatedRole, Delegations, Document, FileMeta, Hashes, ReleasePolicy, RoleKeys, Root, Snapshot, TargetCustom,
    TargetFile, Targets, Timestamp, format_time,
};
pub use trusted::{Floors, KeyedFloor, Signed, TrustedRoot, check_fresh, delegation_fingerprint, fingerprint};

use flywheel_types::Digest;
use serde::{Deserialize, Serialize};

/// TUF specification version written into metadata.
pub const SPEC_VERSION: &str = "1.0.34";
/// Folder of metadata files.
pub const METADATA_DIR: &str = "metadata";
/// Folder of target files.
pub const TARGETS_DIR: &str = "targets";
/// Path of the one file that is ever replaced.
pub const TIMESTAMP_PATH: &str = "metadata/timestamp.json";
/// TUF target path of the assignment document.
pub const ASSIGNMENT_TARGET: &str = "rollout/assignment.json";
/// Targets that `catalog` may list. In TUF `*` does not cross `/`.
pub const CATALOG_PATHS: [&str; 2] = ["bundles/*/*/manifest.json", "blobs/*"];
/// Targets that `rollout` may list.
pub const ROLLOUT_PATHS: [&str; 1] = ["rollout/*"];

/// A metadata role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Root,
    Timestamp,
    Snapshot,
    Targets,
    Catalog,
    Rollout,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 6] =
        [Self::Root, Self::Timestamp, Self::Snapshot, Self::Targets, Self::Catalog, Self::Rollout];
    /// The roles that a snapshot lists.
    pub const IN_SNAPSHOT: [Self; 3] = [Self::Targets, Self::Catalog, Self::Rollout];

    /// The role's name in metadata.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Timestamp => "timestamp",
            Self::Snapshot => "snapshot",
            Self::Targets => "targets",
            Self::Catalog => "catalog",
            Self::Rollout => "rollout",
        }
    }

    /// Key of this role in snapshot and timestamp `meta`.
    #[must_use]
    pub fn meta_name(self) -> String {
        format!("{}.json", self.as_str())
    }

    /// `_type` inside the signed document; delegated roles are targets documents.
    #[must_use]
    pub fn type_word(self) -> &'static str {
        match self {
            Self::Catalog | Self::Rollout => "targets",
            other => other.as_str(),
        }
    }

    /// Path of version `version` in the repository (consistent snapshots: only the timestamp has no number).
    #[must_use]
    pub fn path(self, version: u64) -> String {
        match self {
            Self::Timestamp => TIMESTAMP_PATH.to_owned(),
            other => format!("{METADATA_DIR}/{version}.{}.json", other.as_str()),
        }
    }

    /// Largest file a device accepts, bytes: bounds what an attacker can make it download.
    #[must_use]
    pub fn max_bytes(self) -> u64 {
        match self {
            Self::Root => 512 << 10,
            Self::Timestamp => 16 << 10,
            Self::Snapshot => 64 << 10,
            Self::Targets => 256 << 10,
            Self::Catalog => 8 << 20,
            Self::Rollout => 64 << 10,
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where the target `path` with digest `sha256` lies in the repository (consistent snapshots: the digest is put
/// before the file name), for example `targets/rollout/<sha256>.assignment.json`.
#[must_use]
pub fn target_location(path: &str, sha256: &Digest) -> String {
    match path.rsplit_once('/') {
        Some((dir, name)) => format!("{TARGETS_DIR}/{dir}/{sha256}.{name}"),
        None => format!("{TARGETS_DIR}/{sha256}.{path}"),
    }
}

/// Whether a TUF path pattern matches: segment by segment, `*` stands for any text inside one segment.
#[must_use]
pub fn path_matches(pattern: &str, path: &str) -> bool {
    let (mut p, mut s) = (pattern.split('/'), path.split('/'));
    loop {
        match (p.next(), s.next()) {
            (None, None) => return true,
            (Some(p), Some(s)) if segment_matches(p, s) => {}
            _ => return false,
        }
    }
}

fn segment_matches(pattern: &str, segment: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| segment.strip_prefix(first)) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Why metadata is not acceptable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    #[error("{role} metadata cannot be read: {why}")]
    Malformed { role: Role, why: String },
    #[error("{role} metadata is larger than {limit} bytes")]
    TooLarge { role: Role, limit: u64 },
    #[error("{role} metadata carries {valid} valid signatures of {threshold} needed")]
    BelowThreshold { role: Role, valid: usize, threshold: u32 },
    #[error("{role} version {offered} is older than {trusted}, which was accepted before")]
    Rollback { role: Role, trusted: u64, offered: u64 },
    #[error("{role} is version {got}, version {want} was announced")]
    WrongVersion { role: Role, want: u64, got: u64 },
    #[error("{role} metadata does not have the announced length and digest")]
    WrongContent { role: Role },
    #[error("snapshot does not list {role}")]
    NotListed { role: Role },
    #[error("targets metadata does not delegate to {role} as required: {why}")]
    BadDelegation { role: Role, why: String },
    #[error("{role} metadata expired at {expires}")]
    Expired { role: Role, expires: chrono::DateTime<chrono::Utc> },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_do_not_cross_segments() {
        assert!(path_matches("bundles/*/*/manifest.json", "bundles/qa/181/manifest.json"));
        assert!(!path_matches("bundles/*", "bundles/qa/181/manifest.json"));
        assert!(path_matches("blobs/*", "blobs/ab.gguf"));
        assert!(!path_matches("rollout/*", "blobs/ab.gguf"));
        assert!(path_matches("a/*-*.x", "a/1-2.x"));
        assert!(!path_matches("a/*-*.x", "a/12.x"));
        assert!(!path_matches("a/b", "a/bc"));
    }

    #[test]
    fn locations_follow_consistent_snapshots() {
        let d = Digest::of(b"");
        assert_eq!(target_location(ASSIGNMENT_TARGET, &d), format!("targets/rollout/{d}.assignment.json"));
        assert_eq!(Role::Catalog.path(7), "metadata/7.catalog.json");
        assert_eq!(Role::Timestamp.path(7), TIMESTAMP_PATH);
    }
}
