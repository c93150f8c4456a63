//! What a device reads from the update repository.

pub mod client;
pub mod manifest;
pub mod metadata;
pub mod repository;
