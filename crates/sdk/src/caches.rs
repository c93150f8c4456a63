//! Parsed forms of immutable bytes, shared by the devices of one process. Keys are digests, so an entry can never be
//! wrong, only unused. It holds no trust: what was verified by one device is still verified by the next.

use crate::error::SdkError;
use crate::index::{IndexSnapshot, chain};
use flywheel_bundle::ManifestV1;
use flywheel_types::Digest;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// More entries than this and a cache starts over: on a phone there are one or two, in a simulator a few dozen.
const MAX_ENTRIES: usize = 256;

struct Memo<V>(Mutex<HashMap<Digest, Arc<V>>>);

impl<V> Default for Memo<V> {
    fn default() -> Self {
        Self(Mutex::new(HashMap::new()))
    }
}

impl<V> Memo<V> {
    fn get_or(&self, key: Digest, make: impl FnOnce() -> Result<V, SdkError>) -> Result<Arc<V>, SdkError> {
        if let Some(found) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(found));
        }
        let made = Arc::new(make()?);
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if map.len() >= MAX_ENTRIES {
            map.clear();
        }
        Ok(Arc::clone(map.entry(key).or_insert(made)))
    }
}

/// Caches of one process.
#[derive(Default)]
pub struct SharedCaches {
    manifests: Memo<ManifestV1>,
    indexes: Memo<IndexSnapshot>,
}

impl SharedCaches {
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn manifest(&self, bytes: &[u8]) -> Result<Arc<ManifestV1>, SdkError> {
        self.manifests.get_or(Digest::of(bytes), || {
            ManifestV1::from_bytes(bytes).map_err(|e| SdkError::refused("the manifest", "manifest_invalid", e))
        })
    }

    pub(crate) fn index_step(&self, from: &IndexSnapshot, answer: &[u8]) -> Result<Arc<IndexSnapshot>, SdkError> {
        let key = chain(from.fingerprint(), Digest::of(answer));
        self.indexes.get_or(key, || from.apply(answer))
    }
}
