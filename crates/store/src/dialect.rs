//! Everything in which SQLite and PostgreSQL differ. All other modules write one portable text for both.

use crate::error::{Error, Result};

/// Which database a store talks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    Sqlite,
    Postgres,
}

impl Backend {
    /// The back end a URL names.
    pub(crate) fn of_url(url: &str) -> Result<Self> {
        if url.starts_with("sqlite:") {
            Ok(Self::Sqlite)
        } else if url.starts_with("postgres:") || url.starts_with("postgresql:") {
            Ok(Self::Postgres)
        } else {
            Err(Error::invalid("database url", "expected `sqlite:PATH` or `postgres://USER@HOST/DATABASE`"))
        }
    }

    /// Opens a write transaction. SQLite takes the write lock at once: a deferred transaction that upgrades later
    /// gets SQLITE_BUSY without waiting for `busy_timeout`.
    pub(crate) fn begin(self) -> &'static str {
        match self {
            Self::Sqlite => "BEGIN IMMEDIATE",
            Self::Postgres => "BEGIN ISOLATION LEVEL READ COMMITTED",
        }
    }

    /// Settings of each new connection. SQLite: durable WAL commits; a reader cannot write by accident. PostgreSQL: the
    /// statements are few and find their rows by key, so planning each anew would cost more than it finds.
    pub(crate) fn session(self, writer: bool) -> &'static str {
        match (self, writer) {
            (Self::Sqlite, true) => {
                "PRAGMA busy_timeout = 30000; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; \
                 PRAGMA foreign_keys = ON; PRAGMA secure_delete = ON"
            }
            (Self::Sqlite, false) => "PRAGMA busy_timeout = 30000; PRAGMA foreign_keys = ON; PRAGMA query_only = ON",
            (Self::Postgres, _) => {
                "SET TIME ZONE 'UTC'; SET lock_timeout = '30s'; SET plan_cache_mode = force_generic_plan; \
                 SET enable_bitmapscan = off; SET default_transaction_isolation = 'read committed'"
            }
        }
    }

    /// Suffix of a claim's sub-select: skip rows that another claim holds. SQLite has one writer at a time.
    pub(crate) fn skip_locked(self) -> &'static str {
        match self {
            Self::Sqlite => "",
            Self::Postgres => " FOR UPDATE SKIP LOCKED",
        }
    }

    /// Suffix of a sub-select that holds the row it found until the end of the transaction.
    pub(crate) fn hold_row(self) -> &'static str {
        match self {
            Self::Sqlite => "",
            Self::Postgres => " FOR UPDATE",
        }
    }

    /// Whether a lone writing statement is a transaction by itself. SQLite is told to begin like everywhere else, so
    /// that it waits for the write lock before it reads.
    pub(crate) fn begins_by_itself(self) -> bool {
        match self {
            Self::Sqlite => false,
            Self::Postgres => true,
        }
    }

    /// Tries to serialise on `$1` (BIGINT) until the end of the transaction; selects 1 when it may go on. In
    /// SQLite the transaction itself is the lock, so there is nothing to ask.
    pub(crate) fn try_lock(self) -> Option<&'static str> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some("SELECT CASE WHEN pg_try_advisory_xact_lock($1) THEN 1 ELSE 0 END AS ok"),
        }
    }

    /// Waits for the lock `$1` until the end of the transaction (migrations).
    pub(crate) fn wait_lock(self) -> Option<&'static str> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some("SELECT 1 AS ok FROM pg_advisory_xact_lock($1)"),
        }
    }

    /// The database's own clock, microseconds since the epoch. `None`: the database shares our machine's clock.
    pub(crate) fn now_us(self) -> Option<&'static str> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT) AS us"),
        }
    }

    /// The migrations of this back end in order: version, name, text.
    pub(crate) fn migrations(self) -> &'static [(i64, &'static str, &'static str)] {
        match self {
            Self::Sqlite => &[
                (1, "control", include_str!("../../../migrations/sqlite/0001_control.sql")),
                (2, "ingest_quota", include_str!("../../../migrations/sqlite/0002_ingest_quota.sql")),
                (3, "saved_views", include_str!("../../../migrations/sqlite/0003_saved_views.sql")),
                (4, "erasure", include_str!("../../../migrations/sqlite/0004_erasure.sql")),
            ],
            Self::Postgres => &[
                (1, "control", include_str!("../../../migrations/postgres/0001_control.sql")),
                (2, "ingest_quota", include_str!("../../../migrations/postgres/0002_ingest_quota.sql")),
                (3, "saved_views", include_str!("../../../migrations/postgres/0003_saved_views.sql")),
                (4, "erasure", include_str!("../../../migrations/postgres/0004_erasure.sql")),
            ],
        }
    }
}

/// `$from, $from+1, …`: `count` placeholders for an IN list.
pub(crate) fn placeholders(from: usize, count: usize) -> String {
    (from..from + count).map(|i| format!("${i}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_choose_the_back_end() {
        assert_eq!(Backend::of_url("sqlite:x.db").unwrap(), Backend::Sqlite);
        assert_eq!(Backend::of_url("postgres://h/d").unwrap(), Backend::Postgres);
        assert!(Backend::of_url("mysql://h/d").is_err());
    }

    #[test]
    fn placeholders_count_from_the_given_number() {
        assert_eq!(placeholders(3, 2), "$3, $4");
        assert_eq!(placeholders(1, 0), "");
    }
}
