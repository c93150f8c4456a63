//! How fast an engine runs a model on this machine. Numbers of a shared machine only compare inside one run.

use super::Engine;
use crate::model::{GenerateOptions, ModelError};
use serde::Serialize;
use std::{ops::ControlFlow, time::Duration};

/// The clock and memory reader that a measurement uses.
pub struct Probes<'a> {
    /// Time since any fixed moment, never going back.
    pub now: &'a mut dyn FnMut() -> Duration,
    /// Peak resident memory of this process, bytes, where the system tells.
    pub peak_rss_bytes: &'a mut dyn FnMut() -> Option<u64>,
}

/// Speed with one number of sequences together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SpeedReport {
    pub sequences: usize,
    /// Prompt tokens per second.
    pub prefill_tokens_per_s: f64,
    /// New tokens per second, all sequences together.
    pub decode_tokens_per_s: f64,
    /// Time until each sequence has its first token.
    pub first_token_ms: f64,
    pub peak_rss_bytes: Option<u64>,
}

/// Processes `sequences` different prompts of `prompt` tokens and generates `new` tokens for each.
///
/// # Errors
/// [`ModelError::Input`] for sizes of 0 or beyond the context, and those of generation.
pub fn speed(
    model: &dyn Engine,
    sequences: usize,
    prompt: usize,
    new: usize,
    probes: &mut Probes<'_>,
) -> Result<SpeedReport, ModelError> {
    if sequences == 0 || new < 2 {
        return Err(ModelError::input("a speed measurement needs a sequence and two new tokens"));
    }
    // Any tokens do; different first tokens keep prompts from sharing work.
    let vocab = model.vocab() as u32;
    let token = |s: usize, i: usize| (s as u32 * 101 + i as u32 * 37 + 17) % vocab;
    let prompts: Vec<Vec<u32>> = (0..sequences).map(|s| (0..prompt).map(|i| token(s, i)).collect()).collect();
    let mut timed = |max_new_tokens: usize| -> Result<f64, ModelError> {
        let options = GenerateOptions { max_new_tokens, max_batch: sequences, ..GenerateOptions::default() };
        let start = (probes.now)();
        model.generate(&prompts, &options, &mut |_, _| ControlFlow::Continue(()))?;
        Ok((probes.now)().saturating_sub(start).as_secs_f64().max(1e-9))
    };
    let first = timed(1)?;
    let whole = timed(new)?;
    Ok(SpeedReport {
        sequences,
        prefill_tokens_per_s: (sequences * prompt) as f64 / first,
        decode_tokens_per_s: (sequences * (new - 1)) as f64 / (whole - first).max(1e-9),
        first_token_ms: first * 1e3,
        peak_rss_bytes: (probes.peak_rss_bytes)(),
    })
}
