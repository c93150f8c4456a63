//! The device half: from a root built into the app to a verified assignment, catalog, manifest and file.
//!
//! [`UpdateClient`] does no I/O of its own. Drive it with bytes ([`UpdateClient::begin`], then
//! [`UpdateClient::next_request`] and [`UpdateClient::supply`] in turn), or let [`refresh`] drive it over a
//! [`Fetch`]. Rules beyond TUF: expired metadata keeps the installed model running but installs nothing new, and
//! a trust record that cannot be stored blocks installs, because the next start could be rolled back.

mod client;
mod error;
mod fetch;
mod session;
mod state;
mod store;

pub use client::{Options, UpdateClient};
pub use error::{InstallBlocked, VerifyError};
pub use fetch::{Fetch, FetchError, refresh};
pub use session::{Refresh, Reply, Request};
pub use state::{CatalogEntry, EpochCheck, RunPath, VerifiedState, check_epoch_floor, verify_manifest};
pub use store::{METADATA_RECORD, MemoryTrustStore, StoreError, TRUST_RECORD, TrustStore};

#[cfg(feature = "publish")]
pub(crate) mod state_for_publisher {
    //! The publisher reads catalogs and assignments with the device's own code.
    pub(crate) use super::state::{CatalogView, assignment_target, read_assignment, read_catalog};
}

use chrono::{DateTime, Utc};

/// The time a device reckons with: the latest of its clock, the signing time of the newest timestamp it has
/// verified, and the time the app was built. A clock that is behind is lifted; one that is ahead is never
/// written down, so it only delays installs until it is corrected.
#[must_use]
pub fn effective_now(
    clock: DateTime<Utc>,
    last_issued: Option<DateTime<Utc>>,
    built_at: DateTime<Utc>,
) -> DateTime<Utc> {
    clock.max(built_at).max(last_issued.unwrap_or(built_at))
}
