//! What to write, in which order. Executing a plan is the server's business; a plan may be cut off anywhere.

use super::repository::RepositoryState;
use flywheel_types::Digest;

/// Where the bytes of a write come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    Bytes(Vec<u8>),
    /// A file the server holds under its digest (check length and digest while copying).
    Blob {
        sha256: Digest,
        length: u64,
    },
}

/// What may stand at the path before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteMode {
    /// Nothing, or the very same bytes (then the write is already done). Anything else is an error: names are
    /// never reused.
    CreateOnly,
    /// Exactly these bytes (`None`: nothing). Anything else means that somebody published in between: load the
    /// repository again and make a new plan.
    CompareAndSwap { expected: Option<Digest> },
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteOp {
    /// Relative to the repository address.
    pub path: String,
    pub content: Content,
    pub mode: WriteMode,
}

/// Writes in crash-safe order: each file after everything it refers to, the timestamp last. Devices see the new
/// state with the last write and not before.
#[derive(Debug, Clone)]
pub struct PublishPlan {
    pub ops: Vec<WriteOp>,
    /// The repository after the last write.
    pub after: RepositoryState,
}
