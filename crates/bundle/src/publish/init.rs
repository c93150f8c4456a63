//! Offline ceremonies: the first root and targets, and their successors.

use super::error::PublishError;
use super::keys::RoleSigner;
use super::repository::RepositoryState;
use super::unsigned::{SignedMetadata, Unsigned};
use crate::tuf::{CATALOG_PATHS, DelegatedRole, Delegations, PublicKey, ROLLOUT_PATHS, Role, RoleKeys, Root, Targets};
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use std::collections::{BTreeMap, BTreeSet};

/// How much ceremony an installation wants. The format is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// One key per role, long lives.
    Starter,
    /// Threshold keys, short lives (`root` 3 of 5, `targets` 2 of 3 recommended).
    Full,
}

/// Life of new metadata per role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expiries {
    pub root: TimeDelta,
    pub targets: TimeDelta,
    pub catalog: TimeDelta,
    pub rollout: TimeDelta,
    pub snapshot: TimeDelta,
    pub timestamp: TimeDelta,
}

impl Expiries {
    /// The lives of a profile. Full: a year, 90, 60, 7, 7 and 7 days.
    #[must_use]
    pub fn of(profile: Profile) -> Self {
        let d = TimeDelta::days;
        match profile {
            Profile::Starter => Self {
                root: d(730),
                targets: d(365),
                catalog: d(180),
                rollout: d(30),
                snapshot: d(30),
                timestamp: d(30),
            },
            Profile::Full => {
                Self { root: d(365), targets: d(90), catalog: d(60), rollout: d(7), snapshot: d(7), timestamp: d(7) }
            }
        }
    }

    /// Life of one role.
    #[must_use]
    pub fn life(&self, role: Role) -> TimeDelta {
        match role {
            Role::Root => self.root,
            Role::Targets => self.targets,
            Role::Catalog => self.catalog,
            Role::Rollout => self.rollout,
            Role::Snapshot => self.snapshot,
            Role::Timestamp => self.timestamp,
        }
    }

    /// Expiry of something signed at `now`, whole seconds.
    pub(super) fn from(&self, role: Role, now: DateTime<Utc>) -> DateTime<Utc> {
        now.trunc_subsecs(0) + self.life(role)
    }
}

/// Public keys of a role and how many of them must sign.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleKeySet {
    pub keys: Vec<PublicKey>,
    pub threshold: u32,
}

impl RoleKeySet {
    /// One key, enough by itself.
    #[must_use]
    pub fn single(key: PublicKey) -> Self {
        Self { keys: vec![key], threshold: 1 }
    }

    fn role_keys(&self) -> RoleKeys {
        RoleKeys { keyids: self.keys.iter().map(PublicKey::id).collect(), threshold: self.threshold }
    }
}

/// The public keys of all roles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keyring {
    pub root: RoleKeySet,
    pub targets: RoleKeySet,
    pub catalog: RoleKeySet,
    pub rollout: RoleKeySet,
    pub snapshot: RoleKeySet,
    pub timestamp: RoleKeySet,
}

impl Keyring {
    fn sets(&self) -> [(Role, &RoleKeySet); 6] {
        [
            (Role::Root, &self.root),
            (Role::Targets, &self.targets),
            (Role::Catalog, &self.catalog),
            (Role::Rollout, &self.rollout),
            (Role::Snapshot, &self.snapshot),
            (Role::Timestamp, &self.timestamp),
        ]
    }

    /// Thresholds that can be met, real keys, and no key that is both online and offline: then a stolen server
    /// could add bundles.
    ///
    /// # Errors
    /// [`PublishError::Keyring`].
    pub fn check(&self) -> Result<(), PublishError> {
        let mut online = BTreeSet::new();
        let mut offline = BTreeSet::new();
        for (role, set) in self.sets() {
            let bad = |why: String| PublishError::Keyring(format!("{role}: {why}"));
            let mut own = BTreeSet::new();
            for key in &set.keys {
                let material = key.material().ok_or_else(|| bad("a key is not Ed25519".to_owned()))?;
                if !own.insert(material) {
                    return Err(bad("the same key twice".to_owned()));
                }
            }
            if set.threshold == 0 || set.threshold as usize > own.len() {
                return Err(bad(format!("threshold {} with {} keys", set.threshold, own.len())));
            }
            match role {
                Role::Rollout | Role::Snapshot | Role::Timestamp => online.extend(own),
                Role::Root | Role::Targets | Role::Catalog => offline.extend(own),
            }
        }
        if !online.is_disjoint(&offline) {
            let why = "a key serves online (rollout, snapshot, timestamp) and offline roles: make another";
            return Err(PublishError::Keyring(why.to_owned()));
        }
        Ok(())
    }
}

/// The files made offline. `root` is also what is built into the app.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InitialRepository {
    pub root: SignedMetadata,
    pub targets: SignedMetadata,
}

/// Makes root 1 and targets 1, signed by enough of their keys. Publish them with the first [`super::assemble`]
/// over [`RepositoryState::initial`].
///
/// # Errors
/// A bad keyring, or signers that do not reach the threshold.
pub fn init_repository(
    keyring: &Keyring,
    expiries: &Expiries,
    now: DateTime<Utc>,
    root_signers: &[&dyn RoleSigner],
    targets_signers: &[&dyn RoleSigner],
) -> Result<InitialRepository, PublishError> {
    keyring.check()?;
    let root = root_document(keyring, 1, expiries, now).sign_as(Role::Root, root_signers)?;
    let targets = targets_document(keyring, 1, expiries, now).sign_as(Role::Targets, targets_signers)?;
    let made = InitialRepository { root, targets };
    // The device half decides whether this is a repository.
    RepositoryState::initial(&made)?;
    Ok(made)
}

/// The next root: new keys or a new expiry. It must be signed by enough of the old and of the new root keys.
///
/// # Errors
/// A bad keyring.
pub fn root_next(
    state: &RepositoryState,
    keyring: &Keyring,
    expiries: &Expiries,
    now: DateTime<Utc>,
) -> Result<Unsigned, PublishError> {
    keyring.check()?;
    let version = state.root().version.saturating_add(1);
    Unsigned::new(Role::Root, version, &root_document(keyring, version, expiries, now))
}

/// The next targets: new catalog or rollout keys, or a new expiry.
///
/// # Errors
/// A bad keyring.
pub fn targets_next(
    state: &RepositoryState,
    keyring: &Keyring,
    expiries: &Expiries,
    now: DateTime<Utc>,
) -> Result<Unsigned, PublishError> {
    keyring.check()?;
    let version = state.next_version(Role::Targets);
    Unsigned::new(Role::Targets, version, &targets_document(keyring, version, expiries, now))
}

fn root_document(keyring: &Keyring, version: u64, expiries: &Expiries, now: DateTime<Utc>) -> Root {
    let top = [
        (Role::Root, &keyring.root),
        (Role::Targets, &keyring.targets),
        (Role::Snapshot, &keyring.snapshot),
        (Role::Timestamp, &keyring.timestamp),
    ];
    Root {
        version,
        expires: expiries.from(Role::Root, now),
        consistent_snapshot: true,
        keys: top.iter().flat_map(|(_, s)| &s.keys).map(|k| (k.id(), k.clone())).collect(),
        roles: top.iter().map(|(r, s)| (r.as_str().to_owned(), s.role_keys())).collect(),
    }
}

fn targets_document(keyring: &Keyring, version: u64, expiries: &Expiries, now: DateTime<Utc>) -> Targets {
    let delegated = |role: Role, set: &RoleKeySet, paths: &[&str]| DelegatedRole {
        name: role.as_str().to_owned(),
        keyids: set.role_keys().keyids,
        threshold: set.threshold,
        paths: paths.iter().map(|p| (*p).to_owned()).collect(),
        terminating: true,
    };
    let keys = keyring.catalog.keys.iter().chain(&keyring.rollout.keys);
    Targets {
        version,
        expires: expiries.from(Role::Targets, now),
        targets: BTreeMap::new(),
        delegations: Some(Delegations {
            keys: keys.map(|k| (k.id(), k.clone())).collect(),
            roles: vec![
                delegated(Role::Catalog, &keyring.catalog, &CATALOG_PATHS),
                delegated(Role::Rollout, &keyring.rollout, &ROLLOUT_PATHS),
            ],
        }),
        release_policy: None,
    }
}

/// Shorthand for documents whose version is inside.
trait SignAs {
    fn sign_as(&self, role: Role, signers: &[&dyn RoleSigner]) -> Result<SignedMetadata, PublishError>;
}

impl<T: serde::Serialize + crate::tuf::Document> SignAs for T {
    fn sign_as(&self, role: Role, signers: &[&dyn RoleSigner]) -> Result<SignedMetadata, PublishError> {
        Unsigned::new(role, self.version(), self)?.sign(signers)
    }
}
