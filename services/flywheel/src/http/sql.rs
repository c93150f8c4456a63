//! SQL for people: one SELECT over the app's telemetry, with the lake's caps on time, rows and memory.

use super::auth::Principal;
use super::error::{ApiResult, JsonBody};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, header};
use axum::response::{IntoResponse, Response};
use flywheel_lake::{Format, SqlLimits};
use flywheel_types::{Error, Role};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Query {
    query: String,
}

#[derive(Debug, Serialize)]
pub struct Column {
    name: String,
    /// Arrow's name of the type, for example `Utf8` or `Timestamp(µs, "UTC")`.
    #[serde(rename = "type")]
    kind: String,
}

/// Rows are arrays in the order of the columns; times are RFC 3339.
#[derive(Debug, Serialize)]
pub struct Answer {
    columns: Vec<Column>,
    rows: Vec<Vec<Value>>,
    /// There were more rows than one answer may have.
    truncated: bool,
}

/// `POST /v1/sql`. The tables may hold (masked) text of people who agreed to send it, so this needs an operator.
pub async fn query(
    State(server): State<Arc<Server>>,
    who: Principal,
    headers: HeaderMap,
    JsonBody(body): JsonBody<Query>,
) -> ApiResult<Response> {
    who.require(Role::Operator)?;
    let format = wanted(&headers)?;
    let scope = server.query_scope(&who.app).await?;
    let result = server.lake.sql(scope, &body.query, &SqlLimits::default()).await?;
    if let Some(format) = format {
        let kind = [(header::CONTENT_TYPE, format.media_type()), (TRUNCATED, word(result.truncated))];
        return Ok((kind, result.to_bytes(format)?).into_response());
    }
    let columns: Vec<Column> = result
        .schema
        .fields()
        .iter()
        .map(|f| Column { name: f.name().clone(), kind: f.data_type().to_string() })
        .collect();
    let rows = result.to_json()?.into_iter().map(|row| in_order(&columns, row)).collect();
    Ok(Json(Answer { columns, rows, truncated: result.truncated }).into_response())
}

/// Says in the forms that have no place for it whether there were more rows.
const TRUNCATED: HeaderName = HeaderName::from_static("x-flywheel-truncated");

fn word(flag: bool) -> &'static str {
    if flag { "true" } else { "false" }
}

/// The form that `accept` asks for; `None` is JSON.
fn wanted(headers: &HeaderMap) -> Result<Option<Format>, Error> {
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or("*/*");
    for kind in accept.split(',') {
        let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if ["*/*", "application/*", "application/json"].contains(&kind.as_str()) {
            return Ok(None);
        }
        if let Some(format) = Format::ALL.into_iter().find(|f| f.media_type() == kind) {
            return Ok(Some(format));
        }
    }
    let known = Format::ALL.map(Format::media_type).join(", ");
    Err(Error::invalid(
        "not_acceptable",
        format!("no answer can be `{accept}`"),
        format!("ask for application/json, {known}"),
    ))
}

/// An object becomes an array in the order of the columns; what is left out is NULL.
fn in_order(columns: &[Column], row: Value) -> Vec<Value> {
    let Value::Object(mut fields) = row else { return vec![Value::Null; columns.len()] };
    columns.iter().map(|c| fields.remove(&c.name).unwrap_or(Value::Null)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::testing::TestServer;
    use serde_json::json;

    #[test]
    fn rows_follow_the_columns_and_nulls_are_kept() {
        let columns: Vec<Column> = ["b", "a"].map(|n| Column { name: n.into(), kind: "Int64".into() }).into();
        assert_eq!(in_order(&columns, json!({ "a": 1, "b": 2 })), vec![json!(2), json!(1)]);
        assert_eq!(in_order(&columns, json!({ "a": 1 })), vec![Value::Null, json!(1)]);
    }

    #[tokio::test]
    async fn one_select_answers_and_everything_else_is_refused() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        let ask = async |q: &str| client.post("/v1/sql", &json!({ "query": q })).await;
        let got = ask("SELECT count(*) AS n, CAST(NULL AS VARCHAR) AS nothing FROM interactions").await.json();
        assert_eq!(got["rows"], json!([[0, null]]));
        assert_eq!((&got["columns"][0]["name"], &got["columns"][0]["type"]), (&json!("n"), &json!("Int64")));
        assert_eq!(got["truncated"], false);
        for bad in ["DROP TABLE interactions", "SELECT 1; SELECT 2", "SELECT * FROM other"] {
            let answer = ask(bad).await;
            assert_eq!((answer.status, answer.json()["code"].as_str()), (400, Some("bad_query")), "{bad}");
        }
        let select = json!({ "query": "SELECT 1 AS a, 'x,y' AS b, make_array(1) AS c" });
        let csv = client.accept("text/csv").post("/v1/sql", &select).await;
        assert_eq!((csv.status, csv.json()["code"].as_str()), (400, Some("nested_column")));
        let select = json!({ "query": "SELECT 1 AS a, 'x,y' AS b" });
        assert_eq!(client.accept("text/csv").post("/v1/sql", &select).await.text, "a,b\n1,\"x,y\"\n");
        let other = client.accept("image/png").post("/v1/sql", &select).await;
        assert_eq!(other.json()["code"], "not_acceptable");
        let viewer = client.with(&t.token(Some("shop"), Role::Viewer).await);
        assert_eq!(viewer.post("/v1/sql", &json!({ "query": "SELECT 1" })).await.status, 403);
    }
}
