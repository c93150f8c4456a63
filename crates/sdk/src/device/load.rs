//! The load window: the app tells before it loads a model and after. Only a death in between counts against a bundle.

use super::Device;
use crate::error::SdkError;
use flywheel_bundle::ManifestV1;
use flywheel_types::Digest;
use flywheel_types::wire::DeviceEventKind;
use std::path::PathBuf;
use std::sync::Arc;

/// A bundle that is complete on this device.
#[derive(Debug, Clone, PartialEq)]
pub struct InstalledBundle {
    /// Manifest digest.
    pub bundle: Digest,
    pub manifest: Arc<ManifestV1>,
    /// Files of the build this device uses, in the order the engine expects.
    pub files: Vec<PathBuf>,
    /// Not confirmed since it became active.
    pub on_trial: bool,
}

/// What to load.
#[derive(Debug, Clone, PartialEq)]
pub enum LoadPlan {
    Run(InstalledBundle),
    /// The assignment says "no model".
    Off,
    /// Nothing is installed: use what the app ships, or nothing.
    Empty,
}

/// What became of a failed load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOutcome {
    /// The device left the bundle for its previous one (or for none).
    pub fell_back: bool,
    /// The bundle that is active now.
    pub active: Option<Digest>,
}

impl Device {
    /// What is to run, without opening a load window.
    #[must_use]
    pub fn plan(&self) -> LoadPlan {
        if self.state.off {
            return LoadPlan::Off;
        }
        let (Some(slot), Some(manifest)) = (&self.state.active, &self.manifest) else {
            return LoadPlan::Empty;
        };
        let facts = self.env.host.facts();
        let Some(build) = manifest.build_for(&facts) else {
            return LoadPlan::Empty;
        };
        let own = self.blob_dir();
        LoadPlan::Run(InstalledBundle {
            bundle: slot.bundle,
            manifest: Arc::clone(manifest),
            files: build.artefacts.iter().map(|a| self.env.blobs.path(a, &own)).collect(),
            on_trial: slot.confirmed_at.is_none(),
        })
    }

    /// Opens the load window and says what to load. Call [`Device::load_succeeded`] or [`Device::load_failed`] when
    /// the model was loaded and its probe prompt answered.
    ///
    /// # Errors
    /// The mark could not be stored; the model must not be loaded then.
    pub fn load_begin(&mut self) -> Result<LoadPlan, SdkError> {
        let plan = self.plan();
        if matches!(plan, LoadPlan::Run(_)) {
            let now = self.now();
            self.transition(|s| s.load_begin(now))?;
        }
        Ok(plan)
    }

    /// The model is loaded and the probe passed; `load_ms` is the time of the load.
    ///
    /// # Errors
    /// The state could not be stored.
    pub fn load_succeeded(&mut self, load_ms: f64) -> Result<(), SdkError> {
        let now = self.now();
        self.transition(|s| s.load_succeeded(load_ms, now))
    }

    /// The engine refused the model, ran out of memory or the probe failed. `reason` is a short machine word.
    ///
    /// # Errors
    /// The state could not be stored.
    pub fn load_failed(&mut self, reason: &str, out_of_memory: bool) -> Result<LoadOutcome, SdkError> {
        let now = self.now();
        let before = self.state.active.as_ref().map(|s| s.bundle);
        let event = if out_of_memory { DeviceEventKind::OutOfMemory } else { DeviceEventKind::LoadFailed };
        self.transition(|s| s.load_failed(reason.to_owned(), event, now))?;
        let active = self.state.active.as_ref().map(|s| s.bundle);
        Ok(LoadOutcome { fell_back: active != before, active })
    }
}
