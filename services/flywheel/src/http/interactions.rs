//! Rejected answers for annotators: what was asked, what the model said, and what people held against it.

use super::auth::Principal;
use super::error::{ApiError, ApiResult, Params};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_lake::read::RejectedInteraction;
use flywheel_types::{Error, LabelKind, Role, TrustClass};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Days that are looked back without `since`.
const DEFAULT_DAYS: i64 = 7;
/// Most answers in one page.
const MAX_LIST: usize = 1000;

#[derive(Debug, Deserialize)]
pub struct RejectedQuery {
    /// Only answers received after this time; the last week by default.
    since: Option<DateTime<Utc>>,
    #[serde(default = "page")]
    limit: usize,
}

fn page() -> usize {
    100
}

/// One rejected answer.
#[derive(Debug, Serialize)]
pub struct Rejected {
    interaction_id: String,
    install_id: String,
    trust: TrustClass,
    received_at: DateTime<Utc>,
    template_id: String,
    bundle: String,
    locale: String,
    /// `chunk_id@version` in rank order.
    chunks: Vec<String>,
    /// Masked; absent when the user did not agree to send it.
    question: Option<String>,
    answer: Option<String>,
    label: LabelKind,
    reason: Option<String>,
}

impl From<RejectedInteraction> for Rejected {
    fn from(r: RejectedInteraction) -> Self {
        Self {
            interaction_id: r.interaction,
            install_id: r.install,
            trust: r.trust,
            received_at: r.received_at,
            template_id: r.template,
            bundle: r.bundle,
            locale: r.locale,
            chunks: r.chunks,
            question: r.question,
            answer: r.answer,
            label: r.label,
            reason: r.reason,
        }
    }
}

/// `GET /v1/interactions/rejected`.
pub async fn rejected(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<RejectedQuery>,
) -> ApiResult<Json<Vec<Rejected>>> {
    who.require(Role::Annotator)?;
    if q.limit == 0 || q.limit > MAX_LIST {
        return Err(ApiError(Error::invalid(
            "bad_limit",
            format!("a limit of {} answers", q.limit),
            format!("use 1 to {MAX_LIST}"),
        )));
    }
    let since = q.since.unwrap_or_else(|| server.now() - TimeDelta::days(DEFAULT_DAYS));
    let rows = server.lake.rejected_interactions(&who.app, since, q.limit, None).await?;
    Ok(Json(rows.into_iter().map(Rejected::from).collect()))
}

#[cfg(test)]
mod tests {
    use crate::server::testing::TestServer;
    use flywheel_types::Role;

    #[tokio::test]
    async fn only_annotators_read_answers_and_limits_hold() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Annotator).await);
        assert_eq!(client.get("/v1/interactions/rejected?since=2026-02-01T00:00:00Z").await.text, "[]");
        assert_eq!(client.get("/v1/interactions/rejected?limit=0").await.json()["code"], "bad_limit");
        assert_eq!(client.get("/v1/interactions/rejected?since=yesterday").await.json()["code"], "bad_query");
        let operator = client.with(&t.token(Some("shop"), Role::Operator).await);
        assert_eq!(operator.get("/v1/interactions/rejected").await.status, 403);
        assert_eq!(operator.get("/v1/releases?state=approved").await.text, "[]");
        assert_eq!(operator.get("/v1/datasets").await.text, "[]");
    }
}
