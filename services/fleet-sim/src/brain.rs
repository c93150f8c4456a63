//! The seam to the model: the fleet asks, a brain answers. The fleet sends every distinct question of a tick once, so
//! that an implementation can batch, memoise and run a real model.

use flywheel_sdk::{Chunk, InstalledBundle};
use flywheel_types::{Digest, TemplateId};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Everything an answer depends on.
#[derive(Debug, Clone)]
pub struct BrainAsk {
    /// Manifest digest of the bundle that answers.
    pub bundle: Digest,
    pub template: TemplateId,
    pub question: Arc<str>,
    /// Visible chunks in rank order.
    pub chunks: Vec<Arc<Chunk>>,
}

impl BrainAsk {
    fn chunk_keys(&self) -> impl Iterator<Item = (&str, u32)> {
        self.chunks.iter().map(|c| (c.id.as_str(), c.version))
    }
}

impl PartialEq for BrainAsk {
    fn eq(&self, other: &Self) -> bool {
        self.bundle == other.bundle
            && self.template == other.template
            && self.question == other.question
            && self.chunk_keys().eq(other.chunk_keys())
    }
}
impl Eq for BrainAsk {}
impl Hash for BrainAsk {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bundle.hash(state);
        self.template.hash(state);
        self.question.hash(state);
        self.chunk_keys().for_each(|k| k.hash(state));
    }
}

/// What a model made of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrainAnswer {
    /// Visible answer.
    pub text: String,
    pub input_tokens: u32,
    pub output_tokens: u32,
}

/// How an attempt to load a bundle ends on a phone.
#[derive(Debug, Clone, PartialEq)]
pub enum LoadTrial {
    /// Loaded and probed; the latency model says how long it took.
    Works,
    /// The engine or the probe says no.
    Fails { reason: String, out_of_memory: bool },
    /// The process dies inside the load window; the phone starts again.
    Dies,
}

/// A model, or something that stands for one.
#[async_trait::async_trait]
pub trait Brain: Send + Sync {
    /// Answers each question, in order. Called once a tick with distinct questions.
    ///
    /// # Errors
    /// The tick fails with this error.
    async fn answer(&self, asks: &[BrainAsk]) -> anyhow::Result<Vec<BrainAnswer>>;

    /// Called when a phone loads a bundle (the files are verified); says how that ends. `roll` is uniform in [0, 1).
    fn load(&self, bundle: &InstalledBundle, class: &str, roll: f64) -> LoadTrial {
        let _ = (bundle, class, roll);
        LoadTrial::Works
    }

    /// Chance that one answer with this bundle ends in a crash of the app.
    fn crash_chance(&self, bundle: &Digest) -> f64 {
        let _ = bundle;
        0.0
    }
}
