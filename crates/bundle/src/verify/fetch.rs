//! The synchronous driver: the whole refresh over one small trait.

use super::client::UpdateClient;
use super::error::VerifyError;
use super::session::{Refresh, Reply};
use chrono::{DateTime, Utc};

/// Bytes could not be had; says why. Not for "does not exist".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot fetch {path}: {why}")]
pub struct FetchError {
    pub path: String,
    pub why: String,
}

/// Where repository files come from.
pub trait Fetch {
    /// Reads `path` (relative to the repository address); `None` when there is no such file. Must stop after
    /// `max_len` bytes: return the first `max_len + 1` or an error, never more.
    ///
    /// # Errors
    /// [`FetchError`] for anything but "no such file".
    fn fetch(&self, path: &str, max_len: u64) -> Result<Option<Vec<u8>>, FetchError>;
}

/// Runs one refresh to its end. `clock` is the device's clock; the client lifts it where it is behind.
///
/// # Errors
/// [`VerifyError`]; what was verified before stays in force.
pub fn refresh(client: &mut UpdateClient, fetch: &dyn Fetch, clock: DateTime<Utc>) -> Result<Refresh, VerifyError> {
    client.begin(clock);
    while let Some(request) = client.next_request() {
        let reply = match fetch.fetch(&request.path, request.max_len) {
            Ok(Some(bytes)) => Reply::Found(bytes.into()),
            Ok(None) => Reply::NotFound,
            Err(e) => {
                client.abandon();
                return Err(e.into());
            }
        };
        client.supply(reply)?;
    }
    Ok(client.last_refresh())
}
