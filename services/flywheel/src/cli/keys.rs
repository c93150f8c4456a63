//! `flywheel keys init`: all keys of an app, made once, and its first signed metadata. Root, targets and release
//! keys go to a folder that the operator moves away; the server keeps the online keys only.

use crate::config::Config;
use crate::delivery::{Delivery, Publication, outside};
use anyhow::{Context, Result, bail};
use chrono::{DateTime, Utc};
use flywheel_bundle::publish::{
    CatalogEdit, Keyring, RepositoryState, RoleKeySet, RoleSigner, SecretKey, catalog_next, init_repository,
};
use flywheel_bundle::tuf::Role;
use flywheel_types::AppId;
use flywheel_types::assign::AssignmentV1;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Makes the keys and publishes the empty repository at the business time `now`.
///
/// # Errors
/// When keys exist already (they are never overwritten) or a file cannot be written.
pub fn init(config: &Config, app: &AppId, offline_dir: &Path, now: DateTime<Utc>) -> Result<()> {
    let delivery = Delivery::new(config.tuf_dir(), config.keys_dir());
    let online_dir = delivery.keys(app);
    if online_dir.join("root.json").exists() {
        bail!("app `{app}` has keys already ({}); they are never overwritten", online_dir.display());
    }
    std::fs::create_dir_all(offline_dir).with_context(|| format!("cannot make {}", offline_dir.display()))?;
    std::fs::create_dir_all(&online_dir).with_context(|| format!("cannot make {}", online_dir.display()))?;
    let root = make(Role::Root, &offline_dir.join("root.json"))?;
    let targets = make(Role::Targets, &offline_dir.join("targets.json"))?;
    let release = make(Role::Catalog, &offline_dir.join("release.json"))?;
    let rollout = make(Role::Rollout, &online_dir.join("rollout.json"))?;
    let snapshot = make(Role::Snapshot, &online_dir.join("snapshot.json"))?;
    let timestamp = make(Role::Timestamp, &online_dir.join("timestamp.json"))?;
    let single = |k: &SecretKey| RoleKeySet::single(k.public().clone());
    let keyring = Keyring {
        root: single(&root),
        targets: single(&targets),
        catalog: single(&release),
        rollout: single(&rollout),
        snapshot: single(&snapshot),
        timestamp: single(&timestamp),
    };
    let made = init_repository(&keyring, delivery.expiries(), now, &[&root], &[&targets])?;
    // the trust anchor that the app ships inside its binary
    write_new(&offline_dir.join("trusted-root.json"), &made.root.bytes)?;
    let state = RepositoryState::initial(&made)?;
    let catalog = catalog_next(&state, &CatalogEdit::default(), delivery.expiries(), now)?.sign(&[&release])?;
    let assignment = AssignmentV1 {
        v: 1,
        app: app.clone(),
        serial: 1,
        issued_at: now,
        poll_s: 6 * 3600,
        jitter_pct: 10,
        default_bundle: None,
        rollouts: Vec::new(),
        pins: Default::default(),
    };
    let first = Publication { catalog: Some(catalog), manifests: Vec::new(), assignment: Some(assignment) };
    delivery.publish_from(&state, app, first, &|_| PathBuf::new(), now)?;
    // written last: its presence says that the app can publish
    write_new(&online_dir.join("root.json"), &made.root.bytes)?;
    Ok(())
}

fn make(role: Role, path: &Path) -> Result<SecretKey> {
    let mut seed = [0u8; 32];
    getrandom::fill(&mut seed).map_err(|e| anyhow::anyhow!("the system gave no randomness: {e}"))?;
    let key = SecretKey::from_seed(role, &seed);
    write_new(path, key.to_file().map_err(outside)?.as_bytes())?;
    Ok(key)
}

/// Creates a file that only its owner can read; an existing one is an error.
fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot create {}", path.display()))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(())
}
