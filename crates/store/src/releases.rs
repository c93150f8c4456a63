//! Releases: bundles asked to be listed in the signed catalog, and what the signer answered.

use crate::query::{FromRow, Row, q};
use crate::words::words;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, BundleKind, CandidateId, Digest};
use serde::Serialize;

words! {
    /// State of a release.
    ReleaseState {
        SigningRequested = "signing_requested",
        Approved = "approved",
        Refused = "refused",
    }
}

/// One release.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReleaseRow {
    pub app_id: AppId,
    /// Digest of `manifest_text`; the bundle's name.
    pub manifest: Digest,
    /// The manifest's exact bytes (JSON text).
    pub manifest_text: String,
    pub kind: BundleKind,
    pub candidate_id: Option<CandidateId>,
    pub security_epoch: u64,
    pub state: ReleaseState,
    pub reason: Option<String>,
    pub decided_by: Option<String>,
    pub requested_at: DateTime<Utc>,
    pub decided_at: Option<DateTime<Utc>>,
    /// When its rollout completed; the newest is the last complete bundle, kept for ever.
    pub completed_at: Option<DateTime<Utc>>,
}

impl FromRow for ReleaseRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            manifest: row.parsed("manifest")?,
            manifest_text: row.text("manifest_text")?,
            kind: row.parsed("kind")?,
            candidate_id: row.opt_parsed("candidate_id")?,
            security_epoch: row.num("security_epoch")?,
            state: row.parsed("state")?,
            reason: row.opt_text("reason")?,
            decided_by: row.opt_text("decided_by")?,
            requested_at: row.time("requested_at")?,
            decided_at: row.opt_time("decided_at")?,
            completed_at: row.opt_time("completed_at")?,
        })
    }
}

/// A bundle to be signed into the catalog.
#[derive(Debug, Clone, PartialEq)]
pub struct NewRelease {
    pub manifest_text: String,
    pub kind: BundleKind,
    pub candidate_id: Option<CandidateId>,
    pub security_epoch: u64,
}

const SELECT: &str = "SELECT app_id, manifest, manifest_text, kind, candidate_id, security_epoch, state, reason, \
    decided_by, requested_at, decided_at, completed_at FROM releases";

impl Store {
    /// The release of a manifest.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn release_get(&self, app: &AppId, manifest: Digest) -> Result<Option<ReleaseRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND manifest = $2");
        self.fetch_opt(q(sql).bind(app).bind(manifest)).await
    }

    /// Releases in one state or in all, oldest request first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn release_list(&self, app: &AppId, state: Option<ReleaseState>) -> Result<Vec<ReleaseRow>> {
        let which = state.map_or("$2 = ''", |_| "state = $2");
        let sql = format!("{SELECT} WHERE app_id = $1 AND {which} ORDER BY requested_at, manifest");
        self.fetch(q(sql).bind(app).bind(state.map_or("", ReleaseState::as_str))).await
    }

    /// The last bundle whose rollout completed: what to roll back to.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn release_last_complete(&self, app: &AppId) -> Result<Option<ReleaseRow>> {
        let sql = format!(
            "{SELECT} WHERE app_id = $1 AND completed_at IS NOT NULL \
             ORDER BY completed_at DESC, requested_at DESC, manifest LIMIT 1"
        );
        self.fetch_opt(q(sql).bind(app)).await
    }
}

impl Tx {
    /// Asks for a bundle to be signed; answers its digest. The same manifest again changes nothing.
    ///
    /// # Errors
    /// [`Error::Conflict`] when it was refused before.
    pub async fn release_request(&mut self, app: &AppId, new: &NewRelease) -> Result<Digest> {
        let digest = Digest::of(new.manifest_text.as_bytes());
        let epoch =
            i64::try_from(new.security_epoch).map_err(|_| Error::invalid("security epoch", "it is beyond 2^63"))?;
        let at = self.at();
        let sql = "INSERT INTO releases (app_id, manifest, manifest_text, kind, candidate_id, security_epoch, state, \
                   requested_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING";
        let query = q(sql)
            .bind(app)
            .bind(digest)
            .bind(&new.manifest_text)
            .bind(new.kind)
            .bind(&new.candidate_id)
            .bind(epoch)
            .bind(ReleaseState::SigningRequested)
            .bind(at);
        if self.execute(query).await? == 1 {
            return Ok(digest);
        }
        let sql = format!("{SELECT} WHERE app_id = $1 AND manifest = $2");
        let row: Option<ReleaseRow> = self.fetch_opt(q(sql).bind(app).bind(digest)).await?;
        match row {
            Some(r) if r.state == ReleaseState::Refused => {
                Err(Error::conflict("release", digest, format!("it was refused: {}", r.reason.unwrap_or_default())))
            }
            _ => Ok(digest),
        }
    }

    /// The signer's answer to a request.
    ///
    /// # Errors
    /// [`Error::Conflict`] when it is decided already or does not exist.
    pub async fn release_decide(
        &mut self,
        app: &AppId,
        manifest: Digest,
        approved: bool,
        by: &str,
        reason: &str,
    ) -> Result<()> {
        let to = if approved { ReleaseState::Approved } else { ReleaseState::Refused };
        let at = self.at();
        let sql = "UPDATE releases SET state = $4, decided_by = $5, reason = $6, decided_at = $7 \
                   WHERE app_id = $1 AND manifest = $2 AND state = $3";
        let query = q(sql)
            .bind(app)
            .bind(manifest)
            .bind(ReleaseState::SigningRequested)
            .bind(to)
            .bind(by)
            .bind(reason)
            .bind(at);
        match self.execute(query).await? {
            0 => Err(Error::conflict("release", manifest, "it does not wait for a signature")),
            _ => Ok(()),
        }
    }

    /// Notes that the rollout of an approved release reached everybody.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the release is not approved.
    pub async fn release_complete_set(&mut self, app: &AppId, manifest: Digest) -> Result<()> {
        let at = self.at();
        let sql = "UPDATE releases SET completed_at = $4 WHERE app_id = $1 AND manifest = $2 AND state = $3";
        let query = q(sql).bind(app).bind(manifest).bind(ReleaseState::Approved).bind(at);
        match self.execute(query).await? {
            0 => Err(Error::conflict("release", manifest, "it is not approved")),
            _ => Ok(()),
        }
    }

    /// Takes the "complete" mark away again: after a complete rollout was rolled back, the release before it is the
    /// last complete one.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn release_complete_clear(&mut self, app: &AppId, manifest: Digest) -> Result<()> {
        let sql = "UPDATE releases SET completed_at = NULL WHERE app_id = $1 AND manifest = $2";
        self.execute(q(sql).bind(app).bind(manifest)).await.map(|_| ())
    }
}
