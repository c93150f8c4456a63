//! A repository in memory that enforces the write modes: for tests, simulations and dry runs.

use super::plan::{Content, PublishPlan, WriteMode, WriteOp};
use crate::verify::{Fetch, FetchError};
use flywheel_types::Digest;
use std::collections::BTreeMap;

/// Files by path, and blobs to copy from.
#[derive(Debug, Clone, Default)]
pub struct MemoryRepository {
    pub files: BTreeMap<String, Vec<u8>>,
    /// The server's content-addressed store.
    pub blobs: BTreeMap<Digest, Vec<u8>>,
}

impl MemoryRepository {
    /// Makes a blob available to later plans.
    pub fn add_blob(&mut self, bytes: Vec<u8>) {
        self.blobs.insert(Digest::of(&bytes), bytes);
    }

    /// Executes the first `limit` writes of a plan, as if the server died then.
    ///
    /// # Errors
    /// The write mode is violated or a blob is missing.
    pub fn apply_first(&mut self, plan: &PublishPlan, limit: usize) -> Result<(), String> {
        plan.ops.iter().take(limit).try_for_each(|op| self.write(op))
    }

    /// Executes a whole plan.
    ///
    /// # Errors
    /// As [`Self::apply_first`].
    pub fn apply(&mut self, plan: &PublishPlan) -> Result<(), String> {
        self.apply_first(plan, plan.ops.len())
    }

    /// Reads a file, in the form that [`super::RepositoryState::load`] takes.
    ///
    /// # Errors
    /// Never; the signature is the reader's.
    pub fn read(&self, path: &str) -> Result<Option<Vec<u8>>, String> {
        Ok(self.files.get(path).cloned())
    }

    fn write(&mut self, op: &WriteOp) -> Result<(), String> {
        let bytes = match &op.content {
            Content::Bytes(bytes) => bytes.clone(),
            Content::Blob { sha256, length } => match self.blobs.get(sha256) {
                Some(bytes) if bytes.len() as u64 == *length => bytes.clone(),
                _ => {
                    return Err(format!("{}: blob {sha256} of {length} bytes is not there", op.path));
                }
            },
        };
        let present = self.files.get(&op.path);
        let allowed = match op.mode {
            WriteMode::CreateOnly => present.is_none_or(|p| *p == bytes),
            WriteMode::CompareAndSwap { expected } => present.map(|p| Digest::of(p)) == expected,
        };
        if !allowed {
            return Err(format!("{}: something else stands there", op.path));
        }
        self.files.insert(op.path.clone(), bytes);
        Ok(())
    }
}

impl Fetch for MemoryRepository {
    fn fetch(&self, path: &str, max_len: u64) -> Result<Option<Vec<u8>>, FetchError> {
        let cut = usize::try_from(max_len).unwrap_or(usize::MAX).saturating_add(1);
        Ok(self.files.get(path).map(|b| b[..b.len().min(cut)].to_vec()))
    }
}
