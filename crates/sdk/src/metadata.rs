//! Drives the TUF client of the bundle crate over the transport. The trust records lie in the device's folder; a
//! record that cannot be stored blocks installs, because the next start could be rolled back.

use crate::config::Durability;
use crate::error::SdkError;
use crate::files;
use crate::transport::{HttpRequest, HttpResponse, HttpTransport, fetch};
use chrono::{DateTime, Utc};
use flywheel_bundle::tuf::TIMESTAMP_PATH;
use flywheel_bundle::verify::{InstallBlocked, Options, StoreError, TrustStore};
use flywheel_bundle::{CatalogEntry, Refresh, Reply, UpdateClient, VerifiedState, VerifyError};
use flywheel_types::Digest;
use std::path::PathBuf;
use std::sync::Arc;

/// Trust records as files, replaced in one step.
struct FileTrust {
    dir: PathBuf,
    durability: Durability,
}

impl TrustStore for FileTrust {
    fn load(&self, record: &str) -> Result<Option<Vec<u8>>, StoreError> {
        files::read(&self.dir.join(record)).map_err(|e| StoreError { record: record.to_owned(), why: e.to_string() })
    }
    fn save(&mut self, record: &str, bytes: &[u8]) -> Result<(), StoreError> {
        files::replace(&self.dir.join(record), bytes, self.durability)
            .map_err(|e| StoreError { record: record.to_owned(), why: e.to_string() })
    }
}

/// The device's view of its repository.
pub(crate) struct Metadata {
    client: UpdateClient,
    /// Repository address: `<base_url>/tuf/<app>`.
    url: String,
    /// Entity tag of the timestamp that was supplied last.
    etag: Option<String>,
}

impl Metadata {
    pub(crate) fn open(config: &crate::DeviceConfig) -> Result<Self, SdkError> {
        let dir = config.dir.join("trust");
        files::create_dir(&dir)?;
        let store = FileTrust { dir, durability: config.durability };
        let client = UpdateClient::open(
            &config.trusted_root,
            config.app.clone(),
            config.build_time,
            Box::new(store),
            Options::default(),
        )
        .map_err(|e| SdkError::refused("the trusted root", e.code(), e))?;
        if client.recovered() {
            tracing::warn!("a trust record was damaged; the version floors were restored from the other one");
        }
        Ok(Self { client, url: format!("{}/tuf/{}", config.base_url, config.app), etag: None })
    }

    pub(crate) fn state(&self) -> Option<Arc<VerifiedState>> {
        self.client.state().map(Arc::clone)
    }

    pub(crate) fn epoch_floor(&self) -> u64 {
        self.client.epoch_floor()
    }

    /// Whether the state is fresh enough to follow it, and the bundle may be installed under it.
    pub(crate) fn installable(&self, bundle: &Digest, now: DateTime<Utc>) -> Result<CatalogEntry, SdkError> {
        self.client.installable(bundle, now).cloned().map_err(|e| blocked(bundle, e))
    }

    /// One poll.
    pub(crate) async fn refresh(
        &mut self,
        transport: &dyn HttpTransport,
        now: DateTime<Utc>,
    ) -> Result<Refresh, SdkError> {
        self.client.begin(now);
        while let Some(request) = self.client.next_request() {
            let is_timestamp = request.path == TIMESTAMP_PATH;
            let mut get = HttpRequest::get(format!("{}/{}", self.url, request.path));
            if let Some(etag) = self.etag.as_ref().filter(|_| is_timestamp && self.client.state().is_some()) {
                get = get.header("if-none-match", etag.clone());
            }
            let what = format!("polling {}", request.path);
            let answer = fetch(transport, get, request.max_len).await;
            let answer = answer.map_err(|source| SdkError::Transport { what: what.clone(), source })?;
            let reply = reply(&answer).ok_or_else(|| SdkError::Status {
                what,
                status: answer.head.status,
                retry_after_s: answer.head.header("retry-after").and_then(|v| crate::backoff::retry_after_s(v, now)),
            })?;
            if is_timestamp && !matches!(reply, Reply::NotModified) {
                self.etag = answer.head.header("etag").map(str::to_owned);
            }
            self.client.supply(reply).map_err(|e| {
                self.etag = None;
                refusal(&e)
            })?;
        }
        Ok(self.client.last_refresh())
    }

    /// Fetches a repository file whose digest and length are known; the caller verifies it.
    pub(crate) async fn file(
        &mut self,
        transport: &dyn HttpTransport,
        location: &str,
        length: u64,
    ) -> Result<Vec<u8>, SdkError> {
        let what = format!("fetching {location}");
        let get = HttpRequest::get(format!("{}/{location}", self.url));
        let answer =
            fetch(transport, get, length).await.map_err(|source| SdkError::Transport { what: what.clone(), source })?;
        match answer.head.status {
            200 => Ok(answer.body.to_vec()),
            status => Err(SdkError::Status { what, status, retry_after_s: None }),
        }
    }
}

fn reply(answer: &HttpResponse) -> Option<Reply> {
    match answer.head.status {
        200 => Some(Reply::Found(Arc::from(&answer.body[..]))),
        304 => Some(Reply::NotModified),
        // Object stores answer 403 for a missing name when the caller may not list.
        403 | 404 | 410 => Some(Reply::NotFound),
        _ => None,
    }
}

fn refusal(e: &VerifyError) -> SdkError {
    match e.code() {
        "stale" => SdkError::Expired(e.to_string()),
        code => SdkError::refused("update metadata", code, e),
    }
}

fn blocked(bundle: &Digest, e: InstallBlocked) -> SdkError {
    match e {
        InstallBlocked::Stale { .. } | InstallBlocked::RefreshUnfinished | InstallBlocked::NothingVerified => {
            SdkError::Expired(e.to_string())
        }
        other => SdkError::refused(format!("bundle {bundle}"), other.code(), other),
    }
}
