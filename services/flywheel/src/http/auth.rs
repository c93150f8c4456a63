//! Who is asking: bearer tokens of people and programs, the dashboard's cookie, and the app's ingest key.

use super::error::ApiError;
use crate::server::Server;
use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::request::Parts;
use flywheel_store::secret::Secret;
use flywheel_types::wire::INGEST_KEY_HEADER;
use flywheel_types::{AppId, Error, ErrorKind, Role};
use std::sync::Arc;

/// Cookie with the token of a person at the dashboard.
pub const COOKIE: &str = "flywheel_token";
/// Header by which a token for all apps names the app.
const APP_HEADER: &str = "x-fleet-app";

/// A person or program with a valid token, acting on one app.
#[derive(Debug, Clone)]
pub struct Principal {
    pub app: AppId,
    pub role: Role,
    /// Name for the audit log.
    pub name: String,
    /// Stable id of the token: two people have two of them.
    pub token_id: String,
}

impl Principal {
    /// # Errors
    /// `Forbidden` unless the role includes `needed`.
    pub fn require(&self, needed: Role) -> Result<(), Error> {
        if self.role.includes(needed) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Forbidden,
            "role_too_low",
            format!("this needs the role `{needed}`; the token has `{}`", self.role),
            "ask an admin for a token with that role",
        ))
    }
}

fn unauthenticated(message: &str) -> Error {
    Error::new(
        ErrorKind::Unauthenticated,
        "no_valid_token",
        message,
        "send `Authorization: Bearer <token>`; an admin makes tokens with `flywheel token create`",
    )
}

fn presented(headers: &HeaderMap) -> Option<String> {
    let bearer = headers
        .get(axum::http::header::AUTHORIZATION)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.strip_prefix("Bearer "))
        .map(str::to_owned);
    bearer.or_else(|| cookie(headers, COOKIE))
}

/// Value of one cookie.
pub fn cookie(headers: &HeaderMap, name: &str) -> Option<String> {
    headers
        .get_all(axum::http::header::COOKIE)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(k, _)| *k == name)
        .map(|(_, v)| v.to_owned())
}

/// Finds the principal of a request.
///
/// # Errors
/// `Unauthenticated` without a live token, `Invalid` when a token for all apps names none, `NotFound` for a
/// foreign or unknown app (never `Forbidden`: the existence of an app is nobody else's business).
pub async fn principal(server: &Server, headers: &HeaderMap) -> Result<Principal, Error> {
    let secret = presented(headers).ok_or_else(|| unauthenticated("no token was sent"))?;
    let token = server.store.token_find(&Secret::presented(secret)).await?;
    // an expiry protects against real time passing: never the virtual clock
    let now = server.store.lease_now();
    let token =
        token.filter(|t| t.is_live(now)).ok_or_else(|| unauthenticated("the token is unknown, expired or revoked"))?;
    let named = headers.get(APP_HEADER).and_then(|v| v.to_str().ok());
    let app = match (&token.app_id, named) {
        (Some(own), None) => own.clone(),
        (Some(own), Some(n)) if own.as_str() == n => own.clone(),
        (None, Some(n)) => AppId::new(n)
            .map_err(|e| Error::invalid("bad_app", format!("{APP_HEADER}: {e}"), "name an existing app"))?,
        (None, None) => {
            return Err(Error::invalid(
                "app_not_named",
                "this token is for all apps and the request names none",
                format!("send the header `{APP_HEADER}: <app>`"),
            ));
        }
        (Some(_), Some(_)) => return Err(Error::not_found("app_not_found", "no such app")),
    };
    if server.store.app_get(&app).await?.is_none() {
        return Err(Error::not_found("app_not_found", "no such app"));
    }
    Ok(Principal { app, role: token.role, name: token.name, token_id: token.token_id })
}

impl FromRequestParts<Arc<Server>> for Principal {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> Result<Self, ApiError> {
        Ok(principal(server, &parts.headers).await?)
    }
}

/// The app behind an ingest key. The key ships inside the app: it opens the intake and nothing else.
#[derive(Debug, Clone)]
pub struct IngestApp {
    pub app: AppId,
    pub key_id: String,
    pub events_per_minute: Option<u32>,
}

impl FromRequestParts<Arc<Server>> for IngestApp {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> Result<Self, ApiError> {
        let headers = &parts.headers;
        let key = headers
            .get(INGEST_KEY_HEADER)
            .and_then(|v| v.to_str().ok())
            .or_else(|| {
                let bearer = headers.get(axum::http::header::AUTHORIZATION)?.to_str().ok()?;
                bearer.strip_prefix("Bearer ")
            })
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Unauthenticated,
                    "no_ingest_key",
                    "no ingest key was sent",
                    format!("send `{INGEST_KEY_HEADER}: <key>`; `flywheel ingest-key create` makes one"),
                )
            })?;
        Ok(server.ingest_app(key).await?)
    }
}
