//! Quantises a merged model into the format that phones run and registers the result as a candidate.

use super::{blocking::watched, evaluate};
use crate::http::candidates::candidate_id;
use crate::models::{quantize_file, refused};
use crate::server::Server;
use flywheel_inference::quantize::{Profile, Progress, QuantizeOptions, QuantizeReport};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::candidates::{CandidateSource, NewCandidate};
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, BundleKind, Digest, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub const KIND: &str = "requantize";

/// What to quantise, and where it came from.
#[derive(Debug, Serialize, Deserialize)]
pub struct Payload {
    /// The F16 file.
    pub merged: Digest,
    /// The model that training started from.
    pub base: Digest,
    pub dataset: Option<Digest>,
    pub profile: String,
    #[serde(default)]
    pub training: Value,
}

/// Queues a quantisation.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, payload: &Payload) -> Result<(), Error> {
    let key = format!("{app}:{}:{}", payload.merged, payload.profile);
    let value = serde_json::to_value(payload).map_err(Error::internal)?;
    tx.job_enqueue(app, &NewJob::new(KIND, value).dedup(key).concurrency(format!("train:{app}"), 1)).await?;
    Ok(())
}

/// The step.
///
/// # Errors
/// `Invalid` for an unknown profile or a model that cannot be quantised; database errors.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let (id, payload) = (ctx.app(), super::payload::<Payload>(ctx)?);
    let profile: Profile = payload.profile.parse().map_err(refused)?;
    // do
    let input = server.objects.file(payload.merged);
    let job = ctx.job();
    let output = server.objects.scratch()?.join(format!("quantized-{}-{}.gguf", job.job_id, job.attempt));
    let out = output.clone();
    let report = watched(ctx, move |watch| {
        let mut shown = |p: Progress<'_>| watch.report(json!({ "done": p.done, "of": p.total, "tensor": p.tensor }));
        quantize_file(&input, &out, &QuantizeOptions::new(profile), &mut shown)
    })
    .await?;
    let (artefact, size_bytes) = server.objects.adopt_file(&output)?;
    // commit
    let candidate = candidate_id(artefact)?;
    let new = NewCandidate {
        candidate_id: candidate.clone(),
        kind: BundleKind::Weights,
        base: Some(payload.base),
        artefact,
        object_path: artefact.to_hex(),
        size_bytes,
        dataset: payload.dataset,
        source: CandidateSource::Job,
        job: Some((job.job_id.clone(), job.attempt)),
        report: json!({ "precision": payload.profile, "training": payload.training, "quantization": summary(&report) }),
        created_by: "controller".into(),
    };
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    if tx.candidate_register(id, &new).await? {
        evaluate::enqueue(&mut tx, id, &candidate).await?;
    }
    let detail = json!({ "candidate": candidate, "artefact": artefact, "size_bytes": size_bytes, "quantization": summary(&report) });
    tx.audit_append(id, "controller", "candidate.register", candidate.as_str(), &detail).await?;
    tx.commit().await?;
    Ok(detail)
}

/// What people ask about a quantised file.
pub fn summary(report: &QuantizeReport) -> Value {
    json!({
        "profile": report.profile.name(), "bits_per_weight": report.bits_per_weight(), "size_bytes": report.size_bytes,
        "fallbacks": report.fallbacks().count(),
    })
}
