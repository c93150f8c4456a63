//! Candidates: register one that was made elsewhere, read what the offline gate said, override a failed gate.

use super::auth::Principal;
use super::error::{ApiResult, JsonBody, Params, PathParams};
use crate::pipeline::evaluate;
use crate::server::Server;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use flywheel_store::candidates::{CandidateRow, CandidateSource, NewCandidate};
use flywheel_store::evaluations::EvaluationRow;
use flywheel_types::{BundleKind, CandidateId, CandidateState, Digest, Error, Role};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::io::AsyncWriteExt;

/// Largest uploaded model file, bytes (a 1.5B-class model at F16 with room).
const MAX_UPLOAD: u64 = 16 << 30;

/// `POST /v1/models`: streams a file into the object store; answers its digest. Uploading again is harmless.
pub async fn upload(State(server): State<Arc<Server>>, who: Principal, body: Body) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    let scratch = tempfile::NamedTempFile::new_in(server.objects.scratch()?).map_err(Error::internal)?;
    let mut out = tokio::fs::File::create(scratch.path()).await.map_err(Error::internal)?;
    let (mut stream, mut size) = (body.into_data_stream(), 0u64);
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|e| {
            Error::invalid("upload_cut_off", "the upload ended early", "send the file again").with_inside(e)
        })?;
        size += piece.len() as u64;
        if size > MAX_UPLOAD {
            return Err(Error::new(
                flywheel_types::ErrorKind::TooLarge,
                "model_too_large",
                format!("the file has more than {MAX_UPLOAD} bytes"),
                "quantise or split it first",
            )
            .into());
        }
        out.write_all(&piece).await.map_err(Error::internal)?;
    }
    out.flush().await.map_err(Error::internal)?;
    drop(out);
    let (digest, size_bytes) = server.objects.adopt_file(scratch.path())?;
    Ok(Json(json!({ "artefact": digest, "size_bytes": size_bytes })))
}

#[derive(Debug, Deserialize)]
pub struct Register {
    kind: BundleKind,
    artefact: Digest,
    #[serde(default)]
    base: Option<Digest>,
    #[serde(default)]
    note: String,
}

/// `POST /v1/candidates`: registers an uploaded file and queues its evaluation.
pub async fn register(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<Register>,
) -> ApiResult<Json<CandidateRow>> {
    who.require(Role::Operator)?;
    let file = server.objects.file(body.artefact);
    let size_bytes = std::fs::metadata(&file)
        .map_err(|_| {
            Error::not_found("artefact_not_found", format!("no uploaded file has the digest {}", body.artefact))
        })?
        .len();
    let candidate_id = candidate_id(body.artefact)?;
    let new = NewCandidate {
        candidate_id: candidate_id.clone(),
        kind: body.kind,
        base: body.base,
        artefact: body.artefact,
        object_path: body.artefact.to_hex(),
        size_bytes,
        dataset: None,
        source: CandidateSource::External,
        job: None,
        report: json!({ "note": body.note }),
        created_by: who.name.clone(),
    };
    let mut tx = server.begin().await?;
    if tx.candidate_register(&who.app, &new).await? {
        evaluate::enqueue(&mut tx, &who.app, &candidate_id).await?;
        let detail = json!({ "artefact": body.artefact, "note": body.note });
        tx.audit_append(&who.app, &who.name, "candidate.register", candidate_id.as_str(), &detail).await?;
    }
    tx.commit().await?;
    Ok(Json(found(&server, &who, &candidate_id).await?))
}

/// Id of the candidate with this artefact: derived, so that a repeated step makes the same one.
///
/// # Errors
/// Never for a valid digest.
pub fn candidate_id(artefact: Digest) -> Result<CandidateId, Error> {
    CandidateId::new(format!("c-{}", &artefact.to_hex()[..16])).map_err(Error::internal)
}

async fn found(server: &Server, who: &Principal, id: &CandidateId) -> Result<CandidateRow, Error> {
    server
        .store
        .candidate_get(&who.app, id)
        .await?
        .ok_or_else(|| Error::not_found("candidate_not_found", format!("there is no candidate `{id}`")))
}

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    state: Option<CandidateState>,
}

/// `GET /v1/candidates`.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<CandidateRow>>> {
    who.require(Role::Viewer)?;
    Ok(Json(server.store.candidate_list(&who.app, q.state, 500).await?))
}

#[derive(Debug, Serialize)]
pub struct WithEvaluations {
    #[serde(flatten)]
    candidate: CandidateRow,
    evaluations: Vec<EvaluationRow>,
}

/// `GET /v1/candidates/{id}`.
pub async fn get(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(id): PathParams<CandidateId>,
) -> ApiResult<Json<WithEvaluations>> {
    who.require(Role::Viewer)?;
    let candidate = found(&server, &who, &id).await?;
    let evaluations = server.store.evaluation_list(&who.app, &id).await?;
    Ok(Json(WithEvaluations { candidate, evaluations }))
}

#[derive(Debug, Deserialize)]
pub struct Override {
    reason: String,
}

/// `POST /v1/candidates/{id}/override`: an approver lets a candidate past a failed offline gate. The person who
/// registered it cannot be the one.
pub async fn override_gate(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(id): PathParams<CandidateId>,
    JsonBody(body): JsonBody<Override>,
) -> ApiResult<Json<CandidateRow>> {
    who.require(Role::Approver)?;
    let candidate = found(&server, &who, &id).await?;
    if candidate.created_by == who.name {
        return Err(Error::new(
            flywheel_types::ErrorKind::Forbidden,
            "own_candidate",
            "who registered a candidate cannot override its gate",
            "ask another approver",
        )
        .into());
    }
    if body.reason.trim().is_empty() {
        return Err(Error::invalid("no_reason", "an override needs a reason", "say why in `reason`").into());
    }
    let mut tx = server.begin().await?;
    let (from, to) = (CandidateState::GateFailed, CandidateState::Overridden);
    tx.candidate_state_set(&who.app, &id, from, to, &body.reason).await?;
    crate::pipeline::publish::enqueue(&mut tx, &who.app, &id).await?;
    let detail = json!({ "reason": body.reason });
    tx.audit_append(&who.app, &who.name, "candidate.override", id.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(Json(found(&server, &who, &id).await?))
}
