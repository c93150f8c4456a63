//! [`UpdateClient`]: one device's trust in one repository, kept across restarts.

use super::effective_now;
use super::error::{InstallBlocked, VerifyError};
use super::session::{Refresh, Session};
use super::state::{CatalogEntry, VerifiedState};
use super::store::{
    FileSet, METADATA_RECORD, MetadataV1, StoreError, TRUST_RECORD, TrustStore, TrustV1, decode, encode,
};
use crate::tuf::{Floors, Role, TrustedRoot};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest};
use std::sync::Arc;

/// What a client may do differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Ask for the timestamp first and stop when it is byte for byte the trusted one and everything is still
    /// fresh, so that an idle poll is one request. Whoever could replay that timestamp could also hide a new
    /// root, so nothing is lost; a repository that rotates keys signs a new timestamp. Off: the order of the
    /// specification, root first, at every refresh.
    pub idle_shortcut: bool,
    /// New roots accepted in one refresh.
    pub max_new_roots: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { idle_shortcut: true, max_new_roots: 64 }
    }
}

/// The files behind a [`VerifiedState`].
#[derive(Debug, Clone)]
pub(super) struct Files {
    pub timestamp: Arc<[u8]>,
    pub snapshot: Arc<[u8]>,
    pub targets: Arc<[u8]>,
    pub catalog: Arc<[u8]>,
    pub rollout: Arc<[u8]>,
    pub assignment: Arc<[u8]>,
}

/// Last complete refresh.
#[derive(Debug, Clone)]
pub(super) struct Current {
    pub files: Files,
    pub state: Arc<VerifiedState>,
    /// Nothing newer has been accepted since.
    pub newest: bool,
}

/// A device's TUF client. See the module text for how to drive it.
pub struct UpdateClient {
    pub(super) app: AppId,
    pub(super) options: Options,
    pub(super) built_at: DateTime<Utc>,
    pub(super) trusted: TrustedRoot,
    pub(super) floors: Floors,
    pub(super) current: Option<Current>,
    pub(super) session: Session,
    pub(super) dirty: bool,
    store: Box<dyn TrustStore>,
    store_failure: Option<StoreError>,
    recovered: bool,
}

impl std::fmt::Debug for UpdateClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpdateClient")
            .field("app", &self.app)
            .field("root_version", &self.trusted.root().version)
            .field("floors", &self.floors)
            .field("store_failure", &self.store_failure)
            .finish_non_exhaustive()
    }
}

impl UpdateClient {
    /// Opens a client. `root` is the root file built into the app, `built_at` when the app was built. Damaged
    /// records are not fatal: what the other record knows is kept, and [`Self::recovered`] tells.
    ///
    /// # Errors
    /// A bad built-in root, or records that exist but cannot be read at all.
    pub fn open(
        root: &[u8],
        app: AppId,
        built_at: DateTime<Utc>,
        store: Box<dyn TrustStore>,
        options: Options,
    ) -> Result<Self, VerifyError> {
        let mut trusted = TrustedRoot::from_root(root.into())?;
        let mut recovered = false;
        let trust = load_record::<TrustV1>(&*store, TRUST_RECORD, &mut recovered)?.filter(|t| t.v == 1);
        let metadata = load_record::<MetadataV1>(&*store, METADATA_RECORD, &mut recovered)?.filter(|m| m.v == 1);
        let records = [trust.as_ref(), metadata.as_ref().map(|m| &m.trust)];
        for record in records.into_iter().flatten() {
            // A root from an app update may be newer than the stored one; the newest wins.
            if let Ok(stored) = TrustedRoot::from_root(record.root.as_bytes().into())
                && stored.root().version > trusted.root().version
            {
                trusted = stored;
            }
        }
        let mut floors = records
            .into_iter()
            .flatten()
            .map(|r| r.floors.clone())
            .reduce(|newer, older| newer.merge(&older))
            .unwrap_or_else(|| Floors::new(trusted.root()));
        floors.rebase(trusted.root());
        let mut client = Self {
            app,
            options,
            built_at,
            trusted,
            floors,
            current: None,
            session: Session::default(),
            dirty: false,
            store,
            store_failure: None,
            recovered,
        };
        client.current = metadata.and_then(|m| m.set).and_then(|set| client.restore(&set));
        Ok(client)
    }

    /// The last complete state, fresh or not: what the installed bundle runs under. Installing needs
    /// [`Self::may_install`].
    #[must_use]
    pub fn state(&self) -> Option<&Arc<VerifiedState>> {
        self.current.as_ref().map(|c| &c.state)
    }

    /// The state, if something new may be installed under it at `clock`.
    ///
    /// # Errors
    /// [`InstallBlocked`] says what is missing; the installed bundle keeps running.
    pub fn may_install(&self, clock: DateTime<Utc>) -> Result<&Arc<VerifiedState>, InstallBlocked> {
        if let Some(failure) = &self.store_failure {
            return Err(InstallBlocked::TrustNotStored(failure.to_string()));
        }
        let current = self.current.as_ref().ok_or(InstallBlocked::NothingVerified)?;
        let (role, expires) = current.state.valid_until;
        if self.now(clock) >= expires {
            return Err(InstallBlocked::Stale { role, expires });
        }
        if !current.newest {
            return Err(InstallBlocked::RefreshUnfinished);
        }
        Ok(&current.state)
    }

    /// The entry of `bundle`, if it may be installed at `clock`: fresh state, listed, not revoked, not below the
    /// floor. Next: fetch the manifest and pass it to [`super::verify_manifest`].
    ///
    /// # Errors
    /// [`InstallBlocked`].
    pub fn installable(&self, bundle: &Digest, clock: DateTime<Utc>) -> Result<&CatalogEntry, InstallBlocked> {
        self.may_install(clock)?.installable(bundle, self.epoch_floor())
    }

    /// Highest security epoch floor this device has accepted from the present release keys.
    #[must_use]
    pub fn epoch_floor(&self) -> u64 {
        self.floors.security_epoch.value
    }

    /// Version floors, for reports.
    #[must_use]
    pub fn floors(&self) -> &Floors {
        &self.floors
    }

    /// Version of the trusted root.
    #[must_use]
    pub fn root_version(&self) -> u64 {
        self.trusted.root().version
    }

    /// Whether a stored record was damaged when the client was opened; report it.
    #[must_use]
    pub fn recovered(&self) -> bool {
        self.recovered
    }

    /// The last failure to store trust, until a later write succeeds.
    #[must_use]
    pub fn store_failure(&self) -> Option<&StoreError> {
        self.store_failure.as_ref()
    }

    /// `clock`, lifted where it is certainly behind.
    #[must_use]
    pub fn now(&self, clock: DateTime<Utc>) -> DateTime<Utc> {
        effective_now(clock, self.floors.issued, self.built_at)
    }

    /// Outcome of the last refresh that ended well.
    #[must_use]
    pub fn last_refresh(&self) -> Refresh {
        self.session.last
    }

    /// Stores what was accepted. A failure is remembered and blocks installs.
    pub(super) fn flush(&mut self) {
        if !self.dirty && self.store_failure.is_none() {
            return;
        }
        match self.save() {
            Ok(()) => {
                self.store_failure = None;
                self.dirty = false;
            }
            Err(e) => self.store_failure = Some(e),
        }
    }

    fn save(&mut self) -> Result<(), StoreError> {
        let root = String::from_utf8_lossy(self.trusted.bytes()).into_owned();
        let trust = TrustV1 { v: 1, root, floors: self.floors.clone() };
        self.store.save(TRUST_RECORD, &encode(TRUST_RECORD, &trust)?)?;
        let text = |bytes: &Arc<[u8]>| String::from_utf8_lossy(bytes).into_owned();
        let set = self.current.as_ref().map(|c| FileSet {
            root_version: c.state.versions.get(&Role::Root).copied().unwrap_or(0),
            timestamp: text(&c.files.timestamp),
            snapshot: text(&c.files.snapshot),
            targets: text(&c.files.targets),
            catalog: text(&c.files.catalog),
            rollout: text(&c.files.rollout),
            assignment: text(&c.files.assignment),
        });
        let metadata = MetadataV1 { v: 1, trust, set };
        self.store.save(METADATA_RECORD, &encode(METADATA_RECORD, &metadata)?)
    }
}

fn load_record<T: serde::de::DeserializeOwned>(
    store: &dyn TrustStore,
    record: &str,
    damaged: &mut bool,
) -> Result<Option<T>, VerifyError> {
    let Some(bytes) = store.load(record)? else {
        return Ok(None);
    };
    let value = decode(&bytes);
    *damaged |= value.is_none();
    Ok(value)
}
