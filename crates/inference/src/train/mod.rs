//! Training: LoRA (arXiv 2106.09685), norms alone, or every weight; hand-written forward and backward passes over packed
//! weights.
//!
//! Only what is trained gets gradients; a frozen layer needs no more than `dX = dY · W`. Several samples
//! are packed into one pass, each attending only to itself and to the beginning that all have in common, which is
//! computed once. With the same decoder, samples and configuration
//! every run gives the same bits, also when it was interrupted and resumed (docs/adr/004, docs/adr/018).

mod adapted;
mod attention;
mod buffers;
mod config;
mod dense;
mod distill;
mod effective;
mod gradients;
mod grid;
mod layout;
mod lora;
mod loss;
mod optimizer;
mod params;
mod pass;
mod sample;
mod start;
mod state;

pub use config::{LoraConfig, Schedule, StepReport, TrainConfig, Trainable};
pub use distill::Distillation;
pub use gradients::{Gradients, MatrixGradient, matrix_gradients};
pub use grid::WeightGrid;
pub use sample::Sample;
pub use start::{random_model, with_tensors};

use crate::model::{Adapter, Decoder, ModelError, Pair};
use buffers::Buffers;
use config::check;
use distill::Teacher;
use effective::Effective;
use optimizer::Adam;
use params::Params;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// A training run.
#[derive(Debug)]
pub struct Trainer {
    decoder: Decoder,
    trainable: Trainable,
    config: TrainConfig,
    samples: Vec<Sample>,
    params: Params,
    effective: Effective,
    teacher: Option<Teacher>,
    buffers: Buffers,
    adam: Adam,
    step: usize,
    /// Digest of everything that decides the run's result; a saved state of another run is refused.
    fingerprint: [u8; 32],
}

impl Trainer {
    /// Prepares a run on `decoder`'s weights (an adapter it carries is not used).
    ///
    /// # Errors
    /// [`ModelError::Input`] for samples or a configuration that cannot be trained, [`ModelError::Unsupported`] for a
    /// model with latent attention or experts.
    pub fn new(
        decoder: &Decoder,
        trainable: impl Into<Trainable>,
        config: TrainConfig,
        samples: Vec<Sample>,
    ) -> Result<Self, ModelError> {
        let trainable = trainable.into();
        check(&trainable, &config)?;
        decoder.config().check_plain("training")?;
        if samples.is_empty() {
            return Err(ModelError::input("there are no training samples"));
        }
        for (i, sample) in samples.iter().enumerate() {
            let name = format!("sample {i}");
            decoder.check_tokens(&sample.tokens, &name)?;
            sample.check(&name)?;
        }
        let params = Params::new(&decoder.weights, &trainable, config.seed);
        let effective = Effective::new(&decoder.weights, &params, config.grid)?;
        let adam = Adam::new(params.len());
        let fingerprint = state::fingerprint(decoder, &trainable, &config, &samples);
        let (decoder, teacher) = (decoder.clone(), None);
        let buffers = Buffers::default();
        Ok(Self {
            decoder,
            trainable,
            config,
            samples,
            params,
            effective,
            teacher,
            buffers,
            adam,
            step: 0,
            fingerprint,
        })
    }

    /// The same run with a loss that compares with `teacher`'s predictions.
    ///
    /// # Errors
    /// [`ModelError::Input`] for a teacher with another vocabulary, a temperature that is not above 0 or a share outside 0..=1.
    pub fn distill(mut self, teacher: &Decoder, how: Distillation) -> Result<Self, ModelError> {
        self.fingerprint = state::with_teacher(&self.fingerprint, teacher, how);
        self.teacher = Some(Teacher::new(&self.decoder, teacher, how)?);
        Ok(self)
    }

    /// Steps done.
    #[must_use]
    pub fn steps_done(&self) -> usize {
        self.step
    }
    /// Trainable values.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.params.len()
    }

    /// One step: gradients of the next samples, clipping, AdamW.
    ///
    /// # Errors
    /// [`ModelError::NotFinite`] naming the loss or the trained tensor; the trained values stay those of before.
    /// [`ModelError::Weight`] where a matrix left the range of numbers or of its format; the run is over then.
    pub fn step(&mut self) -> Result<StepReport, ModelError> {
        let batch = self.next_samples();
        let of_batch = || batch.iter().map(|i| &self.samples[*i]);
        let tokens: usize = of_batch().map(|s| s.tokens.len()).sum();
        let answer_tokens: usize = of_batch().map(Sample::counted).sum();
        let weight: f64 = of_batch().map(Sample::total_weight).sum();
        let (loss, mut grads) = self.gradients(&batch, 1.0 / weight as f32);
        let loss = (loss / weight) as f32;
        if !loss.is_finite() {
            return Err(not_finite(format!("the loss of step {}", self.step + 1)));
        }
        if let Some(tensor) = self.params.not_finite(&grads) {
            return Err(not_finite(format!("the gradient of `{tensor}` in step {}", self.step + 1)));
        }
        let norm = optimizer::norm(&grads);
        if let Some(limit) = self.config.clip_norm.filter(|limit| norm > *limit) {
            grads.iter_mut().for_each(|g| *g *= limit / norm);
        }
        let learning_rate = self.learning_rate();
        let decayed = self.params.decayed();
        self.adam.update(&self.config, learning_rate, self.step + 1, &decayed, &grads, self.params.values_mut());
        self.effective.update(&self.decoder.weights, &self.params, self.config.grid)?;
        self.step += 1;
        Ok(StepReport { step: self.step, loss, grad_norm: norm, learning_rate, tokens, answer_tokens })
    }

    /// Sum of the losses of some samples, and the gradient of `sum · scale`.
    fn gradients(&self, batch: &[usize], scale: f32) -> (f64, Vec<f32>) {
        let mut grads = vec![0.0; self.params.len()];
        let mut loss = 0.0f64;
        for (number, samples) in self.passes(batch).into_iter().enumerate() {
            let texts: Vec<&Sample> = samples.iter().map(|i| &self.samples[*i]).collect();
            let noise = [self.config.seed, self.step as u64, number as u64];
            let pass = pass::Pass { dropout: self.trainable.dropout(), noise, ..self.pass(self.teacher.as_ref()) };
            loss += pass.run(&texts, scale, &mut grads);
        }
        (loss, grads)
    }

    fn pass<'a>(&'a self, teacher: Option<&'a Teacher>) -> pass::Pass<'a> {
        pass::Pass {
            merged: self.config.grid.is_some(),
            recompute: self.config.recompute,
            teacher,
            ..pass::Pass::plain(&self.decoder.weights, &self.params, &self.effective, &self.buffers)
        }
    }

    /// Mean loss of other samples as the trained values are now, without dropout and teacher: nats a counted token.
    ///
    /// # Errors
    /// [`ModelError::Input`] for samples that have no loss.
    pub fn measure(&self, samples: &[Sample]) -> Result<f64, ModelError> {
        self.mean_loss(samples, None)
    }

    /// Mean KL divergence of the predictions from those of `base`, nats a counted token: what a weight format costs, and what
    /// training for it won back.
    ///
    /// # Errors
    /// As [`Trainer::measure`], and for a base with another vocabulary.
    pub fn divergence(&self, base: &Decoder, samples: &[Sample]) -> Result<f64, ModelError> {
        let teacher = Teacher::new(&self.decoder, base, Distillation { temperature: 1.0, share: 1.0 })?;
        self.mean_loss(samples, Some(&teacher))
    }

    fn mean_loss(&self, samples: &[Sample], teacher: Option<&Teacher>) -> Result<f64, ModelError> {
        let (mut loss, mut weight) = (0.0, 0.0);
        for (i, sample) in samples.iter().enumerate() {
            let name = format!("sample {i}");
            self.decoder.check_tokens(&sample.tokens, &name)?;
            sample.check(&name)?;
            loss += self.pass(teacher).measure(&[sample]);
            weight += sample.total_weight();
        }
        Ok(loss / weight)
    }

    /// All remaining steps; `watch` sees each report and can stop the run, which then can be saved or finished.
    ///
    /// # Errors
    /// As [`Trainer::step`], and [`ModelError::Cancelled`].
    pub fn run(&mut self, watch: &mut dyn FnMut(&StepReport) -> ControlFlow<()>) -> Result<(), ModelError> {
        while self.step < self.config.steps {
            let report = self.step()?;
            if watch(&report).is_break() {
                return Err(ModelError::Cancelled);
            }
        }
        Ok(())
    }

    /// The adapter as it is now, for evaluation on the way.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] if a value is not finite, or the run trains no adapter.
    pub fn adapter(&self) -> Result<Adapter, ModelError> {
        let Trainable::Lora(lora) = &self.trainable else {
            return Err(ModelError::adapter("this run trains whole tensors, see `Trainer::tensors`"));
        };
        let rank = lora.rank;
        let alpha = lora.alpha * if lora.rank_stabilized { (rank as f32).sqrt() } else { 1.0 };
        let pairs = self.params.slots().map(|slot| {
            let (a, b) = self.params.pair(slot);
            ((slot.layer, slot.target), Pair { rank, a: a.to_vec(), b: transposed(b, rank) })
        });
        Adapter::new(self.decoder.config().arch, alpha, Some(self.decoder.base_digest().into()), pairs)
    }

    /// Ends the run.
    ///
    /// # Errors
    /// As [`Trainer::adapter`].
    pub fn finish(self) -> Result<Adapter, ModelError> {
        self.adapter()
    }

    /// The trained whole tensors as they are now, row-major, by their names in a GGUF file; none in a run on adapters. See
    /// [`with_tensors`].
    #[must_use]
    pub fn tensors(&self) -> BTreeMap<String, Vec<f32>> {
        let mut out = BTreeMap::new();
        self.params.parts().for_each(|(part, values)| part.put(&self.decoder.weights, values, &mut out));
        out
    }

    /// The whole state of the run, for [`Trainer::restore`].
    #[must_use]
    pub fn save(&self) -> Vec<u8> {
        state::encode(&self.fingerprint, self.step, self.params.values(), &self.adam)
    }

    /// Continues from a state that the same decoder, configuration and samples made; the result is bit-equal to
    /// a run that was never interrupted.
    ///
    /// # Errors
    /// [`ModelError::State`] for damaged bytes or another run's state; nothing is changed then.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(), ModelError> {
        let (step, values, adam) = state::decode(bytes, &self.fingerprint, self.params.len())?;
        self.step = step;
        self.params.values_mut().copy_from_slice(&values);
        self.adam = adam;
        self.effective.update(&self.decoder.weights, &self.params, self.config.grid)?;
        Ok(())
    }

    fn learning_rate(&self) -> f32 {
        let c = &self.config;
        if self.step < c.warmup_steps {
            return c.learning_rate * (self.step + 1) as f32 / c.warmup_steps as f32;
        }
        match c.schedule {
            Schedule::Constant => c.learning_rate,
            Schedule::Cosine => {
                let span = c.steps.saturating_sub(c.warmup_steps).max(1) as f64;
                let part = ((self.step - c.warmup_steps) as f64 / span).min(1.0);
                (f64::from(c.learning_rate) * 0.5 * (1.0 + (std::f64::consts::PI * part).cos())) as f32
            }
        }
    }

    /// Indices of the samples of the coming step: every epoch is a shuffle of its own.
    #[must_use]
    pub fn next_samples(&self) -> Vec<usize> {
        let (n, batch) = (self.samples.len(), self.config.batch);
        let mut out = Vec::with_capacity(batch);
        let mut at = self.step * batch;
        while out.len() < batch {
            let order = shuffle(n, self.config.seed, (at / n) as u64);
            let take = (n - at % n).min(batch - out.len());
            out.extend_from_slice(&order[at % n..at % n + take]);
            at += take;
        }
        out
    }

    /// Cuts the batch into passes of at most `pass_tokens` rows.
    fn passes(&self, batch: &[usize]) -> Vec<Vec<usize>> {
        let mut passes: Vec<Vec<usize>> = Vec::new();
        for &i in batch {
            let fits = |pass: &Vec<usize>| {
                let with: Vec<&Sample> = pass.iter().chain([&i]).map(|i| &self.samples[*i]).collect();
                layout::rows(&with) <= self.config.pass_tokens
            };
            match passes.last_mut().filter(|pass| fits(pass)) {
                Some(pass) => pass.push(i),
                None => passes.push(vec![i]),
            }
        }
        passes
    }
}

fn not_finite(place: String) -> ModelError {
    ModelError::NotFinite { place, hint: "use a lower learning rate or clip the gradient" }
}

fn shuffle(n: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(params::STREAMS + epoch);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, rng.random_range(0..=i));
    }
    order
}

/// `rank × outputs` → `outputs × rank`.
fn transposed(b: &[f32], rank: usize) -> Vec<f32> {
    let outputs = b.len() / rank;
    (0..b.len()).map(|i| b[i % rank * outputs + i / rank]).collect()
}

#[cfg(test)]
mod tests;
