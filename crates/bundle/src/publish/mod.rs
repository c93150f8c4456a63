//! The server half: makes new metadata and an ordered list of writes. Pure functions; keys sign through
//! [`RoleSigner`], so that the release key can live in another process than the online keys.
//!
//! Once, offline: [`init_repository`]. For each release: [`catalog_next`] gives bytes to sign (any process that
//! can read the repository), the release key signs them ([`Unsigned::sign`]), then [`assemble`] checks the
//! result and adds what the online keys sign: rollout, snapshot, timestamp. Write the [`PublishPlan`] in order;
//! a crash in between leaves the old state in force, and the next plan steps over the orphans.

mod assemble;
mod catalog;
mod error;
mod init;
mod keys;
mod memory;
mod plan;
mod repository;
mod unsigned;

pub use assemble::{Changes, OnlineSigners, assemble};
pub use catalog::{CatalogEdit, catalog_next, check_assignment};
pub use error::PublishError;
pub use init::{Expiries, InitialRepository, Keyring, Profile, RoleKeySet, init_repository, root_next, targets_next};
pub use keys::{RoleSigner, SecretKey, SignError};
pub use memory::MemoryRepository;
pub use plan::{Content, PublishPlan, WriteMode, WriteOp};
pub use repository::{Due, RepositoryState};
pub use unsigned::{SignedMetadata, Unsigned, add_signatures};
