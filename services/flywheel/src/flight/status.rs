//! Our errors as gRPC statuses: the outside half only; the inside half goes to the log.

use arrow_flight::error::FlightError;
use flywheel_types::{Error, ErrorKind};
use tonic::{Code, Status};

/// The status of an error.
pub fn refusal(e: &Error) -> Status {
    if let Some(inside) = &e.inside {
        tracing::error!(code = e.code, inside, "a Flight SQL call failed");
    }
    Status::new(code(e), format!("{} ({}): {}", e.message, e.code, e.hint))
}

/// The same where rows are expected.
pub fn broken(e: &Error) -> FlightError {
    FlightError::Tonic(Box::new(refusal(e)))
}

fn code(e: &Error) -> Code {
    match e.kind {
        // drivers repeat what is unavailable by themselves: a query that was too slow once is too slow again
        ErrorKind::Unavailable if e.code == "query_timeout" => Code::DeadlineExceeded,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::Unauthenticated => Code::Unauthenticated,
        ErrorKind::Forbidden => Code::PermissionDenied,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Conflict => Code::Aborted,
        ErrorKind::TooLarge | ErrorKind::Quota => Code::ResourceExhausted,
        ErrorKind::Unsupported => Code::Unimplemented,
        ErrorKind::Internal => Code::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_what_to_do_and_never_the_inside() {
        let e = Error::new(ErrorKind::TooLarge, "result_too_large", "it is too large", "select less")
            .with_inside("/secret");
        let status = refusal(&e);
        assert_eq!(
            (status.code(), status.message()),
            (Code::ResourceExhausted, "it is too large (result_too_large): select less")
        );
        assert_eq!(refusal(&Error::internal("/secret")).code(), Code::Internal);
        let slow = Error::new(ErrorKind::Unavailable, "query_timeout", "slow", "narrow it");
        assert_eq!(refusal(&slow).code(), Code::DeadlineExceeded);
        assert_eq!(refusal(&Error::new(ErrorKind::Unavailable, "replaying", "m", "h")).code(), Code::Unavailable);
    }
}
