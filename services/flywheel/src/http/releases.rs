//! Releases: bundles that wait for a signature, are approved, or were refused.

use super::auth::Principal;
use super::error::{ApiResult, Params};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_store::releases::{ReleaseRow, ReleaseState};
use flywheel_types::Role;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    state: Option<ReleaseState>,
}

/// `GET /v1/releases`: oldest request first.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<ReleaseRow>>> {
    who.require(Role::Viewer)?;
    Ok(Json(server.store.release_list(&who.app, q.state).await?))
}
