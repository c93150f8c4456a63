//! Dataset snapshots: immutable, named by digest. Erasure makes a new snapshot and tombstones the old.

use crate::query::{FromRow, Row, json_text, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest};
use serde::Serialize;
use serde_json::Value;

/// One snapshot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DatasetRow {
    pub app_id: AppId,
    pub digest: Digest,
    /// Where the bytes lie in the object store.
    pub object_path: String,
    /// Samples by split and whatever else is worth showing.
    pub counts: Value,
    pub created_at: DateTime<Utc>,
    /// Set when the snapshot must not be used any more.
    pub tombstone_at: Option<DateTime<Utc>>,
    pub tombstone: Option<String>,
    /// The snapshot that replaced it.
    pub successor: Option<Digest>,
}

impl FromRow for DatasetRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            digest: row.parsed("digest")?,
            object_path: row.text("object_path")?,
            counts: row.json("counts")?,
            created_at: row.time("created_at")?,
            tombstone_at: row.opt_time("tombstone_at")?,
            tombstone: row.opt_text("tombstone")?,
            successor: row.opt_parsed("successor")?,
        })
    }
}

const SELECT: &str = "SELECT app_id, digest, object_path, counts, created_at, tombstone_at, tombstone, \
    successor FROM datasets";

impl Store {
    /// The snapshot.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn dataset_get(&self, app: &AppId, digest: Digest) -> Result<Option<DatasetRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND digest = $2");
        self.fetch_opt(q(sql).bind(app).bind(digest)).await
    }

    /// Snapshots, newest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn dataset_list(&self, app: &AppId, limit: u32) -> Result<Vec<DatasetRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 ORDER BY created_at DESC, digest LIMIT $2");
        self.fetch(q(sql).bind(app).bind(limit)).await
    }
}

impl Tx {
    /// Registers a snapshot whose bytes are stored already; answers whether it is new.
    ///
    /// # Errors
    /// [`Error::Conflict`] when this digest is tombstoned.
    pub async fn dataset_create(
        &mut self,
        app: &AppId,
        digest: Digest,
        object_path: &str,
        counts: &Value,
    ) -> Result<bool> {
        let at = self.at();
        let sql = "INSERT INTO datasets (app_id, digest, object_path, counts, created_at) \
                   VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING";
        let query = q(sql).bind(app).bind(digest).bind(object_path).bind(json_text("counts", counts)?).bind(at);
        if self.execute(query).await? == 1 {
            return Ok(true);
        }
        let sql = format!("{SELECT} WHERE app_id = $1 AND digest = $2");
        let row: Option<DatasetRow> = self.fetch_opt(q(sql).bind(app).bind(digest)).await?;
        match row.and_then(|r| r.tombstone) {
            Some(why) => Err(Error::conflict("dataset", digest, format!("it is tombstoned: {why}"))),
            None => Ok(false),
        }
    }

    /// Forbids further use of a snapshot; its row stays as a tombstone.
    ///
    /// # Errors
    /// [`Error::Conflict`] when there is no such live snapshot.
    pub async fn dataset_tombstone(
        &mut self,
        app: &AppId,
        digest: Digest,
        reason: &str,
        successor: Option<Digest>,
    ) -> Result<()> {
        let at = self.at();
        let sql = "UPDATE datasets SET tombstone_at = $3, tombstone = $4, successor = $5 \
                   WHERE app_id = $1 AND digest = $2 AND tombstone_at IS NULL";
        match self.execute(q(sql).bind(app).bind(digest).bind(at).bind(reason).bind(successor)).await? {
            0 => Err(Error::conflict("dataset", digest, "it does not exist or is tombstoned already")),
            _ => Ok(()),
        }
    }
}
