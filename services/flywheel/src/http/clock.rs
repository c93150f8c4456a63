//! The business clock. Reading it is for everybody with a token; moving it is for simulations.

use super::auth::Principal;
use super::error::{ApiResult, JsonBody};
use crate::controller;
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use flywheel_types::Role;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /v1/clock`.
pub async fn now(State(server): State<Arc<Server>>, who: Principal) -> ApiResult<Json<Value>> {
    who.require(Role::Viewer)?;
    Ok(Json(json!({ "now": server.now(), "virtual": server.virtual_clock.is_some() })))
}

#[derive(Debug, Deserialize)]
pub struct Advance {
    /// New business time; the present one settles the jobs without moving.
    now: DateTime<Utc>,
}

/// `POST /v1/clock`: moves the virtual clock; answers when tables, controllers and jobs are done with the tick.
pub async fn advance(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(body): JsonBody<Advance>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Admin)?;
    controller::advance(&server, body.now).await?;
    Ok(Json(json!({ "now": server.now() })))
}
