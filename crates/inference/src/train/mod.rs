//! LoRA training (arXiv 2106.09685): hand-written forward and backward passes over the frozen, packed weights.
//!
//! Only the adapter's matrices get gradients; a frozen layer needs no more than `dX = dY · W`. Several samples
//! are packed into one pass, each attending only to itself and to the beginning that all have in common, which is
//! computed once. With the same decoder, samples and configuration
//! every run gives the same bits, also when it was interrupted and resumed (docs/adr/004).

mod attention;
mod config;
mod gradients;
mod layout;
mod loss;
mod optimizer;
mod params;
mod pass;
mod state;

pub use config::{LoraConfig, Sample, Schedule, StepReport, TrainConfig};
pub use gradients::{MatrixGradient, matrix_gradients};

use crate::model::{Adapter, Decoder, ModelError, Pair};
use config::check;
use optimizer::Adam;
use params::Params;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::{ControlFlow, Range};

/// A training run.
#[derive(Debug)]
pub struct Trainer {
    decoder: Decoder,
    lora: LoraConfig,
    config: TrainConfig,
    samples: Vec<Sample>,
    params: Params,
    adam: Adam,
    step: usize,
    /// Digest of everything that decides the run's result; a saved state of another run is refused.
    fingerprint: [u8; 32],
}

impl Trainer {
    /// Prepares a run on `decoder`'s frozen weights (an adapter it carries is not used).
    ///
    /// # Errors
    /// [`ModelError::Input`] for samples or a configuration that cannot be trained, [`ModelError::Unsupported`] for a
    /// model with latent attention or experts.
    pub fn new(
        decoder: &Decoder,
        lora: LoraConfig,
        config: TrainConfig,
        samples: Vec<Sample>,
    ) -> Result<Self, ModelError> {
        check(&lora, &config)?;
        decoder.config().check_plain("training")?;
        if samples.is_empty() {
            return Err(ModelError::input("there are no training samples"));
        }
        for (i, sample) in samples.iter().enumerate() {
            decoder.check_tokens(&sample.tokens, &format!("sample {i}"))?;
            if sample.answer_from == 0 || sample.answer_from >= sample.tokens.len() {
                let what =
                    format!("sample {i}: the answer starts at token {} of {}", sample.answer_from, sample.tokens.len());
                return Err(ModelError::input(what));
            }
        }
        let params = Params::new(decoder.config(), &lora, config.seed);
        let adam = Adam::new(params.len());
        let fingerprint = state::fingerprint(decoder, &lora, &config, &samples);
        Ok(Self { decoder: decoder.clone(), lora, config, samples, params, adam, step: 0, fingerprint })
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
    /// [`ModelError::NotFinite`] naming the loss or the adapter tensor; the adapter keeps the values of before.
    pub fn step(&mut self) -> Result<StepReport, ModelError> {
        let batch = self.next_samples();
        let answer_tokens: usize = batch.iter().map(|i| self.answer(*i).len()).sum();
        let mut grads = vec![0.0; self.params.len()];
        let mut loss = 0.0f64;
        for (number, samples) in self.passes(&batch).into_iter().enumerate() {
            let texts: Vec<&Sample> = samples.iter().map(|i| &self.samples[*i]).collect();
            let pass = pass::Pass {
                weights: &self.decoder.weights,
                params: &self.params,
                dropout: self.lora.dropout,
                noise: [self.config.seed, self.step as u64, number as u64],
                observer: None,
            };
            loss += pass.run(&texts, 1.0 / answer_tokens as f32, &mut grads);
        }
        let loss = (loss / answer_tokens as f64) as f32;
        if !loss.is_finite() {
            return Err(not_finite(format!("the loss of step {}", self.step + 1)));
        }
        if let Some(tensor) = self.params.not_finite(&grads) {
            return Err(not_finite(format!("the gradient of `{tensor}` in step {}", self.step + 1)));
        }
        let norm = grads.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt() as f32;
        if let Some(limit) = self.config.clip_norm.filter(|limit| norm > *limit) {
            grads.iter_mut().for_each(|g| *g *= limit / norm);
        }
        let learning_rate = self.learning_rate();
        self.adam.update(&self.config, learning_rate, self.step + 1, &grads, self.params.values_mut());
        self.step += 1;
        let tokens = batch.iter().map(|i| self.samples[*i].tokens.len()).sum();
        Ok(StepReport { step: self.step, loss, grad_norm: norm, learning_rate, tokens, answer_tokens })
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
    /// [`ModelError::Adapter`] if a value is not finite.
    pub fn adapter(&self) -> Result<Adapter, ModelError> {
        let rank = self.lora.rank;
        let alpha = self.lora.alpha * if self.lora.rank_stabilized { (rank as f32).sqrt() } else { 1.0 };
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

    /// Samples of the coming step: every epoch is a shuffle of its own.
    fn next_samples(&self) -> Vec<usize> {
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

    fn answer(&self, sample: usize) -> Range<usize> {
        self.samples[sample].answer_from..self.samples[sample].tokens.len()
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
