//! The repository as it stands, read back from its own files. What is read is verified like on a device, so a
//! damaged or tampered store is noticed before anything is signed on top of it.

use super::error::PublishError;
use super::init::{Expiries, InitialRepository};
use crate::tuf::{
    Document, Floors, MetadataError, ReleasePolicy, Role, Root, Signed, Snapshot, TIMESTAMP_PATH, Targets, Timestamp,
    TrustedRoot,
};
use crate::verify::state_for_publisher as state;
use chrono::{DateTime, Utc};
use flywheel_types::assign::AssignmentV1;
use flywheel_types::{AppId, Digest};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Reads one repository file; `Ok(None)` when it does not exist, `Err(why)` when it cannot be read.
pub type Reader<'a> = &'a mut dyn FnMut(&str) -> Result<Option<Vec<u8>>, String>;

/// What is published. Built by [`RepositoryState::initial`] or [`RepositoryState::load`].
#[derive(Debug, Clone)]
pub struct RepositoryState {
    pub(super) trusted: TrustedRoot,
    pub(super) targets: Signed<Targets>,
    pub(super) live: Option<Live>,
    /// Highest version number that is taken, also by files of a publication that was cut off.
    pub(super) taken: BTreeMap<Role, u64>,
    /// Root 1 and targets 1 still have to be written.
    pub(super) unpublished: bool,
}

/// The part that exists once something was published.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub timestamp: Signed<Timestamp>,
    pub snapshot: Signed<Snapshot>,
    pub catalog: Signed<Targets>,
    pub rollout: Signed<Targets>,
    pub assignment: AssignmentV1,
}

/// A role that needs a new signature soon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Due {
    pub role: Role,
    pub expires: DateTime<Utc>,
    /// It has expired already: devices install nothing.
    pub expired: bool,
}

impl RepositoryState {
    /// The state right after the offline ceremony, before anything is published.
    ///
    /// # Errors
    /// The ceremony's files do not verify.
    pub fn initial(made: &InitialRepository) -> Result<Self, PublishError> {
        let trusted = TrustedRoot::from_root(made.root.bytes.as_slice().into())?;
        let bytes: Arc<[u8]> = made.targets.bytes.as_slice().into();
        let targets = trusted.targets_alone(bytes)?;
        let taken = [(Role::Targets, targets.document.version)].into();
        Ok(Self { trusted, targets, live: None, taken, unpublished: true })
    }

    /// Reads the repository of `app`, starting from a root that is trusted (the one built into the app). `None`
    /// when nothing has been published yet. Expired metadata is not an error here.
    ///
    /// # Errors
    /// Files that are missing, unreadable or not what their parents say.
    pub fn load(root: &[u8], app: &AppId, read: Reader<'_>) -> Result<Option<Self>, PublishError> {
        let Some(timestamp) = get(read, TIMESTAMP_PATH)? else {
            return Ok(None);
        };
        let mut chain = vec![TrustedRoot::from_root(root.into())?];
        while let Some(last) = chain.last() {
            let Some(next) = get(read, &Role::Root.path(last.root().version.saturating_add(1)))? else {
                break;
            };
            let mut root = last.clone();
            root.update(next.into())?;
            chain.push(root);
        }
        // A publication that was cut off between root and timestamp leaves the old timestamp under the new root.
        let timestamp: Arc<[u8]> = timestamp.into();
        let mut outcome = Err(MetadataError::NotListed { role: Role::Root }.into());
        for root in chain.iter().rev() {
            outcome = Self::load_under(root, timestamp.clone(), app, read);
            if outcome.is_ok() {
                break;
            }
        }
        let mut this = outcome?;
        if let Some(newest) = chain.pop() {
            this.trusted = newest;
        }
        this.skip_orphans(read)?;
        Ok(Some(this))
    }

    fn load_under(
        trusted: &TrustedRoot,
        timestamp: Arc<[u8]>,
        app: &AppId,
        read: Reader<'_>,
    ) -> Result<Self, PublishError> {
        let none = Floors::new(trusted.root());
        let timestamp = trusted.timestamp(timestamp, &none)?;
        let listed = timestamp.document.meta.get("snapshot.json").map_or(0, |m| m.version);
        let snapshot = need(read, &Role::Snapshot.path(listed))?;
        let snapshot = trusted.snapshot(snapshot, &timestamp.document, &none)?;
        let version = |role: Role| snapshot.document.meta.get(&role.meta_name()).map_or(0, |m| m.version);
        let targets = need(read, &Role::Targets.path(version(Role::Targets)))?;
        let targets = trusted.targets(targets, &snapshot.document)?;
        let mut delegated = |role: Role| -> Result<Signed<Targets>, PublishError> {
            let bytes = need(read, &role.path(version(role)))?;
            Ok(trusted.delegated(role, bytes, &snapshot.document, &targets.document)?)
        };
        let catalog = delegated(Role::Catalog)?;
        let rollout = delegated(Role::Rollout)?;
        let (path, length, sha256) = state::assignment_target(&rollout.document)?;
        let bytes = need(read, &path)?;
        if bytes.len() as u64 != length || Digest::of(&bytes) != sha256 {
            return Err(PublishError::Read { path, why: "content differs from its metadata".to_owned() });
        }
        let assignment = state::read_assignment(&bytes, app, 0)?;
        let taken = [
            (Role::Snapshot, snapshot.document.version),
            (Role::Targets, targets.document.version),
            (Role::Catalog, catalog.document.version),
            (Role::Rollout, rollout.document.version),
        ];
        Ok(Self {
            trusted: trusted.clone(),
            targets,
            taken: taken.into(),
            live: Some(Live { timestamp, snapshot, catalog, rollout, assignment }),
            unpublished: false,
        })
    }

    /// Finds version numbers taken by files of a publication that was cut off, so that the next one steps over
    /// them (every name but the timestamp is written once). [`Self::load`] has done this already.
    ///
    /// # Errors
    /// [`PublishError::Read`].
    pub fn skip_orphans(&mut self, read: Reader<'_>) -> Result<(), PublishError> {
        for role in [Role::Snapshot, Role::Targets, Role::Catalog, Role::Rollout] {
            while get(read, &role.path(self.next_version(role)))?.is_some() {
                self.taken.insert(role, self.next_version(role));
            }
        }
        Ok(())
    }

    /// The version the next document of `role` must have.
    #[must_use]
    pub fn next_version(&self, role: Role) -> u64 {
        match role {
            Role::Root => self.root().version.saturating_add(1),
            Role::Timestamp => self.live.as_ref().map_or(1, |l| l.timestamp.document.version.saturating_add(1)),
            other => self.taken.get(&other).copied().unwrap_or(0).saturating_add(1),
        }
    }

    /// The root document.
    #[must_use]
    pub fn root(&self) -> &Root {
        self.trusted.root()
    }

    /// The root file: what is built into the app.
    #[must_use]
    pub fn root_bytes(&self) -> &[u8] {
        self.trusted.bytes()
    }

    /// The catalog document; `None` before the first publication.
    #[must_use]
    pub fn catalog(&self) -> Option<&Targets> {
        self.live.as_ref().map(|l| &l.catalog.document)
    }

    /// The assignment in force; `None` before the first publication.
    #[must_use]
    pub fn assignment(&self) -> Option<&AssignmentV1> {
        self.live.as_ref().map(|l| &l.assignment)
    }

    /// Security epoch floor and revoked bundles.
    #[must_use]
    pub fn release_policy(&self) -> ReleasePolicy {
        self.catalog().and_then(|c| c.release_policy.clone()).unwrap_or_default()
    }

    /// Digest of the timestamp file, for compare-and-swap; `None` before the first publication.
    #[must_use]
    pub fn timestamp_digest(&self) -> Option<Digest> {
        self.live.as_ref().map(|l| Digest::of(&l.timestamp.bytes))
    }

    /// Roles that have used up half of their life: re-sign the online ones with [`super::assemble`], alarm the
    /// key holders for the others. In the order of [`Role::ALL`].
    #[must_use]
    pub fn due(&self, expiries: &Expiries, now: DateTime<Utc>) -> Vec<Due> {
        let mut all = vec![(Role::Root, self.root().expires), (Role::Targets, self.targets.document.expires)];
        if let Some(live) = &self.live {
            all.extend([
                (Role::Timestamp, live.timestamp.document.expires()),
                (Role::Snapshot, live.snapshot.document.expires()),
                (Role::Catalog, live.catalog.document.expires()),
                (Role::Rollout, live.rollout.document.expires()),
            ]);
        }
        all.sort_by_key(|(role, _)| *role);
        all.into_iter()
            .filter(|(role, expires)| half_used(expiries, *role, *expires, now))
            .map(|(role, expires)| Due { role, expires, expired: expires <= now })
            .collect()
    }
}

/// Whether less than half of the role's life is left.
pub(super) fn half_used(expiries: &Expiries, role: Role, expires: DateTime<Utc>, now: DateTime<Utc>) -> bool {
    expires - now < expiries.life(role) / 2
}

fn get(read: Reader<'_>, path: &str) -> Result<Option<Vec<u8>>, PublishError> {
    read(path).map_err(|why| PublishError::Read { path: path.to_owned(), why })
}

fn need(read: Reader<'_>, path: &str) -> Result<Arc<[u8]>, PublishError> {
    match get(read, path)? {
        Some(bytes) => Ok(bytes.into()),
        None => Err(PublishError::Missing { path: path.to_owned() }),
    }
}
