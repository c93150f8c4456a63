//! Content-addressed objects: datasets, models, vectors, attribution state. The name of an object is the SHA-256
//! of its bytes, so that an upload can be repeated and a reader can check what it got.

use flywheel_types::{Digest, Error};
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

/// Objects in a bucket or folder, with a local folder for files that must be opened by path (model files).
#[derive(Clone)]
pub struct Objects {
    store: Arc<dyn ObjectStore>,
    local: PathBuf,
    /// Small objects that every device asks for (chunk vectors).
    cache: Arc<RwLock<HashMap<Digest, Arc<[u8]>>>>,
}

/// Objects in the cache; it is emptied when full.
const CACHED: usize = 20_000;

impl Objects {
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>, local: PathBuf) -> Self {
        Self { store, local, cache: Arc::default() }
    }

    fn path(digest: Digest) -> ObjectPath {
        let hex = digest.to_hex();
        ObjectPath::from(format!("{}/{hex}", &hex[..2]))
    }

    /// Stores `bytes`; storing the same bytes again is harmless.
    ///
    /// # Errors
    /// Internal when the store fails.
    pub async fn put(&self, bytes: Vec<u8>) -> Result<Digest, Error> {
        let digest = Digest::of(&bytes);
        self.store.put(&Self::path(digest), PutPayload::from(bytes)).await.map_err(Error::internal)?;
        Ok(digest)
    }

    /// Deletes an object; one that is gone already is no error.
    ///
    /// # Errors
    /// Internal when the store fails.
    pub async fn delete(&self, digest: Digest) -> Result<(), Error> {
        if let Ok(mut cache) = self.cache.write() {
            cache.remove(&digest);
        }
        match self.store.delete(&Self::path(digest)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(Error::internal(e)),
        }
    }

    /// Reads and checks an object.
    ///
    /// # Errors
    /// `NotFound` when it is gone, internal when the bytes do not match their name.
    pub async fn get(&self, digest: Digest) -> Result<Vec<u8>, Error> {
        let result = self.store.get(&Self::path(digest)).await.map_err(|e| match e {
            object_store::Error::NotFound { .. } => {
                Error::not_found("object_not_found", format!("object {digest} is not stored"))
            }
            other => Error::internal(other),
        })?;
        let bytes = result.bytes().await.map_err(Error::internal)?.to_vec();
        if Digest::of(&bytes) != digest {
            return Err(Error::internal(format!("object {digest} is damaged")));
        }
        Ok(bytes)
    }

    /// As [`Self::get`], kept in memory: for small objects that are read by every device.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn get_cached(&self, digest: Digest) -> Result<Arc<[u8]>, Error> {
        if let Ok(cache) = self.cache.read()
            && let Some(bytes) = cache.get(&digest)
        {
            return Ok(bytes.clone());
        }
        let bytes: Arc<[u8]> = self.get(digest).await?.into();
        if let Ok(mut cache) = self.cache.write() {
            if cache.len() >= CACHED {
                cache.clear();
            }
            cache.insert(digest, bytes.clone());
        }
        Ok(bytes)
    }

    /// Folder for scratch files on the same file system as the objects.
    ///
    /// # Errors
    /// Internal when it cannot be made.
    pub fn scratch(&self) -> Result<PathBuf, Error> {
        let dir = self.local.join("scratch");
        std::fs::create_dir_all(&dir).map_err(Error::internal)?;
        Ok(dir)
    }

    /// Moves a finished file into the store under its digest. Returns digest and size in bytes.
    ///
    /// # Errors
    /// Internal on any file-system failure.
    pub fn adopt_file(&self, file: &Path) -> Result<(Digest, u64), Error> {
        let (digest, size) = digest_file(file)?;
        let target = self.file(digest);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent).map_err(Error::internal)?;
        }
        std::fs::File::open(file).and_then(|f| f.sync_all()).map_err(Error::internal)?;
        std::fs::rename(file, &target).map_err(Error::internal)?;
        Ok((digest, size))
    }

    /// Local path of an object that is a file.
    #[must_use]
    pub fn file(&self, digest: Digest) -> PathBuf {
        let hex = digest.to_hex();
        self.local.join(&hex[..2]).join(hex)
    }
}

/// SHA-256 and length of a file, read in pieces.
///
/// # Errors
/// Internal when it cannot be read.
pub fn digest_file(file: &Path) -> Result<(Digest, u64), Error> {
    let inside = |e: std::io::Error| Error::internal(format!("{}: {e}", file.display()));
    let mut reader = std::fs::File::open(file).map_err(inside)?;
    let (mut hash, mut buf, mut size) = (Sha256::new(), vec![0u8; 1 << 20], 0u64);
    loop {
        let n = reader.read(&mut buf).map_err(inside)?;
        if n == 0 {
            return Ok((Digest(hash.finalize().into()), size));
        }
        hash.update(&buf[..n]);
        size += n as u64;
    }
}
