//! The catalog: what the release key signs, and what an assignment may name.

use super::error::PublishError;
use super::init::Expiries;
use super::repository::RepositoryState;
use super::unsigned::Unsigned;
use crate::manifest::ManifestV1;
use crate::tuf::{ReleasePolicy, Role, TargetCustom, TargetFile, Targets};
use crate::verify::state_for_publisher::{CatalogView, read_catalog};
use chrono::{DateTime, Utc};
use flywheel_types::Digest;
use flywheel_types::assign::{AssignmentV1, BUCKETS, PpmRange};
use std::collections::{BTreeMap, BTreeSet};

/// Changes to the released bundles.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CatalogEdit {
    /// New bundles.
    pub add: Vec<ManifestV1>,
    /// Bundles to take off the list: no device installs them any more. Not possible while the assignment in
    /// force names them (a roll-back target must stay).
    pub retire: Vec<Digest>,
    /// Needed with `retire`: the manifests of all bundles that stay, to know which files are still in use.
    pub kept: Vec<ManifestV1>,
    /// Bundles that must never be installed again. They leave the assignment in the same publication.
    pub revoke: Vec<Digest>,
    /// New security epoch floor, at least the present one: no older bundle ever runs again.
    pub raise_floor: Option<u64>,
}

/// The next catalog, to be signed by the release key.
///
/// # Errors
/// A bundle that cannot be added, retired or revoked, with the reason.
pub fn catalog_next(
    state: &RepositoryState,
    edit: &CatalogEdit,
    expiries: &Expiries,
    now: DateTime<Utc>,
) -> Result<Unsigned, PublishError> {
    let mut targets = state.catalog().map(|c| c.targets.clone()).unwrap_or_default();
    let mut policy = state.release_policy();
    if let Some(floor) = edit.raise_floor {
        if floor < policy.security_epoch_floor {
            let why = format!("floor {floor} is below the present {}", policy.security_epoch_floor);
            return Err(PublishError::Role { role: Role::Catalog, why });
        }
        policy.security_epoch_floor = floor;
    }
    revoke(&targets, &mut policy, &edit.revoke)?;
    retire(state, &mut targets, edit)?;
    for manifest in &edit.add {
        add(&mut targets, &policy, manifest)?;
    }
    let version = state.next_version(Role::Catalog);
    let document = Targets {
        version,
        expires: expiries.from(Role::Catalog, now),
        targets,
        delegations: None,
        release_policy: Some(policy),
    };
    Unsigned::new(Role::Catalog, version, &document)
}

fn add(
    targets: &mut BTreeMap<String, TargetFile>,
    policy: &ReleasePolicy,
    manifest: &ManifestV1,
) -> Result<(), PublishError> {
    let bytes = manifest.to_bytes()?;
    let bundle = Digest::of(&bytes);
    let refuse = |why: String| Err(PublishError::Bundle { bundle, why });
    if policy.revoked.contains(&bundle) {
        return refuse("has been revoked".to_owned());
    }
    if manifest.security_epoch < policy.security_epoch_floor {
        let (epoch, floor) = (manifest.security_epoch, policy.security_epoch_floor);
        return refuse(format!("security epoch {epoch} is below the floor {floor}"));
    }
    let path = manifest.target_path();
    if targets.get(&path).is_some_and(|t| t.hashes.sha256 != bundle) {
        return refuse(format!("`{path}` is another bundle: take the next seq"));
    }
    let custom = TargetCustom {
        bundle_id: bundle,
        line: manifest.line.clone(),
        seq: manifest.seq,
        kind: manifest.kind,
        security_epoch: manifest.security_epoch,
    };
    let custom =
        serde_json::to_value(custom).map_err(|e| PublishError::Role { role: Role::Catalog, why: e.to_string() })?;
    let file = TargetFile { custom: Some(custom), ..TargetFile::new(bytes.len() as u64, bundle) };
    targets.insert(path, file);
    for file in manifest.files() {
        targets.insert(file.path.clone(), TargetFile::new(file.length, file.sha256));
    }
    Ok(())
}

fn listed(targets: &BTreeMap<String, TargetFile>) -> BTreeMap<Digest, String> {
    let manifests = targets.iter().filter(|(path, _)| !path.starts_with("blobs/"));
    manifests.map(|(path, file)| (file.hashes.sha256, path.clone())).collect()
}

fn revoke(
    targets: &BTreeMap<String, TargetFile>,
    policy: &mut ReleasePolicy,
    bundles: &[Digest],
) -> Result<(), PublishError> {
    let known = listed(targets);
    for bundle in bundles {
        if !known.contains_key(bundle) {
            return Err(PublishError::Bundle { bundle: *bundle, why: "is not in the catalog".to_owned() });
        }
    }
    let all: BTreeSet<Digest> = policy.revoked.iter().chain(bundles).copied().collect();
    policy.revoked = all.into_iter().collect();
    Ok(())
}

fn retire(
    state: &RepositoryState,
    targets: &mut BTreeMap<String, TargetFile>,
    edit: &CatalogEdit,
) -> Result<(), PublishError> {
    if edit.retire.is_empty() {
        return Ok(());
    }
    let mut stay = listed(targets);
    let in_use = state.assignment().map(named_bundles).unwrap_or_default();
    for bundle in &edit.retire {
        let refuse = |why: &str| Err(PublishError::Bundle { bundle: *bundle, why: why.to_owned() });
        if in_use.contains(bundle) {
            return refuse("is named by the assignment in force: move the devices off it first");
        }
        let Some(path) = stay.remove(bundle) else {
            return refuse("is not in the catalog");
        };
        targets.remove(&path);
    }
    let mut needed = BTreeSet::new();
    for manifest in &edit.kept {
        if stay.remove(&manifest.id()?).is_some() {
            needed.extend(manifest.files().into_iter().map(|f| f.path.clone()));
        }
    }
    if let Some(bundle) = stay.keys().next() {
        let why = "stays in the catalog: pass its manifest in `kept`".to_owned();
        return Err(PublishError::Bundle { bundle: *bundle, why });
    }
    targets.retain(|path, _| !path.starts_with("blobs/") || needed.contains(path));
    Ok(())
}

/// Every bundle an assignment can send a device to.
pub(super) fn named_bundles(assignment: &AssignmentV1) -> BTreeSet<Digest> {
    let rollouts = assignment.rollouts.iter().flat_map(|r| [r.treatment_bundle, r.control_bundle]);
    assignment.default_bundle.into_iter().chain(rollouts).chain(assignment.pins.values().copied()).collect()
}

/// Whether an assignment may be published over a catalog: every bundle it names (treatment, fall-back, default,
/// pin) is listed, not revoked and at or above the floor; arms lie within the fleet and do not overlap.
///
/// # Errors
/// [`PublishError::Bundle`] or [`PublishError::Assignment`].
pub fn check_assignment(catalog: &Targets, assignment: &AssignmentV1) -> Result<(), PublishError> {
    check_over(&read_catalog(catalog)?, assignment)
}

fn check_over(view: &CatalogView, assignment: &AssignmentV1) -> Result<(), PublishError> {
    for bundle in named_bundles(assignment) {
        let refuse = |why: String| Err(PublishError::Bundle { bundle, why });
        let Some(entry) = view.entries.get(&bundle) else {
            return refuse("is named by the assignment but not in the catalog".to_owned());
        };
        if view.revoked.contains(&bundle) {
            return refuse("is named by the assignment but revoked".to_owned());
        }
        if entry.security_epoch < view.floor {
            let epoch = entry.security_epoch;
            return refuse(format!("security epoch {epoch} is below the floor {}", view.floor));
        }
    }
    for r in &assignment.rollouts {
        let bad = |why: &str| Err(PublishError::Assignment(format!("rollout {}: {why}", r.rollout_id)));
        let inside = |x: PpmRange| x.from <= x.to && u64::from(x.to) <= BUCKETS;
        if !inside(r.treatment) || !inside(r.control) {
            return bad("a range is upside down or beyond 1,000,000");
        }
        let (t, c) = (r.treatment, r.control);
        if t.width() > 0 && c.width() > 0 && t.from < c.to && c.from < t.to {
            return bad("treatment and control overlap");
        }
    }
    Ok(())
}
