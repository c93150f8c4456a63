//! Findings: suspected causes with their evidence, for people to read, act on or dismiss.

use super::auth::Principal;
use super::error::{ApiResult, JsonBody, Params, PathParams};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_store::findings::{FindingRow, FindingState};
use flywheel_types::{Error, FindingId, Role};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    state: Option<FindingState>,
}

/// `GET /v1/findings`.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<FindingRow>>> {
    who.require(Role::Viewer)?;
    Ok(Json(server.store.finding_list(&who.app, q.state, 500).await?))
}

#[derive(Debug, Deserialize)]
pub struct Dismiss {
    reason: String,
}

/// `POST /v1/findings/{id}/dismiss`.
pub async fn dismiss(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(id): PathParams<FindingId>,
    JsonBody(body): JsonBody<Dismiss>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    let found = server
        .store
        .finding_get(&who.app, &id)
        .await?
        .ok_or_else(|| Error::not_found("finding_not_found", format!("there is no finding `{id}`")))?;
    let mut tx = server.begin().await?;
    tx.finding_state_set(&who.app, &id, found.state, FindingState::Dismissed, &body.reason).await?;
    tx.audit_append(&who.app, &who.name, "finding.dismiss", id.as_str(), &json!({ "reason": body.reason })).await?;
    tx.commit().await?;
    Ok(Json(json!({ "finding_id": id, "state": "dismissed" })))
}
