//! Device core of Flywheel: identity, durable event queue, verified updates in two slots, health and fall-back,
//! knowledge index. It knows HTTP addresses and wire forms, never server internals.
//!
//! The outer interface is one type, [`Device`], with few coarse calls, so that a binding for Kotlin or Swift
//! crosses the language border a handful of times per answer:
//!
//! 1. [`Device::open`] at app start, before any model is loaded. It notices a death inside the last load window.
//! 2. [`Device::load_begin`] → the app loads the model and runs the probe prompt → [`Device::load_succeeded`] or
//!    [`Device::load_failed`].
//! 3. [`Device::record_interaction`], [`Device::record_feedback`], [`Device::record_crash`] while the app runs.
//! 4. [`Device::update`] and [`Device::upload`] from the host's background scheduler, [`Device::sync_index`] when
//!    the app uses the knowledge index.
//!
//! Time, randomness, network, device facts and the place where artefact bytes come from are given ([`Env`]); the
//! core only decides. It does short blocking file work on the calling task: run it on a background thread.

mod backoff;
mod blobs;
mod caches;
mod config;
mod device;
mod env;
mod error;
mod files;
mod identity;
mod index;
mod metadata;
mod policy;
mod queue;
mod slots;
mod transport;

pub use blobs::{Blob, BlobControl, BlobSource, Go, HostCache, HttpBlobs};
pub use caches::SharedCaches;
pub use config::{DeviceConfig, DownloadPolicy, Durability, FailurePolicy, IndexStorage, QueueLimits, UploadPolicy};
pub use device::{Answer, Device, InstalledBundle, LoadOutcome, LoadPlan, UpdateOutcome, UploadOutcome};
pub use env::{Conditions, Env, Host, Network, Thermal};
pub use error::SdkError;
pub use identity::Identity;
pub use index::{Candidate, Chunk, HideV1, IndexChangeV1, IndexChangesV1, IndexSnapshot};
pub use policy::Wait;
pub use transport::{
    BodySink, Fault, Flow, HttpRequest, HttpResponse, HttpTransport, MemoryHttp, Method, ReqwestTransport,
    ResponseHead, SharedGets, TransportError, fetch,
};

/// What the SDK calls itself in uploads.
pub const SDK_NAME: &str = concat!("flywheel-sdk/", env!("CARGO_PKG_VERSION"));
