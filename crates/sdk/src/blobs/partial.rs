//! The side-car of a partial download: which chunks are verified and stored. It trusts nothing but itself: any
//! mismatch with the blob makes the download start over.

use super::Blob;
use crate::config::Durability;
use crate::error::SdkError;
use crate::files;
use flywheel_types::Digest;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Partial {
    sha256: Digest,
    length: u64,
    chunk_size: u64,
    pub(super) etag: Option<String>,
    /// One bit per chunk, lowest bit first, as hex.
    done: String,
    #[serde(skip)]
    bits: Vec<u8>,
}

fn side_path(path: &Path) -> PathBuf {
    path.with_extension("part.json")
}

/// Where the bytes of a partial download lie.
pub(super) fn data_path(path: &Path) -> PathBuf {
    path.with_extension("part")
}

impl Partial {
    pub(super) fn new(blob: &Blob) -> Self {
        Self {
            sha256: blob.sha256,
            length: blob.length,
            chunk_size: blob.chunk_size,
            etag: None,
            done: String::new(),
            bits: vec![0; blob.chunks.len().div_ceil(8)],
        }
    }

    /// The stored state, when it belongs to this blob and its data file is there.
    pub(super) fn load(path: &Path, blob: &Blob) -> Option<Self> {
        let bytes = std::fs::read(side_path(path)).ok()?;
        let mut p: Self = serde_json::from_slice(&bytes).ok()?;
        p.bits = hex::decode(&p.done).ok()?;
        let fits = p.sha256 == blob.sha256
            && p.length == blob.length
            && p.chunk_size == blob.chunk_size
            && p.bits.len() == blob.chunks.len().div_ceil(8)
            && data_path(path).is_file();
        fits.then_some(p)
    }

    pub(super) fn save(&mut self, path: &Path, durability: Durability) -> Result<(), SdkError> {
        self.done = hex::encode(&self.bits);
        let bytes = serde_json::to_vec(self).map_err(|e| SdkError::Usage(e.to_string()))?;
        files::replace(&side_path(path), &bytes, durability)
    }

    pub(super) fn is_done(&self, chunk: usize) -> bool {
        self.bits.get(chunk / 8).is_some_and(|b| b & (1 << (chunk % 8)) != 0)
    }

    pub(super) fn set(&mut self, chunk: usize, done: bool) {
        if let Some(b) = self.bits.get_mut(chunk / 8) {
            if done { *b |= 1 << (chunk % 8) } else { *b &= !(1 << (chunk % 8)) }
        }
    }

    /// First run of missing chunks as `[from, to)` chunk numbers.
    pub(super) fn next_gap(&self, chunks: usize) -> Option<(usize, usize)> {
        let from = (0..chunks).find(|c| !self.is_done(*c))?;
        let to = (from..chunks).find(|c| self.is_done(*c)).unwrap_or(chunks);
        Some((from, to))
    }

    pub(super) fn missing_bytes(&self, blob: &Blob) -> u64 {
        (0..blob.chunks.len())
            .filter(|c| !self.is_done(*c))
            .filter_map(|c| blob.chunk_range(c))
            .map(|(from, to)| to - from)
            .sum()
    }

    pub(super) fn remove(path: &Path) -> Result<(), SdkError> {
        files::remove(&side_path(path))
    }
}
