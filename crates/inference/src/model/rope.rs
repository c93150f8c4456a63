//! Rotary position embedding with a table that grows on demand, forward and backward.

use super::config::{Arch, ModelConfig};
use std::sync::{Arc, PoisonError, RwLock};

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
                f64::from(config.rope.base).powf(exponent) / factor / f64::from(config.rope.linear_factor)
            })
            .collect();
        Self {
            frequencies,
            head_dim: config.head_dim,
            neighbours: config.arch == Arch::Llama,
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
