//! The control database of Flywheel on SQLite or PostgreSQL: one module per aggregate, one query text for both.
//!
//! Reads are methods of [`Store`], writes are methods of [`Tx`], so that a pipeline step commits its new state, the
//! audit entry, its cursor and the next job in ONE transaction. Every finder is scoped by an app. A state changes by
//! compare-and-swap from the state the caller saw; when somebody was faster the call answers [`Error::Conflict`].
//!
//! This crate holds all SQL text of the control database and decides nothing: no clock (the caller says at which
//! business time a transaction happens), no HTTP, no policy.
//!
//! On PostgreSQL two transactions that append to the audit log (or change chunks) of one app wait for each other
//! until the first commits: do that last, and never keep a transaction open across external work.

pub mod apps;
pub mod attribution_state;
pub mod audit;
pub mod candidates;
pub mod chunks;
mod connect;
pub mod corrections;
pub mod cursors;
pub mod datasets;
mod dialect;
pub mod erasures;
mod error;
pub mod evaluations;
pub mod findings;
pub mod ids;
pub mod ingest_keys;
pub mod jobs;
pub mod leases;
pub mod mail_outbox;
mod migrate;
mod pool;
pub mod publications;
mod query;
pub mod releases;
pub mod rollout_plans;
pub mod rollout_requests;
pub mod rollouts;
pub mod schedules;
#[cfg(feature = "scratch")]
pub mod scratch;
pub mod secret;
pub mod templates;
pub mod tokens;
mod tx;
pub mod views;
mod words;

pub use connect::{Store, StoreOptions};
pub use dialect::Backend;
pub use error::{Error, Result};
pub use migrate::Migration;
pub use tx::Tx;
