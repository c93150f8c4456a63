//! How many files and connections the process may have open. The limit that a shell or a unit gives is often 1,024, which is
//! less than the phones that come back at once after a restart; a process may raise it to the system's own.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Fewer than this do not carry a fleet.
const FEW: u64 = 4096;
/// Files that tables, log, database and jobs may need beside the connections.
const OWN_FILES: u64 = 1024;

/// Raises the soft limit to the hard one. Answers how many connections may be open, so that files are left for the log and the
/// tables.
pub fn raise() -> usize {
    let before = getrlimit(Resource::Nofile);
    if before.current != before.maximum {
        let wanted = Rlimit { current: before.maximum, maximum: before.maximum };
        if let Err(e) = setrlimit(Resource::Nofile, wanted) {
            tracing::warn!(error = %e, "the limit of open files could not be raised");
        }
    }
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if limit < FEW {
        tracing::warn!(
            limit,
            wanted = FEW,
            "few files may be open at once: phones will wait for each other; raise the hard limit (LimitNOFILE, ulimit -Hn)"
        );
    } else {
        tracing::info!(limit, "files that may be open");
    }
    connections(limit)
}

/// Half of a low limit, nearly all of a high one.
fn connections(limit: u64) -> usize {
    usize::try_from(limit - (limit / 2).min(OWN_FILES)).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::connections;

    #[test]
    fn files_are_left_for_the_log_and_the_tables() {
        assert_eq!([1, 256, 1024, 65_536].map(connections), [1, 128, 512, 64_512]);
        assert_eq!(connections(u64::MAX), usize::MAX - 1024);
    }
}
