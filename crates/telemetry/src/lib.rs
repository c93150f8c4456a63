//! From bytes on the wire to durable, de-duplicated rows: decoding (OTLP and `/v1/events`), trust, masks, the
//! write-ahead log with group commit, duplicate detection, and the rows that are acknowledged but not yet in a
//! Delta table. Knows no SQL and no Delta; `flywheel-lake` moves the rows on.
//!
//! The path of one request: [`Ingestor::ingest`] inflates, verifies the signature and decodes on the caller's
//! task, then hands Arrow batches to one writer thread, which decides duplicates, appends one record per group to
//! the log, calls `fdatasync` and only then answers (invariants 1 and 2 of ARCHITECTURE.md).

pub mod buffers;
pub mod column;
pub mod decode;
pub mod dedup;
pub mod disposition;
pub mod error;
pub mod events;
pub mod import;
pub mod inflate;
pub mod ingest;
pub mod limits;
pub mod mask;
pub mod otlp;
pub mod rows;
pub mod trust;
pub mod user;
pub mod wal;

pub use buffers::Buffers;
pub use decode::{Decoded, Endpoint};
pub use disposition::{Disposition, Kind};
pub use error::TelemetryError;
pub use ingest::{Classifier, IngestHeaders, IngestOutcome, IngestRequest, Ingestor, Recovery, Settings, Slot};
pub use limits::Limits;
pub use mask::Masks;
pub use rows::{Table, TableRows};
pub use user::UserKeys;
