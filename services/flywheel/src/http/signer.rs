//! The signer's pull API: what waits for a signature, and the signed catalog coming back. The signer has no
//! listening port; the server cannot make it sign.

use super::auth::Principal;
use super::error::{ApiResult, JsonBody};
use crate::delivery::Publication;
use crate::pipeline::publish;
use crate::server::Server;
use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, Utc};
use flywheel_bundle::publish::SignedMetadata;
use flywheel_bundle::tuf::Role as TufRole;
use flywheel_store::releases::ReleaseState;
use flywheel_types::{CandidateState, Digest, Error, Role};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// One release that waits.
#[derive(Debug, Serialize, Deserialize)]
pub struct WaitingRelease {
    pub manifest: Digest,
    pub manifest_text: String,
    pub requested_at: DateTime<Utc>,
    pub candidate: Value,
    /// Newest offline gate report; null when there is none.
    pub evaluation: Value,
}

/// Answer of `GET /v1/signer/work`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Work {
    /// Business time of the server; a signer uses it only in simulations.
    pub business_time: DateTime<Utc>,
    pub releases: Vec<WaitingRelease>,
}

/// `GET /v1/signer/work`.
pub async fn work(State(server): State<Arc<Server>>, who: Principal) -> ApiResult<Json<Work>> {
    who.require(Role::Signer)?;
    let mut releases = Vec::new();
    for r in server.store.release_list(&who.app, Some(ReleaseState::SigningRequested)).await? {
        let (mut candidate, mut evaluation) = (Value::Null, Value::Null);
        if let Some(id) = &r.candidate_id {
            candidate = json!(server.store.candidate_get(&who.app, id).await?);
            evaluation = json!(server.store.evaluation_list(&who.app, id).await?.into_iter().next()); // newest first
        }
        releases.push(WaitingRelease {
            manifest: r.manifest,
            manifest_text: r.manifest_text,
            requested_at: r.requested_at,
            candidate,
            evaluation,
        });
    }
    Ok(Json(Work { business_time: server.now(), releases }))
}

/// What the signer decided about one release.
#[derive(Debug, Serialize, Deserialize)]
pub struct Decision {
    pub manifest: Digest,
    /// Who: the signing policy, or the person who approved.
    pub by: String,
    pub reason: String,
    /// The signed catalog that lists the release, base64; absent when refused.
    pub catalog: Option<String>,
    /// Version of that catalog.
    #[serde(default)]
    pub catalog_version: u64,
}

/// `POST /v1/signer/decisions`: publishes the signed catalog, or records the refusal.
pub async fn decide(
    State(server): State<Arc<Server>>,
    who: Principal,
    JsonBody(d): JsonBody<Decision>,
) -> ApiResult<Json<Value>> {
    who.require(Role::Signer)?;
    let release =
        server.store.release_get(&who.app, d.manifest).await?.ok_or_else(|| {
            Error::not_found("release_not_found", format!("no release has the manifest {}", d.manifest))
        })?;
    let approved = d.catalog.is_some();
    if let Some(catalog) = &d.catalog {
        let bytes =
            STANDARD.decode(catalog).map_err(|e| Error::invalid("bad_catalog", e.to_string(), "send base64"))?;
        let catalog = SignedMetadata { role: TufRole::Catalog, version: d.catalog_version, bytes };
        let manifests = vec![release.manifest_text.clone().into_bytes()];
        server.publish(&who.app, Publication { catalog: Some(catalog), manifests, assignment: None }).await?;
    }
    let mut tx = server.begin().await?;
    tx.release_decide(&who.app, d.manifest, approved, &d.by, &d.reason).await?;
    if let Some(candidate) = &release.candidate_id {
        let to = if approved { CandidateState::Released } else { CandidateState::Refused };
        tx.candidate_state_set(&who.app, candidate, CandidateState::SigningRequested, to, &d.reason).await?;
    }
    let detail = json!({ "by": d.by, "reason": d.reason, "catalog_version": d.catalog_version });
    let action = if approved { "release.sign" } else { "release.refuse" };
    tx.audit_append(&who.app, &who.name, action, &d.manifest.to_hex(), &detail).await?;
    tx.commit().await?;
    if approved {
        publish::released(&server, &who.app, d.manifest).await?;
    }
    Ok(Json(json!({ "manifest": d.manifest, "approved": approved })))
}
