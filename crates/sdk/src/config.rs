//! Settings of one device. Defaults are for phones; every unit is in the name.

use chrono::{DateTime, Utc};
use flywheel_types::AppId;
use std::path::PathBuf;
use std::sync::Arc;

/// How hard the device core tries to survive a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Every change is on the medium (`fdatasync`, folder included) before a call returns.
    Full,
    /// Changes survive the death of the process, not of the machine. For simulations and tests.
    Relaxed,
}

/// Bounds of the event queue. When one is exceeded the oldest interactions go first, then the oldest of the rest;
/// every dropped event is counted and the counts are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    pub max_events: usize,
    pub max_bytes: u64,
}

impl Default for QueueLimits {
    fn default() -> Self {
        Self { max_events: 10_000, max_bytes: 8 << 20 }
    }
}

/// Shape and pace of uploads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UploadPolicy {
    pub max_batch_events: usize,
    pub max_batch_bytes: usize,
    /// Batches one call of `upload` sends at most.
    pub max_batches_per_call: usize,
    pub gzip: bool,
    /// First and largest delay of the full-jitter back-off, seconds.
    pub backoff_base_s: u64,
    pub backoff_cap_s: u64,
}

impl Default for UploadPolicy {
    fn default() -> Self {
        Self {
            max_batch_events: 200,
            max_batch_bytes: 512 << 10,
            max_batches_per_call: 8,
            gzip: true,
            backoff_base_s: 2,
            backoff_cap_s: 6 * 3600,
        }
    }
}

/// When artefacts may be downloaded. Metadata polls and event uploads only need a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DownloadPolicy {
    /// Largest update that may use a metered network, bytes.
    pub metered_max_bytes: u64,
    /// Enough without being plugged in. "Charging" alone is unreliable: phones with a charge limit flip it.
    pub min_battery_pct: u8,
    /// Downloads stop above this state.
    pub max_thermal: crate::Thermal,
    /// Space that must stay free, bytes.
    pub reserve_bytes: u64,
    /// Tries of one chunk before the call gives up (it can be called again).
    pub tries: u32,
}

impl Default for DownloadPolicy {
    fn default() -> Self {
        Self {
            metered_max_bytes: 0,
            min_battery_pct: 30,
            max_thermal: crate::Thermal::Moderate,
            reserve_bytes: 256 << 20,
            tries: 4,
        }
    }
}

/// What a failing bundle costs on this device. A verdict is keyed by (bundle, rollout), so that a number that failed
/// once is not banned for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailurePolicy {
    /// Deaths or failures in a row inside the load window before the device falls back.
    pub deaths_in_a_row: u32,
    /// Installs after the first verdict, only while the assignment says `retry_failed`.
    pub retry_budget: u32,
    /// Pause between such installs, seconds.
    pub retry_after_s: u64,
    /// A verdict older than this is forgotten, seconds.
    pub expire_s: u64,
}

impl Default for FailurePolicy {
    fn default() -> Self {
        Self { deaths_in_a_row: 2, retry_budget: 3, retry_after_s: 3600, expire_s: 30 * 86_400 }
    }
}

/// Where the knowledge index is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexStorage {
    /// In the device's folder; survives a restart.
    File,
    /// In memory only; fetched again after a restart. For simulations.
    Memory,
}

/// Settings of one device.
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    pub app: AppId,
    /// Server address without a trailing slash, for example `https://fleet.example.com`.
    pub base_url: String,
    /// The app's ingest key. It ships in the app, so it is no secret, but it is never logged.
    pub ingest_key: String,
    /// `root.json` that the app ships: the one thing trusted without a check.
    pub trusted_root: Arc<[u8]>,
    /// Folder owned by the SDK; all paths stored inside are relative to it.
    pub dir: PathBuf,
    pub durability: Durability,
    /// Take a lock on the folder, so that a second process of the app gets `Busy` instead of a torn state. Costs one
    /// open file.
    pub exclusive: bool,
    /// Build time of the app: the clock is never believed to be earlier.
    pub build_time: DateTime<Utc>,
    pub queue: QueueLimits,
    pub upload: UploadPolicy,
    pub download: DownloadPolicy,
    pub failure: FailurePolicy,
    pub index: IndexStorage,
}

impl DeviceConfig {
    /// Settings with every default for a phone.
    #[must_use]
    pub fn new(
        app: AppId,
        base_url: impl Into<String>,
        ingest_key: impl Into<String>,
        trusted_root: Arc<[u8]>,
        dir: impl Into<PathBuf>,
    ) -> Self {
        Self {
            app,
            base_url: base_url.into(),
            ingest_key: ingest_key.into(),
            trusted_root,
            dir: dir.into(),
            durability: Durability::Full,
            exclusive: true,
            build_time: DateTime::UNIX_EPOCH,
            queue: QueueLimits::default(),
            upload: UploadPolicy::default(),
            download: DownloadPolicy::default(),
            failure: FailurePolicy::default(),
            index: IndexStorage::File,
        }
    }
}
