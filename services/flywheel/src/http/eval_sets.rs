//! Evaluation sets: questions with expected answers that a candidate must pass before it can be released.

use super::auth::Principal;
use super::error::{ApiError, ApiResult, JsonBody, PathParams};
use crate::pipeline::evaluate::{EvalItem, EvalSet, SETS};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_types::{Error, ErrorKind, Role};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// Most questions in a set.
const MAX_ITEMS: usize = 5000;
/// Longest id and cluster, bytes.
const MAX_ID: usize = 128;
/// Longest question, bytes.
const MAX_PROMPT: usize = 16 << 10;
/// Longest expected answer, bytes.
const MAX_EXPECT: usize = 4 << 10;
/// Largest set as stored, bytes.
const MAX_SET: usize = 4 << 20;

/// Channel of a set among the publications.
fn channel(name: &str) -> String {
    format!("eval-set/{name}")
}

/// `GET /v1/eval-sets/{name}`.
pub async fn get(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Viewer)?;
    check_name(&name)?;
    let row = server.store.publication_get(&who.app, &channel(&name)).await?.ok_or_else(|| {
        Error::new(
            ErrorKind::NotFound,
            "eval_set_not_found",
            format!("there is no evaluation set `{name}`"),
            format!("send one with PUT /v1/eval-sets/{name}"),
        )
    })?;
    let set: EvalSet =
        serde_json::from_str(&row.body).map_err(|e| Error::internal(format!("evaluation set {name}: {e}")))?;
    Ok(Json(json!({ "name": name, "version": row.version, "digest": row.digest, "items": set.items })))
}

/// `PUT /v1/eval-sets/{name}`: replaces the set; the same content again changes nothing.
pub async fn put(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
    JsonBody(set): JsonBody<EvalSet>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Operator)?;
    check_name(&name)?;
    check(&set)?;
    let body = serde_json::to_string(&set).map_err(Error::internal)?;
    if body.len() > MAX_SET {
        return Err(ApiError(too_large("the set", body.len(), MAX_SET)));
    }
    let old = server.store.publication_get(&who.app, &channel(&name)).await?;
    if let Some(same) = old.as_ref().filter(|o| o.body == body) {
        return Ok(Json(answer(&name, same.version, &set)));
    }
    let mut tx = server.begin().await?;
    let version = tx.publication_set(&who.app, &channel(&name), old.map_or(0, |o| o.version), &body).await?;
    let shown = answer(&name, version, &set);
    tx.audit_append(&who.app, &who.name, "eval_set.put", &name, &shown).await?;
    tx.commit().await?;
    Ok(Json(shown))
}

fn answer(name: &str, version: i64, set: &EvalSet) -> Value {
    let clusters: HashSet<&str> = set.items.iter().map(|i| i.cluster.as_str()).collect();
    // a set with another name is kept, but no gate looks at it: the caller should know
    let used = SETS.contains(&name);
    json!({ "name": name, "version": version, "items": set.items.len(), "clusters": clusters.len(), "used": used })
}

fn check_name(name: &str) -> Result<(), Error> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(Error::invalid(
            "bad_eval_set_name",
            format!("`{}` cannot be the name of an evaluation set", name.chars().take(64).collect::<String>()),
            "use 1 to 64 letters, digits, `.`, `_` or `-`",
        ));
    }
    Ok(())
}

fn too_large(what: &str, size: usize, limit: usize) -> Error {
    Error::new(
        ErrorKind::TooLarge,
        "eval_set_too_large",
        format!("{what} has {size} bytes, {limit} is the limit"),
        "shorten it or split the set",
    )
}

fn check(set: &EvalSet) -> Result<(), Error> {
    if set.items.is_empty() || set.items.len() > MAX_ITEMS {
        return Err(Error::invalid(
            "bad_item_count",
            format!("{} items in the set", set.items.len()),
            format!("send 1 to {MAX_ITEMS}"),
        ));
    }
    let mut seen = HashSet::new();
    for (i, item) in set.items.iter().enumerate() {
        check_item(i, item)?;
        if !seen.insert(item.id.as_str()) {
            return Err(Error::invalid(
                "duplicate_item",
                format!("items[{i}]: the id `{}` is there twice", item.id),
                "give each item its own id",
            ));
        }
    }
    Ok(())
}

fn check_item(i: usize, item: &EvalItem) -> Result<(), Error> {
    let fields = [
        ("id", &item.id, MAX_ID),
        ("prompt", &item.prompt, MAX_PROMPT),
        ("expect", &item.expect, MAX_EXPECT),
        ("cluster", &item.cluster, MAX_ID),
    ];
    for (name, text, limit) in fields {
        if text.trim().is_empty() {
            return Err(Error::invalid("empty_field", format!("items[{i}].{name} is empty"), "fill it in"));
        }
        if text.len() > limit {
            return Err(too_large(&format!("items[{i}].{name}"), text.len(), limit));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::testing::TestServer;

    fn set(n: usize) -> EvalSet {
        let item = |i: usize| EvalItem {
            id: format!("q{i}"),
            prompt: "Is the shop open on Sunday?".into(),
            expect: "yes".into(),
            cluster: "hours".into(),
        };
        EvalSet { items: (0..n).map(item).collect() }
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(check(&set(3)).is_ok());
        assert_eq!(check(&set(0)).unwrap_err().code, "bad_item_count");
        assert_eq!(check(&set(MAX_ITEMS + 1)).unwrap_err().code, "bad_item_count");
        let mut twice = set(2);
        twice.items[1].id = "q0".into();
        assert!(check(&twice).unwrap_err().message.contains("items[1]"));
        let mut empty = set(2);
        empty.items[1].expect = " ".into();
        assert_eq!(check(&empty).unwrap_err().message, "items[1].expect is empty");
        let mut long = set(1);
        long.items[0].prompt = "x".repeat(MAX_PROMPT + 1);
        assert_eq!(check(&long).unwrap_err().kind, ErrorKind::TooLarge);
        assert!(check_name("held-out.v2").is_ok() && check_name("a/b").is_err());
    }

    #[test]
    fn the_answer_says_whether_a_gate_reads_the_set() {
        assert_eq!(answer("heldout", 2, &set(3))["used"], true);
        let other = answer("hedlout", 2, &set(3));
        assert_eq!((&other["used"], &other["clusters"]), (&json!(false), &json!(1)));
    }

    #[tokio::test]
    async fn a_set_is_stored_by_version() {
        let t = TestServer::start(None).await;
        let client = t.client().await.with(&t.token(Some("shop"), Role::Operator).await);
        assert_eq!(client.get("/v1/eval-sets/heldout").await.json()["code"], "eval_set_not_found");
        let body = serde_json::to_value(set(2)).unwrap();
        assert_eq!(client.put("/v1/eval-sets/heldout", &body).await.json()["version"], 1);
        assert_eq!(client.put("/v1/eval-sets/heldout", &body).await.json()["version"], 1, "the same changes nothing");
        assert_eq!(
            client.put("/v1/eval-sets/heldout", &serde_json::to_value(set(3)).unwrap()).await.json()["version"],
            2
        );
        let got = client.get("/v1/eval-sets/heldout").await.json();
        assert_eq!((got["items"].as_array().unwrap().len(), &got["items"][2]["expect"]), (3, &json!("yes")));
        assert_eq!(client.put("/v1/eval-sets/heldout", &json!({ "items": [] })).await.status, 400);
        let audited = t.server.store.audit_list(&t.app, None, 10).await.unwrap();
        assert!(audited.iter().all(|a| !a.detail.to_string().contains("Sunday")), "no question in the log");
    }
}
