//! Where artefact bytes come from. The seam is [`BlobSource`]: a phone downloads into its own folder ([`HttpBlobs`]);
//! many simulated devices on one host may share one verified content-addressed folder ([`HostCache`]). Manifests and
//! signatures are checked by every device in both cases, and every byte is checked against the signed digests before
//! anybody uses it.

mod download;
mod host_cache;
mod partial;

pub use host_cache::HostCache;

use crate::config::Durability;
use crate::error::SdkError;
use crate::files;
use crate::policy::Wait;
use crate::transport::HttpTransport;
use flywheel_bundle::ArtefactV1;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An artefact as the blob source sees it: path in the repository, length, digest, chunk digests.
pub type Blob = ArtefactV1;

/// Result of a step that may have to wait for better conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Go<T> {
    Done(T),
    Wait(Wait),
}

/// What the device core decides while bytes flow.
pub trait BlobControl: Send + Sync {
    /// Asked before the first byte and between chunks, with the bytes of this artefact that are still missing.
    ///
    /// # Errors
    /// The reason to stop for now. What was verified is kept.
    fn may_continue(&self, missing_bytes: u64) -> Result<(), Wait>;
    /// Asked before each write.
    ///
    /// # Errors
    /// Why nothing may be written (no space, quota).
    fn before_write(&self, bytes: u64) -> io::Result<()>;
}

/// Makes artefacts available on this device.
#[async_trait::async_trait]
pub trait BlobSource: Send + Sync {
    /// Returns once every byte of `blob` is present and matches its signed digests, or says what it waits for.
    /// Dropping the future at any point is safe; the next call goes on where it stopped.
    ///
    /// `own` is the device's blob folder.
    ///
    /// # Errors
    /// [`SdkError::Refused`] when the bytes do not match, else network and storage errors.
    async fn obtain(&self, blob: &Blob, own: &Path, control: &dyn BlobControl) -> Result<Go<PathBuf>, SdkError>;

    /// Bytes that [`BlobSource::obtain`] would have to fetch onto this device's storage.
    fn missing_bytes(&self, blob: &Blob, own: &Path) -> u64;

    /// Where an obtained blob lies; also valid after an app update moved the folder.
    fn path(&self, blob: &Blob, own: &Path) -> PathBuf;
}

/// File name of a blob in any blob folder.
pub(crate) fn file_name(blob: &Blob) -> String {
    let extension = blob.path.rsplit_once('.').map_or("bin", |(_, e)| e);
    format!("{}.{extension}", blob.sha256)
}

/// Downloads over HTTP into the device's own folder, resumable, chunk by chunk.
pub struct HttpBlobs {
    transport: Arc<dyn HttpTransport>,
    targets_url: String,
    durability: Durability,
    tries: u32,
    fetched_bytes: AtomicU64,
}

impl HttpBlobs {
    /// `targets_url` is the address of the app's target folder, for example
    /// `https://fleet.example.com/tuf/myapp/targets`. `tries` bounds consecutive requests without a new chunk.
    pub fn new(
        transport: Arc<dyn HttpTransport>,
        targets_url: impl Into<String>,
        durability: Durability,
        tries: u32,
    ) -> Self {
        Self {
            transport,
            targets_url: targets_url.into(),
            durability,
            tries: tries.max(1),
            fetched_bytes: AtomicU64::new(0),
        }
    }

    /// Body bytes received for blobs so far.
    #[must_use]
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    /// Address of a blob. Targets carry their digest in the name (TUF consistent snapshots), so a name is immutable.
    fn url(&self, blob: &Blob) -> String {
        let (folder, name) = blob.path.rsplit_once('/').unwrap_or(("", &blob.path));
        let slash = if folder.is_empty() { "" } else { "/" };
        format!("{}/{folder}{slash}{}.{name}", self.targets_url, blob.sha256)
    }
}

#[async_trait::async_trait]
impl BlobSource for HttpBlobs {
    async fn obtain(&self, blob: &Blob, own: &Path, control: &dyn BlobControl) -> Result<Go<PathBuf>, SdkError> {
        let path = self.path(blob, own);
        if present(&path, blob) {
            return Ok(Go::Done(path));
        }
        files::create_dir(own)?;
        let job = download::Download {
            transport: self.transport.as_ref(),
            url: self.url(blob),
            blob,
            path: &path,
            durability: self.durability,
            tries: self.tries,
            control,
            fetched_bytes: &self.fetched_bytes,
        };
        Ok(match job.run().await? {
            None => Go::Done(path),
            Some(wait) => Go::Wait(wait),
        })
    }

    fn missing_bytes(&self, blob: &Blob, own: &Path) -> u64 {
        let path = self.path(blob, own);
        if present(&path, blob) {
            return 0;
        }
        partial::Partial::load(&path, blob).map_or(blob.length, |p| p.missing_bytes(blob))
    }

    fn path(&self, blob: &Blob, own: &Path) -> PathBuf {
        own.join(file_name(blob))
    }
}

/// A file gets its final name only after every chunk was verified, so name and length are enough.
fn present(path: &Path, blob: &Blob) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == blob.length)
}

#[cfg(test)]
mod tests;
