//! The audit log: read it by pages, and check that nobody changed it.

use super::auth::Principal;
use super::error::{ApiResult, Params};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_store::audit::{AuditCheck, AuditRow};
use flywheel_types::Role;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    /// Only entries with a smaller number: the last `seq` of the page before.
    before: Option<i64>,
    #[serde(default = "page")]
    limit: u32,
}

fn page() -> u32 {
    100
}

/// `GET /v1/audit`: newest first.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<AuditRow>>> {
    who.require(Role::Viewer)?;
    Ok(Json(server.store.audit_list(&who.app, q.before, q.limit.clamp(1, 1000)).await?))
}

/// `GET /v1/audit/verify`: recomputes the whole hash chain. A broken chain is an answer (200), not an error.
pub async fn verify(State(server): State<Arc<Server>>, who: Principal) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    let check = server.store.audit_verify(&who.app).await?;
    if let AuditCheck::Broken { seq, reason } = &check {
        tracing::error!(app = %who.app, seq, reason, "the audit log is broken");
    }
    Ok(Json(shown(&check)))
}

fn shown(check: &AuditCheck) -> Value {
    match check {
        AuditCheck::Intact { entries, head } => json!({ "intact": true, "entries": entries, "head": head }),
        AuditCheck::Broken { seq, reason } => json!({ "intact": false, "seq": seq, "reason": reason }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::testing::TestServer;

    #[test]
    fn a_broken_chain_names_the_entry() {
        let got = shown(&AuditCheck::Broken { seq: 7, reason: "entry is missing".into() });
        assert_eq!(got, json!({ "intact": false, "seq": 7, "reason": "entry is missing" }));
    }

    #[tokio::test]
    async fn pages_go_back_and_the_chain_is_checked() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        let mut tx = t.server.begin().await.unwrap();
        for i in 0..5 {
            tx.audit_append(&t.app, "test", "test.note", &format!("note-{i}"), &json!({ "i": i })).await.unwrap();
        }
        tx.commit().await.unwrap();
        let page = client.get("/v1/audit?limit=2").await.json();
        assert_eq!((&page[0]["subject"], page.as_array().unwrap().len()), (&json!("note-4"), 2));
        let older = client.get(&format!("/v1/audit?limit=2&before={}", page[1]["seq"])).await.json();
        assert_eq!(older[0]["subject"], "note-2");
        // five notes and the token
        let check = client.get("/v1/audit/verify").await.json();
        assert_eq!((&check["intact"], &check["entries"]), (&json!(true), &json!(6)));
    }
}
