//! LoRA training on conversations, with a state to go on from, and merging. The job `lora` and `flywheel model train` are
//! these calls.

use super::quantized::Wanted;
use super::texts::Conversation;
use super::{Model, open, refused};
use crate::pipeline::blocking::stopped;
use flywheel_inference::gguf::{self, Gguf, GgufError, TensorData};
use flywheel_inference::model::{Adapter, Decoder, MergedType, ModelConfig, ModelError, Storage, Target, merge};
use flywheel_inference::train::{
    Distillation, LoraConfig, Sample, Schedule, StepReport, TrainConfig, Trainer, WeightGrid,
};
use flywheel_types::Error;
use serde::{Deserialize, Serialize};
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

/// A finished run.
pub struct Trained {
    pub adapter: Adapter,
    /// Of the steps of this attempt.
    pub losses: Vec<f32>,
    /// Steps that an earlier attempt had done.
    pub resumed_at: usize,
    /// Mean KL divergence from the base of the model in the recipe's grid, nats a token of an answer: when this attempt began, and
    /// at the end.
    pub divergence: Option<[f64; 2]>,
}

/// Trains; `watch` sees every step and can stop the run. Blocking.
///
/// # Errors
/// `Invalid` for data or a base that cannot be trained; internal for file-system failures; [`stopped`], with a
/// checkpoint from which the next attempt goes on.
pub fn train(work: &Work, watch: &mut dyn FnMut(&StepReport) -> ControlFlow<()>) -> Result<Trained, Error> {
    let model = Model::load(&open(&work.base)?)?;
    let encode = |conversations: &[Conversation]| -> Result<Vec<Sample>, Error> {
        conversations.iter().map(|s| s.sample(&model.tokenizer, &model.template)).collect()
    };
    let samples = encode(&work.samples)?;
    let measured = if work.recipe.grid.is_some() { encode(&work.measured)? } else { Vec::new() };
    let r = &work.recipe;
    let lora = LoraConfig {
        rank: r.rank,
        alpha: r.alpha,
        rank_stabilized: r.rank_stabilized,
        targets: r.targets.clone(),
        dropout: r.dropout,
    };
    let config = TrainConfig {
        steps: r.steps,
        batch: r.batch,
        learning_rate: r.learning_rate,
        seed: r.seed,
        schedule: r.schedule,
        grid: r.grid,
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(&model.decoder, lora, config, samples).map_err(refused)?;
    if let Some((file, how)) = &work.teacher {
        let teacher = Decoder::load_with(&open(file)?, Storage::F16).map_err(refused)?;
        trainer = trainer.distill(&teacher, *how).map_err(refused)?;
    }
    if let Ok(bytes) = std::fs::read(&work.checkpoint) {
        // a checkpoint of another run is refused by its fingerprint: start over
        let _ = trainer.restore(&bytes);
    }
    let resumed_at = trainer.steps_done();
    let far = |trainer: &Trainer| trainer.divergence(&model.decoder, &measured).map_err(refused);
    let rounded = r.grid.is_some() && !measured.is_empty();
    let before = rounded.then(|| far(&trainer)).transpose()?;
    let mut losses = Vec::with_capacity(r.steps);
    while trainer.steps_done() < r.steps {
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
    Ok(Trained { adapter: trainer.finish().map_err(refused)?, losses, resumed_at, divergence })
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
    let tensors = merged.tensors.into_iter().map(|(spec, data)| match data {
        TensorData::Lazy(make) => {
            let next = move || if go_on() { make() } else { Err(GgufError::Write { what: "stopped".into() }) };
            (spec, TensorData::Lazy(Box::new(next)))
        }
        ready @ TensorData::Bytes(_) => (spec, ready),
    });
    gguf::write(out, &merged.metadata, tensors).map_err(|e| if go_on() { refused(e) } else { stopped("merging") })
}

fn checkpoint(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let temp = path.with_extension("tmp");
    std::fs::write(&temp, bytes).and_then(|()| std::fs::rename(&temp, path)).map_err(Error::internal)
}
