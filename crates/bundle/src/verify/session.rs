//! One refresh, step by step: the client workflow of TUF spec 5 without any I/O.

use super::client::{Current, Files, UpdateClient};
use super::error::VerifyError;
use super::state::{self, VerifiedState};
use super::store::FileSet;
use crate::tuf::{
    Document, FileMeta, Floors, MetadataError, Role, Signed, Snapshot, TIMESTAMP_PATH, Targets, Timestamp, check_fresh,
    delegation_fingerprint,
};
use chrono::{DateTime, Utc};
use flywheel_types::Digest;
use std::sync::Arc;

/// A file the client needs next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Relative to the repository address.
    pub path: String,
    /// Stop reading after this many bytes.
    pub max_len: u64,
}

/// The answer to a [`Request`].
#[derive(Debug, Clone)]
pub enum Reply {
    Found(Arc<[u8]>),
    NotFound,
    /// Only for the timestamp, when the server confirmed (ETag) that it is the one supplied last.
    NotModified,
}

/// How a refresh ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Refresh {
    /// The repository is as it was.
    #[default]
    Unchanged,
    /// There is a new [`VerifiedState`].
    Updated,
}

#[derive(Debug, Clone, PartialEq)]
enum Want {
    /// The timestamp, to see whether anything changed at all.
    Poll,
    Root(u64),
    Timestamp,
    /// Snapshot, targets, catalog or rollout as announced by the parent.
    Listed(Role, FileMeta),
    Assignment {
        path: String,
        length: u64,
        sha256: Digest,
    },
}

#[derive(Debug, Clone, Default)]
struct Draft {
    timestamp: Option<Signed<Timestamp>>,
    snapshot: Option<Signed<Snapshot>>,
    targets: Option<Signed<Targets>>,
    catalog: Option<Signed<Targets>>,
    rollout: Option<Signed<Targets>>,
}

/// State of a refresh in progress.
#[derive(Debug, Clone, Default)]
pub(super) struct Session {
    pub last: Refresh,
    now: DateTime<Utc>,
    want: Option<Want>,
    polled: Option<Arc<[u8]>>,
    new_roots: u64,
    draft: Draft,
}

impl UpdateClient {
    /// Starts a refresh at device time `clock`; one that was under way is dropped.
    pub fn begin(&mut self, clock: DateTime<Utc>) {
        self.flush();
        let poll = self.options.idle_shortcut && self.may_install(clock).is_ok();
        let first = Want::Root(self.trusted.root().version.saturating_add(1));
        self.session = Session {
            last: self.session.last,
            now: self.now(clock),
            want: Some(if poll { Want::Poll } else { first }),
            ..Session::default()
        };
    }

    /// The next file needed; `None` when the refresh is over.
    #[must_use]
    pub fn next_request(&self) -> Option<Request> {
        let (path, max_len) = match self.session.want.as_ref()? {
            Want::Poll | Want::Timestamp => (TIMESTAMP_PATH.to_owned(), Role::Timestamp.max_bytes()),
            Want::Root(version) => (Role::Root.path(*version), Role::Root.max_bytes()),
            Want::Listed(role, meta) => {
                let max = meta.length.unwrap_or(u64::MAX).min(role.max_bytes());
                (role.path(meta.version), max)
            }
            Want::Assignment { path, length, .. } => (path.clone(), *length),
        };
        Some(Request { path, max_len })
    }

    /// Takes the answer to [`Self::next_request`]. On an error the refresh is over: what was verified so far
    /// counts (and is stored), nothing else changes.
    ///
    /// # Errors
    /// [`VerifyError`].
    pub fn supply(&mut self, reply: Reply) -> Result<(), VerifyError> {
        let request = self.next_request().ok_or(VerifyError::NoOpenRequest)?;
        let want = self.session.want.take().ok_or(VerifyError::NoOpenRequest)?;
        let result = match &reply {
            Reply::Found(bytes) if bytes.len() as u64 > request.max_len => {
                Err(VerifyError::TooLarge { path: request.path, limit: request.max_len })
            }
            _ => self.step(want, reply, request.path),
        };
        match result {
            Ok(next) => self.session.want = next,
            Err(e) => {
                self.abandon();
                return Err(e);
            }
        }
        if self.session.want.is_none() {
            self.flush();
        }
        Ok(())
    }

    /// Ends a refresh early, for example because the network is gone.
    pub fn abandon(&mut self) {
        self.session.want = None;
        self.session.draft = Draft::default();
        self.flush();
    }

    fn step(&mut self, want: Want, reply: Reply, path: String) -> Result<Option<Want>, VerifyError> {
        match (want, reply) {
            (Want::Poll, Reply::NotModified) => Ok(self.unchanged()),
            (Want::Poll, Reply::Found(bytes)) => {
                if self.current.as_ref().is_some_and(|c| c.files.timestamp == bytes) {
                    return Ok(self.unchanged());
                }
                self.session.polled = Some(bytes);
                Ok(Some(Want::Root(self.trusted.root().version.saturating_add(1))))
            }
            (Want::Root(_), Reply::Found(bytes)) => self.new_root(bytes).map(Some),
            (Want::Root(_), Reply::NotFound) => {
                check_fresh(Role::Root, self.trusted.root(), self.session.now)?;
                match self.session.polled.take() {
                    Some(bytes) => self.timestamp(bytes),
                    None => Ok(Some(Want::Timestamp)),
                }
            }
            (Want::Timestamp, Reply::Found(bytes)) => self.timestamp(bytes),
            (Want::Timestamp, Reply::NotModified) => {
                let bytes = self.current.as_ref().map(|c| c.files.timestamp.clone());
                self.timestamp(bytes.ok_or(VerifyError::Missing { path })?)
            }
            (Want::Listed(role, _), Reply::Found(bytes)) => {
                self.listed(role, bytes)?;
                self.reach()
            }
            (Want::Assignment { sha256, length, .. }, Reply::Found(bytes)) => {
                if bytes.len() as u64 != length || Digest::of(&bytes) != sha256 {
                    return Err(VerifyError::WrongContent { path });
                }
                self.complete(bytes)
            }
            (_, Reply::NotFound | Reply::NotModified) => Err(VerifyError::Missing { path }),
        }
    }

    fn unchanged(&mut self) -> Option<Want> {
        self.session.last = Refresh::Unchanged;
        None
    }

    fn new_root(&mut self, bytes: Arc<[u8]>) -> Result<Want, VerifyError> {
        self.session.new_roots += 1;
        if self.session.new_roots > self.options.max_new_roots {
            return Err(VerifyError::TooManyRoots(self.options.max_new_roots));
        }
        self.trusted.update(bytes)?;
        // At every step, so that keys rotated away and back within one refresh are noticed as well.
        self.floors.rebase(self.trusted.root());
        self.outdated();
        Ok(Want::Root(self.trusted.root().version.saturating_add(1)))
    }

    /// Something newer than the current state has been accepted.
    fn outdated(&mut self) {
        self.dirty = true;
        if let Some(current) = &mut self.current {
            current.newest = false;
        }
    }

    fn timestamp(&mut self, bytes: Arc<[u8]>) -> Result<Option<Want>, VerifyError> {
        let mut signed = self.trusted.timestamp(bytes, &self.floors)?;
        // Spec 5.4.3.1: of two timestamps with one version the first that was trusted stays.
        if let Some(current) = &self.current
            && current.state.versions.get(&Role::Timestamp) == Some(&signed.document.version)
            && let Ok(known) = self.trusted.timestamp(current.files.timestamp.clone(), &self.floors)
        {
            signed = known;
        }
        check_fresh(Role::Timestamp, &signed.document, self.session.now)?;
        if signed.document.version > self.floors.timestamp {
            self.outdated();
        }
        let before = self.floors.clone();
        self.floors.accept_timestamp(&signed.document);
        self.dirty |= self.floors != before;
        self.session.now = self.now(self.session.now);
        self.session.draft.timestamp = Some(signed);
        self.reach()
    }

    /// Goes as far as the files of the last refresh allow; says what must be fetched.
    fn reach(&mut self) -> Result<Option<Want>, VerifyError> {
        for role in [Role::Snapshot, Role::Targets, Role::Catalog, Role::Rollout] {
            let Some((done, meta)) = self.announced(role) else {
                return Err(MetadataError::NotListed { role }.into());
            };
            if done {
                continue;
            }
            if meta.length.is_some_and(|l| l > role.max_bytes()) {
                return Err(MetadataError::TooLarge { role, limit: role.max_bytes() }.into());
            }
            match self.kept(role).filter(|b| meta.hashes.is_some() && meta.describes(b)) {
                Some(bytes) => self.listed(role, bytes)?,
                None => return Ok(Some(Want::Listed(role, meta))),
            }
        }
        let rollout = self.session.draft.rollout.as_ref();
        let rollout = rollout.ok_or(MetadataError::NotListed { role: Role::Rollout })?;
        let (path, length, sha256) = state::assignment_target(&rollout.document)?;
        match self.current.as_ref().map(|c| c.files.assignment.clone()) {
            Some(bytes) if Digest::of(&bytes) == sha256 => self.complete(bytes),
            _ => Ok(Some(Want::Assignment { path, length, sha256 })),
        }
    }

    /// Whether `role` is done, and how its parent announces it.
    fn announced(&self, role: Role) -> Option<(bool, FileMeta)> {
        let draft = &self.session.draft;
        let done = match role {
            Role::Snapshot => draft.snapshot.is_some(),
            Role::Targets => draft.targets.is_some(),
            Role::Catalog => draft.catalog.is_some(),
            Role::Rollout => draft.rollout.is_some(),
            Role::Root | Role::Timestamp => return None,
        };
        let meta = match role {
            Role::Snapshot => &draft.timestamp.as_ref()?.document.meta,
            _ => &draft.snapshot.as_ref()?.document.meta,
        };
        Some((done, meta.get(&role.meta_name())?.clone()))
    }

    fn kept(&self, role: Role) -> Option<Arc<[u8]>> {
        let files = &self.current.as_ref()?.files;
        match role {
            Role::Snapshot => Some(files.snapshot.clone()),
            Role::Targets => Some(files.targets.clone()),
            Role::Catalog => Some(files.catalog.clone()),
            Role::Rollout => Some(files.rollout.clone()),
            Role::Root | Role::Timestamp => None,
        }
    }

    fn listed(&mut self, role: Role, bytes: Arc<[u8]>) -> Result<(), VerifyError> {
        let now = self.session.now;
        let draft = &mut self.session.draft;
        match role {
            Role::Snapshot => {
                let timestamp = draft.timestamp.as_ref().ok_or(VerifyError::NoOpenRequest)?;
                let signed = self.trusted.snapshot(bytes, &timestamp.document, &self.floors)?;
                check_fresh(role, &signed.document, now)?;
                // The timestamp may have been stored by a refresh that ended before this file.
                let before = self.floors.clone();
                self.floors.accept_snapshot(&signed.document);
                self.dirty |= self.floors != before;
                draft.snapshot = Some(signed);
            }
            Role::Targets => {
                let snapshot = draft.snapshot.as_ref().ok_or(VerifyError::NoOpenRequest)?;
                let signed = self.trusted.targets(bytes, &snapshot.document)?;
                check_fresh(role, &signed.document, now)?;
                draft.targets = Some(signed);
            }
            Role::Catalog | Role::Rollout => {
                let snapshot = draft.snapshot.as_ref().ok_or(VerifyError::NoOpenRequest)?;
                let targets = draft.targets.as_ref().ok_or(VerifyError::NoOpenRequest)?;
                let signed = self.trusted.delegated(role, bytes, &snapshot.document, &targets.document)?;
                check_fresh(role, &signed.document, now)?;
                match role {
                    Role::Catalog => draft.catalog = Some(signed),
                    _ => draft.rollout = Some(signed),
                }
            }
            Role::Root | Role::Timestamp => return Err(VerifyError::NoOpenRequest),
        }
        Ok(())
    }

    /// Everything is there: make the new state.
    fn complete(&mut self, assignment: Arc<[u8]>) -> Result<Option<Want>, VerifyError> {
        let draft = std::mem::take(&mut self.session.draft);
        let (new, floors) = self.assemble(draft, assignment, self.floors.clone())?;
        let updated = self.current.as_ref().is_none_or(|c| c.state != new.state);
        let same_files = self.current.as_ref().is_some_and(|c| c.newest && c.files.timestamp == new.files.timestamp);
        self.dirty |= !same_files || floors != self.floors;
        self.floors = floors;
        self.current = Some(new);
        self.session.last = if updated { Refresh::Updated } else { Refresh::Unchanged };
        Ok(None)
    }

    fn assemble(
        &self,
        draft: Draft,
        assignment: Arc<[u8]>,
        mut floors: Floors,
    ) -> Result<(Current, Floors), VerifyError> {
        let Draft {
            timestamp: Some(timestamp),
            snapshot: Some(snapshot),
            targets: Some(targets),
            catalog: Some(catalog),
            rollout: Some(rollout),
        } = draft
        else {
            return Err(VerifyError::NoOpenRequest);
        };
        let view = state::read_catalog(&catalog.document)?;
        let rollout_keys = delegation_fingerprint(&targets.document, Role::Rollout);
        let serial_floor = floors.assignment.under(rollout_keys);
        let document = state::read_assignment(&assignment, &self.app, serial_floor)?;
        floors.assignment.raise(rollout_keys, document.serial);
        let catalog_keys = delegation_fingerprint(&targets.document, Role::Catalog);
        floors.security_epoch.raise(catalog_keys, view.floor);
        let expiries = [
            (Role::Root, self.trusted.root().expires),
            (Role::Timestamp, timestamp.document.expires),
            (Role::Snapshot, snapshot.document.expires),
            (Role::Targets, targets.document.expires),
            (Role::Catalog, catalog.document.expires),
            (Role::Rollout, rollout.document.expires),
        ];
        let first = expiries.into_iter().min_by_key(|(_, t)| *t);
        let versions = [
            (Role::Root, self.trusted.root().version),
            (Role::Timestamp, timestamp.document.version()),
            (Role::Snapshot, snapshot.document.version()),
            (Role::Targets, targets.document.version()),
            (Role::Catalog, catalog.document.version()),
            (Role::Rollout, rollout.document.version()),
        ];
        let state = VerifiedState {
            app: self.app.clone(),
            assignment: document,
            catalog: view.entries,
            blobs: view.blobs,
            revoked: view.revoked,
            security_epoch_floor: view.floor,
            issued_at: timestamp.document.issued,
            valid_until: first.unwrap_or((Role::Root, self.trusted.root().expires)),
            versions: versions.into_iter().collect(),
        };
        let files = Files {
            timestamp: timestamp.bytes,
            snapshot: snapshot.bytes,
            targets: targets.bytes,
            catalog: catalog.bytes,
            rollout: rollout.bytes,
            assignment,
        };
        Ok((Current { files, state: Arc::new(state), newest: true }, floors))
    }

    /// Verifies a stored set again, under the present root, without asking whether it is fresh. `None` when it
    /// does not hold; the set is marked old when the floors have moved past it.
    pub(super) fn restore(&self, set: &FileSet) -> Option<Current> {
        let none = Floors::new(self.trusted.root());
        let bytes = |s: &String| Arc::<[u8]>::from(s.as_bytes());
        let timestamp = self.trusted.timestamp(bytes(&set.timestamp), &none).ok()?;
        let snapshot = self.trusted.snapshot(bytes(&set.snapshot), &timestamp.document, &none).ok()?;
        let targets = self.trusted.targets(bytes(&set.targets), &snapshot.document).ok()?;
        let delegated =
            |role, text| self.trusted.delegated(role, bytes(text), &snapshot.document, &targets.document).ok();
        let catalog = delegated(Role::Catalog, &set.catalog)?;
        let rollout = delegated(Role::Rollout, &set.rollout)?;
        let (_, _, sha256) = state::assignment_target(&rollout.document).ok()?;
        if Digest::of(set.assignment.as_bytes()) != sha256 {
            return None;
        }
        let newest =
            timestamp.document.version >= self.floors.timestamp && set.root_version == self.trusted.root().version;
        let draft = Draft {
            timestamp: Some(timestamp),
            snapshot: Some(snapshot),
            targets: Some(targets),
            catalog: Some(catalog),
            rollout: Some(rollout),
        };
        let (current, _) = self.assemble(draft, bytes(&set.assignment), none).ok()?;
        Some(Current { newest, ..current })
    }
}
