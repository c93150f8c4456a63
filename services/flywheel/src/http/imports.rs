//! Imports of history: started here, done by a job.

use super::auth::Principal;
use super::error::{ApiResult, JsonBody};
use crate::pipeline::import::{self, Payload};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_jobs::Enqueued;
use flywheel_lake::import::{Form, check};
use flywheel_types::Role;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    source: String,
    table: Option<String>,
    format: Option<Form>,
}

/// `POST /v1/imports`: queues an import. While one of the same source is open, asking again answers that job.
pub async fn start(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<Start>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    body.table.as_deref().map(import::table).transpose()?;
    let source = check(&body.source, &server.config.import.sources)?.to_string();
    let payload = Payload { v: 1, source, table: body.table, format: body.format, start: Some(server.now()) };
    let mut tx = server.begin().await?;
    let done = tx.job_enqueue(&who.app, &import::job(&payload)).await?;
    let new = matches!(done, Enqueued::New(_));
    if new {
        let detail = json!({ "job": done.id(), "table": payload.table, "format": payload.format });
        tx.audit_append(&who.app, &who.name, "import.start", &payload.source, &detail).await?;
    }
    tx.commit().await?;
    Ok(Json(json!({ "job_id": done.id(), "new": new, "source": payload.source })))
}

#[cfg(test)]
mod tests {
    use crate::server::testing::TestServer;
    use flywheel_types::Role;
    use serde_json::json;

    #[tokio::test]
    async fn without_configured_sources_nothing_may_be_imported() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        let answer = client.post("/v1/imports", &json!({ "source": "file:///srv/history/" })).await;
        assert_eq!((answer.status, answer.json()["code"].as_str()), (403, Some("import_source_not_allowed")));
        assert!(answer.json()["hint"].as_str().unwrap().contains("[import] sources"), "{}", answer.text);
        let answer = client.post("/v1/imports", &json!({ "source": "history", "tabel": "feedback" })).await;
        assert_eq!((answer.status, answer.json()["code"].as_str()), (400, Some("bad_json")));
        assert_eq!(client.get("/v1/jobs?kind=import").await.json(), json!([]));
    }
}
