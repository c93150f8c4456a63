//! What the host gives: clock, randomness, network, facts about the device and where artefact bytes come from.

use crate::blobs::BlobSource;
use crate::caches::SharedCaches;
use crate::transport::HttpTransport;
use flywheel_types::BusinessClock;
use flywheel_types::wire::DeviceFactsV1;
use rand::RngCore;
use std::io;
use std::sync::Arc;

/// Network the device has now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    Offline,
    /// Cellular or a metered hotspot.
    Metered,
    Unmetered,
}

/// Thermal state, in the order of severity. Android: `THERMAL_STATUS_*` NONE, LIGHT, MODERATE, SEVERE, and CRITICAL
/// for everything above; iOS: nominal, fair → light, serious → severe, critical.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thermal {
    Nominal,
    Light,
    Moderate,
    Severe,
    Critical,
}

/// Conditions that change while the app runs. Facts come in, the core decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conditions {
    pub network: Network,
    pub plugged_in: bool,
    /// Percent; `None` when the platform does not tell.
    pub battery_pct: Option<u8>,
    pub thermal: Thermal,
    /// Free bytes of the volume that holds the SDK's folder; `None` when unknown (then no precheck is possible).
    pub free_bytes: Option<u64>,
}

impl Default for Conditions {
    /// A plugged-in device on an unmetered network with unknown free space.
    fn default() -> Self {
        Self {
            network: Network::Unmetered,
            plugged_in: true,
            battery_pct: None,
            thermal: Thermal::Nominal,
            free_bytes: None,
        }
    }
}

/// The host app, asked whenever a decision needs it (also between the chunks of a download).
pub trait Host: Send + Sync {
    /// Facts that decide eligibility and slices.
    fn facts(&self) -> DeviceFactsV1;
    /// Conditions right now.
    fn conditions(&self) -> Conditions;
    /// Called before `bytes` are written for a download; an app with a storage quota answers
    /// [`io::ErrorKind::QuotaExceeded`].
    ///
    /// # Errors
    /// The reason why nothing may be written now.
    fn before_write(&self, bytes: u64) -> io::Result<()> {
        let _ = bytes;
        Ok(())
    }
}

/// Everything a [`crate::Device`] needs from outside.
pub struct Env {
    pub clock: Arc<dyn BusinessClock>,
    /// Source of the identity key, of ids and of jitter. A cryptographic generator on phones.
    pub rng: Box<dyn RngCore + Send>,
    pub transport: Arc<dyn HttpTransport>,
    pub blobs: Arc<dyn BlobSource>,
    pub host: Arc<dyn Host>,
    /// Parsed forms of immutable bytes; one per process is enough.
    pub shared: Arc<SharedCaches>,
}
