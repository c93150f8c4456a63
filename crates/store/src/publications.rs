//! Documents whose version must always rise (assignment, catalog, snapshot, timestamp): the number is taken here, in
//! the transaction that decides what the document says, before the bytes are published.

use crate::query::{FromRow, Row, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest};
use serde::Serialize;

/// Newest document of a channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PublicationRow {
    /// For example `assignment`.
    pub channel: String,
    /// 1, 2, 3, …
    pub version: i64,
    pub digest: Digest,
    /// The exact text.
    pub body: String,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for PublicationRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            channel: row.text("channel")?,
            version: row.int("version")?,
            digest: row.parsed("digest")?,
            body: row.text("body")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

const SELECT: &str = "SELECT channel, version, digest, body, updated_at FROM publications";

impl Store {
    /// The newest document of a channel.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn publication_get(&self, app: &AppId, channel: &str) -> Result<Option<PublicationRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND channel = $2");
        self.fetch_opt(q(sql).bind(app).bind(channel)).await
    }
}

impl Tx {
    /// Stores the document that follows version `from` (0: none); answers the new version, `from + 1`.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another version is the newest by now.
    pub async fn publication_set(&mut self, app: &AppId, channel: &str, from: i64, body: &str) -> Result<i64> {
        let at = self.at();
        let sql = if from == 0 {
            "INSERT INTO publications (app_id, channel, version, digest, body, updated_at) \
             VALUES ($1, $2, $3 + 1, $4, $5, $6) ON CONFLICT DO NOTHING"
        } else {
            "UPDATE publications SET version = version + 1, digest = $4, body = $5, updated_at = $6 \
             WHERE app_id = $1 AND channel = $2 AND version = $3"
        };
        let query = q(sql).bind(app).bind(channel).bind(from).bind(Digest::of(body.as_bytes())).bind(body).bind(at);
        match self.execute(query).await? {
            0 => Err(Error::conflict("publication", channel, format!("{from} is not its newest version"))),
            _ => Ok(from + 1),
        }
    }
}
