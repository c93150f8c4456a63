//! The lake from outside: exactly once, reads, queries and their caps, imports, erasure. One program, because each one links
//! all of the query engine and takes a minute to build.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test ends with its first surprise; helpers outside `#[test]` functions too"
)]

mod cancel;
mod erase;
mod exactly_once;
mod group_by_words;
mod import;
mod kill;
mod reads;
mod sql_attacks;
mod support;
mod throughput;
