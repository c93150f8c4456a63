//! Speed by formula: a roofline (Williams, Waterman and Patterson, CACM 52, 2009) for the two phases of a decoder.
//!
//! Every part of a pass takes the longer of the time to move its bytes and the time of its multiply-adds:
//!
//! - a linear layer of `n` weights over `m` tokens: all its bytes once, `n·m` multiply-adds; of experts those that one token
//!   goes through (more tokens touch more of them, so their prefill is a bound);
//! - attention of `m` tokens on `c` in the cache: `2·kv_width·2` bytes and `2·q_width` multiply-adds a layer for every
//!   pair of a token and what it sees;
//! - the output layer runs for the last token only.
//!
//! The rest (norms, activations, sampling) is left out, so a real runtime is somewhat slower.

use crate::linalg::{Packed, Storage};
use crate::model::{ModelConfig, ModelError};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a class of devices can do at most, all threads together. Measured with the runtime's own loops (as
/// [`measure_ceilings`] does) the prediction is close; from a data sheet it is a bound.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceClass {
    pub name: String,
    /// Memory to arithmetic, bytes a second.
    pub bytes_per_s: f64,
    /// Multiply-adds a second.
    pub multiply_adds_per_s: f64,
}

/// A model as the device reads it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoredModel<'a> {
    pub config: &'a ModelConfig,
    /// Mean bytes of a weight of the linear layers: bits per weight of the file over 8, or 2 for this crate's f16.
    pub bytes_per_weight: f64,
    /// Prompt tokens processed together.
    pub pass_tokens: usize,
}

/// What limits a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    Memory,
    Compute,
}

/// Predicted speed of one sequence.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    pub device_class: String,
    pub prompt_tokens: usize,
    /// Time to the first token.
    pub ttft_ms: f64,
    pub prefill_tokens_per_s: f64,
    /// While the tokens after the prompt are made.
    pub decode_tokens_per_s: f64,
    /// Read for the first token after the prompt.
    pub bytes_per_token: f64,
    pub multiply_adds_per_token: f64,
    pub prefill_bound: Bound,
    pub decode_bound: Bound,
}

/// Bytes and multiply-adds of a part of a pass.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    bytes: f64,
    multiply_adds: f64,
}

impl Cost {
    fn seconds(self, device: &DeviceClass) -> f64 {
        (self.bytes / device.bytes_per_s).max(self.multiply_adds / device.multiply_adds_per_s)
    }
    fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, multiply_adds: self.multiply_adds + other.multiply_adds }
    }
}

/// Linear layers of all blocks, attention, output layer.
fn pass(model: &StoredModel<'_>, tokens: usize, before: usize, rows_out: usize) -> [Cost; 3] {
    let c = model.config;
    let (m, layers) = (tokens as f64, c.layers as f64);
    let weights = c.token_weights();
    let linear =
        |n: usize, rows: f64| Cost { bytes: n as f64 * model.bytes_per_weight, multiply_adds: n as f64 * rows };
    let seen = before as f64 + (m + 1.0) / 2.0;
    let cache = (before + tokens) as f64 * 2.0 * c.kv_width() as f64 * 2.0;
    let attention = Cost { bytes: layers * cache, multiply_adds: layers * m * seen * 2.0 * c.q_width() as f64 };
    [linear(weights, m), attention, linear(c.vocab * c.width, rows_out as f64)]
}

/// Predicts time and speed for a prompt of `prompt` tokens and `new` tokens after it (at least one of each).
#[must_use]
pub fn predict(model: &StoredModel<'_>, prompt: usize, new: usize, device: &DeviceClass) -> Prediction {
    let (prompt, new) = (prompt.max(1), new.max(1));
    let (mut prefill, mut prefill_cost) = (0.0, Cost::default());
    let step = model.pass_tokens.max(1);
    for start in (0..prompt).step_by(step) {
        let tokens = step.min(prompt - start);
        let last = usize::from(start + tokens == prompt);
        let parts = pass(model, tokens, start, last);
        for part in parts.into_iter().take(2 + last) {
            prefill += part.seconds(device);
            prefill_cost = prefill_cost.plus(part);
        }
    }
    // The cache grows evenly: the token in the middle costs the mean.
    let parts = pass(model, 1, prompt + new / 2, 1);
    let decode: f64 = parts.iter().map(|p| p.seconds(device)).sum();
    let token = pass(model, 1, prompt, 1).into_iter().fold(Cost::default(), Cost::plus);
    let bound = |c: Cost| {
        if c.bytes / device.bytes_per_s > c.multiply_adds / device.multiply_adds_per_s {
            Bound::Memory
        } else {
            Bound::Compute
        }
    };
    Prediction {
        device_class: device.name.clone(),
        prompt_tokens: prompt,
        ttft_ms: prefill * 1e3,
        prefill_tokens_per_s: prompt as f64 / prefill,
        decode_tokens_per_s: 1.0 / decode,
        bytes_per_token: token.bytes,
        multiply_adds_per_token: token.multiply_adds,
        prefill_bound: bound(prefill_cost),
        decode_bound: bound(token),
    }
}

/// Rows and columns of the matrix that is measured with: 64 MB as f16, more than caches hold.
const ROWS: usize = 16_384;
const COLS: usize = 2048;
/// Tokens of the product that measures arithmetic.
const BATCH: usize = 256;
/// Repetitions; the median counts.
const RUNS: usize = 7;

/// Measures this machine with the loops of this crate's decoder (as the Empirical Roofline Toolkit does, PMBS 2014): a
/// product with one row for bytes a second, with 256 rows for multiply-adds a second. `now` is time since any fixed
/// moment. Takes a few seconds on all threads of the pool.
///
/// # Errors
/// [`ModelError::Input`] never: the matrix is made here and can be packed.
pub fn measure_ceilings(name: &str, now: &mut dyn FnMut() -> Duration) -> Result<DeviceClass, ModelError> {
    let row: Vec<f32> = (0..COLS).map(|i| ((i * 37 % 64) as f32 - 32.0) / 512.0).collect();
    let parts = vec![row.as_slice(); ROWS];
    let matrix = Packed::stack(&parts, COLS, Storage::F16)
        .map_err(|at| ModelError::input(format!("weight {at} of the matrix to measure with cannot be stored")))?;
    let x: Vec<f32> = row.iter().cycle().take(BATCH * COLS).copied().collect();
    let mut out = vec![0.0; BATCH * ROWS];
    let mut seconds = |m: usize| {
        let mut runs: Vec<f64> = (0..RUNS)
            .map(|_| {
                let start = now();
                matrix.forward(&x[..m * COLS], m, &mut out[..m * ROWS], false);
                now().saturating_sub(start).as_secs_f64().max(1e-9)
            })
            .collect();
        runs.sort_unstable_by(f64::total_cmp);
        runs[RUNS / 2]
    };
    Ok(DeviceClass {
        name: name.to_owned(),
        bytes_per_s: matrix.size_bytes() as f64 / seconds(1),
        multiply_adds_per_s: (BATCH * ROWS * COLS) as f64 / seconds(BATCH),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::{Probes, speed};
    use crate::gguf::Gguf;
    use crate::model::tests::tiny;
    use crate::model::{Arch, Decoder};
    use crate::testing::model_file;
    use std::time::Instant;

    #[test]
    fn costs_follow_from_the_sizes() {
        let model = tiny(Arch::Llama);
        let stored = StoredModel { config: model.config(), bytes_per_weight: 2.0, pass_tokens: 64 };
        // 2 layers of 24·(64 + 3·40) + 32·24 weights, an output layer of 50·24, 2 layers of a cache of 32 values
        let (blocks, output) = (2.0 * (24.0 * 184.0 + 768.0), 1200.0);
        let slow = DeviceClass { name: "slow memory".into(), bytes_per_s: 1e6, multiply_adds_per_s: 1e12 };
        let p = predict(&stored, 10, 1, &slow);
        let cache = 2.0 * 11.0 * 32.0 * 2.0;
        assert_eq!(p.bytes_per_token, 2.0 * (blocks + output) + cache);
        assert_eq!(p.multiply_adds_per_token, blocks + output + 2.0 * 11.0 * 2.0 * 32.0);
        assert_eq!((p.decode_bound, p.prefill_bound), (Bound::Memory, Bound::Memory));
        assert!((p.decode_tokens_per_s * p.bytes_per_token / 1e6 - 1.0).abs() < 1e-9);
        let weak = DeviceClass { name: "slow arithmetic".into(), bytes_per_s: 1e12, multiply_adds_per_s: 1e6 };
        let p = predict(&stored, 10, 1, &weak);
        let prefill = 10.0 * blocks + output + 2.0 * (10.0 * 11.0 / 2.0) * 2.0 * 32.0;
        assert_eq!(p.prefill_bound, Bound::Compute);
        assert!((p.ttft_ms / (prefill / 1e6 * 1e3) - 1.0).abs() < 1e-9);
        // two passes read the weights twice
        let halves = predict(&StoredModel { pass_tokens: 5, ..stored }, 10, 1, &slow);
        let once = predict(&stored, 10, 1, &slow);
        assert!((halves.ttft_ms - once.ttft_ms - (2.0 * blocks + 2.0 * 5.0 * 64.0) / 1e3).abs() < 1e-6);
    }

    /// Prints what was predicted and measured; the limit is 25 %.
    #[test]
    #[ignore = "a measurement: needs an idle machine, run it alone with --ignored --nocapture"]
    fn this_machine_does_what_is_predicted() {
        let Some(path) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
        let model = Decoder::load(&Gguf::open(&path).unwrap()).unwrap();
        let start = Instant::now();
        let device = measure_ceilings("this machine", &mut || start.elapsed()).unwrap();
        let stored = StoredModel { config: model.config(), bytes_per_weight: 2.0, pass_tokens: 512 };
        let (prompt, new) = (256, 64);
        let p = predict(&stored, prompt, new, &device);
        let mut runs: Vec<(f64, f64)> = (0..5)
            .map(|_| {
                let mut probes = Probes { now: &mut || start.elapsed(), peak_rss_bytes: &mut || None };
                let s = speed(&model, 1, prompt, new, &mut probes).unwrap();
                (s.prefill_tokens_per_s, s.decode_tokens_per_s)
            })
            .collect();
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let prefill = runs[2].0;
        runs.sort_by(|a, b| a.1.total_cmp(&b.1));
        let decode = runs[2].1;
        println!("{device:?}\n{p:?}\nmeasured: prefill {prefill:.1} tok/s, decode {decode:.1} tok/s");
        for (what, predicted, measured) in
            [("prefill", p.prefill_tokens_per_s, prefill), ("decode", p.decode_tokens_per_s, decode)]
        {
            let off = predicted / measured - 1.0;
            println!("{what}: predicted {predicted:.1}, {:+.1} %", 100.0 * off);
            assert!(off.abs() <= 0.25, "{what} is off by {:.1} %", 100.0 * off);
        }
    }
}
