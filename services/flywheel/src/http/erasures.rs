//! People who asked to be forgotten, their receipts, and holds that forbid it.

use super::auth::Principal;
use super::error::{ApiError, ApiResult, JsonBody, PathParams};
use crate::pipeline::erase;
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use flywheel_store::erasures::{ErasureRow, HoldRow, NewErasure, SubjectKind};
use flywheel_store::ids;
use flywheel_telemetry::UserKeys;
use flywheel_types::{AppId, Digest, Error, InstallId, Role};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Longest reason or name, bytes.
const MAX_TEXT: usize = 500;
/// Erasures shown.
const SHOWN: u32 = 1000;

/// One subject and why.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// As the app knows its user; only the key made of it is stored.
    user_id: Option<String>,
    user_key: Option<String>,
    install_id: Option<InstallId>,
    reason: String,
}

impl Asked {
    fn subject(&self, server: &Server, app: &AppId) -> Result<(SubjectKind, String), Error> {
        let bad = |message: &str| {
            Error::invalid(
                "bad_subject",
                message,
                "name one of `user_id`, `user_key` (32 hexadecimal digits), `install_id`",
            )
        };
        match (&self.user_id, &self.user_key, &self.install_id) {
            (Some(id), None, None) => {
                let key = server.users.key(app, id).ok_or_else(|| bad("`user_id` is empty"))?;
                Ok((SubjectKind::UserKey, key))
            }
            (None, Some(key), None) if UserKeys::is_key(key) => Ok((SubjectKind::UserKey, key.clone())),
            (None, Some(_), None) => Err(bad("`user_key` is no user key")),
            (None, None, Some(install)) => Ok((SubjectKind::Install, install.to_string())),
            (None, None, None) => Err(bad("nobody is named")),
            _ => Err(bad("more than one subject is named")),
        }
    }

    fn reason(&self) -> Result<String, Error> {
        match self.reason.trim() {
            text if !text.is_empty() && text.len() <= MAX_TEXT => Ok(text.to_owned()),
            _ => Err(Error::invalid(
                "bad_reason",
                format!("`reason` must have 1 to {MAX_TEXT} bytes"),
                "say why, without naming the person",
            )),
        }
    }
}

/// `POST /v1/erasures`.
pub async fn request(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<Asked>,
) -> ApiResult<(StatusCode, Json<Value>)> {
    who.require(Role::Admin)?;
    let (subject_kind, subject) = body.subject(&server, &who.app)?;
    let digest = Digest::of(subject.as_bytes());
    let new = NewErasure {
        erasure_id: ids::fresh("e"),
        subject_kind,
        subject,
        reason: body.reason()?,
        requested_by: who.name.clone(),
    };
    let mut tx = server.begin().await?;
    tx.erasure_create(&who.app, &new).await?;
    erase::enqueue(&mut tx, &who.app, &new.erasure_id).await?;
    let detail = json!({ "subject_kind": subject_kind, "subject_digest": digest });
    tx.audit_append(&who.app, &who.name, "erasure.request", &new.erasure_id, &detail).await?;
    tx.commit().await?;
    let answer = json!({ "erasure_id": new.erasure_id, "state": "requested", "subject_digest": digest });
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

/// `GET /v1/erasures`.
pub async fn list(State(server): State<Arc<Server>>, who: Principal) -> ApiResult<Json<Vec<ErasureRow>>> {
    who.require(Role::Operator)?;
    Ok(Json(server.store.erasure_list(&who.app, SHOWN).await?))
}

/// `GET /v1/erasures/{id}`: with the receipt when it is done.
pub async fn get(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(id): PathParams<String>,
) -> ApiResult<Json<ErasureRow>> {
    who.require(Role::Operator)?;
    let row = server.store.erasure_get(&who.app, &id).await?;
    let none = || Error::not_found("erasure_not_found", format!("there is no erasure `{id}`"));
    Ok(Json(row.ok_or_else(none)?))
}

/// `GET /v1/holds`.
pub async fn holds(State(server): State<Arc<Server>>, who: Principal) -> ApiResult<Json<Vec<HoldRow>>> {
    who.require(Role::Admin)?;
    Ok(Json(server.store.hold_list(&who.app).await?))
}

/// `PUT /v1/holds/{name}`.
pub async fn put_hold(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
    JsonBody(body): JsonBody<Asked>,
) -> ApiResult<Json<HoldRow>> {
    who.require(Role::Admin)?;
    if name.len() > 64 || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
        return Err(ApiError(Error::invalid(
            "bad_hold_name",
            "a hold's name has up to 64 letters, digits, `-`, `_` and `.`",
            "choose another name",
        )));
    }
    let (subject_kind, subject) = body.subject(&server, &who.app)?;
    let digest = Digest::of(subject.as_bytes());
    let hold = HoldRow {
        app_id: who.app.clone(),
        name,
        subject_kind,
        subject,
        reason: body.reason()?,
        created_by: who.name.clone(),
        created_at: server.now(),
    };
    let mut tx = server.begin().await?;
    tx.hold_put(&who.app, &hold).await?;
    let detail = json!({ "subject_kind": subject_kind, "subject_digest": digest });
    tx.audit_append(&who.app, &who.name, "hold.put", &hold.name, &detail).await?;
    tx.commit().await?;
    Ok(Json(hold))
}

/// `DELETE /v1/holds/{name}`: what waited for it is erased now.
pub async fn lift_hold(
    State(server): State<Arc<Server>>,
    who: Principal,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Admin)?;
    let mut tx = server.begin().await?;
    let hold = tx.hold_lift(&who.app, &name).await?;
    let waiting: Vec<String> = tx.erasures_release(&who.app).await?.into_iter().map(|e| e.erasure_id).collect();
    for erasure in &waiting {
        erase::enqueue(&mut tx, &who.app, erasure).await?;
    }
    let detail = json!({ "subject_digest": Digest::of(hold.subject.as_bytes()), "erasures": waiting });
    tx.audit_append(&who.app, &who.name, "hold.lift", &name, &detail).await?;
    tx.commit().await?;
    Ok(Json(json!({ "lifted": name, "erasures": waiting })))
}
