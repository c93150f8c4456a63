//! The phones' own engine, llama.cpp, as a back end of evaluation (cargo feature `llama-cpp`): what a candidate does where it
//! will run, beside what our decoder says. Keys and values are kept as a phone keeps them, in half precision, unless
//! [`GenerateOptions::cache`] says otherwise.

use super::engine::{Engine, GeneratedWatch};
use crate::gguf::Gguf;
use crate::linalg::log_sum_exp;
use crate::model::{
    Adapter, GenerateOptions, Generated, KvType, LogitVisitor, ModelError, Sampling, Stop, argmax, base_digest,
};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::{KvCacheType, LlamaContextParams};
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::model::{LlamaLoraAdapter, LlamaModel};
use llama_cpp_2::token::LlamaToken;
use std::num::NonZeroU32;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Tokens in one pass.
const PASS_TOKENS: usize = 512;

/// A model that llama.cpp runs.
pub struct LlamaCpp {
    // Freed before the model it belongs to. The lock is also held while a context is made, which llama.cpp does not allow
    // twice at a time for a model.
    adapter: Mutex<Option<LlamaLoraAdapter>>,
    model: LlamaModel,
    file: Gguf,
    digest: OnceLock<String>,
    vocab: usize,
    context: usize,
    threads: i32,
}

impl std::fmt::Debug for LlamaCpp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LlamaCpp").field("vocab", &self.vocab).field("context", &self.context).finish_non_exhaustive()
    }
}

/// llama.cpp can be started once in a process. Its log is dropped: what it says of a model, our reader said before.
fn backend() -> Result<&'static LlamaBackend, ModelError> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    let start = || {
        let mut backend = LlamaBackend::init().map_err(|e| e.to_string())?;
        backend.void_logs();
        Ok(backend)
    };
    BACKEND.get_or_init(start).as_ref().map_err(|e: &String| failed("starting", e))
}

fn failed(doing: &str, e: impl std::fmt::Display) -> ModelError {
    ModelError::input(format!("llama.cpp failed at {doing}: {e}"))
}

/// Numbers of llama.cpp are `i32`; tokens and positions were checked against the vocabulary and the context.
fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl LlamaCpp {
    /// Opens a GGUF file (the first shard of several) and, if one is given, an adapter for it in a GGUF file.
    ///
    /// # Errors
    /// [`ModelError::Gguf`] for what our reader refuses, [`ModelError::Adapter`] for an adapter of another base or in another
    /// form, [`ModelError::Unsupported`] for what llama.cpp does not load.
    pub fn open(path: &Path, adapter: Option<&Path>) -> Result<Self, ModelError> {
        let file = Gguf::open(path)?;
        let digest = OnceLock::new();
        if let Some(path) = adapter {
            if path.is_dir() {
                let what = format!("{} is a folder; llama.cpp takes adapters as GGUF files", path.display());
                return Err(ModelError::adapter(what));
            }
            // llama.cpp itself takes every adapter whose shapes fit
            Adapter::from_gguf(&Gguf::open(path)?)?.check_base(digest.get_or_init(|| base_digest(&file)))?;
        }
        let unsupported = |path: &Path, e: &dyn std::fmt::Display| {
            ModelError::unsupported(format!("llama.cpp does not load {}: {e}", path.display()))
        };
        let params = LlamaModelParams::default();
        let mut model = LlamaModel::load_from_file(backend()?, path, &params).map_err(|e| unsupported(path, &e))?;
        let adapter =
            adapter.map(|path| model.lora_adapter_init(path).map_err(|e| unsupported(path, &e))).transpose()?;
        let threads = std::thread::available_parallelism().map_or(1, |n| int(n.get()));
        Ok(Self {
            vocab: usize::try_from(model.n_vocab()).unwrap_or(0),
            context: model.n_ctx_train() as usize,
            adapter: Mutex::new(adapter),
            model,
            file,
            digest,
            threads,
        })
    }

    fn check(&self, tokens: &[u32], more: usize, what: &str) -> Result<(), ModelError> {
        if tokens.is_empty() {
            return Err(ModelError::input(format!("{what} has no tokens")));
        }
        if let Some(t) = tokens.iter().find(|t| **t as usize >= self.vocab) {
            return Err(ModelError::input(format!("{what}: token {t} of a vocabulary of {}", self.vocab)));
        }
        if tokens.len() + more > self.context {
            let n = tokens.len() + more;
            return Err(ModelError::input(format!("{what} is {n} tokens; the model's context is {}", self.context)));
        }
        Ok(())
    }

    /// For `sequences` of at most `tokens` each.
    fn session(&self, tokens: usize, sequences: usize, cache: KvType) -> Result<Session<'_>, ModelError> {
        let cache = match cache {
            KvType::F16 => KvCacheType::F16,
            KvType::Q8_0 => KvCacheType::Q8_0,
        };
        // llama.cpp gives each sequence a part of the context, in steps of 256
        let all = tokens.next_multiple_of(256) * sequences;
        let size = u32::try_from(all).ok().and_then(NonZeroU32::new);
        let size = size.ok_or_else(|| ModelError::input(format!("a context of {all} tokens")))?;
        let params = LlamaContextParams::default()
            .with_n_ctx(Some(size))
            .with_n_batch(PASS_TOKENS as u32)
            .with_n_ubatch(PASS_TOKENS as u32)
            .with_n_seq_max(sequences as u32)
            .with_n_threads(self.threads)
            .with_n_threads_batch(self.threads)
            .with_type_k(cache)
            .with_type_v(cache);
        let mut adapter = self.adapter.lock().unwrap_or_else(PoisonError::into_inner);
        let mut context = self.model.new_context(backend()?, params).map_err(|e| failed("making a context", e))?;
        if let Some(adapter) = adapter.as_mut() {
            context.lora_adapter_set(adapter, 1.0).map_err(|e| failed("applying the adapter", e))?;
        }
        Ok(Session { context, batch: LlamaBatch::new(PASS_TOKENS, 1) })
    }
}

/// Tokens of one sequence.
struct Run<'a> {
    sequence: i32,
    /// Position of the first token.
    start: usize,
    tokens: &'a [u32],
    /// Positions whose logits are wanted.
    wanted: Range<usize>,
}

struct Session<'m> {
    context: LlamaContext<'m>,
    batch: LlamaBatch<'static>,
}

impl Session<'_> {
    /// Runs tokens after what the sequence holds already.
    fn run(&mut self, run: Run<'_>, visit: &mut LogitVisitor<'_>) -> Result<(), ModelError> {
        for (i, piece) in run.tokens.chunks(PASS_TOKENS).enumerate() {
            let first = run.start + i * PASS_TOKENS;
            let rows: Vec<_> =
                (first..).zip(piece).map(|(p, t)| (run.sequence, p, *t, run.wanted.contains(&p))).collect();
            self.pass(&rows, &mut |row, logits| visit(first + row, logits))?;
        }
        Ok(())
    }

    /// One pass over rows of (sequence, position, token, whether its logits are wanted); `visit` sees the row's number.
    fn pass(&mut self, rows: &[(i32, usize, u32, bool)], visit: &mut LogitVisitor<'_>) -> Result<(), ModelError> {
        self.batch.clear();
        for (sequence, position, token, wanted) in rows {
            let token = LlamaToken(int(*token as usize));
            let added = self.batch.add(token, int(*position), &[*sequence], *wanted);
            added.map_err(|e| failed("collecting tokens", e))?;
        }
        self.context.decode(&mut self.batch).map_err(|e| failed("running the model", e))?;
        for (i, (_, position, _, _)) in rows.iter().enumerate().filter(|(_, row)| row.3) {
            let logits = self.context.get_logits_ith(int(i));
            if !logits.iter().all(|l| l.is_finite()) {
                let place = format!("logits at position {position}");
                return Err(ModelError::NotFinite {
                    place,
                    hint: "llama.cpp left the range of numbers; check the weights",
                });
            }
            visit(i, logits)?;
        }
        Ok(())
    }
}

impl Engine for LlamaCpp {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn base_digest(&self) -> &str {
        self.digest.get_or_init(|| base_digest(&self.file))
    }

    fn visit_logits(
        &self,
        tokens: &[u32],
        positions: Range<usize>,
        visit: &mut LogitVisitor<'_>,
    ) -> Result<(), ModelError> {
        self.check(tokens, 0, "the text")?;
        if positions.end > tokens.len() {
            let what = format!("position {} of a text of {} tokens", positions.end - 1, tokens.len());
            return Err(ModelError::input(what));
        }
        let tokens = &tokens[..positions.end];
        self.session(tokens.len(), 1, KvType::F16)?.run(Run { sequence: 0, start: 0, tokens, wanted: positions }, visit)
    }

    fn option_log_likelihoods(&self, prompt: &[u32], options: &[Vec<u32>]) -> Result<Vec<f64>, ModelError> {
        self.check(prompt, 0, "the prompt")?;
        for (i, option) in options.iter().enumerate() {
            self.check(option, prompt.len(), &format!("option {i} with its prompt"))?;
        }
        let longest = options.iter().map(Vec::len).max().unwrap_or(0);
        let mut session = self.session(prompt.len() + longest, 1, KvType::F16)?;
        let mut first = Vec::new();
        let run = Run { sequence: 0, start: 0, tokens: prompt, wanted: prompt.len() - 1..prompt.len() };
        session.run(run, &mut |_, row| {
            first = row.to_vec();
            Ok(())
        })?;
        let likely = |row: &[f32], target: u32| f64::from(row[target as usize]) - f64::from(log_sum_exp(row));
        let mut out = Vec::with_capacity(options.len());
        for option in options {
            let mut sum = likely(&first, option[0]);
            let end = prompt.len() + option.len() - 1;
            let (tokens, wanted) = (&option[..option.len() - 1], prompt.len()..end);
            session.run(Run { sequence: 0, start: prompt.len(), tokens, wanted }, &mut |position, row| {
                sum += likely(row, option[position - prompt.len() + 1]);
                Ok(())
            })?;
            out.push(sum);
            let kept = session.context.clear_kv_cache_seq(Some(0), u32::try_from(prompt.len()).ok(), None);
            if !kept.map_err(|e| failed("going back to the prompt", e))? {
                return Err(failed("going back to the prompt", "this kind of model cannot forget a part of its text"));
            }
        }
        Ok(out)
    }

    /// Greedy only: what is drawn at random would not compare between engines.
    fn generate(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        watch: &mut GeneratedWatch<'_>,
    ) -> Result<Vec<Generated>, ModelError> {
        if !options.sampling.is_greedy() || options.sampling.repeat_penalty != Sampling::GREEDY.repeat_penalty {
            return Err(ModelError::input("llama.cpp as a back end generates greedily, without a penalty"));
        }
        for (i, prompt) in prompts.iter().enumerate() {
            self.check(prompt, 0, &format!("prompt {i}"))?;
        }
        if options.max_new_tokens == 0 {
            return Err(ModelError::input("max_new_tokens must be at least 1"));
        }
        let mut out = Vec::with_capacity(prompts.len());
        for together in prompts.chunks(options.max_batch.clamp(1, PASS_TOKENS)) {
            for generated in self.generate_together(together, options)? {
                if watch(out.len(), &generated).is_break() {
                    return Err(ModelError::Cancelled);
                }
                out.push(generated);
            }
        }
        Ok(out)
    }
}

/// A text in work.
struct Text {
    /// Tokens of the prompt.
    prompt: usize,
    tokens: Vec<u32>,
    stop: Option<Stop>,
}

impl Text {
    /// Takes the token after a row of logits.
    fn take(&mut self, logits: &[f32], options: &GenerateOptions, context: usize) {
        let token = argmax(logits) as u32;
        if options.stop_ids.contains(&token) {
            self.stop = Some(Stop::Token(token));
            return;
        }
        self.tokens.push(token);
        if self.tokens.len() >= options.max_new_tokens || self.prompt + self.tokens.len() > context {
            self.stop = Some(Stop::Length);
        }
    }
}

impl LlamaCpp {
    fn generate_together(&self, prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Vec<Generated>, ModelError> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let size = (longest + options.max_new_tokens).min(self.context);
        let mut session = self.session(size, prompts.len(), options.cache)?;
        let mut texts = Vec::with_capacity(prompts.len());
        for (sequence, prompt) in (0..).zip(prompts) {
            let mut text = Text { prompt: prompt.len(), tokens: Vec::new(), stop: None };
            let run = Run { sequence, start: 0, tokens: prompt, wanted: prompt.len() - 1..prompt.len() };
            session.run(run, &mut |_, row| {
                text.take(row, options, self.context);
                Ok(())
            })?;
            texts.push(text);
        }
        loop {
            let open: Vec<usize> = (0..texts.len()).filter(|i| texts[*i].stop.is_none()).collect();
            if open.is_empty() {
                break;
            }
            let row = |i: &usize| {
                let text = &texts[*i];
                (int(*i), text.prompt + text.tokens.len() - 1, text.tokens.last().copied().unwrap_or(0), true)
            };
            let rows: Vec<_> = open.iter().map(row).collect();
            session.pass(&rows, &mut |at, logits| {
                texts[open[at]].take(logits, options, self.context);
                Ok(())
            })?;
        }
        let done = texts.into_iter().map(|t| Generated { tokens: t.tokens, stop: t.stop.unwrap_or(Stop::Length) });
        Ok(done.collect())
    }
}

#[cfg(test)]
#[path = "llama_cpp_tests.rs"]
mod tests;
