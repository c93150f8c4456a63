//! The write-ahead log: segments of checksummed records in one folder owned by one process. A record is one group of
//! requests: the Arrow rows of every table and the identities of the batches, written with one `fdatasync`. Records
//! are freed segment by segment when every table has them in Delta.
//!
//! Stored form (little endian):
//! segment `wal-<first seq, 20 digits>.log` = `FLYWAL01`, first seq u64, then records;
//! record = magic u32, payload length u32, seq u64, CRC-32 of the payload, CRC-32 of the 20 bytes before, payload;
//! payload version 2 = version u8, number of sections u8, directory, sections; the directory holds for each section its tag
//! u8, rows u32, length u32 and CRC-32; the batch identities (tag 16) come first, then Arrow IPC streams (1–4);
//! payload version 1 (still read) = version u8, then sections of tag u8, length u32, bytes.

pub mod log;
pub(crate) mod record;
pub mod replay;
pub mod snapshot;
pub mod stored;

pub use log::{Log, LogConfig};
pub use record::Group;
pub use replay::{Damage, Replay};
pub use stored::Stored;

#[cfg(test)]
mod tests;
