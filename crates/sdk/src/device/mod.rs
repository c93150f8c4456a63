//! [`Device`]: one installation of the app, put together from queue, slots, metadata and index. Every change of state
//! is one transition: computed on a copy, stored in one step, then its reports enter the queue. A crash at any
//! point, also inside an awaited call that is dropped, leaves the old or the new state, and no report twice.

mod events;
mod install;
mod load;
mod sync;
mod update;
mod upload;

pub use events::Answer;
pub use load::{InstalledBundle, LoadOutcome, LoadPlan};
pub use update::UpdateOutcome;
pub use upload::UploadOutcome;

use crate::backoff::Backoff;
use crate::config::{DeviceConfig, IndexStorage};
use crate::env::Env;
use crate::error::SdkError;
use crate::files;
use crate::identity::Identity;
use crate::index::IndexSnapshot;
use crate::metadata::Metadata;
use crate::queue::Queue;
use crate::slots::State;
use chrono::{DateTime, Utc};
use flywheel_bundle::ManifestV1;
use flywheel_types::wire::{AssignedArmV1, EventV1};
use flywheel_types::{Digest, InstallId};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// First bound of the pause after a failed install, seconds: each try may cost a chunk of 8 MiB.
const INSTALL_PAUSE_S: u64 = 300;

/// One installation of the app on one device. See the crate text for the order of calls.
pub struct Device {
    config: DeviceConfig,
    env: Env,
    identity: Identity,
    queue: Queue,
    state: State,
    metadata: Metadata,
    /// Manifest of the active bundle.
    manifest: Option<Arc<ManifestV1>>,
    index: Arc<IndexSnapshot>,
    polls: Backoff,
    /// Pause after an install that failed, so that a broken bundle is not fetched at every call.
    installs: Backoff,
    uploads: Backoff,
    /// Largest batch that went through lately, after the server called one too large.
    batch_events: usize,
    died_in_load: bool,
    /// Whose answers they are, in the app's own words.
    user: Option<String>,
    _lock: Option<File>,
}

impl Device {
    /// Opens the device's folder, making it and a new identity when there is none. Call it at app start, before
    /// anything loads a model: a load that did not end is noticed here and counted.
    ///
    /// # Errors
    /// [`SdkError::Busy`] when another process holds the folder, [`SdkError::Refused`] for a bad built-in root,
    /// [`SdkError::Corrupt`] for a damaged install key, and file errors.
    pub fn open(config: DeviceConfig, mut env: Env) -> Result<Self, SdkError> {
        files::create_dir(&config.dir)?;
        let lock = config.exclusive.then(|| files::lock(&config.dir)).transpose()?;
        let identity = Identity::load_or_create(&config.dir.join("install.key"), &mut *env.rng, config.durability)?;
        let queue = Queue::open(&config.dir, config.durability, config.queue)?;
        let mut state = read_state(&config.dir.join("state.json"))?;
        // A state that was lost must not begin with report numbers the queue knows already.
        if state.next_report <= queue.last_report() && state.reports.is_empty() {
            state.next_report = queue.last_report().saturating_add(1);
        }
        let metadata = Metadata::open(&config)?;
        let index = read_index(&config)?;
        let new_backoff = |base_s| Backoff::new(base_s, config.upload.backoff_cap_s);
        let (polls, uploads) = (new_backoff(config.upload.backoff_base_s), new_backoff(config.upload.backoff_base_s));
        let installs = new_backoff(INSTALL_PAUSE_S);
        let batch_events = config.upload.max_batch_events;
        let mut device = Self {
            config,
            env,
            identity,
            queue,
            state,
            metadata,
            manifest: None,
            index: Arc::new(index),
            polls,
            installs,
            uploads,
            batch_events,
            died_in_load: false,
            user: None,
            _lock: lock,
        };
        device.flush_reports()?;
        let now = device.now();
        device.died_in_load = device.state.loading.is_some();
        if device.died_in_load {
            device.transition(|s| {
                s.note_death_in_load(now);
            })?;
        }
        device.load_manifest()?;
        Ok(device)
    }

    /// Whether the process died inside the last load window, as noticed by [`Device::open`].
    #[must_use]
    pub fn died_in_load(&self) -> bool {
        self.died_in_load
    }

    #[must_use]
    pub fn install_id(&self) -> InstallId {
        self.identity.install_id()
    }

    /// Manifest digest of the bundle the device is meant to run; `None` for "no model".
    #[must_use]
    pub fn active_bundle(&self) -> Option<Digest> {
        if self.state.off { None } else { self.state.active.as_ref().map(|s| s.bundle) }
    }

    /// The bundle in the second slot.
    #[must_use]
    pub fn previous_bundle(&self) -> Option<Digest> {
        self.state.previous.as_ref().map(|s| s.bundle)
    }

    /// Whether the active bundle was loaded and probed since it became active.
    #[must_use]
    pub fn is_confirmed(&self) -> bool {
        self.state.active.as_ref().is_some_and(|s| s.confirmed_at.is_some())
    }

    /// The arm of the newest assignment this device has seen.
    #[must_use]
    pub fn arm(&self) -> Option<&AssignedArmV1> {
        self.state.arm.as_ref()
    }

    /// The knowledge index as of the last sync.
    #[must_use]
    pub fn index(&self) -> &Arc<IndexSnapshot> {
        &self.index
    }

    /// Events that wait for upload.
    #[must_use]
    pub fn queued_events(&self) -> usize {
        self.queue.len()
    }

    /// When the next poll is due.
    #[must_use]
    pub fn next_poll_at(&self) -> DateTime<Utc> {
        self.state.next_poll_at
    }

    fn now(&self) -> DateTime<Utc> {
        self.env.clock.now()
    }

    /// Folder of artefacts that were downloaded by this device.
    fn blob_dir(&self) -> PathBuf {
        self.config.dir.join("blobs")
    }

    fn manifest_path(&self, bundle: &Digest) -> PathBuf {
        self.config.dir.join("bundles").join(format!("{bundle}.json"))
    }

    /// Computes a new state on a copy, stores it in one step, then queues its reports. On an error nothing changed.
    fn transition<T>(&mut self, change: impl FnOnce(&mut State) -> T) -> Result<T, SdkError> {
        let mut next = self.state.clone();
        let out = change(&mut next);
        if next == self.state {
            return Ok(out);
        }
        let json = serde_json::to_vec(&next).map_err(|e| SdkError::Usage(e.to_string()))?;
        files::replace(&self.config.dir.join("state.json"), &json, self.config.durability)?;
        let bundle_changed = next.active.as_ref().map(|s| s.bundle) != self.state.active.as_ref().map(|s| s.bundle);
        self.state = next;
        if bundle_changed {
            self.load_manifest()?;
        }
        self.flush_reports()?;
        Ok(out)
    }

    /// Moves reports from the state's outbox into the queue. The queue knows their numbers, so a crash in between
    /// repeats nothing; the outbox on disk is emptied with the next transition.
    fn flush_reports(&mut self) -> Result<(), SdkError> {
        let Some(first) = self.state.reports.first() else {
            return Ok(());
        };
        let first_no = first.no;
        let events: Vec<EventV1> = self.state.reports.iter().map(|r| EventV1::Device(r.event.clone())).collect();
        self.queue.append(&events, first_no)?;
        self.state.reports.clear();
        Ok(())
    }

    fn load_manifest(&mut self) -> Result<(), SdkError> {
        self.manifest = match &self.state.active {
            None => None,
            Some(slot) => self.read_manifest(&slot.bundle)?,
        };
        Ok(())
    }

    /// The stored manifest of a bundle, when it is there and is the one its name says.
    fn read_manifest(&self, bundle: &Digest) -> Result<Option<Arc<ManifestV1>>, SdkError> {
        match files::read(&self.manifest_path(bundle))? {
            Some(bytes) if Digest::of(&bytes) == *bundle => Ok(Some(self.env.shared.manifest(&bytes)?)),
            _ => Ok(None),
        }
    }
}

/// The stored state. A damaged one is put aside and the device begins with empty slots: its identity, its queue and its
/// trust records are separate files, so neither rollback protection nor sequence numbers are lost.
fn read_state(path: &Path) -> Result<State, SdkError> {
    let Some(bytes) = files::read(path)? else {
        return Ok(State::default());
    };
    match serde_json::from_slice::<State>(&bytes) {
        Ok(state) if state.v == 1 => Ok(state),
        other => {
            let why = other.err().map_or("unknown version".to_owned(), |e| e.to_string());
            tracing::warn!(path = %path.display(), why, "the device state cannot be read; starting with empty slots");
            let aside = path.with_extension("bad");
            std::fs::rename(path, &aside).map_err(|e| SdkError::io("putting a damaged file aside", path, e))?;
            Ok(State::default())
        }
    }
}

/// The stored index; a damaged one is fetched again.
fn read_index(config: &DeviceConfig) -> Result<IndexSnapshot, SdkError> {
    if config.index == IndexStorage::Memory {
        return Ok(IndexSnapshot::default());
    }
    let stored = files::read(&config.dir.join("index.json"))?;
    Ok(stored.and_then(|bytes| IndexSnapshot::default().apply(&bytes).ok()).unwrap_or_default())
}
