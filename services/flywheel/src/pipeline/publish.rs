//! Makes a bundle of a candidate that passed its gate (or was overridden) and asks the signer for a signature. The
//! signer pulls the request, checks it against its own policy and sends the signed catalog back; then the rollout
//! starts. Nothing here can sign a release.

use super::{app, attribute, reconcile_rollout};
use crate::server::Server;
use flywheel_bundle::manifest::{ArtefactHasher, ArtefactV1, BaseModelV1, BuildV1, HealthV1, LineageV1, ManifestV1};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::candidates::CandidateRow;
use flywheel_store::jobs::NewJob;
use flywheel_store::releases::NewRelease;
use flywheel_types::{AppId, CandidateId, CandidateState, Digest, Error};
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;

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
    let seq = server.store.release_list(id, None).await?.len() as u64 + 1;
    let evaluation = server.store.evaluation_list(id, &candidate).await?.into_iter().last();
    // do: hash the artefact as devices will read it
    let artefact = artefact_of(&server.objects.file(row.artefact), "gguf")?;
    if artefact.sha256 != row.artefact {
        return Err(Error::internal(format!("artefact {} is damaged on disk", row.artefact)));
    }
    let manifest = manifest(id, &row, artefact, seq, evaluation.as_ref())?;
    let bytes =
        manifest.to_bytes().map_err(|e| Error::invalid("manifest_refused", e.to_string(), "see the message"))?;
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

/// Hashes a file in the pieces that devices verify.
///
/// # Errors
/// Internal when it cannot be read.
pub fn artefact_of(file: &Path, extension: &str) -> Result<ArtefactV1, Error> {
    let mut reader = std::fs::File::open(file).map_err(|e| Error::internal(format!("{}: {e}", file.display())))?;
    let (mut hasher, mut buf) = (ArtefactHasher::new(), vec![0u8; 1 << 20]);
    loop {
        let n = reader.read(&mut buf).map_err(Error::internal)?;
        if n == 0 {
            return Ok(hasher.finish(extension));
        }
        hasher.update(&buf[..n]);
    }
}

fn manifest(
    id: &AppId,
    row: &CandidateRow,
    artefact: ArtefactV1,
    seq: u64,
    evaluation: Option<&flywheel_store::evaluations::EvaluationRow>,
) -> Result<ManifestV1, Error> {
    let evaluation = evaluation
        .map(|e| serde_json::to_vec(&e.report).map(|b| Digest::of(&b)).map_err(Error::internal))
        .transpose()?;
    let precision = row.report.get("precision").and_then(Value::as_str).unwrap_or("unknown").to_owned();
    Ok(ManifestV1 {
        format: 1,
        app: id.clone(),
        kind: row.kind,
        line: "assistant".into(),
        seq,
        security_epoch: 0,
        base: row.base.map(|digest| BaseModelV1 { id: "base".into(), digest }),
        builds: vec![BuildV1 {
            device_classes: Vec::new(),
            runtime: "llama.cpp".into(),
            min_runtime: None,
            precision,
            accelerator: None,
            // weights, KV cache and runtime of a phone that shares its memory with the app
            min_ram_bytes: artefact.length * 2,
            artefacts: vec![artefact],
        }],
        tokenizer: None,
        chat_template: None,
        adapters: Vec::new(),
        deltas: Vec::new(),
        licence: "Apache-2.0".into(),
        evaluation,
        lineage: LineageV1 {
            candidate: row.candidate_id.clone(),
            dataset: row.dataset,
            base: row.base,
            job: row.job.as_ref().map(|(job, _)| job.clone()),
        },
        health: HealthV1::default(),
        extra: Default::default(),
    })
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
