//! Vocabulary of Flywheel: ids, states with their legal transitions, versioned wire forms, device
//! assignment, row batches for the pure crates, clocks and the error shape. No I/O lives here.

pub mod assign;
pub mod clock;
pub mod error;
pub mod id;
pub mod rows;
pub mod state;
pub mod wire;

pub use clock::{BusinessClock, LeaseClock, VirtualClock};
pub use error::{Error, ErrorKind};
pub use id::{AppId, CandidateId, ChunkId, Digest, FindingId, InstallId, InteractionId, JobId, RolloutId, TemplateId};
pub use state::*;
