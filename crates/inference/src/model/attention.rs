//! Causal attention of new tokens over the paged cache.
//!
//! Scores and values go through the same inner loop as the weights. Masked positions get probability 0 exactly,
//! and adding 0 changes nothing: how many positions a tile looks at does not show in the result.

use super::{
    ModelConfig,
    kv::{PAGE, Sequence},
};
use crate::linalg::{Aligned, LANES, Panel, Rows, SharedMut, Target, softmax_prefix, tiles};
use rayon::prelude::*;
use std::cell::RefCell;

/// Rows of one tile of work: as many tokens as fill it.
const TILE: usize = 12;

/// New tokens of one sequence: rows `first..first + len` of the batch, at positions `start..`.
pub(crate) struct Span<'a> {
    pub cache: &'a Sequence,
    pub first: usize,
    pub start: usize,
    pub len: usize,
}

#[derive(Default)]
struct Scratch {
    query: Vec<f32>,
    scores: Aligned<f32>,
    packed: Aligned<f32>,
    out: Vec<f32>,
}
thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// One tile: `len` tokens from `token` of a span, one key head.
struct Task<'a> {
    span: &'a Span<'a>,
    token: usize,
    len: usize,
    head: usize,
}

/// `out[row] = softmax(q k^T / sqrt(d)) v` for all new tokens; `qkv` rows hold rotated queries in front.
pub(crate) fn attend(c: &ModelConfig, layer: usize, spans: &[Span<'_>], qkv: &[f32], out: &mut [f32]) {
    let step = (TILE / c.group()).max(1);
    let mut tasks = Vec::new();
    for span in spans {
        for token in (0..span.len).step_by(step) {
            let len = step.min(span.len - token);
            tasks.extend((0..c.kv_heads).map(|head| Task { span, token, len, head }));
        }
    }
    let out = SharedMut::new(out);
    // A task is a few microseconds; splitting finer than this costs more than it balances.
    tasks.par_iter().with_min_len(8).for_each(|task| {
        let mut scratch = SCRATCH.take();
        run(c, layer, task, qkv, out, &mut scratch);
        SCRATCH.set(scratch);
    });
}

fn run(c: &ModelConfig, layer: usize, task: &Task<'_>, qkv: &[f32], out: SharedMut, s: &mut Scratch) {
    let (d, group, span) = (c.head_dim, c.group(), task.span);
    let m = task.len * group;
    let first_row = span.first + task.token;
    let scale = 1.0 / (d as f32).sqrt();
    s.query.clear();
    for t in 0..task.len {
        let heads = &qkv[(first_row + t) * c.qkv_width() + task.head * group * d..][..group * d];
        s.query.extend(heads.iter().map(|q| q * scale));
    }
    let seen = span.start + task.token + task.len;
    let width = seen.next_multiple_of(LANES);
    s.scores.reserve(m * width);
    let scores = &mut s.scores[..m * width];
    let target = SharedMut::new(scores);
    let query = Rows::pack(&s.query, d, m, d, &mut s.packed);
    for panel in 0..width / LANES {
        let keys = Panel::F16(span.cache.keys(layer, task.head, panel));
        let to = Target { c: target, at: panel * LANES, stride: width, cols: LANES, add: false };
        // SAFETY: `scores` belongs to this thread.
        unsafe { tiles(&query, 0, d, keys, to) }
    }
    for (r, row) in scores.chunks_exact_mut(width).enumerate() {
        softmax_prefix(row, span.start + task.token + r / group + 1);
    }
    let weights = Rows::pack(scores, width, m, width, &mut s.packed);
    s.out.clear();
    s.out.resize(m * d, 0.0);
    let target = SharedMut::new(&mut s.out);
    for page in 0..seen.div_ceil(PAGE).min(span.cache.pages()) {
        let steps = PAGE.min(seen - page * PAGE);
        for panel in 0..d.div_ceil(LANES) {
            let values = Panel::F16(span.cache.values(layer, task.head, page, panel));
            let cols = LANES.min(d - panel * LANES);
            let to = Target { c: target, at: panel * LANES, stride: d, cols, add: page > 0 };
            // SAFETY: `s.out` belongs to this thread.
            unsafe { tiles(&weights, page * PAGE, steps, values, to) }
        }
    }
    for t in 0..task.len {
        let at = (first_row + t) * c.q_width() + task.head * group * d;
        // SAFETY: rows and heads of different tasks are different places of `out`.
        unsafe { out.slice(at, group * d) }.copy_from_slice(&s.out[t * group * d..][..group * d]);
    }
}
