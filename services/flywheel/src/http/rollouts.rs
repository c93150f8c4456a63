//! Rollouts: start one, read its plans and verdicts, and ask for a change. A request is stored and applied by the
//! planner in the next reconciliation, so that there is one code path for people and for the controller.

use super::auth::Principal;
use super::error::{ApiResult, JsonBody, Params, PathParams};
use crate::pipeline::reconcile_rollout;
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_experiment::planner::RolloutPolicyV1;
use flywheel_store::rollout_requests::{RequestRow, RequestVerb};
use flywheel_store::rollouts::RolloutRow;
use flywheel_types::assign::Predicate;
use flywheel_types::{Digest, Error, InstallId, Role, RolloutId};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub struct Start {
    /// Manifest digest of an approved release.
    bundle: Digest,
    /// Named devices before any statistics; the app's ring when left out.
    #[serde(default)]
    ring: Option<Vec<InstallId>>,
    #[serde(default)]
    eligible: Vec<Predicate>,
    /// The app's policy when left out.
    #[serde(default)]
    policy: Option<RolloutPolicyV1>,
}

/// `POST /v1/rollouts`: drafts a rollout of an approved release against the last complete one.
pub async fn start(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<Start>,
) -> ApiResult<Json<RolloutRow>> {
    who.require(Role::Operator)?;
    let request = reconcile_rollout::StartRequest {
        bundle: body.bundle,
        ring: body.ring,
        eligible: body.eligible,
        policy: body.policy,
        created_by: who.name.clone(),
    };
    let row = reconcile_rollout::start(&server, &who.app, request).await?;
    Ok(Json(row))
}

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    #[serde(default)]
    open: bool,
}

/// `GET /v1/rollouts`.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<RolloutRow>>> {
    who.require(Role::Viewer)?;
    Ok(Json(server.store.rollout_list(&who.app, q.open, 200).await?))
}

/// `GET /v1/rollouts/{id}`: the rollout with all plans, verdicts and requests.
pub async fn get(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(id): PathParams<RolloutId>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Viewer)?;
    let row = found(&server, &who, &id).await?;
    let plans = server.store.rollout_plan_list(&who.app, &id).await?;
    let verdicts = server.store.rollout_verdict_list(&who.app, &id).await?;
    let requests = server.store.rollout_request_list(&who.app, &id, false).await?;
    Ok(Json(json!({
        "rollout": row,
        "plans": plans.iter().map(|p| &p.plan).collect::<Vec<_>>(),
        "verdicts": verdicts,
        "requests": requests,
    })))
}

pub async fn found(server: &Server, who: &Principal, id: &RolloutId) -> Result<RolloutRow, Error> {
    server
        .store
        .rollout_get(&who.app, id)
        .await?
        .ok_or_else(|| Error::not_found("rollout_not_found", format!("there is no rollout `{id}`")))
}

#[derive(Debug, Deserialize)]
pub struct Ask {
    reason: String,
    /// For `approve`: the generation and change that the person saw.
    #[serde(default)]
    approves: Value,
}

/// `POST /v1/rollouts/{id}/{verb}`: pause, resume, halt, rollback, approve, promote or override.
pub async fn ask(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams((id, verb)): PathParams<(RolloutId, String)>,
    JsonBody(body): JsonBody<Ask>,
) -> ApiResult<Json<RequestRow>> {
    let verb: RequestVerb = verb
        .parse()
        .map_err(|_| Error::not_found("no_such_verb", format!("`{verb}` is nothing that can be asked of a rollout")))?;
    let needed = match verb {
        RequestVerb::Approve | RequestVerb::Override => Role::Approver,
        RequestVerb::Pause | RequestVerb::Resume | RequestVerb::Halt | RequestVerb::Rollback | RequestVerb::Promote => {
            Role::Operator
        }
    };
    who.require(needed)?;
    found(&server, &who, &id).await?;
    let mut tx = server.begin().await?;
    let request = tx.rollout_request_create(&who.app, &id, verb, &who.name, &body.reason, &body.approves).await?;
    reconcile_rollout::enqueue(&mut tx, &who.app, &id).await?;
    let detail = json!({ "verb": verb, "reason": body.reason, "request": request });
    tx.audit_append(&who.app, &who.name, "rollout.request", id.as_str(), &detail).await?;
    tx.commit().await?;
    let rows = server.store.rollout_request_list(&who.app, &id, false).await?;
    let row = rows.into_iter().find(|r| r.request_id == request).ok_or_else(|| Error::internal("request vanished"))?;
    Ok(Json(row))
}
