//! One error shape for everything that can reach a person: what the caller may read and what the log needs
//! are separate fields, and the inside text is never part of `Display`.

use serde::Serialize;
use std::fmt;

/// What the caller can do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request is wrong; sending it again will not help.
    Invalid,
    /// No valid credential.
    Unauthenticated,
    /// The credential does not allow this.
    Forbidden,
    /// No such thing for this app.
    NotFound,
    /// The state changed underneath, or the transition is not legal.
    Conflict,
    /// Larger than a stated limit.
    TooLarge,
    /// A media type or encoding that the path does not take.
    Unsupported,
    /// Per-key quota; try later.
    Quota,
    /// Overloaded or not ready; try later.
    Unavailable,
    /// Our fault.
    Internal,
}

impl ErrorKind {
    /// HTTP status code of this kind.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Unauthenticated => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::TooLarge => 413,
            Self::Unsupported => 415,
            Self::Quota => 429,
            Self::Unavailable => 503,
            Self::Internal => 500,
        }
    }
    /// Whether the same request may succeed later.
    #[must_use]
    pub fn retryable(self) -> bool {
        match self {
            Self::Quota | Self::Unavailable => true,
            Self::Invalid
            | Self::Unauthenticated
            | Self::Forbidden
            | Self::NotFound
            | Self::Conflict
            | Self::TooLarge
            | Self::Unsupported
            | Self::Internal => false,
        }
    }
}

/// An error with a public half (`code`, `message`, `hint`) and a private half (`inside`).
#[derive(Debug, Clone)]
pub struct Error {
    pub kind: ErrorKind,
    /// Stable machine word, for example `chunk_not_found`.
    pub code: &'static str,
    /// What was wrong and where, for the caller.
    pub message: String,
    /// What to do about it.
    pub hint: String,
    /// For the log only.
    pub inside: Option<String>,
}

impl Error {
    #[must_use]
    pub fn new(kind: ErrorKind, code: &'static str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { kind, code, message: message.into(), hint: hint.into(), inside: None }
    }
    /// Attaches text for the log that the caller must not see.
    #[must_use]
    pub fn with_inside(mut self, inside: impl fmt::Display) -> Self {
        self.inside = Some(inside.to_string());
        self
    }
    /// An internal error; the cause goes to the log, the caller gets a fixed sentence.
    #[must_use]
    pub fn internal(inside: impl fmt::Display) -> Self {
        Self::new(
            ErrorKind::Internal,
            "internal",
            "the server could not finish this request",
            "try again; if it persists, give the request id to the operator",
        )
        .with_inside(inside)
    }
    #[must_use]
    pub fn invalid(code: &'static str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, code, message, hint)
    }
    #[must_use]
    pub fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, code, message, "check the id and the app of your token")
    }
    #[must_use]
    pub fn conflict(code: &'static str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorKind::Conflict, code, message, hint)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.code)
    }
}
impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_never_shows_the_inside() {
        let e = Error::internal("password=hunter2");
        assert!(!e.to_string().contains("hunter2"));
        assert_eq!(e.inside.as_deref(), Some("password=hunter2"));
        assert_eq!(e.kind.status(), 500);
    }
}
