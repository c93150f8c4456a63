//! Whether queries may be answered after a start. A log that is small is read beside the tables like any other backlog; a large
//! one is committed first, because a query over it would take long and a partial answer is none.

use flywheel_types::{Error, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};

/// How far the log of an earlier run is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayProgress {
    /// Log bytes at the start.
    pub total_bytes: u64,
    pub left_bytes: u64,
}

pub(crate) struct ReplayState {
    total: u64,
    threshold: u64,
    done: AtomicBool,
}

impl ReplayState {
    /// `total` bytes were found in the log; queries wait until less than `threshold` is left.
    pub fn new(total: u64, threshold: u64) -> Self {
        Self { total, threshold, done: AtomicBool::new(total <= threshold) }
    }

    /// Progress; `None` once it is done, whatever the backlog is later.
    pub fn progress(&self, left: u64) -> Option<ReplayProgress> {
        if self.done.load(Ordering::Relaxed) {
            return None;
        }
        if left <= self.threshold {
            self.done.store(true, Ordering::Relaxed);
            return None;
        }
        Some(ReplayProgress { total_bytes: self.total, left_bytes: left })
    }

    /// # Errors
    /// `Unavailable` with the progress while queries have to wait.
    pub fn ready(&self, left: u64) -> Result<(), Error> {
        let Some(p) = self.progress(left) else { return Ok(()) };
        let mb = |bytes: u64| bytes / 1_000_000;
        Err(Error::new(
            ErrorKind::Unavailable,
            "replaying",
            format!(
                "the server commits what it acknowledged before it was stopped: {} of {} MB are left",
                mb(p.left_bytes),
                mb(p.total_bytes)
            ),
            "ask again after the time in Retry-After; telemetry is taken meanwhile",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_wait_for_a_large_log_only_and_once() {
        assert!(ReplayState::new(10, 10).ready(10).is_ok());
        let state = ReplayState::new(5_000_000_000, 512_000_000);
        let e = state.ready(3_000_000_000).unwrap_err();
        assert_eq!((e.kind, e.code), (ErrorKind::Unavailable, "replaying"));
        assert!(e.message.contains("3000 of 5000 MB"), "{}", e.message);
        assert!(state.ready(512_000_000).is_ok());
        assert!(state.ready(4_000_000_000).is_ok(), "a later backlog is read beside the tables");
    }
}
