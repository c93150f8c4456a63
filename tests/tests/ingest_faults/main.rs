//! Faults that a telemetry server meets, against the real binary over real sockets: `kill -9` at points that matter, a disk
//! that is full, a log larger than memory, thousands of phones at once, and what other engines read from the tables
//! afterwards. What is stored is asked, never concluded from a status.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test ends with its first surprise and says what it saw; helpers outside `#[test]` functions too"
)]

mod ask;
mod check;
mod delta;
mod disk_full;
mod foreign;
mod kill;
mod load;
mod long_log;
mod reconnect;
mod watch;
