//! Trains a LoRA adapter on a dataset snapshot, merges it into the base and registers nothing by itself: the merged
//! file goes on to quantisation, which makes the candidate. Training checkpoints and resumes bit-exact.

use super::blocking::{Watch, stopped, watched};
use super::{app, build_dataset::setting, requantize};
use crate::models::{Model, open, refused};
use crate::server::Server;
use flywheel_attribution::dataset::{DatasetV1, SampleV1, Split};
use flywheel_inference::gguf::{self, Gguf};
use flywheel_inference::model::{Adapter, MergedType, merge};
use flywheel_inference::tokenizer::{ChatTemplate, Message, Tokenizer};
use flywheel_inference::train::{LoraConfig, Sample, Schedule, TrainConfig, Trainer};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::jobs::NewJob;
use flywheel_types::{AppId, Digest, Error};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

pub const KIND: &str = "lora";

/// Training parameters, per app (`lora` in the settings) or from the command line.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    pub steps: usize,
    pub batch: usize,
    /// Peak, or constant, as `schedule` says.
    pub learning_rate: f32,
    pub schedule: Schedule,
    pub rank: usize,
    pub alpha: f32,
    pub seed: u64,
    /// Format of the candidate.
    pub profile: String,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            steps: 30,
            batch: 6,
            learning_rate: 1e-3,
            schedule: Schedule::Cosine,
            rank: 8,
            alpha: 16.0,
            seed: 7,
            profile: "q8_0".into(),
        }
    }
}

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
    let row = server.store.dataset_get(id, dataset).await?.filter(|d| d.tombstone_at.is_none());
    let row = row.ok_or_else(|| Error::not_found("dataset_not_found", format!("dataset {dataset} is gone")))?;
    let object: Digest = row.object_path.parse().map_err(Error::internal)?;
    let bytes = server.objects.get(object).await?;
    let samples = DatasetV1::read(&bytes).map_err(|e| Error::internal(format!("dataset {dataset}: {e}")))?;
    let base = base(server, id).await?;
    // do
    let work = Work {
        base: server.objects.file(base),
        samples: samples.into_iter().filter(|s| s.split == Split::Train).collect(),
        recipe: recipe.clone(),
        checkpoint: server.objects.scratch()?.join(format!("train-{}.state", ctx.job().job_id)),
        merged: server.objects.scratch()?.join(format!("merged-{}-{}.gguf", ctx.job().job_id, ctx.job().attempt)),
    };
    let checkpoint = work.checkpoint.clone();
    let merged_file = work.merged.clone();
    let losses = watched(ctx, move |watch| train(work, watch)).await?;
    let (merged, size_bytes) = server.objects.adopt_file(&merged_file)?;
    let _ = std::fs::remove_file(checkpoint);
    // commit
    let report = json!({
        "recipe": { "steps": recipe.steps, "batch": recipe.batch, "learning_rate": recipe.learning_rate,
            "schedule": recipe.schedule, "rank": recipe.rank, "alpha": recipe.alpha, "seed": recipe.seed },
        "first_loss": losses.first(), "last_loss": losses.last(), "samples_seen": recipe.steps * recipe.batch,
    });
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    let next =
        requantize::Payload { merged, base, dataset: Some(dataset), profile: recipe.profile, training: report.clone() };
    requantize::enqueue(&mut tx, id, &next).await?;
    let detail = json!({ "merged": merged, "size_bytes": size_bytes, "training": report });
    tx.audit_append(id, "controller", "lora.train", &dataset.to_hex(), &detail).await?;
    tx.commit().await?;
    Ok(detail)
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

/// One training run.
pub struct Work {
    pub base: PathBuf,
    pub samples: Vec<SampleV1>,
    pub recipe: Recipe,
    pub checkpoint: PathBuf,
    pub merged: PathBuf,
}

/// Trains, merges and writes the merged file; answers the losses. Blocking.
///
/// # Errors
/// `Invalid` for data or a base that cannot be trained; internal for file-system failures; [`stopped`], with a
/// checkpoint from which the next attempt goes on.
pub fn train(work: Work, watch: &Watch) -> Result<Vec<f32>, Error> {
    let gguf = open(&work.base)?;
    let model = Model::load(&gguf)?;
    let samples = tokens(&model.tokenizer, &model.template, &work.samples)?;
    let r = &work.recipe;
    let lora = LoraConfig { rank: r.rank, alpha: r.alpha, ..LoraConfig::default() };
    let config = TrainConfig {
        steps: r.steps,
        batch: r.batch,
        learning_rate: r.learning_rate,
        seed: r.seed,
        schedule: r.schedule,
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(&model.decoder, lora, config, samples).map_err(refused)?;
    if let Ok(bytes) = std::fs::read(&work.checkpoint) {
        // a checkpoint of another run is refused by its fingerprint: start over
        let _ = trainer.restore(&bytes);
    }
    let mut losses = Vec::with_capacity(r.steps);
    while trainer.steps_done() < r.steps {
        let report = trainer.step().map_err(refused)?;
        losses.push(report.loss);
        let go_on = watch.report(json!({ "step": report.step, "of": r.steps, "loss": report.loss }));
        if report.step % 10 == 0 || go_on.is_break() {
            checkpoint(&work.checkpoint, &trainer.save())?;
        }
        if go_on.is_break() {
            return Err(stopped("training"));
        }
    }
    let adapter = trainer.finish().map_err(refused)?;
    write_merged(&gguf, &adapter, &work.merged)?;
    Ok(losses)
}

/// Merges an adapter into its base and writes F16.
///
/// # Errors
/// `Invalid` when the adapter belongs to another base.
pub fn write_merged(base: &Gguf, adapter: &Adapter, out: &Path) -> Result<(), Error> {
    let merged = merge(base, adapter, MergedType::F16).map_err(refused)?;
    gguf::write(out, &merged.metadata, merged.tensors).map_err(refused)?;
    Ok(())
}

fn checkpoint(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let temp = path.with_extension("tmp");
    std::fs::write(&temp, bytes).and_then(|()| std::fs::rename(&temp, path)).map_err(Error::internal)
}

/// Chat samples as tokens; the loss counts the answer and its end mark only.
///
/// # Errors
/// `Invalid` for a sample without an assistant message.
pub fn tokens(tokenizer: &Tokenizer, template: &ChatTemplate, samples: &[SampleV1]) -> Result<Vec<Sample>, Error> {
    samples
        .iter()
        .map(|s| {
            let (answer, asked) = s.messages.split_last().filter(|(a, _)| a.role == "assistant").ok_or_else(|| {
                Error::invalid(
                    "bad_sample",
                    format!("sample `{}` does not end with an answer", s.id),
                    "rebuild the dataset",
                )
            })?;
            let asked: Vec<Message<'_>> = asked
                .iter()
                .map(|m| if m.role == "system" { Message::system(&m.content) } else { Message::user(&m.content) })
                .collect();
            Sample::chat(tokenizer, template, &asked, &answer.content).map_err(refused)
        })
        .collect()
}
