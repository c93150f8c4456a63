//! The chunk registry: what the app retrieves from, which version is served, and why one is hidden.

use super::auth::{IngestApp, Principal};
use super::error::{ApiError, ApiResult, JsonBody, Params, PathParams};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flywheel_store::chunks::{ChunkMove, ChunkPut, ChunkRow, IndexChange, NewChunk};
use flywheel_types::assign::BUCKETS;
use flywheel_types::{AppId, ChunkId, ChunkState, Digest, Error, Role};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// Longest text of a chunk, bytes.
const MAX_TEXT: usize = 64 << 10;
/// Most chunks in one request.
const MAX_CHUNKS: usize = 1000;

#[derive(Debug, Deserialize)]
pub struct PutChunks {
    chunks: Vec<PutChunk>,
}

#[derive(Debug, Deserialize)]
struct PutChunk {
    chunk_id: ChunkId,
    text: String,
    #[serde(default)]
    source: String,
    #[serde(default)]
    collection: String,
    #[serde(default)]
    tags: Vec<String>,
}

/// `PUT /v1/chunks`: creates chunks or new versions of them and queues their embedding, in one transaction.
pub async fn put(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<PutChunks>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    if body.chunks.is_empty() || body.chunks.len() > MAX_CHUNKS {
        return Err(ApiError(Error::invalid(
            "bad_chunk_count",
            format!("{} chunks in one request", body.chunks.len()),
            format!("send 1 to {MAX_CHUNKS}"),
        )));
    }
    let mut tx = server.begin().await?;
    let (mut created, mut versions, mut unchanged) = (0, 0, 0);
    for c in &body.chunks {
        check_text(c)?;
        let new = NewChunk {
            chunk_id: c.chunk_id.clone(),
            collection: c.collection.clone(),
            source: c.source.clone(),
            tags: c.tags.clone(),
            text_digest: Digest::of(c.text.as_bytes()),
            text: Some(c.text.clone()),
        };
        match tx.chunk_put(&who.app, &new).await? {
            ChunkPut::Created => created += 1,
            ChunkPut::NewVersion => versions += 1,
            ChunkPut::Relabelled | ChunkPut::Unchanged => unchanged += 1,
        }
    }
    if created + versions > 0 {
        crate::pipeline::reembed::enqueue(&mut tx, &who.app).await?;
    }
    let detail = json!({ "created": created, "new_versions": versions, "unchanged": unchanged });
    tx.audit_append(&who.app, &who.name, "chunk.put", "chunks", &detail).await?;
    tx.commit().await?;
    Ok(Json(detail))
}

fn check_text(c: &PutChunk) -> Result<(), Error> {
    if c.text.trim().is_empty() {
        return Err(Error::invalid("empty_chunk", format!("chunk `{}` has no text", c.chunk_id), "send its text"));
    }
    if c.text.len() > MAX_TEXT {
        return Err(Error::invalid(
            "chunk_too_long",
            format!("chunk `{}` has {} bytes", c.chunk_id, c.text.len()),
            format!("split it: the limit is {MAX_TEXT} bytes"),
        ));
    }
    Ok(())
}

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    state: Option<ChunkState>,
    after: Option<ChunkId>,
    #[serde(default = "page")]
    limit: u32,
}

fn page() -> u32 {
    200
}

/// `GET /v1/chunks`.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<ChunkRow>>> {
    who.require(Role::Viewer)?;
    Ok(Json(server.store.chunk_list(&who.app, q.state, q.after.as_ref(), q.limit.min(1000)).await?))
}

#[derive(Debug, Deserialize)]
pub struct StateRequest {
    chunk_id: ChunkId,
    to: ChunkState,
    reason: String,
}

/// `POST /v1/chunks/state`: a person moves a chunk; the transition must be legal and is audited.
pub async fn set_state(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<StateRequest>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    let mut tx = server.begin().await?;
    let row = tx
        .chunk_get(&who.app, &body.chunk_id)
        .await?
        .ok_or_else(|| Error::not_found("chunk_not_found", format!("there is no chunk `{}`", body.chunk_id)))?;
    let change = ChunkMove::new(row.state, body.to);
    let index_version = tx.chunk_state_set(&who.app, &body.chunk_id, row.version, &change).await?;
    let detail = json!({ "from": row.state, "to": body.to, "version": row.version, "reason": body.reason });
    tx.audit_append(&who.app, &who.name, "chunk.state", body.chunk_id.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(Json(json!({ "index_version": index_version })))
}

#[derive(Debug, Deserialize)]
pub struct Since {
    #[serde(default)]
    since: i64,
    #[serde(default = "change_page")]
    limit: u32,
}

fn change_page() -> u32 {
    1000
}

/// One change as a device reads it.
#[derive(Debug, Serialize)]
struct Change {
    index_version: i64,
    chunk_id: ChunkId,
    version: i64,
    state: ChunkState,
    collection: String,
    text: Option<String>,
    /// Base64 of little-endian f32.
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding: Option<String>,
    hide: Option<Hide>,
}

/// Which devices must not use the chunk: those with `bucket(salt, install) < share_ppm`.
#[derive(Debug, Serialize, PartialEq, Eq)]
struct Hide {
    salt: String,
    share_ppm: u32,
}

/// `GET /v1/index/changes`: the feed that devices follow.
pub async fn changes(
    State(server): State<Arc<Server>>,
    app: IngestApp,
    Params(q): Params<Since>,
) -> ApiResult<Json<Value>> {
    let rows = server.store.index_change_list(&app.app, q.since, q.limit.min(5000)).await?;
    let index_version = rows.last().map_or(q.since, |r| r.index_version);
    let mut out = Vec::with_capacity(rows.len());
    for row in rows {
        out.push(change(&server, &app.app, row).await?);
    }
    Ok(Json(json!({ "index_version": index_version, "changes": out })))
}

async fn change(server: &Server, _app: &AppId, row: IndexChange) -> Result<Change, Error> {
    let embedding = match row.embedding {
        Some(digest) => Some(STANDARD.encode(server.objects.get_cached(digest).await?.as_ref())),
        None => None,
    };
    let hide = hide(&row);
    Ok(Change {
        index_version: row.index_version,
        chunk_id: row.chunk_id,
        version: row.chunk_version,
        state: row.state,
        collection: row.collection,
        text: row.text,
        embedding,
        hide,
    })
}

/// Frozen in any way: hidden everywhere; canary states: on the canary share, or on everybody else.
fn hide(row: &IndexChange) -> Option<Hide> {
    use ChunkState as S;
    let all = BUCKETS as u32;
    let salt = || row.canary_salt.clone().unwrap_or_default();
    match row.state {
        S::Active | S::Suspect => None,
        S::Frozen | S::ReembedQueued | S::Shadow | S::Retired => Some(Hide { salt: String::new(), share_ppm: all }),
        S::CanaryFrozen => Some(Hide { salt: salt(), share_ppm: row.canary_ppm }),
        // visible on the canary share only: the buckets from the top
        S::CanaryActive => Some(Hide { salt: salt(), share_ppm: all.saturating_sub(row.canary_ppm) }),
    }
}

/// `GET /v1/chunks/versions/{chunk_id}`.
pub async fn versions(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(chunk): PathParams<ChunkId>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Viewer)?;
    let rows = server.store.chunk_version_list(&who.app, &chunk).await?;
    Ok(Json(json!(rows.iter().map(|r| json!({
        "version": r.version, "source": r.source, "text": r.text, "text_digest": r.text_digest, "created_at": r.created_at,
    })).collect::<Vec<_>>())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(state: ChunkState, ppm: u32) -> IndexChange {
        IndexChange {
            index_version: 1,
            chunk_id: ChunkId::new("c").unwrap(),
            chunk_version: 1,
            state,
            collection: String::new(),
            text: None,
            text_digest: Digest::of(b""),
            embedding: None,
            canary_salt: Some("s".into()),
            canary_ppm: ppm,
            at: chrono::DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn a_frozen_chunk_is_hidden_everywhere_and_a_canary_on_its_share() {
        assert_eq!(hide(&row(ChunkState::Active, 0)), None);
        assert_eq!(hide(&row(ChunkState::Frozen, 0)).unwrap().share_ppm, 1_000_000);
        assert_eq!(hide(&row(ChunkState::CanaryFrozen, 100_000)).unwrap().share_ppm, 100_000);
        assert_eq!(hide(&row(ChunkState::CanaryActive, 100_000)).unwrap().share_ppm, 900_000);
    }
}
