//! Where a device keeps what it trusts. Two records, each able to restore the version floors alone, so that one
//! damaged file never opens the way back to older metadata.

use crate::tuf::Floors;
use flywheel_types::Digest;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Record with root and floors.
pub const TRUST_RECORD: &str = "trust.json";
/// Record with root, floors and the last complete set of metadata.
pub const METADATA_RECORD: &str = "metadata.json";

/// A record could not be read or written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("record {record}: {why}")]
pub struct StoreError {
    pub record: String,
    pub why: String,
}

/// Durable storage for the two records.
pub trait TrustStore: Send {
    /// Reads a record; `None` when it was never written.
    ///
    /// # Errors
    /// [`StoreError`] when it exists but cannot be read.
    fn load(&self, record: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// Replaces a record: after `Ok` the new bytes survive a power cut, and at no moment is there a mixture of old
    /// and new (write beside, sync, rename, sync the folder).
    ///
    /// # Errors
    /// [`StoreError`]; the client then blocks installs until a later write succeeds.
    fn save(&mut self, record: &str, bytes: &[u8]) -> Result<(), StoreError>;
}

/// In memory; clones share the content. For simulations and tests.
#[derive(Debug, Clone, Default)]
pub struct MemoryTrustStore(Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

impl TrustStore for MemoryTrustStore {
    fn load(&self, record: &str) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).get(record).cloned())
    }
    fn save(&mut self, record: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        map.insert(record.to_owned(), bytes.to_vec());
        Ok(())
    }
}

/// Content of [`TRUST_RECORD`], version 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TrustV1 {
    pub v: u8,
    /// The trusted root file.
    pub root: String,
    pub floors: Floors,
}

/// Content of [`METADATA_RECORD`], version 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct MetadataV1 {
    pub v: u8,
    pub trust: TrustV1,
    pub set: Option<FileSet>,
}

/// The files of one complete refresh.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct FileSet {
    /// Version of the root it was complete under.
    pub root_version: u64,
    pub timestamp: String,
    pub snapshot: String,
    pub targets: String,
    pub catalog: String,
    pub rollout: String,
    pub assignment: String,
}

/// Writes a record: digest of the rest on the first line, then JSON.
pub(super) fn encode<T: Serialize>(record: &str, value: &T) -> Result<Vec<u8>, StoreError> {
    let body = serde_json::to_vec(value).map_err(|e| StoreError { record: record.to_owned(), why: e.to_string() })?;
    let mut out = Digest::of(&body).to_hex().into_bytes();
    out.push(b'\n');
    out.extend_from_slice(&body);
    Ok(out)
}

/// Reads a record; `None` when it is cut off, altered or of another version.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (head, body) = bytes.split_at_checked(64)?;
    let body = body.strip_prefix(b"\n")?;
    if Digest::of(body).to_hex().as_bytes() != head {
        return None;
    }
    serde_json::from_slice(body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_and_any_flip_is_noticed() {
        let bytes = encode("r", &vec![1u8, 2, 3]).unwrap();
        assert_eq!(decode::<Vec<u8>>(&bytes), Some(vec![1, 2, 3]));
        for cut in 0..bytes.len() {
            assert_eq!(decode::<Vec<u8>>(&bytes[..cut]), None, "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut b = bytes.clone();
            b[at] ^= 1;
            assert_eq!(decode::<Vec<u8>>(&b), None, "flip at {at}");
        }
    }
}
