//! Generation for many prompts: continuous batching over a shared prefix.

use super::{
    Decoder, ModelError,
    forward::Step,
    kv::Sequence,
    sample::{Sampling, choose},
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
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
    pub sampling: Sampling,
    /// Sequences in work at the same time; bounds memory (each holds keys and values of its context).
    pub max_batch: usize,
}

impl Default for GenerateOptions {
    /// Greedy, 64 tokens, 32 sequences at a time, no stop token.
    fn default() -> Self {
        Self { max_new_tokens: 64, stop_ids: Vec::new(), sampling: Sampling::Greedy, max_batch: 32 }
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

/// A prompt in work.
struct Active {
    index: usize,
    cache: Sequence,
    /// Tokens to be processed next: the rest of the prompt, then the token just chosen.
    pending: Vec<u32>,
    tokens: Vec<u32>,
    rng: Option<ChaCha8Rng>,
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
        check_options(options)?;
        for (i, prompt) in prompts.iter().enumerate() {
            self.check_tokens(prompt, &format!("prompt {i}"))?;
        }
        let mut results: Vec<Option<Generated>> = vec![None; prompts.len()];
        let root = self.shared_prefix(prompts);
        let mut waiting = prompts.iter().enumerate();
        let mut active: Vec<Active> = Vec::new();
        loop {
            while active.len() < options.max_batch {
                let Some((index, prompt)) = waiting.next() else {
                    break;
                };
                active.push(Active {
                    index,
                    cache: root.clone(),
                    pending: prompt[root.len()..].to_vec(),
                    tokens: Vec::new(),
                    rng: rng(&options.sampling, index),
                });
            }
            if active.is_empty() {
                break;
            }
            for (position, stop) in self.round(&mut active, options)?.into_iter().rev() {
                let done = active.remove(position);
                let text = Generated { tokens: done.tokens, stop };
                if watch(done.index, &text).is_break() {
                    return Err(ModelError::Cancelled);
                }
                results[done.index] = Some(text);
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
        check_options(options)?;
        self.check_tokens(prompt, "the prompt")?;
        let cache = self.new_sequence();
        let rng = rng(&options.sampling, 0);
        let mut active = [Active { index: 0, cache, pending: prompt.to_vec(), tokens: Vec::new(), rng }];
        loop {
            let before = active[0].tokens.len();
            let ended = self.round(&mut active, options)?;
            if let Some(token) = active[0].tokens.get(before)
                && see(*token).is_break()
            {
                return Err(ModelError::Cancelled);
            }
            if let Some((_, stop)) = ended.first() {
                return Ok(Generated { tokens: std::mem::take(&mut active[0].tokens), stop: *stop });
            }
        }
    }

    /// One pass: a piece of the waiting prompts, or a token for every sequence. Returns what ended, by
    /// rising position in `active`.
    fn round(&self, active: &mut [Active], options: &GenerateOptions) -> Result<Vec<(usize, Stop)>, ModelError> {
        let mut budget = PREFILL_TOKENS.max(active.len());
        let mut takes = Vec::with_capacity(active.len());
        for (i, a) in active.iter().enumerate() {
            let later = active.len() - i - 1; // one token is reserved for each sequence that follows
            let take = a.pending.len().min(budget.saturating_sub(later).max(1));
            budget -= take.min(budget);
            takes.push(take);
        }
        let pieces: Vec<Vec<u32>> =
            active.iter_mut().zip(&takes).map(|(a, take)| a.pending.drain(..*take).collect()).collect();
        let mut steps: Vec<Step<'_>> =
            active.iter_mut().zip(&pieces).map(|(a, tokens)| Step { cache: &mut a.cache, tokens }).collect();
        let hidden = self.advance(&mut steps);
        let width = self.config().width;
        let (mut last_rows, mut ready, mut row) = (Vec::new(), Vec::new(), 0);
        for (i, take) in takes.iter().enumerate() {
            row += take;
            if active[i].pending.is_empty() {
                last_rows.extend_from_slice(&hidden[(row - 1) * width..row * width]);
                ready.push(i);
            }
        }
        let mut logits = self.logits_of(&last_rows, ready.len())?;
        let mut ended = Vec::new();
        for (i, row) in ready.into_iter().zip(logits.chunks_exact_mut(self.config().vocab)) {
            let a = &mut active[i];
            let token = choose(row, &options.sampling, a.rng.as_mut());
            if options.stop_ids.contains(&token) {
                ended.push((i, Stop::Token(token)));
                continue;
            }
            a.tokens.push(token);
            a.pending.push(token);
            if a.tokens.len() == options.max_new_tokens || a.cache.len() == self.config().context {
                ended.push((i, Stop::Length));
            }
        }
        Ok(ended)
    }

    /// The cache of the common beginning of all prompts; at least one token of each prompt stays out of it.
    fn shared_prefix(&self, prompts: &[Vec<u32>]) -> Sequence {
        let mut root = self.new_sequence();
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

fn rng(sampling: &Sampling, index: usize) -> Option<ChaCha8Rng> {
    match sampling {
        Sampling::Greedy => None,
        Sampling::TopP { seed, .. } => {
            let mut rng = ChaCha8Rng::seed_from_u64(*seed);
            rng.set_stream(index as u64);
            Some(rng)
        }
    }
}

fn check_options(options: &GenerateOptions) -> Result<(), ModelError> {
    if options.max_new_tokens == 0 || options.max_batch == 0 {
        return Err(ModelError::input("max_new_tokens and max_batch must be at least 1"));
    }
    if let Sampling::TopP { temperature, top_p, .. } = options.sampling
        && !(temperature.is_finite() && temperature > 0.0 && top_p > 0.0 && top_p <= 1.0)
    {
        let what = format!("temperature {temperature} must be above 0 and top_p {top_p} in 0..=1");
        return Err(ModelError::input(what));
    }
    Ok(())
}
