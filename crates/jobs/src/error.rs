//! How an attempt ends when it does not succeed, and why a schedule is refused.

use flywheel_store as store;
use flywheel_types as types;

/// The class decides what happens to the job.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// May work next time: again after the back-off, dead when the attempts are used up.
    #[error("{0}")]
    Retryable(String),
    /// Will never work: dead at once.
    #[error("{0}")]
    Permanent(String),
    /// Another worker has the job: nothing may be written about it any more.
    #[error("the lease is lost")]
    LeaseLost,
    /// Somebody asked to cancel the job.
    #[error("cancelled on request")]
    Cancelled,
    /// The worker is shut down: again at once, and the attempt does not count.
    #[error("interrupted by shut-down")]
    Interrupted,
}

impl JobError {
    /// A failure that may pass.
    pub fn retryable(cause: impl std::fmt::Display) -> Self {
        Self::Retryable(cause.to_string())
    }
    /// A failure that will not pass.
    pub fn permanent(cause: impl std::fmt::Display) -> Self {
        Self::Permanent(cause.to_string())
    }
}

/// What the store refuses for good (wrong input, unreadable rows) is permanent; conflicts and outages may pass. The
/// fence itself reports a lost lease through [`crate::JobContext::fence`].
impl From<store::Error> for JobError {
    fn from(e: store::Error) -> Self {
        match e {
            store::Error::Invalid { .. } | store::Error::Corrupt { .. } => Self::permanent(e),
            store::Error::NotFound { .. }
            | store::Error::Conflict { .. }
            | store::Error::Unavailable(_)
            | store::Error::Database(_) => Self::retryable(e),
        }
    }
}

/// Why a schedule is refused.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    #[error("cron expression `{expr}`: {detail}")]
    Expression { expr: String, detail: String },
    #[error("`{0}` is not an IANA time zone; write one like `Europe/London`, or `UTC`")]
    Zone(String),
    #[error("cron expression `{0}` never fires")]
    NeverFires(String),
    #[error("{field}: {detail}")]
    Field { field: &'static str, detail: String },
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl From<ScheduleError> for types::Error {
    fn from(e: ScheduleError) -> Self {
        let text = e.to_string();
        match e {
            ScheduleError::Store(inner) => inner.into(),
            ScheduleError::Expression { .. } => Self::invalid(
                "bad_cron",
                text,
                "five fields: minute hour day-of-month month day-of-week (0 or 7 is Sunday)",
            ),
            ScheduleError::Zone(_) => Self::invalid("bad_zone", text, "use a name from the IANA time zone database"),
            ScheduleError::NeverFires(_) => {
                Self::invalid("never_fires", text, "check day and month, for example 30 February")
            }
            ScheduleError::Field { .. } => Self::invalid("bad_schedule", text, "correct the field"),
        }
    }
}
