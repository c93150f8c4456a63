//! Saved views: SELECTs under a name, which queries use like tables and the dashboard shows.

use super::auth::Principal;
use super::error::{ApiError, ApiResult, JsonBody, PathParams};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_lake::{SavedView, built_in};
use flywheel_store::views::{NewView, ViewRow};
use flywheel_types::{Digest, Error, Role};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// Most views of an app.
const MAX_VIEWS: i64 = 50;
/// Longest description, bytes.
const MAX_DESCRIPTION: usize = 512;

/// A view as listed.
#[derive(Debug, Serialize)]
pub struct Shown {
    name: String,
    description: String,
    query: String,
    built_in: bool,
    /// Who saved it last; absent for a built-in one.
    #[serde(skip_serializing_if = "Option::is_none")]
    created_by: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    updated_at: Option<chrono::DateTime<chrono::Utc>>,
}

impl From<ViewRow> for Shown {
    fn from(row: ViewRow) -> Self {
        Self {
            name: row.name,
            description: row.description,
            query: row.query,
            built_in: false,
            created_by: Some(row.created_by),
            updated_at: Some(row.updated_at),
        }
    }
}

/// `GET /v1/views`.
pub async fn list(State(server): State<Arc<Server>>, who: Principal) -> ApiResult<Json<Vec<Shown>>> {
    who.require(Role::Viewer)?;
    let own = built_in().iter().map(|v| Shown {
        name: v.name.to_owned(),
        description: v.description.to_owned(),
        query: v.query.clone(),
        built_in: true,
        created_by: None,
        updated_at: None,
    });
    let saved = server.store.view_list(&who.app).await?;
    Ok(Json(own.chain(saved.into_iter().map(Shown::from)).collect()))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Put {
    query: String,
    #[serde(default)]
    description: String,
}

/// `PUT /v1/views/{name}`: saves a view or replaces the one of that name.
pub async fn put(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
    JsonBody(body): JsonBody<Put>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    let description = body.description.trim();
    if description.len() > MAX_DESCRIPTION {
        let message = format!("the description has {} bytes", description.len());
        return Err(ApiError(Error::invalid("field_too_long", message, format!("use up to {MAX_DESCRIPTION}"))));
    }
    let view = SavedView { name: name.clone(), query: body.query };
    let scope = server.query_scope(&who.app).await?;
    let columns = server.lake.check_view(scope, &view).await?;
    let new = NewView {
        name: name.clone(),
        query: view.query,
        description: description.to_owned(),
        created_by: who.name.clone(),
    };
    let mut tx = server.begin().await?;
    if tx.view_get(&who.app, &name).await?.is_none() && tx.view_count(&who.app).await? >= MAX_VIEWS {
        return Err(ApiError(Error::invalid(
            "too_many_views",
            format!("the app has {MAX_VIEWS} saved views"),
            "delete one that nobody uses",
        )));
    }
    tx.view_put(&who.app, &new).await?;
    // the text may name a person, and the log is kept for ever
    let detail = json!({ "query_sha256": Digest::of(new.query.as_bytes()).to_hex() });
    tx.audit_append(&who.app, &who.name, "view.put", &name, &detail).await?;
    tx.commit().await?;
    let columns: Vec<Value> = columns.into_iter().map(|c| json!({ "name": c.name, "type": c.kind })).collect();
    Ok(Json(json!({ "name": name, "columns": columns })))
}

/// `DELETE /v1/views/{name}`.
pub async fn delete(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    if built_in().iter().any(|v| v.name == name) {
        let message = format!("`{name}` comes with the program");
        return Err(ApiError(Error::invalid("built_in_view", message, "only saved views can be deleted")));
    }
    let mut tx = server.begin().await?;
    if tx.view_get(&who.app, &name).await?.is_none() {
        return Err(ApiError(Error::not_found("view_not_found", format!("there is no saved view `{name}`"))));
    }
    tx.view_delete(&who.app, &name).await?;
    tx.audit_append(&who.app, &who.name, "view.delete", &name, &json!({})).await?;
    tx.commit().await?;
    Ok(Json(json!({ "name": name, "deleted": true })))
}

#[cfg(test)]
mod tests {
    use crate::server::testing::TestServer;
    use flywheel_types::Role;
    use serde_json::json;

    #[tokio::test]
    async fn a_view_is_saved_used_by_name_and_deleted() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        let text = "SELECT bundle, sum(answers) AS answers FROM rejection_rate_24h GROUP BY bundle";
        let put = client.put("/v1/views/by_bundle", &json!({ "query": text, "description": " Answers. " })).await;
        assert_eq!(put.status, 200, "{}", put.text);
        let columns = json!([{ "name": "bundle", "type": "Utf8" }, { "name": "answers", "type": "Int64" }]);
        assert_eq!(put.json(), json!({ "name": "by_bundle", "columns": columns }));
        let listed = client.get("/v1/views").await.json();
        let names: Vec<&str> = listed.as_array().unwrap().iter().map(|v| v["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["rejection_rate_24h", "latency_24h", "intake_24h", "metrics_24h", "by_bundle"]);
        assert_eq!((&listed[4]["description"], &listed[4]["built_in"]), (&json!("Answers."), &json!(false)));
        assert_eq!(listed[4]["created_by"], "test-operator");
        let ask = json!({ "query": "SELECT count(*) AS n FROM by_bundle" });
        assert_eq!(client.post("/v1/sql", &ask).await.json()["rows"], json!([[0]]));
        // another app does not see it
        let mut tx = t.server.begin().await.unwrap();
        let other = flywheel_types::AppId::new("other").unwrap();
        tx.app_create(&other, &flywheel_store::apps::AppSettings::default()).await.unwrap();
        tx.commit().await.unwrap();
        let stranger = client.with(&t.token(Some("other"), Role::Operator).await);
        assert_eq!(stranger.post("/v1/sql", &ask).await.json()["code"], "bad_query");
        assert_eq!(client.delete("/v1/views/by_bundle").await.json(), json!({ "name": "by_bundle", "deleted": true }));
        assert_eq!(client.delete("/v1/views/by_bundle").await.json()["code"], "view_not_found");
        assert_eq!(client.delete("/v1/views/intake_24h").await.json()["code"], "built_in_view");
        assert_eq!(client.post("/v1/sql", &ask).await.json()["code"], "bad_query");
        let audited = t.server.store.audit_list(&t.app, None, 2).await.unwrap();
        assert_eq!(audited.iter().map(|a| a.action.as_str()).collect::<Vec<_>>(), ["view.delete", "view.put"]);
        assert!(!audited[1].detail.to_string().contains("SELECT"), "{}", audited[1].detail);
    }

    #[tokio::test]
    async fn views_are_bounded_and_need_an_operator() {
        let t = TestServer::start(None).await;
        let operator = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        let body = json!({ "query": "SELECT 1 AS one" });
        for i in 0..50 {
            assert_eq!(operator.put(&format!("/v1/views/v{i}"), &body).await.status, 200);
        }
        assert_eq!(operator.put("/v1/views/v50", &body).await.json()["code"], "too_many_views");
        assert_eq!(operator.put("/v1/views/v49", &body).await.status, 200, "replacing one is no new one");
        let long = json!({ "query": "SELECT 1 AS one", "description": "x".repeat(513) });
        assert_eq!(operator.put("/v1/views/v1", &long).await.json()["code"], "field_too_long");
        let viewer = operator.with(&t.token(Some("shop"), Role::Viewer).await);
        assert_eq!(viewer.put("/v1/views/mine", &body).await.status, 403);
        assert_eq!(viewer.delete("/v1/views/v1").await.status, 403);
        assert_eq!(viewer.get("/v1/views").await.json().as_array().unwrap().len(), 54);
    }
}
