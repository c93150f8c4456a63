//! Dataset snapshots: which exist, how large they are, and which must not be used any more.

use super::auth::Principal;
use super::error::{ApiResult, Params};
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use flywheel_store::datasets::DatasetRow;
use flywheel_types::Role;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Debug, Deserialize)]
pub struct ListQuery {
    #[serde(default = "page")]
    limit: u32,
}

fn page() -> u32 {
    200
}

/// `GET /v1/datasets`: newest first.
pub async fn list(
    State(server): State<Arc<Server>>,
    who: Principal,
    Params(q): Params<ListQuery>,
) -> ApiResult<Json<Vec<DatasetRow>>> {
    who.require(Role::Viewer)?;
    Ok(Json(server.store.dataset_list(&who.app, q.limit.clamp(1, 1000)).await?))
}
