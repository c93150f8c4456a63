//! The checks of the client workflow (TUF spec 5.3 to 5.6) as pure functions over a trusted root, and the
//! version floors that make them hold across restarts. Expiry is a separate question ([`check_fresh`]):
//! expired metadata still proves which versions exist.

use super::metadata::{Document, RoleKeys, Root, Snapshot, Targets, Timestamp, read};
use super::{Envelope, MetadataError, Role};
use chrono::{DateTime, Utc};
use flywheel_types::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A verified document with the bytes it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Signed<T> {
    pub document: T,
    pub bytes: Arc<[u8]>,
}

/// The newest versions a device has accepted, under which keys. Nothing older is accepted again; only a
/// rotation of the keys that vouch for a number resets it (recovery from a fast-forward attack).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Floors {
    /// Fingerprint of the timestamp and snapshot keys that the versions below were accepted under.
    pub keys: Digest,
    pub timestamp: u64,
    pub snapshot: u64,
    /// Versions of targets, catalog and rollout.
    pub roles: BTreeMap<Role, u64>,
    /// When the newest accepted timestamp was signed.
    pub issued: Option<DateTime<Utc>>,
    /// Highest security epoch floor and the catalog keys that signed it.
    pub security_epoch: KeyedFloor,
    /// Highest assignment serial and the rollout keys that signed it.
    pub assignment: KeyedFloor,
}

/// A floor that holds as long as the keys behind it do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyedFloor {
    pub keys: Digest,
    pub value: u64,
}

impl KeyedFloor {
    fn none() -> Self {
        Self { keys: Digest([0; 32]), value: 0 }
    }

    /// The floor under `keys`; zero when it was set under others.
    #[must_use]
    pub fn under(self, keys: Digest) -> u64 {
        if self.keys == keys { self.value } else { 0 }
    }

    /// Raises the floor to `value`, or restarts it under new keys.
    pub fn raise(&mut self, keys: Digest, value: u64) {
        *self = Self { keys, value: value.max(self.under(keys)) };
    }
}

impl Floors {
    /// No history under `root`'s keys.
    #[must_use]
    pub fn new(root: &Root) -> Self {
        Self {
            keys: root_fingerprint(root),
            timestamp: 0,
            snapshot: 0,
            roles: BTreeMap::new(),
            issued: None,
            security_epoch: KeyedFloor::none(),
            assignment: KeyedFloor::none(),
        }
    }

    /// The floor of a role that the snapshot lists.
    #[must_use]
    pub fn role(&self, role: Role) -> u64 {
        self.roles.get(&role).copied().unwrap_or(0)
    }

    /// Drops the version floors when `root` has other timestamp or snapshot keys (spec 5.3.11). The security
    /// epoch and the assignment serial have keys of their own.
    pub fn rebase(&mut self, root: &Root) {
        if self.keys != root_fingerprint(root) {
            let (security_epoch, assignment) = (self.security_epoch, self.assignment);
            *self = Self { security_epoch, assignment, ..Self::new(root) };
        }
    }

    /// The stricter of two records of the same device.
    #[must_use]
    pub fn merge(mut self, other: &Self) -> Self {
        if self.keys == other.keys {
            self.timestamp = self.timestamp.max(other.timestamp);
            self.snapshot = self.snapshot.max(other.snapshot);
            self.issued = self.issued.max(other.issued);
            for (role, version) in &other.roles {
                let floor = self.roles.entry(*role).or_default();
                *floor = (*floor).max(*version);
            }
        }
        for (mine, theirs) in
            [(&mut self.security_epoch, other.security_epoch), (&mut self.assignment, other.assignment)]
        {
            if mine.keys == theirs.keys {
                mine.value = mine.value.max(theirs.value);
            }
        }
        self
    }

    /// Takes in an accepted timestamp.
    pub fn accept_timestamp(&mut self, timestamp: &Timestamp) {
        self.timestamp = self.timestamp.max(timestamp.version);
        if let Some(snapshot) = timestamp.meta.get("snapshot.json") {
            self.snapshot = self.snapshot.max(snapshot.version);
        }
        self.issued = self.issued.max(timestamp.issued);
    }

    /// Takes in an accepted snapshot.
    pub fn accept_snapshot(&mut self, snapshot: &Snapshot) {
        self.snapshot = self.snapshot.max(snapshot.version);
        for role in Role::IN_SNAPSHOT {
            if let Some(meta) = snapshot.meta.get(&role.meta_name()) {
                let floor = self.roles.entry(role).or_default();
                *floor = (*floor).max(meta.version);
            }
        }
    }
}

/// Fingerprint of a set of key ids.
#[must_use]
pub fn fingerprint<'a>(keys: impl IntoIterator<Item = &'a RoleKeys>) -> Digest {
    let mut text = String::new();
    for role in keys {
        let mut ids: Vec<&str> = role.keyids.iter().map(String::as_str).collect();
        ids.sort_unstable();
        text.push_str(&ids.join(","));
        text.push(';');
    }
    Digest::of(text.as_bytes())
}

fn root_fingerprint(root: &Root) -> Digest {
    fingerprint([Role::Timestamp, Role::Snapshot].iter().filter_map(|r| root.roles.get(r.as_str())))
}

/// Whether a document may still authorise something new at `now`.
///
/// # Errors
/// [`MetadataError::Expired`] from the moment of expiry on.
pub fn check_fresh<T: Document>(role: Role, document: &T, now: DateTime<Utc>) -> Result<(), MetadataError> {
    if document.expires() <= now {
        return Err(MetadataError::Expired { role, expires: document.expires() });
    }
    Ok(())
}

/// The root that everything else is checked against.
#[derive(Debug, Clone, PartialEq)]
pub struct TrustedRoot(Signed<Root>);

impl TrustedRoot {
    /// Takes a root that is trusted by other means (built into the app, or stored by this device earlier). It
    /// must carry its own threshold of signatures.
    ///
    /// # Errors
    /// [`MetadataError`] when it does not.
    pub fn from_root(bytes: Arc<[u8]>) -> Result<Self, MetadataError> {
        let (envelope, document) = open::<Root>(Role::Root, &bytes)?;
        verify_top(&envelope, Role::Root, &document)?;
        Ok(Self(Signed { document, bytes }))
    }

    /// The document.
    #[must_use]
    pub fn root(&self) -> &Root {
        &self.0.document
    }

    /// The file as received.
    #[must_use]
    pub fn bytes(&self) -> &Arc<[u8]> {
        &self.0.bytes
    }

    /// The next root: exactly one version up, signed by the old keys and by its own (spec 5.3.4, 5.3.5).
    ///
    /// # Errors
    /// [`MetadataError`]; `self` is unchanged then.
    pub fn update(&mut self, bytes: Arc<[u8]>) -> Result<(), MetadataError> {
        let (envelope, document) = open::<Root>(Role::Root, &bytes)?;
        let want = self.root().version.saturating_add(1);
        if document.version != want {
            return Err(MetadataError::WrongVersion { role: Role::Root, want, got: document.version });
        }
        verify_top(&envelope, Role::Root, self.root())?;
        verify_top(&envelope, Role::Root, &document)?;
        self.0 = Signed { document, bytes };
        Ok(())
    }

    /// A timestamp (spec 5.4).
    ///
    /// # Errors
    /// Too few signatures, or a version of it or of the snapshot it names below the floor.
    pub fn timestamp(&self, bytes: Arc<[u8]>, floors: &Floors) -> Result<Signed<Timestamp>, MetadataError> {
        let (envelope, document) = open::<Timestamp>(Role::Timestamp, &bytes)?;
        verify_top(&envelope, Role::Timestamp, self.root())?;
        floor(Role::Timestamp, floors.timestamp, document.version)?;
        let snapshot = document.meta.get("snapshot.json").map_or(0, |m| m.version);
        floor(Role::Snapshot, floors.snapshot, snapshot)?;
        if document.issued.is_some_and(|i| i >= document.expires) {
            let why = "was signed after its own expiry".to_owned();
            return Err(MetadataError::Malformed { role: Role::Timestamp, why });
        }
        Ok(Signed { document, bytes })
    }

    /// The snapshot that `timestamp` names (spec 5.5). It must list every role, none older than the floor.
    ///
    /// # Errors
    /// Other content or version than announced, too few signatures, a missing or older role.
    pub fn snapshot(
        &self,
        bytes: Arc<[u8]>,
        timestamp: &Timestamp,
        floors: &Floors,
    ) -> Result<Signed<Snapshot>, MetadataError> {
        let role = Role::Snapshot;
        let meta = timestamp.meta.get("snapshot.json").ok_or(MetadataError::NotListed { role })?;
        if !meta.describes(&bytes) {
            return Err(MetadataError::WrongContent { role });
        }
        let (envelope, document) = open::<Snapshot>(role, &bytes)?;
        verify_top(&envelope, role, self.root())?;
        exact(role, meta.version, document.version)?;
        for listed in Role::IN_SNAPSHOT {
            let entry = document.meta.get(&listed.meta_name()).ok_or(MetadataError::NotListed { role: listed })?;
            floor(listed, floors.role(listed), entry.version)?;
        }
        Ok(Signed { document, bytes })
    }

    /// Top-level targets before any snapshot exists: signatures and delegations only. For publishers.
    ///
    /// # Errors
    /// Too few signatures or [`MetadataError::BadDelegation`].
    pub fn targets_alone(&self, bytes: Arc<[u8]>) -> Result<Signed<Targets>, MetadataError> {
        let (envelope, document) = open::<Targets>(Role::Targets, &bytes)?;
        self.check_targets(&envelope, &document)?;
        Ok(Signed { document, bytes })
    }

    /// The top-level targets that `snapshot` names (spec 5.6). It must delegate to `catalog` and to `rollout`,
    /// terminating, each within its own folders.
    ///
    /// # Errors
    /// As [`Self::snapshot`], or [`MetadataError::BadDelegation`].
    pub fn targets(&self, bytes: Arc<[u8]>, snapshot: &Snapshot) -> Result<Signed<Targets>, MetadataError> {
        let (envelope, document) = open_listed(Role::Targets, &bytes, snapshot)?;
        self.check_targets(&envelope, &document)?;
        Ok(Signed { document, bytes })
    }

    fn check_targets(&self, envelope: &Envelope, document: &Targets) -> Result<(), MetadataError> {
        verify_top(envelope, Role::Targets, self.root())?;
        for (role, folders) in [(Role::Catalog, &["bundles/", "blobs/"][..]), (Role::Rollout, &["rollout/"][..])] {
            let bad = |why: &str| MetadataError::BadDelegation { role, why: why.to_owned() };
            let delegation = document
                .delegations
                .as_ref()
                .and_then(|d| d.role(role))
                .ok_or_else(|| bad("not delegated exactly once"))?;
            if !delegation.terminating {
                return Err(bad("must be terminating"));
            }
            // A wider path would let an online key list what only the release key may.
            if !delegation.paths.iter().all(|p| folders.iter().any(|f| p.starts_with(f))) {
                return Err(bad("paths outside its own folders"));
            }
        }
        Ok(())
    }

    /// `catalog` or `rollout`, checked against the delegation in `targets` as it stands now, also when the bytes
    /// come from an earlier run.
    ///
    /// # Errors
    /// As [`Self::snapshot`], or a target outside the delegated paths.
    pub fn delegated(
        &self,
        role: Role,
        bytes: Arc<[u8]>,
        snapshot: &Snapshot,
        targets: &Targets,
    ) -> Result<Signed<Targets>, MetadataError> {
        let missing = || MetadataError::BadDelegation { role, why: "not delegated".to_owned() };
        let delegations = targets.delegations.as_ref().ok_or_else(missing)?;
        let delegation = delegations.role(role).ok_or_else(missing)?;
        let (envelope, document) = open_listed(role, &bytes, snapshot)?;
        envelope.verify(role, &delegations.keys, &delegation.role_keys())?;
        if let Some(stray) =
            document.targets.keys().find(|t| !delegation.paths.iter().any(|p| super::path_matches(p, t)))
        {
            let why = format!("target `{stray}` is outside the delegated paths");
            return Err(MetadataError::Malformed { role, why });
        }
        Ok(Signed { document, bytes })
    }
}

/// Fingerprint of the keys behind a delegated role.
#[must_use]
pub fn delegation_fingerprint(targets: &Targets, role: Role) -> Digest {
    let keys = targets.delegations.as_ref().and_then(|d| d.role(role)).map(super::DelegatedRole::role_keys);
    fingerprint(keys.iter())
}

fn open<T: Document>(role: Role, bytes: &[u8]) -> Result<(Envelope, T), MetadataError> {
    let envelope = Envelope::parse(role, bytes)?;
    let document = read(role, envelope.signed.clone())?;
    Ok((envelope, document))
}

fn open_listed(role: Role, bytes: &[u8], snapshot: &Snapshot) -> Result<(Envelope, Targets), MetadataError> {
    let meta = snapshot.meta.get(&role.meta_name()).ok_or(MetadataError::NotListed { role })?;
    if !meta.describes(bytes) {
        return Err(MetadataError::WrongContent { role });
    }
    let (envelope, document) = open::<Targets>(role, bytes)?;
    exact(role, meta.version, document.version)?;
    Ok((envelope, document))
}

fn verify_top(envelope: &Envelope, role: Role, root: &Root) -> Result<(), MetadataError> {
    let keys = root
        .roles
        .get(role.as_str())
        .ok_or(MetadataError::Malformed { role: Role::Root, why: format!("role {role} is missing") })?;
    envelope.verify(role, &root.keys, keys)
}

fn floor(role: Role, trusted: u64, offered: u64) -> Result<(), MetadataError> {
    if offered < trusted {
        return Err(MetadataError::Rollback { role, trusted, offered });
    }
    Ok(())
}

fn exact(role: Role, want: u64, got: u64) -> Result<(), MetadataError> {
    if want != got {
        return Err(MetadataError::WrongVersion { role, want, got });
    }
    Ok(())
}
