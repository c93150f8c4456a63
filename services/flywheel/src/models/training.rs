//! Training of adapters and of norms on conversations, with a state to go on from, and the files that come of it. The job
//! `lora` and `flywheel model train` are these calls.

use super::quantized::Wanted;
use super::texts::Conversation;
use super::{Model, open, refused};
use crate::pipeline::blocking::stopped;
use flywheel_inference::gguf::{self, Gguf, GgufError, TensorData, TensorSpec, Value};
use flywheel_inference::model::{Adapter, Decoder, MergedType, ModelConfig, ModelError, Storage, Target, merge};
use flywheel_inference::train::{
    Distillation, LoraConfig, Sample, Schedule, StepReport, TrainConfig, Trainable, Trainer, WeightGrid, with_tensors,
};
use flywheel_types::Error;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Training parameters and the form of the candidate, per app (`lora` in the settings) or from the command line.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    pub steps: usize,
    pub batch: usize,
    /// Peak, or constant, as `schedule` says.
    pub learning_rate: f32,
    pub schedule: Schedule,
    /// The matrices that are adapted.
    pub targets: Vec<Target>,
    pub rank: usize,
    pub alpha: f32,
    /// `alpha / sqrt(rank)` instead of `alpha / rank`.
    pub rank_stabilized: bool,
    pub dropout: f32,
    /// Train for matrices in this format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grid: Option<WeightGrid>,
    pub seed: u64,
    /// Format of the candidate.
    pub profile: Wanted,
    /// Most bytes of the candidate with the profile `auto`; the size of the base's file when left out.
    pub budget_bytes: Option<u64>,
    /// About so many tokens of the dataset calibrate the quantisation.
    pub calibration_tokens: usize,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            steps: 30,
            batch: 6,
            learning_rate: 1e-3,
            schedule: Schedule::Cosine,
            targets: Target::ATTENTION.into(),
            rank: 8,
            alpha: 16.0,
            rank_stabilized: false,
            dropout: 0.0,
            grid: None,
            seed: 7,
            profile: Wanted::Auto,
            budget_bytes: None,
            calibration_tokens: 2048,
        }
    }
}

/// One training run.
pub struct Work {
    pub base: PathBuf,
    pub samples: Vec<Conversation>,
    pub recipe: Recipe,
    /// Where the state of the run is kept; a run with the same base, samples and recipe goes on from it.
    pub checkpoint: PathBuf,
    /// Another model whose predictions the loss compares with.
    pub teacher: Option<(PathBuf, Distillation)>,
    /// How far the model in the recipe's grid is from its base on these, before and after.
    pub measured: Vec<Conversation>,
}

/// Values of whole tensors, row-major, by their names in the file.
pub type Tensors = BTreeMap<String, Vec<f32>>;

/// A finished run, and what it made: an [`Adapter`] or [`Tensors`].
pub struct Trained<T> {
    pub made: T,
    /// Digest of the base's tensors.
    pub base_sha256: String,
    /// Of the steps of this attempt.
    pub losses: Vec<f32>,
    /// Steps that an earlier attempt had done.
    pub resumed_at: usize,
    /// Mean KL divergence from the base of the model in the recipe's grid, nats a token of an answer: when this attempt began, and
    /// at the end.
    pub divergence: Option<[f64; 2]>,
}

/// Sees every step and can stop the run.
pub type Watch<'a> = dyn FnMut(&StepReport) -> ControlFlow<()> + 'a;

/// Trains an adapter. Blocking.
///
/// # Errors
/// `Invalid` for data or a base that cannot be trained; internal for file-system failures; [`stopped`], with a
/// checkpoint from which the next attempt goes on.
pub fn train(work: &Work, watch: &mut Watch<'_>) -> Result<Trained<Adapter>, Error> {
    let r = &work.recipe;
    let lora = LoraConfig {
        rank: r.rank,
        alpha: r.alpha,
        rank_stabilized: r.rank_stabilized,
        targets: r.targets.clone(),
        dropout: r.dropout,
    };
    run(work, lora.into(), watch, Trainer::finish)
}

/// Trains the norms of the base alone, those of heads included; what the recipe says of an adapter is not used. Blocking.
///
/// # Errors
/// As [`train`].
pub fn train_norms(work: &Work, watch: &mut Watch<'_>) -> Result<Trained<Tensors>, Error> {
    run(work, Trainable::Norms, watch, |trainer| Ok(trainer.tensors()))
}

fn run<T>(
    work: &Work,
    trainable: Trainable,
    watch: &mut Watch<'_>,
    make: impl FnOnce(Trainer) -> Result<T, ModelError>,
) -> Result<Trained<T>, Error> {
    let model = Model::load(&open(&work.base)?)?;
    let (mut trainer, measured) = prepare(work, trainable, &model)?;
    let resumed_at = trainer.steps_done();
    let far = |trainer: &Trainer| trainer.divergence(&model.decoder, &measured).map_err(refused);
    let before = (!measured.is_empty()).then(|| far(&trainer)).transpose()?;
    let mut losses = Vec::with_capacity(work.recipe.steps);
    while trainer.steps_done() < work.recipe.steps {
        let report = trainer.step().map_err(refused)?;
        losses.push(report.loss);
        let go_on = watch(&report);
        if report.step % 10 == 0 || go_on.is_break() {
            checkpoint(&work.checkpoint, &trainer.save())?;
        }
        if go_on.is_break() {
            return Err(stopped("training"));
        }
    }
    let divergence = before.map(|before| far(&trainer).map(|after| [before, after])).transpose()?;
    let made = make(trainer).map_err(refused)?;
    Ok(Trained { made, base_sha256: model.decoder.base_digest().into(), losses, resumed_at, divergence })
}

/// The run at its start or at its checkpoint, and what is measured before and after: nothing without a grid.
fn prepare(work: &Work, trainable: Trainable, model: &Model) -> Result<(Trainer, Vec<Sample>), Error> {
    let encode = |conversations: &[Conversation]| -> Result<Vec<Sample>, Error> {
        conversations.iter().map(|s| s.sample(&model.tokenizer, &model.template)).collect()
    };
    let samples = encode(&work.samples)?;
    let r = &work.recipe;
    let measured = if r.grid.is_some() { encode(&work.measured)? } else { Vec::new() };
    let config = TrainConfig {
        steps: r.steps,
        batch: r.batch,
        learning_rate: r.learning_rate,
        seed: r.seed,
        schedule: r.schedule,
        grid: r.grid,
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(&model.decoder, trainable, config, samples).map_err(refused)?;
    if let Some((file, how)) = &work.teacher {
        let teacher = Decoder::load_with(&open(file)?, Storage::F16).map_err(refused)?;
        trainer = trainer.distill(&teacher, *how).map_err(refused)?;
    }
    if let Ok(bytes) = std::fs::read(&work.checkpoint) {
        // a checkpoint of another run is refused by its fingerprint: start over
        let _ = trainer.restore(&bytes);
    }
    Ok((trainer, measured))
}

/// Reads an adapter for a model: a GGUF file, or a folder that PEFT wrote.
///
/// # Errors
/// `Invalid` naming what is wrong with it; as [`open`].
pub fn open_adapter(path: &Path, base: &Gguf) -> Result<Adapter, Error> {
    if path.is_dir() {
        let config = ModelConfig::from_gguf(base, &mut Vec::new()).map_err(refused)?;
        return Adapter::from_peft(path, &config).map_err(refused);
    }
    Adapter::from_gguf(&open(path)?).map_err(refused)
}

/// Merges an adapter into its base and writes a float model, tensor by tensor as long as `go_on` says so. Nothing is left of
/// a file that was not finished.
///
/// # Errors
/// `Invalid` when the adapter belongs to another base, or a value does not fit into `ty`; [`stopped`].
pub fn write_merged(
    base: &Path,
    adapter: &Adapter,
    out: &Path,
    ty: MergedType,
    go_on: &dyn Fn() -> bool,
) -> Result<u64, Error> {
    let base = open(base)?;
    let merged = merge(&base, adapter, ty).map_err(|e| match e {
        ModelError::Adapter { .. } => {
            Error::invalid("adapter_refused", e.to_string(), "use the base it was trained on")
        }
        other => refused(other),
    })?;
    write_watched(out, &merged.metadata, merged.tensors, go_on, "merging")
}

/// Writes the model with `trained` tensors, as F32, in place of its own; everything else keeps its bytes. Stops and leaves
/// nothing as [`write_merged`].
///
/// # Errors
/// `Invalid` for a base without these tensors or values that are not finite; [`stopped`].
pub fn write_trained(base: &Path, trained: &Tensors, out: &Path, go_on: &dyn Fn() -> bool) -> Result<u64, Error> {
    let base = open(base)?;
    let tensors = with_tensors(&base, trained).map_err(refused)?;
    write_watched(out, base.metadata(), tensors, go_on, "writing the model")
}

fn write_watched<'a>(
    out: &Path,
    metadata: &[(String, Value)],
    tensors: Vec<(TensorSpec, TensorData<'a>)>,
    go_on: &'a dyn Fn() -> bool,
    doing: &str,
) -> Result<u64, Error> {
    let tensors = tensors.into_iter().map(|(spec, data)| {
        let next = move || match data {
            _ if !go_on() => Err(GgufError::Write { what: "stopped".into() }),
            TensorData::Lazy(make) => make(),
            TensorData::Bytes(bytes) => Ok(bytes.into_owned()),
        };
        (spec, TensorData::Lazy(Box::new(next)))
    });
    gguf::write(out, metadata, tensors).map_err(|e| if go_on() { refused(e) } else { stopped(doing) })
}

fn checkpoint(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let temp = path.with_extension("tmp");
    std::fs::write(&temp, bytes).and_then(|()| std::fs::rename(&temp, path)).map_err(Error::internal)
}
