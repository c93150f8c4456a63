//! The write-ahead log: segments of checksummed records in one folder owned by one process. A record is one group of
//! requests: the Arrow rows of every table and the identities of the batches, written with one `fdatasync`. Records
//! are freed segment by segment when every table has them in Delta.
//!
//! Stored form, version 1 (little endian):
//! segment `wal-<first seq, 20 digits>.log` = `FLYWAL01`, first seq u64, then records;
//! record = magic u32, payload length u32, seq u64, CRC-32 of the payload, CRC-32 of the 20 bytes before, payload;
//! payload = version u8, then sections of tag u8, length u32, bytes (1–4 Arrow IPC streams, 16 batch identities).

pub mod log;
pub mod record;
pub mod replay;
pub mod snapshot;

pub use log::{Log, LogConfig};
pub use record::Group;
pub use replay::{Damage, Replay};

#[cfg(test)]
mod tests;
