//! Background jobs: look, cancel, and run a dead one again.

use super::auth::Principal;
use super::error::{ApiError, ApiResult, Params, PathParams};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_store::jobs::{JobCancel, JobFilter, JobRow};
use flywheel_types::{Error, JobId, JobState, Role};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Most jobs in one answer.
const MAX_LIST: u32 = 1000;

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    state: Option<JobState>,
    kind: Option<String>,
    #[serde(default = "page")]
    limit: u32,
}

fn page() -> u32 {
    200
}

/// `GET /v1/jobs`: newest first.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<JobRow>>> {
    who.require(Role::Viewer)?;
    let filter = JobFilter { state: q.state, kind: q.kind, schedule_id: None };
    Ok(Json(server.store.job_list(&who.app, &filter, q.limit.clamp(1, MAX_LIST)).await?))
}

/// `GET /v1/jobs/{id}`.
pub async fn get(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(id): PathParams<JobId>,
) -> ApiResult<Json<JobRow>> {
    who.require(Role::Viewer)?;
    Ok(Json(found(&server, &who, &id).await?))
}

async fn found(server: &Server, who: &Principal, id: &JobId) -> Result<JobRow, Error> {
    let row = server.store.job_get(&who.app, id).await?;
    row.ok_or_else(|| Error::not_found("job_not_found", format!("there is no job `{id}`")))
}

/// `POST /v1/jobs/{id}/cancel`: a queued job ends at once; a running one is told with its next heartbeat.
pub async fn cancel(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(id): PathParams<JobId>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    found(&server, &who, &id).await?;
    let mut tx = server.begin().await?;
    let done = match tx.job_cancel(&who.app, &id, &who.name).await? {
        JobCancel::Done => "cancelled",
        JobCancel::Requested => "requested",
        JobCancel::TooLate(state) => {
            return Err(ApiError(Error::conflict(
                "job_has_ended",
                format!("the job is {state}: there is nothing to cancel"),
                "look at its result with GET /v1/jobs/{id}",
            )));
        }
    };
    tx.audit_append(&who.app, &who.name, "job.cancel", id.as_str(), &json!({ "answer": done })).await?;
    tx.commit().await?;
    Ok(Json(json!({ "job_id": id, "cancel": done })))
}

/// `POST /v1/jobs/{id}/retry`: queues a dead or cancelled job again with all its attempts.
pub async fn retry(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(id): PathParams<JobId>,
) -> ApiResult<Json<JobRow>> {
    who.require(Role::Operator)?;
    let before = found(&server, &who, &id).await?;
    let mut tx = server.begin().await?;
    tx.job_revive(&who.app, &id).await?;
    let detail = json!({ "kind": before.kind, "was": before.state, "attempts": before.counted_attempts() });
    tx.audit_append(&who.app, &who.name, "job.retry", id.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(Json(found(&server, &who, &id).await?))
}

#[cfg(test)]
mod tests {
    use crate::server::testing::TestServer;
    use flywheel_store::jobs::NewJob;
    use flywheel_types::Role;
    use serde_json::{Value, json};

    #[tokio::test]
    async fn a_job_is_cancelled_and_run_again() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        let mut tx = t.server.begin().await.unwrap();
        let job = tx.job_enqueue(&t.app, &NewJob::new("compact", json!({ "v": 1 }))).await.unwrap();
        tx.commit().await.unwrap();
        let path = format!("/v1/jobs/{}", job.id());
        assert_eq!(client.get("/v1/jobs?state=queued&kind=compact").await.json().as_array().unwrap().len(), 1);
        let early = client.post(&format!("{path}/retry"), &Value::Null).await;
        assert_eq!((early.status, early.json()["code"].as_str()), (409, Some("state_conflict")));
        assert_eq!(client.post(&format!("{path}/cancel"), &Value::Null).await.json()["cancel"], "cancelled");
        let late = client.post(&format!("{path}/cancel"), &Value::Null).await;
        assert_eq!((late.status, late.json()["code"].as_str()), (409, Some("job_has_ended")));
        assert_eq!(client.post(&format!("{path}/retry"), &Value::Null).await.json()["state"], "queued");
        let audited = t.server.store.audit_list(&t.app, None, 2).await.unwrap();
        let actions: Vec<String> = audited.into_iter().map(|a| a.action).collect();
        assert_eq!(actions, ["job.retry", "job.cancel"]);
        assert_eq!(client.get("/v1/jobs/none").await.status, 404);
        assert_eq!(client.get("/v1/jobs?state=asleep").await.status, 400);
        let viewer = client.with(&t.token(Some("shop"), Role::Viewer).await);
        assert_eq!(viewer.get(&path).await.status, 200);
        assert_eq!(viewer.post(&format!("{path}/cancel"), &Value::Null).await.status, 403);
    }
}
