//! The scheduler: requests that come and go, processed together in one pass as far as they can be.
//!
//! Every pass takes one token of each sequence that is decoding and pieces of the prompts that wait (continuous
//! batching). A pass has one set of weights, so requests with different adapters are never in the same pass: adapters
//! take turns. What a request gets does not depend on the others.

use super::{
    Adapter, Decoder, Generated, ModelError, Sampling, Stop,
    forward::Step,
    kv::{KvType, PAGE, Sequence},
    prefix::PrefixCache,
    sample::draw,
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, VecDeque};

/// Prompt tokens processed in one pass, so that activations stay small.
const PREFILL_TOKENS: usize = 512;

/// Limits of a [`Scheduler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeOptions {
    /// Sequences in work at the same time; bounds memory (each holds keys and values of its context).
    pub max_batch: usize,
    /// How keys and values are kept.
    pub cache: KvType,
    /// Pages (of 64 tokens) of finished prompts kept for later requests with the same beginning, per adapter.
    pub prefix_pages: usize,
}

impl Default for ServeOptions {
    /// 32 sequences, 8-bit keys and values, 256 pages.
    fn default() -> Self {
        Self { max_batch: 32, cache: KvType::Q8_0, prefix_pages: 256 }
    }
}

/// A text to be continued.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Name of an adapter given to [`Scheduler::add_adapter`]; `None`: the model as it is.
    pub adapter: Option<String>,
    /// Most tokens generated.
    pub max_new_tokens: usize,
    /// Tokens that end the text; they are not part of it.
    pub stop_ids: Vec<u32>,
    pub sampling: Sampling,
    /// Which stream of random numbers of the seed.
    pub stream: u64,
}

/// Number of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What a pass brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Token { request: RequestId, token: u32 },
    Done { request: RequestId, generated: Generated },
}

/// A request in work.
#[derive(Debug)]
struct Active {
    id: RequestId,
    request: Request,
    cache: Sequence,
    /// Tokens to be processed next: the rest of the prompt, then the token just chosen.
    pending: Vec<u32>,
    /// Prompt and generated tokens.
    text: Vec<u32>,
    rng: ChaCha8Rng,
}

impl Active {
    fn new_tokens(&self) -> &[u32] {
        &self.text[self.request.prompt.len()..]
    }
    fn in_prompt(&self) -> bool {
        self.cache.len() < self.request.prompt.len()
    }
}

/// A model (with or without an adapter) and the prompts it has seen.
#[derive(Debug)]
struct Variant {
    decoder: Decoder,
    prefixes: PrefixCache,
}

/// Runs many requests on one model and its adapters.
#[derive(Debug)]
pub struct Scheduler {
    options: ServeOptions,
    variants: BTreeMap<Option<String>, Variant>,
    waiting: VecDeque<(RequestId, Request, Option<Sequence>)>,
    active: Vec<Active>,
    /// Whose pass was last.
    turn: Option<Option<String>>,
    next: u64,
}

impl Scheduler {
    /// # Errors
    /// [`ModelError::Input`] for a batch of 0.
    pub fn new(decoder: Decoder, options: ServeOptions) -> Result<Self, ModelError> {
        if options.max_batch == 0 {
            return Err(ModelError::input("max_batch must be at least 1"));
        }
        let mut this = Self {
            options,
            variants: BTreeMap::new(),
            waiting: VecDeque::new(),
            active: Vec::new(),
            turn: None,
            next: 0,
        };
        this.add(None, decoder);
        Ok(this)
    }

    fn add(&mut self, name: Option<String>, decoder: Decoder) {
        self.variants.insert(name, Variant { decoder, prefixes: PrefixCache::new(self.options.prefix_pages) });
    }

    /// Makes an adapter available under `name`.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] if it was trained on another base or does not fit, or the name is taken.
    pub fn add_adapter(&mut self, name: &str, adapter: &Adapter) -> Result<(), ModelError> {
        let key = Some(name.to_owned());
        if self.variants.contains_key(&key) {
            return Err(ModelError::adapter(format!("the name `{name}` is taken")));
        }
        let Some(base) = self.variants.get(&None) else { return Ok(()) };
        let adapted = base.decoder.with_adapter(adapter)?;
        self.add(key, adapted);
        Ok(())
    }

    /// Takes a request; it starts as soon as there is room.
    ///
    /// # Errors
    /// [`ModelError::Input`] for a prompt or options that cannot be run, [`ModelError::Adapter`] for an unknown name.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, ModelError> {
        self.submit_after(request, None)
    }

    /// The same for a prompt whose first tokens are in `root` already.
    pub(super) fn submit_after(&mut self, request: Request, root: Option<Sequence>) -> Result<RequestId, ModelError> {
        let Some(variant) = self.variants.get(&request.adapter) else {
            let name = request.adapter.unwrap_or_default();
            return Err(ModelError::adapter(format!("`{name}` is not loaded; add it first")));
        };
        if request.max_new_tokens == 0 {
            return Err(ModelError::input("max_new_tokens must be at least 1"));
        }
        request.sampling.check()?;
        variant.decoder.check_tokens(&request.prompt, "the prompt")?;
        let id = RequestId(self.next);
        self.next += 1;
        self.waiting.push_back((id, request, root));
        Ok(id)
    }

    /// Drops a request; `false` if it is not known (any more).
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let before = self.waiting.len() + self.active.len();
        self.waiting.retain(|(id, _, _)| *id != request);
        self.active.retain(|a| a.id != request);
        self.waiting.len() + self.active.len() < before
    }

    /// Requests that are not done.
    #[must_use]
    pub fn open_requests(&self) -> usize {
        self.waiting.len() + self.active.len()
    }

    /// One pass. Without an open request there is nothing to do and nothing comes of it.
    ///
    /// # Errors
    /// [`ModelError::NotFinite`]; the requests of that pass are dropped.
    pub fn step(&mut self) -> Result<Vec<Event>, ModelError> {
        self.admit();
        let Some(group) = self.next_group() else { return Ok(Vec::new()) };
        let Some(variant) = self.variants.get_mut(&group) else { return Ok(Vec::new()) };
        let (mut batch, others): (Vec<Active>, Vec<Active>) =
            std::mem::take(&mut self.active).into_iter().partition(|a| a.request.adapter == group);
        self.active = others;
        let (events, ended) = pass(&variant.decoder, &mut batch)?;
        for a in &mut batch {
            if a.cache.len() <= a.request.prompt.len() {
                variant.prefixes.insert(&a.text[..a.cache.len()], a.cache.full_pages());
            }
        }
        let mut position = 0;
        batch.retain(|a| {
            position += 1;
            let done = ended.contains(&(position - 1));
            if done {
                variant.prefixes.insert(&a.text[..a.cache.len()], a.cache.full_pages());
            }
            !done
        });
        self.active.append(&mut batch);
        self.active.sort_by_key(|a| a.id);
        self.turn = Some(group);
        Ok(events)
    }

    /// Starts waiting requests while there is room. One whose beginning is being computed for another waits for it.
    fn admit(&mut self) {
        while self.active.len() < self.options.max_batch {
            let Some((_, request, root)) = self.waiting.front() else { return };
            let Some(variant) = self.variants.get_mut(&request.adapter) else { return };
            let prompt = &request.prompt;
            // The last token of a prompt is always processed: its logits are wanted.
            let before_last = &prompt[..prompt.len() - 1];
            let cache = match root {
                Some(root) => root.clone(),
                None => {
                    let pages = variant.prefixes.find(before_last);
                    let common = |a: &&Active| {
                        let n = before_last.iter().zip(&a.request.prompt).take_while(|(x, y)| x == y).count();
                        a.request.adapter == request.adapter && a.in_prompt() && n / PAGE > pages.len()
                    };
                    if self.options.prefix_pages > 0 && self.active.iter().any(|a| common(&a)) {
                        return;
                    }
                    variant.decoder.sequence_of_pages(self.options.cache, pages)
                }
            };
            let Some((id, request, _)) = self.waiting.pop_front() else { return };
            let mut rng = ChaCha8Rng::seed_from_u64(request.sampling.seed);
            rng.set_stream(request.stream);
            self.active.push(Active {
                id,
                pending: request.prompt[cache.len()..].to_vec(),
                text: request.prompt.clone(),
                request,
                cache,
                rng,
            });
        }
    }

    /// The next adapter, in order of names, that has something to do.
    fn next_group(&self) -> Option<Option<String>> {
        let groups: std::collections::BTreeSet<&Option<String>> =
            self.active.iter().map(|a| &a.request.adapter).collect();
        let after = groups.iter().find(|g| self.turn.as_ref().is_none_or(|t| t < **g));
        after.or(groups.first()).map(|g| (**g).clone())
    }
}

/// One pass over `active`: a piece of the prompts that wait, and a token for every sequence. Returns what came of it
/// and the positions of what ended.
fn pass(decoder: &Decoder, active: &mut [Active]) -> Result<(Vec<Event>, Vec<usize>), ModelError> {
    let mut budget = PREFILL_TOKENS.max(active.len());
    let mut pieces: Vec<Vec<u32>> = Vec::with_capacity(active.len());
    let n = active.len();
    for (i, a) in active.iter_mut().enumerate() {
        let later = n - i - 1; // one token is reserved for each sequence that follows
        let take = a.pending.len().min(budget.saturating_sub(later).max(1));
        budget -= take.min(budget);
        pieces.push(a.pending.drain(..take).collect());
    }
    let mut steps: Vec<Step<'_>> =
        active.iter_mut().zip(&pieces).map(|(a, tokens)| Step { cache: &mut a.cache, tokens }).collect();
    let hidden = decoder.advance(&mut steps);
    let width = decoder.config().width;
    let (mut last_rows, mut ready, mut row) = (Vec::new(), Vec::new(), 0);
    for (i, piece) in pieces.iter().enumerate() {
        row += piece.len();
        if active[i].pending.is_empty() {
            last_rows.extend_from_slice(&hidden[(row - 1) * width..row * width]);
            ready.push(i);
        }
    }
    let mut logits = decoder.logits_of(&last_rows, ready.len())?;
    let (mut events, mut ended) = (Vec::new(), Vec::new());
    for (i, row) in ready.into_iter().zip(logits.chunks_exact_mut(decoder.config().vocab)) {
        let a = &mut active[i];
        let distribution = a.request.sampling.distribution(row, &a.text);
        let token = draw(&distribution, &mut a.rng);
        let stop = if a.request.stop_ids.contains(&token) {
            Some(Stop::Token(token))
        } else {
            a.text.push(token);
            a.pending.push(token);
            events.push(Event::Token { request: a.id, token });
            let full = a.new_tokens().len() == a.request.max_new_tokens || a.cache.len() == decoder.config().context;
            full.then_some(Stop::Length)
        };
        if let Some(stop) = stop {
            let generated = Generated { tokens: a.new_tokens().to_vec(), stop };
            events.push(Event::Done { request: a.id, generated });
            ended.push(i);
        }
    }
    Ok((events, ended))
}

#[cfg(test)]
mod tests;
