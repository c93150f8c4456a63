//! Signed model bundles: the manifest, the TUF metadata that says which bundles exist and who runs which, and
//! both halves of their life. Feature `verify` (default) is the device: it trusts nothing it did not check.
//! Feature `publish` is the server: pure functions that make new metadata and an ordered list of writes.
//!
//! No network, no file system policy and no clock: bytes go in through small traits, time is a parameter.
//!
//! Repository layout (paths relative to the app's repository address):
//!
//! ```text
//! metadata/timestamp.json                       the only name that is ever replaced
//! metadata/<n>.{root,snapshot,targets,catalog,rollout}.json
//! targets/bundles/<line>/<seq>/<sha256>.manifest.json
//! targets/blobs/<sha256>.<sha256>.<ext>
//! targets/rollout/<sha256>.assignment.json
//! ```

pub mod canonical;
pub mod manifest;
#[cfg(feature = "publish")]
pub mod publish;
#[cfg(feature = "verify")]
pub mod tuf;
#[cfg(feature = "verify")]
pub mod verify;

pub use manifest::{ArtefactHasher, ArtefactV1, BuildV1, ChunkError, ChunkVerifier, ManifestError, ManifestV1};
#[cfg(feature = "verify")]
pub use verify::{
    CatalogEntry, Fetch, FetchError, InstallBlocked, Refresh, Reply, Request, TrustStore, UpdateClient, VerifiedState,
    VerifyError, effective_now, verify_manifest,
};
