//! Ingest keys: they ship inside the app, so they name an app and a quota but prove nothing about the sender.

use crate::query::{FromRow, Row, q};
use crate::secret::Secret;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::AppId;
use serde::Serialize;

/// An ingest key as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IngestKeyRow {
    pub key_id: String,
    pub app_id: AppId,
    pub name: String,
    /// Events the key may send in a minute; `None` is no quota.
    pub events_per_minute: Option<i64>,
    pub created_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
}

impl FromRow for IngestKeyRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            key_id: row.text("key_id")?,
            app_id: row.parsed("app_id")?,
            name: row.text("name")?,
            events_per_minute: row.opt_int("events_per_minute")?,
            created_at: row.time("created_at")?,
            revoked_at: row.opt_time("revoked_at")?,
        })
    }
}

const SELECT: &str = "SELECT key_id, app_id, name, events_per_minute, created_at, revoked_at FROM ingest_keys";

impl Store {
    /// The live key that a sender presented. The key says which app it is for.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn ingest_key_find(&self, secret: &Secret) -> Result<Option<IngestKeyRow>> {
        let sql = format!("{SELECT} WHERE secret = $1 AND revoked_at IS NULL");
        self.fetch_opt(q(sql).bind(secret.digest())).await
    }

    /// Every key of the app, newest first, revoked ones included.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn ingest_key_list(&self, app: &AppId) -> Result<Vec<IngestKeyRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 ORDER BY created_at DESC, key_id");
        self.fetch(q(sql).bind(app)).await
    }
}

impl Tx {
    /// Stores the digest of `secret` under a fresh id. An equal key of the same app is returned instead of a
    /// second one, so that a start-up script may run twice.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the key belongs to another app or was revoked; [`Error::Invalid`] when the app does
    /// not exist.
    pub async fn ingest_key_create(
        &mut self,
        app: &AppId,
        name: &str,
        secret: &Secret,
        events_per_minute: Option<i64>,
    ) -> Result<IngestKeyRow> {
        let at = self.at();
        let sql = "INSERT INTO ingest_keys (key_id, app_id, name, secret, created_at, events_per_minute) \
                   VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (secret) DO NOTHING";
        let query = q(sql).bind(crate::ids::fresh("key")).bind(app).bind(name).bind(secret.digest()).bind(at);
        let query = query.bind(events_per_minute);
        self.execute(query).await?;
        let row: Option<IngestKeyRow> =
            self.fetch_opt(q(format!("{SELECT} WHERE secret = $1")).bind(secret.digest())).await?;
        match row {
            Some(row) if row.app_id == *app && row.revoked_at.is_none() => Ok(row),
            _ => Err(Error::conflict("ingest key", name, "this key is taken or was revoked")),
        }
    }

    /// Revokes a key for ever.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the app has no such live key.
    pub async fn ingest_key_revoke(&mut self, app: &AppId, key_id: &str) -> Result<()> {
        let at = self.at();
        let sql = "UPDATE ingest_keys SET revoked_at = $3 \
                   WHERE app_id = $1 AND key_id = $2 AND revoked_at IS NULL";
        match self.execute(q(sql).bind(app).bind(key_id).bind(at)).await? {
            0 => Err(Error::not_found("ingest key", key_id)),
            _ => Ok(()),
        }
    }
}
