//! What a device knows after a complete refresh, and the checks before a bundle may be installed.

use super::error::{InstallBlocked, VerifyError};
use crate::manifest::ManifestV1;
use crate::tuf::{ASSIGNMENT_TARGET, Role, TargetCustom, Targets, target_location};
use chrono::{DateTime, Utc};
use flywheel_types::assign::AssignmentV1;
use flywheel_types::{AppId, BundleKind, Digest};
use std::collections::{BTreeMap, BTreeSet};

/// Largest assignment document, bytes.
pub(crate) const MAX_ASSIGNMENT_BYTES: u64 = 4 << 20;

/// One released bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogEntry {
    /// Bundle id: digest of the manifest.
    pub bundle: Digest,
    /// Where the manifest lies in the repository, relative to its address.
    pub location: String,
    /// Length of the manifest, bytes.
    pub length: u64,
    pub line: String,
    pub seq: u64,
    pub kind: BundleKind,
    pub security_epoch: u64,
}

/// A complete, consistent, verified view of the repository.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedState {
    pub app: AppId,
    pub assignment: AssignmentV1,
    /// Released bundles by id.
    pub catalog: BTreeMap<Digest, CatalogEntry>,
    /// Released files by digest: length in bytes.
    pub blobs: BTreeMap<Digest, u64>,
    pub revoked: BTreeSet<Digest>,
    /// Floor of this catalog; a device may hold a higher one ([`super::UpdateClient::epoch_floor`]).
    pub security_epoch_floor: u64,
    /// When the timestamp was signed.
    pub issued_at: Option<DateTime<Utc>>,
    /// The role that expires first, and when.
    pub valid_until: (Role, DateTime<Utc>),
    /// Metadata versions, for reports.
    pub versions: BTreeMap<Role, u64>,
}

impl VerifiedState {
    /// The bundle's entry, if the catalog allows installing it under `floor`.
    ///
    /// # Errors
    /// Not listed, revoked or below the floor.
    pub fn installable(&self, bundle: &Digest, floor: u64) -> Result<&CatalogEntry, InstallBlocked> {
        let entry = self.catalog.get(bundle).ok_or(InstallBlocked::NotListed(*bundle))?;
        if self.revoked.contains(bundle) {
            return Err(InstallBlocked::Revoked(*bundle));
        }
        check_epoch_floor(entry.security_epoch, floor, RunPath::Install)?;
        Ok(entry)
    }
}

/// How a bundle is about to become active.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunPath {
    /// Assignment, pin, side-load: anything that is not the local fall-back.
    Install,
    /// Back to the slot that is on the device. Allowed below the floor only when that slot was the active one
    /// when the floor was raised, because "no model" is worse; it must be reported.
    LocalFallback { active_when_floor_raised: bool },
}

/// Outcome of an allowed epoch check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpochCheck {
    AtOrAboveFloor,
    /// Allowed, but the device must report it.
    BelowFloorReport,
}

/// The downgrade check, the same on every path (a check that one mode skips is the mistake of mcuboot 1708).
///
/// # Errors
/// [`InstallBlocked::BelowFloor`].
pub fn check_epoch_floor(epoch: u64, floor: u64, path: RunPath) -> Result<EpochCheck, InstallBlocked> {
    match path {
        _ if epoch >= floor => Ok(EpochCheck::AtOrAboveFloor),
        RunPath::LocalFallback { active_when_floor_raised: true } => Ok(EpochCheck::BelowFloorReport),
        RunPath::LocalFallback { active_when_floor_raised: false } | RunPath::Install => {
            Err(InstallBlocked::BelowFloor { epoch, floor })
        }
    }
}

/// Checks manifest bytes against the catalog: digest, length, the fields the catalog repeats, the app, and that
/// every file is itself released.
///
/// # Errors
/// [`InstallBlocked::ManifestMismatch`] or [`InstallBlocked::Manifest`].
pub fn verify_manifest(
    bytes: &[u8],
    entry: &CatalogEntry,
    state: &VerifiedState,
) -> Result<ManifestV1, InstallBlocked> {
    let mismatch = |why: String| Err(InstallBlocked::ManifestMismatch(why));
    if bytes.len() as u64 != entry.length {
        return mismatch(format!("{} bytes, {} announced", bytes.len(), entry.length));
    }
    let digest = Digest::of(bytes);
    if digest != entry.bundle {
        return mismatch(format!("digest {digest}, {} announced", entry.bundle));
    }
    let m = ManifestV1::from_bytes(bytes)?;
    if m.app != state.app {
        return mismatch(format!("it belongs to app {}", m.app));
    }
    if (m.line.as_str(), m.seq, m.kind, m.security_epoch)
        != (entry.line.as_str(), entry.seq, entry.kind, entry.security_epoch)
    {
        return mismatch("line, seq, kind or security epoch differ".to_owned());
    }
    if let Some(file) = m.files().into_iter().find(|f| state.blobs.get(&f.sha256) != Some(&f.length)) {
        return mismatch(format!("{} is not a released file", file.path));
    }
    Ok(m)
}

/// Catalog entries, blobs, and what the release key says about all of them.
pub(crate) struct CatalogView {
    pub entries: BTreeMap<Digest, CatalogEntry>,
    pub blobs: BTreeMap<Digest, u64>,
    pub revoked: BTreeSet<Digest>,
    pub floor: u64,
}

/// Reads the catalog document.
pub(crate) fn read_catalog(catalog: &Targets) -> Result<CatalogView, VerifyError> {
    let bad = |path: &str, why: &str| VerifyError::Catalog(format!("target `{path}`: {why}"));
    let policy = catalog.release_policy.clone().unwrap_or_default();
    let mut view = CatalogView {
        entries: BTreeMap::new(),
        blobs: BTreeMap::new(),
        revoked: policy.revoked.into_iter().collect(),
        floor: policy.security_epoch_floor,
    };
    for (path, file) in &catalog.targets {
        let sha256 = file.hashes.sha256;
        if path.starts_with("blobs/") {
            view.blobs.insert(sha256, file.length);
            continue;
        }
        let custom: TargetCustom = file
            .custom
            .clone()
            .ok_or_else(|| bad(path, "no custom data"))
            .and_then(|v| serde_json::from_value(v).map_err(|e| bad(path, &e.to_string())))?;
        if custom.bundle_id != sha256 {
            return Err(bad(path, "bundle_id is not the digest of the manifest"));
        }
        view.entries.insert(
            sha256,
            CatalogEntry {
                bundle: sha256,
                location: target_location(path, &sha256),
                length: file.length,
                line: custom.line,
                seq: custom.seq,
                kind: custom.kind,
                security_epoch: custom.security_epoch,
            },
        );
    }
    Ok(view)
}

/// Where the assignment lies, its length and digest.
pub(crate) fn assignment_target(rollout: &Targets) -> Result<(String, u64, Digest), VerifyError> {
    let file = rollout
        .targets
        .get(ASSIGNMENT_TARGET)
        .ok_or_else(|| VerifyError::Assignment(format!("rollout metadata does not list {ASSIGNMENT_TARGET}")))?;
    if file.length > MAX_ASSIGNMENT_BYTES {
        let why = format!("{} bytes, the limit is {MAX_ASSIGNMENT_BYTES}", file.length);
        return Err(VerifyError::Assignment(why));
    }
    let sha256 = file.hashes.sha256;
    Ok((target_location(ASSIGNMENT_TARGET, &sha256), file.length, sha256))
}

/// Reads an assignment document of `app`, not older than `floor`.
pub(crate) fn read_assignment(bytes: &[u8], app: &AppId, floor: u64) -> Result<AssignmentV1, VerifyError> {
    let bad = |why: String| VerifyError::Assignment(why);
    let head: serde_json::Value = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
    match head.get("v").and_then(serde_json::Value::as_u64) {
        Some(1) => {}
        other => {
            return Err(bad(format!("version {other:?}, this build reads 1: update the app")));
        }
    }
    let assignment: AssignmentV1 = serde_json::from_value(head).map_err(|e| bad(e.to_string()))?;
    if assignment.app != *app {
        return Err(bad(format!("it is for app {}, this is {app}", assignment.app)));
    }
    if assignment.serial < floor {
        return Err(VerifyError::AssignmentRollback { trusted: floor, offered: assignment.serial });
    }
    Ok(assignment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floor_holds_on_every_path_but_the_reported_fallback() {
        let fallback = |a| RunPath::LocalFallback { active_when_floor_raised: a };
        assert!(check_epoch_floor(1, 2, RunPath::Install).is_err());
        assert!(check_epoch_floor(1, 2, fallback(false)).is_err());
        assert_eq!(check_epoch_floor(1, 2, fallback(true)), Ok(EpochCheck::BelowFloorReport));
        assert_eq!(check_epoch_floor(2, 2, RunPath::Install), Ok(EpochCheck::AtOrAboveFloor));
    }
}
