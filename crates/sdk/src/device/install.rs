//! Downloads and installs one bundle: manifest, build for this device, artefacts, then one transition. Until that
//! transition the active slot is untouched, whatever fails.

use super::{Device, UpdateOutcome};
use crate::blobs::{BlobControl, Go, file_name};
use crate::config::DownloadPolicy;
use crate::env::Host;
use crate::error::SdkError;
use crate::files;
use crate::policy::{Wait, may_download};
use crate::slots::Slot;
use flywheel_bundle::{BuildV1, CatalogEntry, ManifestV1, VerifiedState, verify_manifest};
use flywheel_types::Digest;
use flywheel_types::assign::Decision;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

/// The policy, asked with what later artefacts of the same bundle still need.
struct Control {
    host: Arc<dyn Host>,
    policy: DownloadPolicy,
    later_bytes: u64,
}

impl BlobControl for Control {
    fn may_continue(&self, missing_bytes: u64) -> Result<(), Wait> {
        match missing_bytes.saturating_add(self.later_bytes) {
            0 => Ok(()),
            all => may_download(&self.policy, &self.host.conditions(), all),
        }
    }
    fn before_write(&self, bytes: u64) -> io::Result<()> {
        self.host.before_write(bytes)
    }
}

impl Device {
    pub(super) async fn install(
        &mut self,
        bundle: Digest,
        decision: &Decision,
        keep: Option<Digest>,
        verified: &VerifiedState,
    ) -> Result<UpdateOutcome, SdkError> {
        let entry = self.metadata.installable(&bundle, self.now())?;
        let manifest = self.manifest_for(&entry, verified).await?;
        let facts = self.env.host.facts();
        let build = manifest.build_for(&facts).ok_or_else(|| {
            SdkError::refused(format!("bundle {bundle}"), "no_build", "it has no build for this device")
        })?;
        let mut wait = self.obtain(build).await?;
        if matches!(wait, Some(Wait::Space { .. })) && self.give_up_previous(keep)? {
            wait = self.obtain(build).await?;
        }
        if let Some(wait) = wait {
            return Ok(UpdateOutcome::Waiting(wait));
        }
        let now = self.now();
        let slot = Slot::new(bundle, self.state.next_install_no, entry.security_epoch, &manifest.health);
        self.transition(|s| s.installed(slot, decision, keep, now))?;
        self.collect_garbage(false);
        Ok(UpdateOutcome::Installed { bundle })
    }

    /// Brings back files of the active bundle that vanished or were cut (a cleaner app, a crash of the machine).
    pub(super) async fn repair(&mut self, bundle: Digest, verified: &VerifiedState) -> Result<UpdateOutcome, SdkError> {
        tracing::warn!(%bundle, "files of the active bundle are missing; they are fetched again");
        let entry = self.metadata.installable(&bundle, self.now())?;
        let manifest = self.manifest_for(&entry, verified).await?;
        let facts = self.env.host.facts();
        if let Some(build) = manifest.build_for(&facts)
            && let Some(wait) = self.obtain(build).await?
        {
            return Ok(UpdateOutcome::Waiting(wait));
        }
        self.load_manifest()?;
        Ok(UpdateOutcome::Installed { bundle })
    }

    /// Whether manifest and files of the active bundle are there, by name and length.
    pub(super) fn is_complete(&self) -> bool {
        let Some(manifest) = &self.manifest else {
            return false;
        };
        let own = self.blob_dir();
        // No build for today's facts: nothing that a download could bring back.
        manifest.build_for(&self.env.host.facts()).is_none_or(|build| {
            build
                .artefacts
                .iter()
                .all(|a| std::fs::metadata(self.env.blobs.path(a, &own)).is_ok_and(|m| m.len() == a.length))
        })
    }

    /// The manifest, verified against the catalog and stored; the stored copy is used when there is one.
    async fn manifest_for(&mut self, entry: &CatalogEntry, verified: &VerifiedState) -> Result<ManifestV1, SdkError> {
        let check = |bytes: &[u8]| {
            verify_manifest(bytes, entry, verified)
                .map_err(|e| SdkError::refused(format!("the manifest of bundle {}", entry.bundle), e.code(), e))
        };
        if let Some(bytes) = files::read(&self.manifest_path(&entry.bundle))?
            && let Ok(manifest) = check(&bytes)
        {
            return Ok(manifest);
        }
        let bytes = self.metadata.file(self.env.transport.as_ref(), &entry.location, entry.length).await?;
        let manifest = check(&bytes)?;
        files::create_dir(&self.config.dir.join("bundles"))?;
        files::replace(&self.manifest_path(&entry.bundle), &bytes, self.config.durability)?;
        Ok(manifest)
    }

    /// Makes every artefact of the build available.
    async fn obtain(&mut self, build: &BuildV1) -> Result<Option<Wait>, SdkError> {
        let own = self.blob_dir();
        let mut left: u64 = build.artefacts.iter().map(|a| self.env.blobs.missing_bytes(a, &own)).sum();
        for artefact in &build.artefacts {
            left = left.saturating_sub(self.env.blobs.missing_bytes(artefact, &own));
            let control = Control { host: Arc::clone(&self.env.host), policy: self.config.download, later_bytes: left };
            match self.env.blobs.obtain(artefact, &own, &control).await? {
                Go::Done(_) => {}
                Go::Wait(wait) => return Ok(Some(wait)),
            }
        }
        Ok(None)
    }

    /// Frees the previous slot when its space is needed and nobody may need it: the active bundle has baked, and it is
    /// not what the running rollout would fall back to.
    fn give_up_previous(&mut self, keep: Option<Digest>) -> Result<bool, SdkError> {
        let baked = self.state.active.as_ref().is_some_and(|a| a.baked);
        match self.previous_bundle() {
            Some(previous) if baked && Some(previous) != keep => {
                self.transition(|s| s.previous = None)?;
                self.collect_garbage(true);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Removes artefacts and manifests that no slot needs, and partial downloads unless one is going on. Failures only
    /// cost space, so they are logged.
    fn collect_garbage(&self, keep_partials: bool) {
        let mut keep = BTreeSet::new();
        for slot in [&self.state.active, &self.state.previous].into_iter().flatten() {
            keep.insert(format!("{}.json", slot.bundle));
            match self.read_manifest(&slot.bundle) {
                Ok(Some(manifest)) => keep.extend(manifest.files().into_iter().map(file_name)),
                // Without its manifest nobody knows which files a slot needs: remove nothing.
                Ok(None) | Err(_) => return,
            }
        }
        for dir in [self.blob_dir(), self.config.dir.join("bundles")] {
            let Ok(entries) = std::fs::read_dir(&dir) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let partial = name.ends_with(".part") || name.ends_with(".part.json");
                if !(keep.contains(&name) || keep_partials && partial)
                    && let Err(e) = std::fs::remove_file(entry.path())
                {
                    tracing::warn!(error = %e, "an unused artefact could not be removed");
                }
            }
        }
    }
}
