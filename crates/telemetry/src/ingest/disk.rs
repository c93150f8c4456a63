//! The low-disk mark: intake stops before the disk is full, because committing what is acknowledged needs room too. It goes
//! on by itself when there is room again.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An answer of the file system is believed for this long.
const FRESH: Duration = Duration::from_millis(250);

pub(crate) struct DiskMark {
    folder: PathBuf,
    min_free: u64,
    last: Mutex<Option<(Instant, bool)>>,
}

impl DiskMark {
    pub fn new(folder: PathBuf, min_free: u64) -> Self {
        Self { folder, min_free, last: Mutex::new(None) }
    }

    /// Whether less than the mark is free. A file system that does not answer is left to the log, which will see.
    pub fn is_low(&self) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, low)) = *last
            && at.elapsed() < FRESH
        {
            return low;
        }
        let free = rustix::fs::statvfs(&self.folder).map(|s| s.f_bavail.saturating_mul(s.f_frsize));
        let low = free.is_ok_and(|free| free < self.min_free);
        let before = last.replace((Instant::now(), low)).is_some_and(|(_, was)| was);
        if low != before {
            tracing::warn!(
                low,
                free = free.unwrap_or(0),
                mark = self.min_free,
                "the disk crossed the mark of the intake"
            );
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_compared_with_what_is_free() {
        let dir = tempfile::tempdir().unwrap();
        assert!(DiskMark::new(dir.path().into(), u64::MAX).is_low());
        assert!(!DiskMark::new(dir.path().into(), 0).is_low());
        assert!(!DiskMark::new(dir.path().join("missing"), u64::MAX).is_low());
    }
}
