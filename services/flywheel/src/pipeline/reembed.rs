//! Embeds chunk texts, and brings a frozen chunk with a corrected text back: re-embed, verify against questions that
//! people asked, then serve it to a canary share. Attribution decides on the canary. Vectors are stored before any
//! state changes, so a crash loses nothing.

use super::freeze::{CANARY_ACTIVE_PPM, canary_salt};
use crate::server::Server;
use flywheel_attribution::retrieval::{
    Bm25, CaseKind, ReembedCase, ReembedPolicyV1, ReembedReport, ReembedVerdict, dense, reembed_verify,
};
use flywheel_inference::encoder::Encoder;
use flywheel_jobs::JobContext;
use flywheel_lake::read::RejectedInteraction;
use flywheel_store::Tx;
use flywheel_store::chunks::{ChunkMove, ChunkRow};
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, ChunkState, Digest, Error};
use serde_json::{Value, json};
use std::path::PathBuf;

pub const KIND: &str = "reembed";
/// Ranks that are compared.
const TOP: usize = 10;
/// Rejected questions that are tried.
const QUESTIONS: usize = 50;

/// Queues the embedding of everything that has no vector yet.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1 })).dedup(app.to_string()).concurrency(format!("reembed:{app}"), 1);
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

/// The step.
///
/// # Errors
/// `Conflict` without an encoder in the configuration; of the object store and the database.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let id = ctx.app();
    let chunks = all(server, id).await?;
    let todo: Vec<&ChunkRow> = chunks.iter().filter(|c| c.embedding.is_none() && c.text.is_some()).collect();
    if todo.is_empty() {
        return Ok(json!({ "embedded": 0 }));
    }
    let texts: Vec<String> = todo.iter().filter_map(|c| c.text.clone()).collect();
    let vectors = embed(server, texts).await?;
    let mut embedded = 0;
    let mut back = Vec::new();
    for (chunk, vector) in todo.iter().zip(&vectors) {
        let digest = server.objects.put(vector.iter().flat_map(|v| v.to_le_bytes()).collect()).await?;
        if chunk.state == ChunkState::Frozen {
            back.push(bring_back(server, ctx, chunk, vector, digest, &chunks).await?);
        } else {
            let mut tx = server.begin().await?;
            ctx.fence(&mut tx).await.map_err(super::lost)?;
            tx.chunk_embedding_set(id, &chunk.chunk_id, chunk.version, digest).await?;
            tx.commit().await?;
        }
        embedded += 1;
    }
    Ok(json!({ "embedded": embedded, "brought_back": back }))
}

async fn all(server: &Server, id: &AppId) -> Result<Vec<ChunkRow>, Error> {
    let (mut out, mut after) = (Vec::new(), None);
    loop {
        let page = server.store.chunk_list(id, None, after.as_ref(), 1000).await?;
        let Some(last) = page.last() else { return Ok(out) };
        after = Some(last.chunk_id.clone());
        out.extend(page);
    }
}

fn encoder_dir(server: &Server) -> Result<PathBuf, Error> {
    server.config.models.encoder_dir.clone().ok_or_else(|| {
        Error::invalid("no_encoder", "no sentence encoder is configured", "set models.encoder_dir in the configuration")
    })
}

async fn embed(server: &Server, texts: Vec<String>) -> Result<Vec<Vec<f32>>, Error> {
    let dir = encoder_dir(server)?;
    tokio::task::spawn_blocking(move || {
        let encoder = Encoder::open(&dir).map_err(crate::models::refused)?;
        Ok(encoder.embed(&texts))
    })
    .await
    .map_err(Error::internal)?
}

/// FROZEN → REEMBED_QUEUED → SHADOW → (verified) CANARY_ACTIVE, or back to FROZEN with the reason.
async fn bring_back(
    server: &Server,
    ctx: &JobContext,
    chunk: &ChunkRow,
    vector: &[f32],
    digest: Digest,
    chunks: &[ChunkRow],
) -> Result<Value, Error> {
    let id = ctx.app();
    let report = verify(server, id, chunk, vector, chunks).await?;
    let now = server.now();
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    let (c, v) = (&chunk.chunk_id, chunk.version);
    tx.chunk_state_set(id, c, v, &ChunkMove::new(ChunkState::Frozen, ChunkState::ReembedQueued)).await?;
    tx.chunk_embedding_set(id, c, v, digest).await?;
    tx.chunk_state_set(id, c, v, &ChunkMove::new(ChunkState::ReembedQueued, ChunkState::Shadow)).await?;
    let to = if report.verdict == ReembedVerdict::Fail { ChunkState::Frozen } else { ChunkState::CanaryActive };
    let mut change = ChunkMove::new(ChunkState::Shadow, to);
    if to == ChunkState::CanaryActive {
        change.canary_salt = Some(canary_salt(chunk, to, now));
        change.canary_ppm = CANARY_ACTIVE_PPM;
    }
    tx.chunk_state_set(id, c, v, &change).await?;
    let detail = json!({ "version": v, "to": to, "verification": report });
    tx.audit_append(id, "controller", "chunk.reembed", c.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(json!({ "chunk": c, "to": to }))
}

/// Ranks the questions of rejected answers before and after, densely and by words.
async fn verify(
    server: &Server,
    id: &AppId,
    chunk: &ChunkRow,
    vector: &[f32],
    chunks: &[ChunkRow],
) -> Result<ReembedReport, Error> {
    let since = server.now() - chrono::TimeDelta::days(30);
    let versioned = |r: &RejectedInteraction| {
        r.chunks.iter().any(|c| c.split('@').next() == Some(chunk.chunk_id.as_str())) && r.question.is_some()
    };
    let rejected = server.lake.rejected_interactions(id, since, 5000, None).await?;
    let questions: Vec<String> =
        rejected.into_iter().filter(versioned).filter_map(|r| r.question).take(QUESTIONS).collect();
    let asked = if questions.is_empty() { Vec::new() } else { embed(server, questions.clone()).await? };
    let mut others = Vec::with_capacity(chunks.len());
    for c in chunks.iter().filter(|c| c.chunk_id != chunk.chunk_id) {
        let Some(d) = c.embedding else { continue };
        others.push((c, floats(&server.objects.get(d).await?)));
    }
    let texts: Vec<&str> = others.iter().filter_map(|(c, _)| c.text.as_deref()).chain(chunk.text.as_deref()).collect();
    let lexical = Bm25::new(texts.iter().copied());
    let mut vectors: Vec<&[f32]> = others.iter().map(|(_, v)| v.as_slice()).collect();
    let before_count = vectors.len();
    vectors.push(vector);
    let target = u32::try_from(before_count).unwrap_or(u32::MAX);
    let cases: Vec<ReembedCase> = questions
        .iter()
        .zip(&asked)
        .map(|(text, q)| ReembedCase {
            kind: CaseKind::Rejected,
            relevant: vec![target],
            // while it is frozen, nobody gets the chunk
            before: ids(dense(q, &vectors[..before_count], TOP)),
            after: ids(dense(q, &vectors, TOP)),
            lexical: ids(lexical.search(text, TOP)),
        })
        .collect();
    Ok(reembed_verify(&ReembedPolicyV1::default(), &cases))
}

fn ids(ranked: Vec<(u32, f64)>) -> Vec<u32> {
    ranked.into_iter().map(|(id, _)| id).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
