//! Trains a LoRA adapter on a dataset snapshot, merges it into the base and registers nothing by itself: the merged
//! file goes on to quantisation, which makes the candidate. Training checkpoints and resumes bit-exact.

use super::blocking::watched;
use super::{app, build_dataset::setting, requantize};
use crate::models::texts::Conversation;
use crate::models::training::{Recipe, Work, train, write_merged};
use crate::server::Server;
use flywheel_attribution::dataset::{DatasetV1, Split};
use flywheel_inference::model::MergedType;
use flywheel_inference::train::StepReport;
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, Digest, Error};
use serde::Deserialize;
use serde_json::{Value, json};

pub const KIND: &str = "lora";

/// Queues training; one at a time per app.
///
/// # Errors
/// Those of the database.
pub async fn enqueue(tx: &mut Tx, app: &AppId, dataset: Digest) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1, "dataset": dataset }))
        .dedup(format!("{app}:{dataset}"))
        .concurrency(format!("train:{app}"), 1);
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

#[derive(Deserialize)]
struct Payload {
    dataset: Digest,
}

/// The step.
///
/// # Errors
/// Of the object store, the model and the database; `Conflict` while no release is complete.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let (id, dataset) = (ctx.app(), super::payload::<Payload>(ctx)?.dataset);
    let recipe: Recipe = setting(&app(server, id).await?.settings, "lora")?;
    // load
    let samples = samples(server, id, dataset).await?;
    let base = base(server, id).await?;
    // do
    let job = ctx.job();
    let work = Work {
        base: server.objects.file(base),
        samples,
        recipe: recipe.clone(),
        checkpoint: server.objects.scratch()?.join(format!("train-{}.state", job.job_id)),
        teacher: None,
        measured: Vec::new(),
    };
    let checkpoint = work.checkpoint.clone();
    let merged_file = server.objects.scratch()?.join(format!("merged-{}-{}.gguf", job.job_id, job.attempt));
    let out = merged_file.clone();
    let losses = watched(ctx, move |watch| {
        let mut shown =
            |s: &StepReport| watch.report(json!({ "step": s.step, "of": work.recipe.steps, "loss": s.loss }));
        let trained = train(&work, &mut shown)?;
        write_merged(&work.base, &trained.made, &out, MergedType::F16, &|| !watch.is_stopped())?;
        Ok(trained.losses)
    })
    .await?;
    let (merged, size_bytes) = server.objects.adopt_file(&merged_file)?;
    let _ = std::fs::remove_file(checkpoint);
    // commit
    let report = json!({
        "recipe": recipe,
        "first_loss": losses.first(), "last_loss": losses.last(), "samples_seen": recipe.steps * recipe.batch,
    });
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    let next = requantize::Payload {
        merged,
        base,
        dataset: Some(dataset),
        profile: recipe.profile,
        budget_bytes: recipe.budget_bytes,
        training: report.clone(),
    };
    requantize::enqueue(&mut tx, id, &next).await?;
    let detail = json!({ "merged": merged, "size_bytes": size_bytes, "training": report });
    tx.audit_append(id, "controller", "lora.train", &dataset.to_hex(), &detail).await?;
    tx.commit().await?;
    Ok(detail)
}

/// The training part of a dataset.
///
/// # Errors
/// `NotFound` for a dataset that is gone; those of the object store and the database.
pub async fn samples(server: &Server, id: &AppId, dataset: Digest) -> Result<Vec<Conversation>, Error> {
    let row = server.store.dataset_get(id, dataset).await?.filter(|d| d.tombstone_at.is_none());
    let row = row.ok_or_else(|| Error::not_found("dataset_not_found", format!("dataset {dataset} is gone")))?;
    let object: Digest = row.object_path.parse().map_err(Error::internal)?;
    let bytes = server.objects.get(object).await?;
    let samples = DatasetV1::read(&bytes).map_err(|e| Error::internal(format!("dataset {dataset}: {e}")))?;
    Ok(samples.into_iter().filter(|s| s.split == Split::Train).map(Conversation::from).collect())
}

/// The model that training starts from: the base of the last complete bundle, never an already tuned file.
///
/// # Errors
/// `Conflict` while no release is complete.
pub async fn base(server: &Server, id: &AppId) -> Result<Digest, Error> {
    let none = || Error::conflict("no_complete_release", "no bundle is complete yet", "release a base model first");
    let release = server.store.release_last_complete(id).await?.ok_or_else(none)?;
    let candidate = release.candidate_id.ok_or_else(none)?;
    let candidate = server.store.candidate_get(id, &candidate).await?.ok_or_else(none)?;
    Ok(candidate.base.unwrap_or(candidate.artefact))
}
