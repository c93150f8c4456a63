//! What to train and how, what goes in and what a step reports.

use super::grid::WeightGrid;
use crate::model::{ModelError, Target};
use serde::{Deserialize, Serialize};

/// The shape of the adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    pub rank: usize,
    /// Strength: the change is `alpha / rank · B · A`.
    pub alpha: f32,
    /// Use `alpha / sqrt(rank)` instead (arXiv 2312.03732); the adapter file holds the equivalent plain alpha.
    pub rank_stabilized: bool,
    pub targets: Vec<Target>,
    /// Share of an adapter's inputs that are set to 0 while training; 0 switches it off.
    pub dropout: f32,
}

impl Default for LoraConfig {
    /// Rank 8, alpha 16, on q, k, v, o.
    fn default() -> Self {
        Self { rank: 8, alpha: 16.0, rank_stabilized: false, targets: Target::ATTENTION.into(), dropout: 0.0 }
    }
}

/// What is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trainable {
    /// An adapter; all weights of the decoder stay as they are.
    Lora(LoraConfig),
    /// The norms: a few thousand values that repair what quantisation did to the rest.
    Norms,
    /// Every weight, from the values that the decoder has (exact only if it was loaded with `Storage::F32`). Memory:
    /// about 20 bytes a weight.
    Full,
}

impl From<LoraConfig> for Trainable {
    fn from(lora: LoraConfig) -> Self {
        Self::Lora(lora)
    }
}

impl Trainable {
    /// Share of an adapter's inputs that are set to 0.
    pub(super) fn dropout(&self) -> f32 {
        match self {
            Self::Lora(lora) => lora.dropout,
            Self::Norms | Self::Full => 0.0,
        }
    }
}

/// How the learning rate changes over the steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    Constant,
    /// Falls along a half cosine to 0 at the last step.
    Cosine,
}

/// How to train.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainConfig {
    pub steps: usize,
    /// Samples of one step.
    pub batch: usize,
    pub learning_rate: f32,
    pub schedule: Schedule,
    /// The rate rises linearly over these first steps.
    pub warmup_steps: usize,
    /// Decoupled weight decay (AdamW, arXiv 1711.05101).
    pub weight_decay: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
    /// Longest allowed gradient (L2 norm over all trained values).
    pub clip_norm: Option<f32>,
    /// Order of samples, start values and dropout follow from it.
    pub seed: u64,
    /// Tokens of one pass, a beginning that its samples share counted once; a step makes as many passes as its samples
    /// need. More is faster and costs memory: about 4 bytes × layers × (4 · width + 2 · ffn) a token. A longer sample is
    /// a pass of its own.
    pub pass_tokens: usize,
    /// Keep only what goes into each block and compute the rest again in the backward pass (arXiv 1604.06174): about a
    /// third more time, and 4 bytes × layers × width a token instead of the above. The result is the same to the bit.
    pub recompute: bool,
    /// Train for matrices in this format: an adapter (without dropout) is folded in before they are rounded, as a merge and
    /// the quantiser will do.
    pub grid: Option<WeightGrid>,
}

impl Default for TrainConfig {
    /// 40 steps of 6 samples at a constant rate of 5e-4, gradient norm at most 1.
    fn default() -> Self {
        Self {
            steps: 40,
            batch: 6,
            learning_rate: 5e-4,
            schedule: Schedule::Constant,
            warmup_steps: 0,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            clip_norm: Some(1.0),
            seed: 0,
            pass_tokens: 640,
            recompute: false,
            grid: None,
        }
    }
}

/// What one step did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepReport {
    /// Steps done, this one included.
    pub step: usize,
    /// Mean loss of the answers' tokens before the step, by their weights: negative log-likelihood in nats, or what
    /// [`Distillation`](super::Distillation) makes of it.
    pub loss: f32,
    /// Norm of the gradient before clipping.
    pub grad_norm: f32,
    pub learning_rate: f32,
    /// Tokens of the step's samples.
    pub tokens: usize,
    /// Tokens that the loss counted: those with a weight above 0.
    pub answer_tokens: usize,
}

/// Refuses what cannot be trained.
pub(super) fn check(trainable: &Trainable, config: &TrainConfig) -> Result<(), ModelError> {
    let lora = match trainable {
        Trainable::Lora(lora) => lora_problem(lora),
        Trainable::Norms | Trainable::Full => None,
    };
    let both = (config.grid.is_some() && trainable.dropout() > 0.0)
        .then_some("dropout must be 0 when training for a weight format: the adapter is part of the matrix then");
    match lora.or(both).or_else(|| config_problem(config)) {
        Some(problem) => Err(ModelError::input(format!("training configuration: {problem}"))),
        None => Ok(()),
    }
}

fn positive(v: f32) -> bool {
    v.is_finite() && v > 0.0
}

fn lora_problem(lora: &LoraConfig) -> Option<&'static str> {
    let mut targets = lora.targets.clone();
    targets.sort_unstable();
    targets.dedup();
    if lora.rank == 0 || !positive(lora.alpha) {
        Some("rank and alpha must be above 0")
    } else if targets.is_empty() || targets.len() != lora.targets.len() {
        Some("targets must be given, each once")
    } else if !(0.0..1.0).contains(&lora.dropout) {
        Some("dropout must be in 0..1")
    } else {
        None
    }
}

fn config_problem(config: &TrainConfig) -> Option<&'static str> {
    if config.batch == 0 || config.steps == 0 {
        Some("steps and batch must be at least 1")
    } else if !positive(config.learning_rate) || !positive(config.epsilon) || config.weight_decay < 0.0 {
        Some("learning_rate and epsilon must be above 0, weight_decay not below")
    } else if ![config.beta1, config.beta2].iter().all(|b| (0.0..1.0).contains(b)) {
        Some("beta1 and beta2 must be in 0..1")
    } else if config.clip_norm.is_some_and(|c| !positive(c)) {
        Some("clip_norm must be above 0")
    } else {
        None
    }
}
