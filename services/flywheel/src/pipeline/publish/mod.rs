//! Makes a bundle of a candidate that passed its gate (or was overridden) and asks the signer for a signature. The
//! signer pulls the request, checks it against its own policy and sends the signed catalog back; then the rollout
//! starts. Nothing here can sign a release.

mod describe;
mod manifest;

use super::blocking::watched;
use super::build_dataset::setting;
use super::{app, attribute, reconcile_rollout};
use crate::server::Server;
use describe::describe;
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::jobs::NewJob;
use flywheel_store::releases::NewRelease;
use flywheel_types::{AppId, BundleKind, CandidateId, CandidateState, Digest, Error};
pub(crate) use manifest::BundleSettings;
use manifest::{Origin, manifest};
use serde_json::{Value, json};

pub const KIND: &str = "publish";

/// Queues the publication of a candidate.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, candidate: &CandidateId) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1, "candidate": candidate })).dedup(format!("{app}:{candidate}"));
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

#[derive(serde::Deserialize)]
struct Payload {
    candidate: CandidateId,
}

/// The step.
///
/// # Errors
/// Of the object store and the database; `Conflict` when the candidate is in no state to be published.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let (id, candidate) = (ctx.app(), super::payload::<Payload>(ctx)?.candidate);
    // load
    let row = server
        .store
        .candidate_get(id, &candidate)
        .await?
        .ok_or_else(|| Error::not_found("candidate_not_found", format!("there is no candidate `{candidate}`")))?;
    if !row.state.can_become(CandidateState::SigningRequested) {
        return Ok(json!({ "skipped": format!("the candidate is {}", row.state) }));
    }
    if row.kind != BundleKind::Weights {
        return Err(Error::invalid(
            "kind_not_publishable",
            format!("candidate `{candidate}` is of kind `{}`; only weights are made into bundles", row.kind),
            "register weights",
        ));
    }
    let settings: BundleSettings = setting(&app(server, id).await?.settings, "bundle")?;
    let seq = server.store.release_list(id, None).await?.len() as u64 + 1;
    let newest = server.store.evaluation_list(id, &candidate).await?.into_iter().next();
    let evaluation = newest.map(|e| serde_json::to_vec(&e.report).map(|b| Digest::of(&b))).transpose();
    // do: hash the artefact as devices will read it
    let (file, base) = (server.objects.file(row.artefact), row.base.map(|b| server.objects.file(b)));
    let described = watched(ctx, move |_| describe(&file, base.as_deref())).await?;
    if described.artefact.sha256 != row.artefact {
        return Err(Error::internal(format!("artefact {} is damaged on disk", row.artefact)));
    }
    let origin = Origin { app: id, row: &row, seq, evaluation: evaluation.map_err(Error::internal)? };
    let manifest = manifest(&origin, described, &settings);
    let bytes = manifest
        .to_bytes()
        .map_err(|e| Error::invalid("manifest_refused", e.to_string(), "check `bundle` in the settings"))?;
    let text = String::from_utf8(bytes).map_err(Error::internal)?;
    // commit
    let new = NewRelease {
        manifest_text: text,
        kind: row.kind,
        candidate_id: Some(candidate.clone()),
        security_epoch: manifest.security_epoch,
    };
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    let digest = tx.release_request(id, &new).await?;
    let to = CandidateState::SigningRequested;
    tx.candidate_state_set(id, &candidate, row.state, to, "bundle made").await?;
    let detail = json!({ "manifest": digest, "seq": seq });
    tx.audit_append(id, "controller", "release.request", candidate.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(detail)
}

/// After the signature: starts the rollout when the app lets the controller act.
///
/// # Errors
/// Of the lake and the database.
pub async fn released(server: &Server, id: &AppId, bundle: Digest) -> Result<(), Error> {
    let settings = app(server, id).await?.settings;
    if !attribute::acts(&settings) {
        return Ok(());
    }
    if !server.store.rollout_list(id, true, 1).await?.is_empty() {
        return Ok(()); // one at a time; an operator starts the next
    }
    let request = reconcile_rollout::StartRequest {
        bundle,
        ring: None,
        eligible: Vec::new(),
        policy: None,
        created_by: "controller".into(),
    };
    reconcile_rollout::start(server, id, request).await?;
    Ok(())
}
