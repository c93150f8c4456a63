//! The chunk registry: current version and state of each knowledge chunk, the history of texts, and the
//! `index_changes` feed that retrievers and phones follow.
//!
//! A state belongs to the current version of a chunk. New text makes a new version: an ACTIVE or SUSPECT chunk is
//! then ACTIVE again without an embedding; in every other state (frozen, in verification) the state stays, so that
//! corrected text still walks the whole way back. Each change a retriever can see takes the next number of the app's
//! index version.

use crate::query::{FromRow, Row, json_text, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, ChunkId, ChunkState, Digest, FindingId};
use serde::Serialize;

/// Current version of a chunk.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChunkRow {
    pub app_id: AppId,
    pub chunk_id: ChunkId,
    /// 1, 2, 3, …
    pub version: i64,
    pub state: ChunkState,
    pub collection: String,
    pub source: String,
    pub tags: Vec<String>,
    /// `None` when the app registers digests only.
    pub text: Option<String>,
    pub text_digest: Digest,
    /// Digest of the embedding object; `None` until computed for this version.
    pub embedding: Option<Digest>,
    /// Salt that picks which devices see the chunk while it is in a canary state.
    pub canary_salt: Option<String>,
    /// Share of devices in the canary, parts per million.
    pub canary_ppm: u32,
    pub state_since: DateTime<Utc>,
    /// When the state ends by itself (business time).
    pub ttl_until: Option<DateTime<Utc>>,
    /// The finding behind the current state.
    pub finding_id: Option<FindingId>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for ChunkRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            chunk_id: row.parsed("chunk_id")?,
            version: row.int("version")?,
            state: row.parsed("state")?,
            collection: row.text("collection")?,
            source: row.text("source")?,
            tags: row.json("tags")?,
            text: row.opt_text("text")?,
            text_digest: row.parsed("text_digest")?,
            embedding: row.opt_parsed("embedding")?,
            canary_salt: row.opt_text("canary_salt")?,
            canary_ppm: row.num("canary_ppm")?,
            state_since: row.time("state_since")?,
            ttl_until: row.opt_time("ttl_until")?,
            finding_id: row.opt_parsed("finding_id")?,
            created_at: row.time("created_at")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

/// What `PUT /v1/chunks` stores.
#[derive(Debug, Clone, PartialEq)]
pub struct NewChunk {
    pub chunk_id: ChunkId,
    pub collection: String,
    pub source: String,
    pub tags: Vec<String>,
    pub text: Option<String>,
    /// Digest of the text; checked against `text` when both are there.
    pub text_digest: Digest,
}

/// What a put did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ChunkPut {
    Created,
    NewVersion,
    /// Only collection, source or tags changed.
    Relabelled,
    Unchanged,
}

/// A change of state and what comes with it.
#[derive(Debug, Clone, PartialEq)]
pub struct ChunkMove {
    pub from: ChunkState,
    pub to: ChunkState,
    pub canary_salt: Option<String>,
    pub canary_ppm: u32,
    pub ttl_until: Option<DateTime<Utc>>,
    pub finding_id: Option<FindingId>,
}

impl ChunkMove {
    /// A move without canary, end or finding.
    #[must_use]
    pub fn new(from: ChunkState, to: ChunkState) -> Self {
        Self { from, to, canary_salt: None, canary_ppm: 0, ttl_until: None, finding_id: None }
    }
}

/// One line of the index feed: what a retriever must now hold for `chunk_id`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IndexChange {
    pub index_version: i64,
    pub chunk_id: ChunkId,
    pub chunk_version: i64,
    pub state: ChunkState,
    pub collection: String,
    pub text: Option<String>,
    pub text_digest: Digest,
    pub embedding: Option<Digest>,
    pub canary_salt: Option<String>,
    pub canary_ppm: u32,
    pub at: DateTime<Utc>,
}

impl FromRow for IndexChange {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            index_version: row.int("index_version")?,
            chunk_id: row.parsed("chunk_id")?,
            chunk_version: row.int("chunk_version")?,
            state: row.parsed("state")?,
            collection: row.text("collection")?,
            text: row.opt_text("text")?,
            text_digest: row.parsed("text_digest")?,
            embedding: row.opt_parsed("embedding")?,
            canary_salt: row.opt_text("canary_salt")?,
            canary_ppm: row.num("canary_ppm")?,
            at: row.time("at")?,
        })
    }
}

/// One text a chunk had.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChunkVersionRow {
    pub version: i64,
    pub source: String,
    pub text: Option<String>,
    pub text_digest: Digest,
    pub created_at: DateTime<Utc>,
}

impl FromRow for ChunkVersionRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            version: row.int("version")?,
            source: row.text("source")?,
            text: row.opt_text("text")?,
            text_digest: row.parsed("text_digest")?,
            created_at: row.time("created_at")?,
        })
    }
}

struct IndexVersion(i64);

impl FromRow for IndexVersion {
    fn from_row(row: &Row) -> Result<Self> {
        row.int("index_version").map(Self)
    }
}

const SELECT: &str = "SELECT app_id, chunk_id, version, state, collection, source, tags, text, text_digest, \
    embedding, canary_salt, canary_ppm, state_since, ttl_until, finding_id, created_at, updated_at FROM chunks";
const CHANGES: &str = "SELECT index_version, chunk_id, chunk_version, state, collection, text, text_digest, \
    embedding, canary_salt, canary_ppm, at FROM index_changes";

impl Store {
    /// The chunk's current version.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn chunk_get(&self, app: &AppId, chunk: &ChunkId) -> Result<Option<ChunkRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND chunk_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(chunk)).await
    }

    /// Chunks by id, after `after` when given, at most `limit`; in one state or in all.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn chunk_list(
        &self,
        app: &AppId,
        state: Option<ChunkState>,
        after: Option<&ChunkId>,
        limit: u32,
    ) -> Result<Vec<ChunkRow>> {
        let which = state.map_or("$2 = ''", |_| "state = $2");
        let sql = format!("{SELECT} WHERE app_id = $1 AND {which} AND chunk_id > $3 ORDER BY chunk_id LIMIT $4");
        let query = q(sql)
            .bind(app)
            .bind(state.map_or("", ChunkState::as_str))
            .bind(after.map_or("", ChunkId::as_str))
            .bind(limit);
        self.fetch(query).await
    }

    /// Chunks whose state has reached its end at `now`.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn chunk_list_expired(&self, app: &AppId, now: DateTime<Utc>) -> Result<Vec<ChunkRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND ttl_until <= $2 ORDER BY chunk_id");
        self.fetch(q(sql).bind(app).bind(now)).await
    }

    /// Every text the chunk had, oldest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn chunk_version_list(&self, app: &AppId, chunk: &ChunkId) -> Result<Vec<ChunkVersionRow>> {
        let sql = "SELECT version, source, text, text_digest, created_at FROM chunk_versions \
                   WHERE app_id = $1 AND chunk_id = $2 ORDER BY version";
        self.fetch(q(sql).bind(app).bind(chunk)).await
    }

    /// The app's index version; 0 before the first chunk.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn index_version_get(&self, app: &AppId) -> Result<i64> {
        let sql = "SELECT index_version FROM index_heads WHERE app_id = $1";
        let row: Option<IndexVersion> = self.fetch_opt(q(sql).bind(app)).await?;
        Ok(row.map_or(0, |v| v.0))
    }

    /// Changes after index version `since`, in order, at most `limit`.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn index_change_list(&self, app: &AppId, since: i64, limit: u32) -> Result<Vec<IndexChange>> {
        let sql = format!("{CHANGES} WHERE app_id = $1 AND index_version > $2 ORDER BY index_version LIMIT $3");
        self.fetch(q(sql).bind(app).bind(since).bind(limit)).await
    }

    /// What the index said about a chunk at index version `at`: to check a retrieved set that a device reports.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn index_change_at(&self, app: &AppId, chunk: &ChunkId, at: i64) -> Result<Option<IndexChange>> {
        let sql = format!(
            "{CHANGES} WHERE app_id = $1 AND chunk_id = $2 AND index_version <= $3 \
             ORDER BY index_version DESC LIMIT 1"
        );
        self.fetch_opt(q(sql).bind(app).bind(chunk).bind(at)).await
    }
}

impl Tx {
    /// The chunk as this transaction sees it.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn chunk_get(&mut self, app: &AppId, chunk: &ChunkId) -> Result<Option<ChunkRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND chunk_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(chunk)).await
    }

    /// Registers a chunk or a new text of it. Putting the same again changes nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the digest is not the text's, [`Error::Conflict`] for a retired chunk or when
    /// somebody else changed it meanwhile.
    pub async fn chunk_put(&mut self, app: &AppId, new: &NewChunk) -> Result<ChunkPut> {
        if new.text.as_ref().is_some_and(|t| Digest::of(t.as_bytes()) != new.text_digest) {
            return Err(Error::invalid("chunk", "text_digest is not the SHA-256 of text"));
        }
        let Some(old) = self.chunk_get(app, &new.chunk_id).await? else {
            return self.chunk_insert(app, new).await;
        };
        if old.state == ChunkState::Retired {
            return Err(Error::conflict("chunk", &new.chunk_id, "it is retired; use a new id"));
        }
        if old.text_digest == new.text_digest {
            return self.chunk_relabel(&old, new).await;
        }
        let state = match old.state {
            ChunkState::Suspect => ChunkState::Active,
            other => other,
        };
        let at = self.at();
        let sql = "UPDATE chunks SET version = version + 1, state = $4, collection = $5, source = $6, tags = $7, \
                   text = $8, text_digest = $9, embedding = NULL, updated_at = $10, \
                   state_since = CASE WHEN state = $4 THEN state_since ELSE $10 END \
                   WHERE app_id = $1 AND chunk_id = $2 AND version = $3";
        let query = q(sql)
            .bind(app)
            .bind(&new.chunk_id)
            .bind(old.version)
            .bind(state)
            .bind(&new.collection)
            .bind(&new.source)
            .bind(json_text("tags", &new.tags)?)
            .bind(&new.text)
            .bind(new.text_digest)
            .bind(at);
        if self.execute(query).await? == 0 {
            return Err(Error::conflict("chunk", &new.chunk_id, "it was changed meanwhile"));
        }
        self.chunk_version_insert(app, new, old.version + 1).await?;
        self.index_change_append(app, &new.chunk_id).await?;
        Ok(ChunkPut::NewVersion)
    }

    async fn chunk_insert(&mut self, app: &AppId, new: &NewChunk) -> Result<ChunkPut> {
        let at = self.at();
        let sql = "INSERT INTO chunks (app_id, chunk_id, version, state, collection, source, tags, text, \
                   text_digest, state_since, created_at, updated_at) \
                   VALUES ($1, $2, 1, $3, $4, $5, $6, $7, $8, $9, $9, $9) ON CONFLICT DO NOTHING";
        let query = q(sql)
            .bind(app)
            .bind(&new.chunk_id)
            .bind(ChunkState::Active)
            .bind(&new.collection)
            .bind(&new.source)
            .bind(json_text("tags", &new.tags)?)
            .bind(&new.text)
            .bind(new.text_digest)
            .bind(at);
        if self.execute(query).await? == 0 {
            return Err(Error::conflict("chunk", &new.chunk_id, "it was created meanwhile"));
        }
        self.chunk_version_insert(app, new, 1).await?;
        self.index_change_append(app, &new.chunk_id).await?;
        Ok(ChunkPut::Created)
    }

    async fn chunk_relabel(&mut self, old: &ChunkRow, new: &NewChunk) -> Result<ChunkPut> {
        if (&old.collection, &old.source, &old.tags) == (&new.collection, &new.source, &new.tags) {
            return Ok(ChunkPut::Unchanged);
        }
        let at = self.at();
        let sql = "UPDATE chunks SET collection = $3, source = $4, tags = $5, updated_at = $6 \
                   WHERE app_id = $1 AND chunk_id = $2";
        let query = q(sql)
            .bind(&old.app_id)
            .bind(&old.chunk_id)
            .bind(&new.collection)
            .bind(&new.source)
            .bind(json_text("tags", &new.tags)?)
            .bind(at);
        self.execute(query).await?;
        if old.collection != new.collection {
            self.index_change_append(&old.app_id, &old.chunk_id).await?;
        }
        Ok(ChunkPut::Relabelled)
    }

    async fn chunk_version_insert(&mut self, app: &AppId, new: &NewChunk, version: i64) -> Result<()> {
        let at = self.at();
        let sql = "INSERT INTO chunk_versions (app_id, chunk_id, version, source, text, text_digest, created_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7)";
        let query = q(sql)
            .bind(app)
            .bind(&new.chunk_id)
            .bind(version)
            .bind(&new.source)
            .bind(&new.text)
            .bind(new.text_digest)
            .bind(at);
        self.execute(query).await.map(|_| ())
    }

    /// Moves a chunk from the state and version the caller saw to another state; answers the new index version.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an illegal step or a canary without salt, [`Error::Conflict`] when the chunk is no
    /// longer in that state or version, [`Error::NotFound`].
    pub async fn chunk_state_set(
        &mut self,
        app: &AppId,
        chunk: &ChunkId,
        version: i64,
        change: &ChunkMove,
    ) -> Result<i64> {
        if !change.from.can_become(change.to) {
            return Err(Error::invalid("chunk state", format!("{} cannot become {}", change.from, change.to)));
        }
        let canary = matches!(change.to, ChunkState::CanaryFrozen | ChunkState::CanaryActive);
        if canary && (change.canary_salt.is_none() || change.canary_ppm == 0) {
            return Err(Error::invalid("chunk canary", "it needs a salt and a share above 0"));
        }
        let at = self.at();
        let sql = "UPDATE chunks SET state = $5, canary_salt = $6, canary_ppm = $7, ttl_until = $8, \
                   finding_id = COALESCE($9, finding_id), state_since = $10, updated_at = $10 \
                   WHERE app_id = $1 AND chunk_id = $2 AND version = $3 AND state = $4";
        let query = q(sql)
            .bind(app)
            .bind(chunk)
            .bind(version)
            .bind(change.from)
            .bind(change.to)
            .bind(&change.canary_salt)
            .bind(change.canary_ppm)
            .bind(change.ttl_until)
            .bind(&change.finding_id)
            .bind(at);
        if self.execute(query).await? == 0 {
            let now = self.chunk_get(app, chunk).await?;
            return Err(match now {
                None => Error::not_found("chunk", chunk),
                Some(c) => Error::conflict(
                    "chunk",
                    chunk,
                    format!("it is {} in version {}, not {} in version {version}", c.state, c.version, change.from),
                ),
            });
        }
        self.index_change_append(app, chunk).await
    }

    /// Stores the digest of the embedding object of `version`; answers the new index version.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the chunk has another version by now.
    pub async fn chunk_embedding_set(
        &mut self,
        app: &AppId,
        chunk: &ChunkId,
        version: i64,
        embedding: Digest,
    ) -> Result<i64> {
        let at = self.at();
        let sql = "UPDATE chunks SET embedding = $4, updated_at = $5 \
                   WHERE app_id = $1 AND chunk_id = $2 AND version = $3";
        let query = q(sql).bind(app).bind(chunk).bind(version).bind(embedding).bind(at);
        if self.execute(query).await? == 0 {
            return Err(Error::conflict("chunk", chunk, format!("it has no version {version} now")));
        }
        self.index_change_append(app, chunk).await
    }

    /// Copies the chunk's current row into the feed under the next index version. Takes the app's index lock until
    /// the end of the transaction.
    async fn index_change_append(&mut self, app: &AppId, chunk: &ChunkId) -> Result<i64> {
        let lock = "INSERT INTO index_heads (app_id, index_version) VALUES ($1, 1) \
                    ON CONFLICT (app_id) DO UPDATE SET index_version = index_heads.index_version + 1 \
                    RETURNING index_version";
        let head: Option<IndexVersion> = self.fetch_opt(q(lock).bind(app)).await?;
        let Some(IndexVersion(version)) = head else {
            return Err(Error::not_found("index head", app));
        };
        let at = self.at();
        let sql = "INSERT INTO index_changes (app_id, index_version, chunk_id, chunk_version, state, collection, \
                   text, text_digest, embedding, canary_salt, canary_ppm, at) \
                   SELECT app_id, $3, chunk_id, version, state, collection, text, text_digest, embedding, \
                   canary_salt, canary_ppm, $4 FROM chunks WHERE app_id = $1 AND chunk_id = $2";
        self.execute(q(sql).bind(app).bind(chunk).bind(version).bind(at)).await?;
        Ok(version)
    }
}
