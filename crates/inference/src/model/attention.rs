//! Causal attention of new tokens over the paged cache.
//!
//! Scores and values go through the same inner loop as the weights. Masked positions get probability 0 exactly,
//! and adding 0 changes nothing: how many positions a tile looks at does not show in the result.

use super::{
    ModelConfig,
    kv::{Head, KvType, PAGE, Sequence},
};
use crate::linalg::blocks::{Input, Isa, Place, WIDTH, multiply};
use crate::linalg::{Aligned, LANES, Panel, Rows, SharedMut, Target, parallel, softmax_prefix, tiles};
use std::cell::RefCell;

/// Rows of one tile of work: as many tokens as fill it.
const TILE: usize = 12;
/// Fewer multiply-adds than this are not worth waking another thread.
const PARALLEL_FROM: usize = 1 << 15;
/// Pieces of the work for each thread.
const PIECES: usize = 8;

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
    /// Queries in 8 bits.
    input: Aligned<u8>,
    /// Probabilities times the scales of values in 8 bits.
    scaled: Vec<f32>,
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
    let work: usize = spans.iter().map(|s| s.len * (s.start + s.len) * 2 * c.q_width()).sum();
    let pieces = if work < PARALLEL_FROM { 1 } else { rayon::current_num_threads() * PIECES };
    let grain = tasks.len().div_ceil(pieces).max(1);
    parallel(tasks.len().div_ceil(grain), |i| {
        let mut scratch = SCRATCH.take();
        for task in tasks.iter().skip(i * grain).take(grain) {
            run(c, layer, task, qkv, out, &mut scratch);
        }
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
    let pages = seen.div_ceil(PAGE).min(span.cache.pages());
    let at = At { layer, head: task.head, seen, d };
    match span.cache.kv() {
        KvType::F16 => {
            let query = Rows::pack(&s.query, d, m, d, &mut s.packed);
            scores_f16(span.cache, &at, &query, target, width);
        }
        KvType::Q8_0 => {
            let query = Input::new(&s.query, d, m, d, &mut s.input);
            scores_q8(span.cache, &at, &query, target, width);
        }
    }
    for (r, row) in scores.chunks_exact_mut(width).enumerate() {
        softmax_prefix(row, span.start + task.token + r / group + 1);
    }
    s.out.clear();
    s.out.resize(m * d, 0.0);
    let target = SharedMut::new(&mut s.out);
    for page in 0..pages {
        let (from, steps) = (page * PAGE, PAGE.min(seen - page * PAGE));
        let add_up = |rows: &Rows<'_>, panel: usize, values: Panel<'_>| {
            let cols = LANES.min(d - panel * LANES);
            let to = Target { c: target, at: panel * LANES, stride: d, cols, add: page > 0 };
            // SAFETY: `s.out` belongs to this thread.
            unsafe { tiles(rows, 0..rows.len(), 0, steps, values, to) }
        };
        match span.cache.head(layer, task.head, page) {
            Head::F16 { values, .. } => {
                let rows = Rows::pack(&scores[from..], width, m, steps, &mut s.packed);
                for panel in 0..d.div_ceil(LANES) {
                    add_up(&rows, panel, Panel::F16(&values[panel * PAGE * LANES..][..PAGE * LANES]));
                }
            }
            Head::Q8(head) => {
                for panel in 0..d.div_ceil(LANES) {
                    let (values, scales) = head.values(panel);
                    s.scaled.clear();
                    for row in scores.chunks_exact(width) {
                        s.scaled.extend(row[from..from + steps].iter().zip(scales).map(|(p, s)| p * s.to_f32()));
                    }
                    let rows = Rows::pack(&s.scaled, steps, m, steps, &mut s.packed);
                    add_up(&rows, panel, Panel::I8(values));
                }
            }
        }
    }
    for t in 0..task.len {
        let at = (first_row + t) * c.q_width() + task.head * group * d;
        // SAFETY: rows and heads of different tasks are different places of `out`.
        unsafe { out.slice(at, group * d) }.copy_from_slice(&s.out[t * group * d..][..group * d]);
    }
}

/// One head of a layer, how many positions are seen, and its dimensions.
struct At {
    layer: usize,
    head: usize,
    seen: usize,
    d: usize,
}

/// `scores[r, position] = q[r] · k[position]`, 32 positions at a time.
fn scores_f16(cache: &Sequence, at: &At, query: &Rows<'_>, target: SharedMut, width: usize) {
    for panel in 0..at.seen.div_ceil(LANES) {
        let Head::F16 { keys, .. } = cache.head(at.layer, at.head, panel * LANES / PAGE) else { return };
        let keys = &keys[panel * LANES % PAGE * at.d..][..LANES * at.d];
        let to = Target { c: target, at: panel * LANES, stride: width, cols: LANES, add: false };
        // SAFETY: the scores belong to this thread.
        unsafe { tiles(query, 0..query.len(), 0, at.d, Panel::F16(keys), to) }
    }
}

/// The same of keys in 8 bits, 16 positions at a time.
fn scores_q8(cache: &Sequence, at: &At, query: &Input<'_>, target: SharedMut, width: usize) {
    let isa = Isa::detect();
    for panel in 0..at.seen.div_ceil(WIDTH) {
        let Head::Q8(head) = cache.head(at.layer, at.head, panel * WIDTH / PAGE) else { return };
        let to = Place { c: target, at: panel * WIDTH, stride: width, cols: WIDTH, add: false };
        // SAFETY: the scores belong to this thread.
        unsafe { multiply(isa, query, head.keys(panel % (PAGE / WIDTH)), to) }
    }
}
