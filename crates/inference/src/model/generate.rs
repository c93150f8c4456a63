//! Generation for many prompts at once, on a [`Scheduler`] of their own.

use super::{
    Decoder, Event, KvType, ModelError, Request, Sampling, Scheduler, ServeOptions, forward::Step, kv::Sequence,
};
use std::ops::ControlFlow;

/// Prompt tokens processed in one pass, so that activations stay small.
const PREFILL_TOKENS: usize = 512;
/// A common beginning shorter than this is not worth a pass of its own.
const SHARED_PREFIX_MIN: usize = 16;

/// What to generate and when to stop.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Most tokens generated for a prompt.
    pub max_new_tokens: usize,
    /// Tokens that end a text; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// Each prompt has its own random stream, derived from the seed and its index.
    pub sampling: Sampling,
    /// Sequences in work at the same time; bounds memory (each holds keys and values of its context).
    pub max_batch: usize,
    /// How keys and values are kept.
    pub cache: KvType,
}

impl Default for GenerateOptions {
    /// Greedy, 64 tokens, 32 sequences at a time, no stop token, 8-bit keys and values.
    fn default() -> Self {
        Self {
            max_new_tokens: 64,
            stop_ids: Vec::new(),
            sampling: Sampling::GREEDY,
            max_batch: 32,
            cache: KvType::default(),
        }
    }
}

impl GenerateOptions {
    fn request(&self, prompt: &[u32], stream: u64) -> Request {
        Request {
            prompt: prompt.to_vec(),
            adapter: None,
            max_new_tokens: self.max_new_tokens,
            stop_ids: self.stop_ids.clone(),
            sampling: self.sampling,
            stream,
        }
    }
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// At this stop token.
    Token(u32),
    /// At `max_new_tokens` or the end of the model's context.
    Length,
}

/// One generated text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// New tokens, without the stop token.
    pub tokens: Vec<u32>,
    pub stop: Stop,
}

impl Decoder {
    /// Generates for all prompts; results in their order. Prompts are processed together, finished ones make
    /// room for the next, a common beginning is processed once; none of this changes a result.
    ///
    /// # Errors
    /// [`ModelError::Input`] for an empty or too long prompt, an unknown token or a senseless option;
    /// [`ModelError::NotFinite`].
    pub fn generate_batch(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
    ) -> Result<Vec<Generated>, ModelError> {
        self.generate_batch_watched(prompts, options, &mut |_, _| ControlFlow::Continue(()))
    }

    /// The same; `watch` sees every finished text with the index of its prompt, in order of completion, and can
    /// stop the work.
    ///
    /// # Errors
    /// As [`Decoder::generate_batch`], and [`ModelError::Cancelled`].
    pub fn generate_batch_watched(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        watch: &mut dyn FnMut(usize, &Generated) -> ControlFlow<()>,
    ) -> Result<Vec<Generated>, ModelError> {
        for (i, prompt) in prompts.iter().enumerate() {
            self.check_tokens(prompt, &format!("prompt {i}"))?;
        }
        let mut scheduler = self.scheduler(options)?;
        options.sampling.check()?;
        let root = self.shared_prefix(prompts, options.cache);
        for (stream, prompt) in (0u64..).zip(prompts) {
            scheduler.submit_after(options.request(prompt, stream), Some(root.clone()))?;
        }
        let mut results: Vec<Option<Generated>> = vec![None; prompts.len()];
        while scheduler.open_requests() > 0 {
            for event in scheduler.step()? {
                let Event::Done { request, generated } = event else { continue };
                let index = request.0 as usize; // requests are numbered in the order of the prompts
                if watch(index, &generated).is_break() {
                    return Err(ModelError::Cancelled);
                }
                results[index] = Some(generated);
            }
        }
        Ok(results.into_iter().flatten().collect())
    }

    /// Generates for one prompt; `see` gets every token as soon as it is chosen and can stop.
    ///
    /// # Errors
    /// As [`Decoder::generate_batch`], and [`ModelError::Cancelled`].
    pub fn generate_stream(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        see: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, ModelError> {
        let mut scheduler = self.scheduler(options)?;
        scheduler.submit(options.request(prompt, 0))?;
        loop {
            for event in scheduler.step()? {
                match event {
                    Event::Token { token, .. } if see(token).is_break() => return Err(ModelError::Cancelled),
                    Event::Token { .. } => {}
                    Event::Done { generated, .. } => return Ok(generated),
                }
            }
        }
    }

    /// A scheduler for requests with these options.
    fn scheduler(&self, options: &GenerateOptions) -> Result<Scheduler, ModelError> {
        let serve = ServeOptions { max_batch: options.max_batch, cache: options.cache, prefix_pages: 0 };
        Scheduler::new(self.clone(), serve)
    }

    /// The cache of the common beginning of all prompts; at least one token of each prompt stays out of it.
    fn shared_prefix(&self, prompts: &[Vec<u32>], cache: KvType) -> Sequence {
        let mut root = self.new_sequence_of(cache);
        let (Some(first), true) = (prompts.first(), prompts.len() > 1) else {
            return root;
        };
        let mut common = prompts.iter().map(Vec::len).min().unwrap_or(0).saturating_sub(1);
        for prompt in prompts {
            common = first.iter().zip(prompt).take(common).take_while(|(a, b)| a == b).count();
        }
        if common >= SHARED_PREFIX_MIN {
            for piece in first[..common].chunks(PREFILL_TOKENS) {
                self.advance(&mut [Step { cache: &mut root, tokens: piece }]);
            }
        }
        root
    }
}
