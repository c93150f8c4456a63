//! The telemetry lake: Delta tables fed from the write-ahead log, SQL over what is committed and what is only
//! acknowledged, the named reads of the pipeline, and upkeep. The only crate that names Delta and DataFusion.
//!
//! Invariants kept here: a Delta commit carries `txn(writer_id, seq)`, so a log record reaches each table once
//! whatever crashes; a log segment is freed when every table has it; a query sees every acknowledged row exactly
//! once, because the Delta snapshot and the end of the buffers change under one lock; every read is of one app, and
//! the filter sits in the table provider.

mod append;
mod bulk;
mod cancel;
pub mod catalogue;
mod committer;
mod config;
mod erase;
mod error;
mod export;
mod group;
pub mod import;
mod lake;
mod maintain;
mod provider;
mod query;
pub mod read;
mod replay;
mod retain;
mod rewrite;
mod sql;
mod table;
mod tail;
mod threads;
mod versions;
mod views;

pub use arrow::array::RecordBatch;
pub use arrow::datatypes::SchemaRef;
pub use config::LakeConfig;
pub use erase::{Erasure, Subjects, Superseded};
pub use error::LakeError;
pub use export::Format;
pub use flywheel_telemetry::Table;
pub use lake::Lake;
pub use maintain::{CompactReport, VacuumReport};
pub use query::SqlStream;
pub use replay::ReplayProgress;
pub use retain::RetainReport;
pub use rewrite::Removed;
pub use sql::{QueryLoad, SqlLimits, SqlResult};
pub use tail::{Tail, TailRows};
pub use versions::Versions;
pub use views::{BuiltInView, QueryScope, SavedView, ViewColumn, built_in};
