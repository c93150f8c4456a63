//! One verified, content-addressed blob folder for many devices of a host. It verifies every byte once; devices of the
//! host then read the same file. Each device still checks its own metadata, manifest and assignment.

use super::{Blob, BlobControl, BlobSource, Go, HttpBlobs, download, file_name};
use crate::error::SdkError;
use crate::policy::Wait;
use flywheel_types::Digest;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

type Verified = Arc<tokio::sync::Mutex<bool>>;

/// Shared blob folder. It ignores the conditions of the device that happens to ask first: the host downloads, not the
/// device. The folder must belong to this process alone.
pub struct HostCache {
    inner: HttpBlobs,
    dir: PathBuf,
    blobs: Mutex<HashMap<Digest, Verified>>,
}

impl HostCache {
    /// A cache in `dir`, filled through `inner`.
    pub fn new(inner: HttpBlobs, dir: impl Into<PathBuf>) -> Self {
        Self { inner, dir: dir.into(), blobs: Mutex::new(HashMap::new()) }
    }

    /// Body bytes received so far.
    #[must_use]
    pub fn fetched_bytes(&self) -> u64 {
        self.inner.fetched_bytes()
    }

    fn entry(&self, digest: Digest) -> Verified {
        let mut blobs = self.blobs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(blobs.entry(digest).or_default())
    }
}

/// The host's own conditions: always good; a full disk shows when writing.
struct HostControl;

impl BlobControl for HostControl {
    fn may_continue(&self, _missing_bytes: u64) -> Result<(), Wait> {
        Ok(())
    }
    fn before_write(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }
}

#[async_trait::async_trait]
impl BlobSource for HostCache {
    async fn obtain(&self, blob: &Blob, _own: &Path, _control: &dyn BlobControl) -> Result<Go<PathBuf>, SdkError> {
        let path = self.dir.join(file_name(blob));
        let entry = self.entry(blob.sha256);
        let mut verified = entry.lock().await;
        if *verified && super::present(&path, blob) {
            return Ok(Go::Done(path));
        }
        if super::present(&path, blob) && download::file_digest(&path)? != blob.sha256 {
            tracing::warn!(blob = %blob.sha256, "a file of the host cache was damaged; it is fetched again");
            crate::files::remove(&path)?;
        }
        let got = self.inner.obtain(blob, &self.dir, &HostControl).await?;
        *verified = matches!(got, Go::Done(_));
        Ok(got)
    }

    fn missing_bytes(&self, _blob: &Blob, _own: &Path) -> u64 {
        0
    }

    fn path(&self, blob: &Blob, _own: &Path) -> PathBuf {
        self.dir.join(file_name(blob))
    }
}
