//! What can go wrong in the control database, by what the caller can do about it.

use flywheel_types as types;

/// Result of a store call.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of the control database.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The named thing does not exist for this app.
    #[error("{what} `{id}` does not exist")]
    NotFound { what: &'static str, id: String },
    /// The state changed underneath, the transition is not legal, or the id is taken by something else.
    #[error("{what} `{id}`: {detail}")]
    Conflict { what: &'static str, id: String, detail: String },
    /// The request is wrong; sending it again will not help.
    #[error("{what}: {detail}")]
    Invalid { what: &'static str, detail: String },
    /// Busy, locked, deadlocked or unreachable; the same call may succeed later.
    #[error("the control database is busy or unreachable")]
    Unavailable(#[source] sqlx::Error),
    /// A stored value does not have the form this program writes.
    #[error("column `{column}` holds a value that cannot be read: {detail}")]
    Corrupt { column: String, detail: String },
    /// The database refused a statement.
    #[error("control database error")]
    Database(#[source] sqlx::Error),
}

impl Error {
    pub(crate) fn not_found(what: &'static str, id: impl std::fmt::Display) -> Self {
        Self::NotFound { what, id: id.to_string() }
    }
    pub(crate) fn conflict(what: &'static str, id: impl std::fmt::Display, detail: impl Into<String>) -> Self {
        Self::Conflict { what, id: id.to_string(), detail: detail.into() }
    }
    pub(crate) fn invalid(what: &'static str, detail: impl Into<String>) -> Self {
        Self::Invalid { what, detail: detail.into() }
    }
    /// Whether the same call may succeed later without anybody changing anything.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Unavailable(_) => true,
            Self::NotFound { .. }
            | Self::Conflict { .. }
            | Self::Invalid { .. }
            | Self::Corrupt { .. }
            | Self::Database(_) => false,
        }
    }
}

/// PostgreSQL SQLSTATE and SQLite result codes that mean "try again": serialisation failure, deadlock, lock not
/// available, connection lost, shutting down, too many connections; SQLITE_BUSY and SQLITE_LOCKED with extensions.
fn is_transient(code: &str) -> bool {
    matches!(code, "40001" | "40P01" | "55P03" | "57P01" | "57P02" | "57P03" | "53300")
        || code.starts_with("08")
        || matches!(code, "5" | "6" | "261" | "262" | "517" | "773")
}

impl From<sqlx::Error> for Error {
    fn from(e: sqlx::Error) -> Self {
        match &e {
            sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::Io(_)
            | sqlx::Error::Tls(_) => Self::Unavailable(e),
            sqlx::Error::Database(db) => {
                if db.code().is_some_and(|c| is_transient(&c)) {
                    Self::Unavailable(e)
                } else if db.is_unique_violation() {
                    Self::conflict("row", db.message().to_owned(), "an equal key exists already")
                } else if db.is_foreign_key_violation() {
                    Self::invalid("reference", "it names something that does not exist")
                } else {
                    Self::Database(e)
                }
            }
            _ => Self::Database(e),
        }
    }
}

impl From<Error> for types::Error {
    fn from(e: Error) -> Self {
        let text = e.to_string();
        match e {
            Error::NotFound { .. } => Self::not_found("not_found", text),
            Error::Conflict { .. } => Self::conflict("state_conflict", text, "read the current state and decide again"),
            Error::Invalid { .. } => Self::invalid("invalid", text, "correct the request"),
            Error::Unavailable(cause) => {
                Self::new(types::ErrorKind::Unavailable, "database_unavailable", text, "try again in a few seconds")
                    .with_inside(cause)
            }
            Error::Corrupt { .. } => Self::internal(text),
            Error::Database(cause) => Self::internal(format!("{text}: {cause}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_public_half_never_shows_the_cause() {
        let e = Error::Database(sqlx::Error::Protocol("password=hunter2".into()));
        let outside = types::Error::from(e);
        assert!(!outside.to_string().contains("hunter2"));
        assert!(outside.inside.unwrap_or_default().contains("hunter2"));
    }

    #[test]
    fn pool_time_out_is_retryable() {
        assert!(Error::from(sqlx::Error::PoolTimedOut).retryable());
        assert!(!Error::conflict("job", "j", "x").retryable());
    }
}
