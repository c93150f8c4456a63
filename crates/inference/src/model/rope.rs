//! Rotary position embedding with a table that grows on demand, forward and backward.

use super::ModelError;
use super::config::{Arch, ModelConfig};
use crate::gguf::Gguf;
use std::sync::{Arc, PoisonError, RwLock};

/// YaRN (arXiv 2309.00071): waves longer than the original context are stretched, short ones kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// How many times the original context.
    pub factor: f32,
    /// Original context, tokens.
    pub context: f32,
    /// Turns within the original context from which on a wave is kept, and to which it is stretched in full.
    pub beta_fast: f32,
    pub beta_slow: f32,
    /// Weight of `0.1 ln(factor)` in the scale of attention (`mscale_all_dim`).
    pub log_weight: f32,
}

impl Yarn {
    /// # Errors
    /// [`ModelError::Unsupported`] for values that cannot be, or that change attention in a way this decoder does not do.
    pub(super) fn from_gguf(gguf: &Gguf, arch: Arch) -> Result<Self, ModelError> {
        let key = |name: &str| format!("{}.{name}", arch.name());
        let number = |name: &str| gguf.optional::<f32>(&key(&format!("rope.scaling.{name}")));
        let context = match gguf.optional::<u32>(&key("rope.scaling.original_context_length"))? {
            Some(n) => n,
            None => gguf.u32(&key("context_length"))?,
        };
        for name in ["yarn_ext_factor", "yarn_attn_factor", "attn_factor"] {
            if let Some(v) = number(name)?.filter(|v| *v != 1.0) {
                return Err(ModelError::unsupported(format!("`{}` is {v}, only 1 is", key(name))));
            }
        }
        let this = Self {
            factor: gguf.f32(&key("rope.scaling.factor"))?,
            context: context as f32,
            beta_fast: number("yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: number("yarn_beta_slow")?.unwrap_or(1.0),
            // the file holds a tenth of it
            log_weight: number("yarn_log_multiplier")?.unwrap_or(0.0) / 0.1,
        };
        let positive = [this.factor, this.context, this.beta_fast, this.beta_slow];
        if positive.iter().any(|v| !(v.is_finite() && *v > 0.0)) || !this.log_weight.is_finite() {
            return Err(ModelError::unsupported(format!("YaRN with {this:?}")));
        }
        Ok(this)
    }

    /// What the softmax's argument is multiplied with, squared in `q · k`.
    pub(super) fn magnitude(&self) -> f32 {
        1.0 + 0.1 * self.log_weight * self.factor.ln()
    }

    /// Frequency of pair `i` of `dims / 2`, whose plain one is `f`.
    fn stretch(&self, i: usize, f: f64, dims: usize, base: f32) -> f64 {
        // the pair that turns `n` times within the original context
        let turns = |n: f32| dims as f32 * (self.context / (n * 2.0 * std::f32::consts::PI)).ln() / (2.0 * base.ln());
        let from = turns(self.beta_fast).floor().max(0.0);
        let to = turns(self.beta_slow).ceil().min(dims as f32 - 1.0);
        let stretched = ((i as f32 - from) / (to - from).max(0.001)).clamp(0.0, 1.0);
        let stretched = f64::from(stretched);
        f / f64::from(self.factor) * stretched + f * (1.0 - stretched)
    }
}

/// Sines and cosines per position, computed in f64 and shared by all calls.
#[derive(Debug)]
pub(crate) struct Rope {
    /// Inverse wavelength of each pair, factors and linear scaling included.
    frequencies: Vec<f64>,
    head_dim: usize,
    neighbours: bool,
    table: RwLock<Arc<Vec<f32>>>,
}

/// A table long enough for one call.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable(Arc<Vec<f32>>);

impl Rope {
    /// `factors` is the content of `rope_freqs.weight`: one divisor per pair (Llama 3.1).
    pub fn new(config: &ModelConfig, factors: Option<&[f32]>) -> Self {
        let half = config.rope.dims / 2;
        let frequencies = (0..half)
            .map(|i| {
                let exponent = -2.0 * i as f64 / config.rope.dims as f64;
                let factor = factors.and_then(|f| f.get(i)).map_or(1.0, |f| f64::from(*f));
                let plain = f64::from(config.rope.base).powf(exponent) / factor / f64::from(config.rope.linear_factor);
                match &config.rope.yarn {
                    Some(yarn) => yarn.stretch(i, plain, config.rope.dims, config.rope.base),
                    None => plain,
                }
            })
            .collect();
        Self {
            frequencies,
            head_dim: config.head_dim,
            neighbours: matches!(config.arch, Arch::Llama | Arch::DeepSeek2),
            table: RwLock::default(),
        }
    }

    /// The table for positions `0..positions`.
    pub fn table(&self, positions: usize) -> RopeTable {
        let want = positions * self.frequencies.len() * 2;
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner).clone();
        if table.len() >= want {
            return RopeTable(table);
        }
        let positions = positions.next_power_of_two().max(512);
        let mut fresh = Vec::with_capacity(positions * self.frequencies.len() * 2);
        for p in 0..positions {
            for f in &self.frequencies {
                let (sin, cos) = (p as f64 * f).sin_cos();
                fresh.extend([cos as f32, sin as f32]);
            }
        }
        let fresh = Arc::new(fresh);
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = fresh.clone();
        RopeTable(fresh)
    }

    /// Rotates the `heads` heads at the start of `row` for `position`; `backward` rotates the other way
    /// (the transposed matrix, which carries gradients).
    pub fn apply(&self, table: &RopeTable, row: &mut [f32], heads: usize, position: usize, backward: bool) {
        let half = self.frequencies.len();
        let turns = &table.0[position * half * 2..][..half * 2];
        let sign = if backward { -1.0 } else { 1.0 };
        for head in row.chunks_exact_mut(self.head_dim).take(heads) {
            for (i, turn) in turns.chunks_exact(2).enumerate() {
                let (a, b) = if self.neighbours { (2 * i, 2 * i + 1) } else { (i, i + half) };
                let (cos, sin) = (turn[0], turn[1] * sign);
                let (x, y) = (head[a], head[b]);
                (head[a], head[b]) = (x * cos - y * sin, x * sin + y * cos);
            }
        }
    }
}
