//! One publication: what changed, signed by the online keys, checked by the device half, as a list of writes.

use super::catalog::check_assignment;
use super::error::PublishError;
use super::init::Expiries;
use super::keys::RoleSigner;
use super::plan::{Content, PublishPlan, WriteMode, WriteOp};
use super::repository::{Live, RepositoryState, half_used};
use super::unsigned::{SignedMetadata, Unsigned};
use crate::tuf::{
    ASSIGNMENT_TARGET, Document, FileMeta, Floors, Role, Signed, Snapshot, TIMESTAMP_PATH, TargetFile, Targets,
    Timestamp, TrustedRoot, check_fresh, target_location,
};
use crate::verify::state_for_publisher as state;
use chrono::{DateTime, SubsecRound, Utc};
use flywheel_types::Digest;
use flywheel_types::assign::AssignmentV1;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is new. All empty: a re-signing.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    /// Signed by old and new root keys.
    pub root: Option<SignedMetadata>,
    pub targets: Option<SignedMetadata>,
    /// Signed by the release key.
    pub catalog: Option<SignedMetadata>,
    /// Manifest files of bundles that are new in `catalog`.
    pub manifests: Vec<Vec<u8>>,
    pub assignment: Option<AssignmentV1>,
}

/// The online keys.
pub struct OnlineSigners<'a> {
    pub rollout: &'a [&'a dyn RoleSigner],
    pub snapshot: &'a [&'a dyn RoleSigner],
    pub timestamp: &'a [&'a dyn RoleSigner],
}

/// Makes a publication. Rollout and snapshot are signed again when their content changes or half of their life
/// is used; the timestamp always. The result is verified as a device would, at `now`.
///
/// # Errors
/// Whatever would make a device refuse the result, an assignment that names a bundle devices may not install, a
/// serial that does not rise, missing manifests.
pub fn assemble(
    state: &RepositoryState,
    changes: Changes,
    signers: &OnlineSigners<'_>,
    expiries: &Expiries,
    now: DateTime<Utc>,
) -> Result<PublishPlan, PublishError> {
    let now = now.trunc_subsecs(0);
    let mut trusted = state.trusted.clone();
    if let Some(root) = &changes.root {
        trusted.update(root.bytes.as_slice().into())?;
    }
    let targets = offline(state, &changes.targets, Role::Targets, Some(&state.targets.bytes))?;
    let live = state.live.as_ref();
    let catalog = offline(state, &changes.catalog, Role::Catalog, live.map(|l| &l.catalog.bytes))?;

    let assignment = pick_assignment(state, changes.assignment)?;
    let assignment_bytes =
        serde_json::to_vec(&assignment).map_err(|e| PublishError::Assignment(format!("cannot be written: {e}")))?;
    let rollout_targets = BTreeMap::from([(
        ASSIGNMENT_TARGET.to_owned(),
        TargetFile::new(assignment_bytes.len() as u64, Digest::of(&assignment_bytes)),
    )]);
    let rollout = sign_rollout(state, rollout_targets, signers, expiries, now)?;
    let metas = [(Role::Targets, &targets), (Role::Catalog, &catalog), (Role::Rollout, &rollout)]
        .map(|(role, file)| (role.meta_name(), FileMeta::of(file.version, &file.bytes)));
    let snapshot = sign_snapshot(state, &trusted, metas.into(), signers, expiries, now)?;
    let timestamp = Timestamp {
        version: state.next_version(Role::Timestamp),
        expires: expiries.from(Role::Timestamp, now),
        meta: [("snapshot.json".to_owned(), FileMeta::of(snapshot.version, &snapshot.bytes))].into(),
        issued: Some(now),
    };
    let timestamp = Unsigned::new(Role::Timestamp, timestamp.version, &timestamp)?.sign(signers.timestamp)?;

    let files = [timestamp, snapshot, targets, catalog, rollout];
    let after = check(&trusted, &files, assignment, now)?;
    let mut ops = content_ops(state, &after, &changes.manifests)?;
    ops.push(create(target_location(ASSIGNMENT_TARGET, &Digest::of(&assignment_bytes)), assignment_bytes));
    ops.extend(metadata_ops(state, files, changes.root));
    Ok(PublishPlan { ops, after })
}

/// A file that other keys signed: the new one, which must take the next version, or the present one.
fn offline(
    state: &RepositoryState,
    new: &Option<SignedMetadata>,
    role: Role,
    present: Option<&Arc<[u8]>>,
) -> Result<SignedMetadata, PublishError> {
    let refuse = |why: String| Err(PublishError::Role { role, why });
    match (new, present) {
        (Some(file), _) if file.role != role => refuse(format!("got {} metadata instead", file.role)),
        (Some(file), _) if file.version < state.next_version(role) && present.is_none_or(|p| **p != *file.bytes) => {
            let want = state.next_version(role);
            refuse(format!("version {} is taken, the next is {want}: make and sign it again", file.version))
        }
        (Some(file), _) => Ok(file.clone()),
        (None, Some(bytes)) => {
            let version = state.taken_now(role);
            Ok(SignedMetadata { role, version, bytes: bytes.to_vec() })
        }
        (None, None) => refuse("nothing is published yet: pass a signed one".to_owned()),
    }
}

fn pick_assignment(state: &RepositoryState, new: Option<AssignmentV1>) -> Result<AssignmentV1, PublishError> {
    match (new, state.assignment()) {
        (Some(new), _) if new.v != 1 => Err(PublishError::Assignment(format!("version {}, not 1", new.v))),
        (Some(new), Some(old)) if new.app != old.app => {
            Err(PublishError::Assignment(format!("is for app {}, not {}", new.app, old.app)))
        }
        (Some(new), Some(old)) if new.serial <= old.serial && new != *old => {
            Err(PublishError::Assignment(format!("serial {} does not rise above {}", new.serial, old.serial)))
        }
        (Some(new), _) => Ok(new),
        (None, Some(old)) => Ok(old.clone()),
        (None, None) => Err(PublishError::Assignment("the first publication needs one".to_owned())),
    }
}

fn sign_rollout(
    state: &RepositoryState,
    targets: BTreeMap<String, TargetFile>,
    signers: &OnlineSigners<'_>,
    expiries: &Expiries,
    now: DateTime<Utc>,
) -> Result<SignedMetadata, PublishError> {
    if let Some(live) = &state.live {
        let old = &live.rollout.document;
        let same = old.targets == targets && signed_by(&live.rollout.bytes, Role::Rollout, signers.rollout);
        if same && !half_used(expiries, Role::Rollout, old.expires, now) {
            return Ok(kept(Role::Rollout, &live.rollout));
        }
    }
    let version = state.next_version(Role::Rollout);
    let document = Targets {
        version,
        expires: expiries.from(Role::Rollout, now),
        targets,
        delegations: None,
        release_policy: None,
    };
    Unsigned::new(Role::Rollout, version, &document)?.sign(signers.rollout)
}

fn sign_snapshot(
    state: &RepositoryState,
    trusted: &TrustedRoot,
    meta: BTreeMap<String, FileMeta>,
    signers: &OnlineSigners<'_>,
    expiries: &Expiries,
    now: DateTime<Utc>,
) -> Result<SignedMetadata, PublishError> {
    if let Some(live) = &state.live {
        let old = &live.snapshot.document;
        let same = old.meta == meta
            && trusted.root() == state.root()
            && signed_by(&live.snapshot.bytes, Role::Snapshot, signers.snapshot);
        if same && !half_used(expiries, Role::Snapshot, old.expires, now) {
            return Ok(kept(Role::Snapshot, &live.snapshot));
        }
    }
    let version = state.next_version(Role::Snapshot);
    let document = Snapshot { version, expires: expiries.from(Role::Snapshot, now), meta };
    Unsigned::new(Role::Snapshot, version, &document)?.sign(signers.snapshot)
}

/// Whether exactly these signers signed the file: after a key change it must be signed again.
fn signed_by(bytes: &[u8], role: Role, signers: &[&dyn RoleSigner]) -> bool {
    let Ok(envelope) = crate::tuf::Envelope::parse(role, bytes) else {
        return false;
    };
    let mut want: Vec<String> = signers.iter().map(|s| s.public().id()).collect();
    let mut have: Vec<String> = envelope.signatures.into_iter().map(|s| s.keyid).collect();
    want.sort_unstable();
    have.sort_unstable();
    want == have
}

fn kept<T: Document>(role: Role, signed: &Signed<T>) -> SignedMetadata {
    SignedMetadata { role, version: signed.document.version(), bytes: signed.bytes.to_vec() }
}

/// Verifies the whole set like a device without history.
fn check(
    trusted: &TrustedRoot,
    files: &[SignedMetadata; 5],
    assignment: AssignmentV1,
    now: DateTime<Utc>,
) -> Result<RepositoryState, PublishError> {
    let [timestamp, snapshot, targets, catalog, rollout] = files;
    let bytes = |f: &SignedMetadata| Arc::<[u8]>::from(f.bytes.as_slice());
    let none = Floors::new(trusted.root());
    let timestamp = trusted.timestamp(bytes(timestamp), &none)?;
    let snapshot = trusted.snapshot(bytes(snapshot), &timestamp.document, &none)?;
    let targets = trusted.targets(bytes(targets), &snapshot.document)?;
    let delegated =
        |role: Role, file: &SignedMetadata| trusted.delegated(role, bytes(file), &snapshot.document, &targets.document);
    let catalog = delegated(Role::Catalog, catalog)?;
    let rollout = delegated(Role::Rollout, rollout)?;
    check_fresh(Role::Root, trusted.root(), now)?;
    check_fresh(Role::Timestamp, &timestamp.document, now)?;
    check_fresh(Role::Snapshot, &snapshot.document, now)?;
    check_fresh(Role::Targets, &targets.document, now)?;
    check_fresh(Role::Catalog, &catalog.document, now)?;
    check_fresh(Role::Rollout, &rollout.document, now)?;
    check_assignment(&catalog.document, &assignment)?;
    state::assignment_target(&rollout.document)?;
    let taken = [
        (Role::Snapshot, snapshot.document.version),
        (Role::Targets, targets.document.version),
        (Role::Catalog, catalog.document.version),
        (Role::Rollout, rollout.document.version),
    ];
    Ok(RepositoryState {
        trusted: trusted.clone(),
        targets,
        taken: taken.into(),
        live: Some(Live { timestamp, snapshot, catalog, rollout, assignment }),
        unpublished: false,
    })
}

/// Blobs and manifests that are new in the catalog.
fn content_ops(
    before: &RepositoryState,
    after: &RepositoryState,
    manifests: &[Vec<u8>],
) -> Result<Vec<WriteOp>, PublishError> {
    let given: BTreeMap<Digest, &Vec<u8>> = manifests.iter().map(|m| (Digest::of(m), m)).collect();
    let (mut blobs, mut documents) = (Vec::new(), Vec::new());
    let old = before.catalog().map(|c| &c.targets);
    for (path, file) in after.catalog().iter().flat_map(|c| &c.targets) {
        let sha256 = file.hashes.sha256;
        if old.is_some_and(|o| o.get(path).is_some_and(|t| t.hashes.sha256 == sha256)) {
            continue;
        }
        let location = target_location(path, &sha256);
        if path.starts_with("blobs/") {
            let content = Content::Blob { sha256, length: file.length };
            blobs.push(WriteOp { path: location, content, mode: WriteMode::CreateOnly });
        } else {
            let why = || "is new in the catalog: pass its manifest bytes".to_owned();
            let bytes = given.get(&sha256).ok_or_else(|| PublishError::Bundle { bundle: sha256, why: why() })?;
            documents.push(create(location, bytes.to_vec()));
        }
    }
    blobs.extend(documents);
    Ok(blobs)
}

fn create(path: String, bytes: Vec<u8>) -> WriteOp {
    WriteOp { path, content: Content::Bytes(bytes), mode: WriteMode::CreateOnly }
}

/// Roles, targets, snapshot, root, timestamp. A new root comes late because between it and the timestamp that
/// its new keys sign devices can fetch nothing.
fn metadata_ops(state: &RepositoryState, files: [SignedMetadata; 5], root: Option<SignedMetadata>) -> Vec<WriteOp> {
    let [timestamp, snapshot, targets, catalog, rollout] = files;
    let mut ops: Vec<WriteOp> = [catalog, rollout, targets, snapshot]
        .into_iter()
        .filter(|f| state.unpublished || !state.is_published(f))
        .map(|f| create(f.role.path(f.version), f.bytes))
        .collect();
    if state.unpublished {
        ops.push(create(Role::Root.path(state.root().version), state.root_bytes().to_vec()));
    }
    ops.extend(root.map(|r| create(Role::Root.path(r.version), r.bytes)));
    ops.push(WriteOp {
        path: TIMESTAMP_PATH.to_owned(),
        content: Content::Bytes(timestamp.bytes),
        mode: WriteMode::CompareAndSwap { expected: state.timestamp_digest() },
    });
    ops
}

impl RepositoryState {
    /// Version of the document of `role` in force (not counting orphans).
    fn taken_now(&self, role: Role) -> u64 {
        match (role, &self.live) {
            (Role::Targets, _) => self.targets.document.version,
            (Role::Catalog, Some(live)) => live.catalog.document.version,
            _ => 0,
        }
    }

    fn is_published(&self, file: &SignedMetadata) -> bool {
        let Some(live) = &self.live else { return false };
        let present: &[u8] = match file.role {
            Role::Root => self.trusted.bytes(),
            Role::Timestamp => &live.timestamp.bytes,
            Role::Snapshot => &live.snapshot.bytes,
            Role::Targets => &self.targets.bytes,
            Role::Catalog => &live.catalog.bytes,
            Role::Rollout => &live.rollout.bytes,
        };
        *present == *file.bytes
    }
}
