//! Publication of signed bundles and of the assignment. The online keys (`rollout`, `snapshot`, `timestamp`) live
//! here; the release key that signs the catalog never does.

pub mod tree;

use chrono::{DateTime, Utc};
use flywheel_bundle::publish::{
    Changes, Expiries, OnlineSigners, Profile, PublishError, RepositoryState, SecretKey, SignedMetadata, assemble,
};
use flywheel_bundle::tuf::Role;
use flywheel_types::assign::AssignmentV1;
use flywheel_types::{AppId, Digest, Error, ErrorKind};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tree::Tree;

/// Publishes for every app of this server.
pub struct Delivery {
    tuf_dir: PathBuf,
    keys_dir: PathBuf,
    expiries: Expiries,
    /// One publication at a time per app in this process; other processes are kept out by compare-and-swap.
    locks: Mutex<HashMap<AppId, Arc<Mutex<()>>>>,
}

/// What to publish.
#[derive(Default)]
pub struct Publication {
    /// Signed by the release key.
    pub catalog: Option<SignedMetadata>,
    /// Manifest files of the bundles that are new in the catalog.
    pub manifests: Vec<Vec<u8>>,
    pub assignment: Option<AssignmentV1>,
}

impl Delivery {
    #[must_use]
    pub fn new(tuf_dir: PathBuf, keys_dir: PathBuf) -> Self {
        Self { tuf_dir, keys_dir, expiries: Expiries::of(Profile::Starter), locks: Mutex::default() }
    }

    /// Life times of the roles.
    #[must_use]
    pub fn expiries(&self) -> &Expiries {
        &self.expiries
    }

    #[must_use]
    pub fn tree(&self, app: &AppId) -> Tree {
        Tree::new(self.tuf_dir.join(app.as_str()))
    }

    /// Folder of the app's online keys and trust anchor.
    #[must_use]
    pub fn keys(&self, app: &AppId) -> PathBuf {
        self.keys_dir.join(app.as_str())
    }

    /// The repository as it is published now.
    ///
    /// # Errors
    /// `Conflict` while the app has no keys, internal when the tree is damaged.
    pub fn state(&self, app: &AppId) -> Result<RepositoryState, Error> {
        let anchor = std::fs::read(self.keys(app).join("root.json")).map_err(|e| {
            Error::conflict(
                "app_has_no_keys",
                format!("app `{app}` has no signing keys on this server"),
                format!("run `flywheel keys init --app {app}`"),
            )
            .with_inside(e)
        })?;
        let tree = self.tree(app);
        RepositoryState::load(&anchor, app, &mut |path| tree.read(path))
            .map_err(outside)?
            .ok_or_else(|| Error::internal("the repository has no timestamp: `keys init` was cut off"))
    }

    fn online(&self, app: &AppId, role: Role) -> Result<SecretKey, Error> {
        let path = self.keys(app).join(format!("{}.json", role.as_str()));
        let text = std::fs::read_to_string(&path).map_err(|e| Error::internal(format!("{}: {e}", path.display())))?;
        SecretKey::from_file(role, &text).map_err(outside)
    }

    /// Publishes; blocks on the disk. Nothing is visible to devices before the last write.
    ///
    /// # Errors
    /// `Conflict` when somebody published in between (call again), `Invalid` for what a device would refuse.
    pub fn publish(
        &self,
        app: &AppId,
        what: Publication,
        blob: &dyn Fn(Digest) -> PathBuf,
        now: DateTime<Utc>,
    ) -> Result<RepositoryState, Error> {
        let lock = {
            let mut locks = self.locks.lock().map_err(|_| Error::internal("publication lock is poisoned"))?;
            locks.entry(app.clone()).or_default().clone()
        };
        let _one = lock.lock().map_err(|_| Error::internal("publication lock is poisoned"))?;
        let state = self.state(app)?;
        self.publish_from(&state, app, what, blob, now)
    }

    /// As [`Self::publish`], from a given state; the caller excludes others.
    ///
    /// # Errors
    /// As [`Self::publish`].
    pub fn publish_from(
        &self,
        state: &RepositoryState,
        app: &AppId,
        what: Publication,
        blob: &dyn Fn(Digest) -> PathBuf,
        now: DateTime<Utc>,
    ) -> Result<RepositoryState, Error> {
        let (rollout, snapshot, timestamp) =
            (self.online(app, Role::Rollout)?, self.online(app, Role::Snapshot)?, self.online(app, Role::Timestamp)?);
        let signers =
            OnlineSigners { rollout: &[&rollout as _], snapshot: &[&snapshot as _], timestamp: &[&timestamp as _] };
        let changes = Changes {
            catalog: what.catalog,
            manifests: what.manifests,
            assignment: what.assignment,
            ..Changes::default()
        };
        let plan = assemble(state, changes, &signers, &self.expiries, now).map_err(outside)?;
        self.tree(app).execute(&plan, blob)?;
        Ok(plan.after)
    }
}

/// A publication error for the caller: what a device would refuse is the caller's to correct.
pub fn outside(e: PublishError) -> Error {
    let kind = match e {
        PublishError::Bundle { .. }
        | PublishError::Assignment(_)
        | PublishError::Manifest(_)
        | PublishError::Role { .. } => ErrorKind::Invalid,
        _ => ErrorKind::Internal,
    };
    let text = e.to_string();
    match kind {
        ErrorKind::Invalid => Error::new(kind, "not_publishable", text, "devices would refuse this: correct it"),
        _ => Error::internal(text),
    }
}
