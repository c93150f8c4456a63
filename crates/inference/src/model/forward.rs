//! The forward pass over new tokens of many sequences at once.

use super::{
    Block, Decoder, ModelConfig, ModelError, Target,
    attention::{Span, attend},
    kv::{KvType, Page, PageLayout, Sequence},
    weights::HeadNorms,
};
use crate::linalg::{Packed, SharedMut, add, parallel, rms_norm, swiglu};
use std::sync::Arc;

/// Fewer values than this are not worth another thread for cheap row operations.
const PARALLEL_VALUES: usize = 1 << 14;

/// Rows that are the input of matrices of a block, named for those matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Site {
    Qkv,
    Out,
    GateUp,
    Down,
    /// Tensors of a block that is not made of seven plain matrices.
    Part {
        /// Names without `blk.N.` and `.weight`.
        tensors: &'static [&'static str],
        /// Which slice of tensors of three dimensions; 0 for the others.
        slice: usize,
        columns: usize,
    },
}

/// Sees the input rows of the matrices of a block while it runs.
pub(crate) type Tap<'a> = dyn FnMut(Site, &[f32]) + 'a;

/// The same for parts of a block that have no site of their own.
fn parts<'a>(tap: &'a mut Tap<'_>) -> impl FnMut(&'static [&'static str], usize, usize, &[f32]) + 'a {
    |tensors, slice, columns, rows| tap(Site::Part { tensors, slice, columns }, rows)
}

/// New tokens of one sequence, to be appended to its cache.
pub(crate) struct Step<'a> {
    pub cache: &'a mut Sequence,
    pub tokens: &'a [u32],
}

/// Calls `f(row index, row)` for all rows.
pub(crate) fn each_row(rows: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync + Send) {
    if rows.len() < PARALLEL_VALUES {
        rows.chunks_exact_mut(width).enumerate().for_each(|(i, row)| f(i, row));
    } else {
        let (grain, n) = ((PARALLEL_VALUES / 4).div_ceil(width), rows.len() / width);
        let all = SharedMut::new(rows);
        parallel(n.div_ceil(grain), |part| {
            for i in part * grain..n.min((part + 1) * grain) {
                // SAFETY: rows are different places.
                f(i, unsafe { all.slice(i * width, width) });
            }
        });
    }
}

pub(crate) fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    each_row(out, width, |i, out| rms_norm(&x[i * width..][..width], weight, eps, out));
}

/// `act = swiglu(gate, up)` for rows of `[gate | up]`.
pub(crate) fn swiglu_rows(gate_up: &[f32], ffn: usize, act: &mut [f32]) {
    each_row(act, ffn, |i, act| {
        let (gate, up) = gate_up[i * 2 * ffn..][..2 * ffn].split_at(ffn);
        swiglu(gate, up, act);
    });
}

pub(crate) fn add_bias(rows: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        rows.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
    }
}

/// Norms every query and key head of rows of `[q | k | v]`, where the model does that.
pub(crate) fn norm_heads(c: &ModelConfig, norms: Option<&HeadNorms>, qkv: &mut [f32]) {
    let Some(norms) = norms else { return };
    each_row(qkv, c.qkv_width(), |_, row| {
        let mut before = vec![0.0; c.head_dim];
        for (i, head) in row.chunks_exact_mut(c.head_dim).take(c.heads + c.kv_heads).enumerate() {
            before.copy_from_slice(head);
            rms_norm(&before, norms.of(c, i), c.rms_eps, head);
        }
    });
}

/// Buffers of one pass, reused by all blocks.
struct Buffers {
    normed: Vec<f32>,
    qkv: Vec<f32>,
    heads: Vec<f32>,
    gate_up: Vec<f32>,
    act: Vec<f32>,
}

impl Decoder {
    /// A sequence for scoring and calibration: keys and values as f16.
    pub(crate) fn new_sequence(&self) -> Sequence {
        self.new_sequence_of(KvType::F16)
    }
    /// A sequence whose keys and values are kept as `kv`.
    pub(crate) fn new_sequence_of(&self, kv: KvType) -> Sequence {
        Sequence::new(PageLayout::new(self.config(), kv))
    }
    /// A sequence that begins with these pages.
    pub(crate) fn sequence_of_pages(&self, kv: KvType, pages: Vec<Arc<Page>>) -> Sequence {
        Sequence::of_pages(PageLayout::new(self.config(), kv), pages)
    }

    /// Appends the tokens of all steps and returns the residual stream after the last block, one row a token.
    pub(crate) fn advance(&self, steps: &mut [Step<'_>]) -> Vec<f32> {
        let c = self.config();
        let m: usize = steps.iter().map(|s| s.tokens.len()).sum();
        let mut x = vec![0.0; m * c.width];
        let tokens = steps.iter().flat_map(|s| s.tokens);
        for (token, row) in tokens.zip(x.chunks_exact_mut(c.width)) {
            self.weights.embedding.row(*token as usize, row);
        }
        self.run_blocks(0, steps, &mut x, &mut |_, _| ());
        x
    }

    /// The blocks from `first` on over the residual stream `x`, one row for each new token of all steps.
    pub(crate) fn run_blocks(&self, first: usize, steps: &mut [Step<'_>], x: &mut [f32], tap: &mut Tap<'_>) {
        let c = self.config();
        let m = x.len() / c.width;
        let mut positions = Vec::with_capacity(m);
        for step in steps.iter_mut() {
            positions.extend(step.cache.len()..step.cache.len() + step.tokens.len());
            step.cache.extend(step.tokens.len());
        }
        let mut b = Buffers {
            normed: vec![0.0; m * c.width.max(c.q_width())],
            qkv: vec![0.0; m * c.qkv_width()],
            heads: vec![0.0; m * c.q_width()],
            gate_up: vec![0.0; m * 2 * c.ffn],
            act: vec![0.0; m * c.ffn],
        };
        for (layer, block) in self.weights.blocks.iter().enumerate().skip(first).filter(|(i, _)| !self.mask.skips(*i)) {
            self.attention_part(layer, block, steps, &positions, x, &mut b, tap);
            self.feed_forward_part(layer, block, x, &mut b, tap);
        }
    }

    /// `out[m, rows] (+)= x · Wᵀ`, as exact as this decoder is.
    pub(crate) fn multiply(&self, w: &Packed, x: &[f32], m: usize, out: &mut [f32], add: bool) {
        if self.exact { w.forward(x, m, out, add) } else { w.forward_fast(x, m, out, add) }
    }

    #[allow(clippy::too_many_arguments, reason = "a block, its rows and who watches")]
    fn attention_part(
        &self,
        layer: usize,
        block: &Block,
        steps: &mut [Step<'_>],
        positions: &[usize],
        x: &mut [f32],
        b: &mut Buffers,
        tap: &mut Tap<'_>,
    ) {
        let (c, m) = (self.config(), positions.len());
        let normed = &mut b.normed[..m * c.width];
        norm_rows(x, &block.attn_norm, c.rms_eps, normed);
        let (q, kv) = (c.q_width(), c.kv_width());
        if let (Some(latent), Some(sizes)) = (&block.latent, &c.latent) {
            latent.project(c, sizes, normed, m, &mut b.qkv, &mut parts(tap));
        } else {
            tap(Site::Qkv, normed);
            self.multiply(&block.qkv, normed, m, &mut b.qkv, false);
            for (target, at) in [(Target::Q, 0), (Target::K, q), (Target::V, q + kv)] {
                self.adapt(layer, target, normed, m, &mut b.qkv, at, c.qkv_width());
            }
            add_bias(&mut b.qkv, block.qkv_bias.as_deref());
            norm_heads(c, block.head_norms.as_ref(), &mut b.qkv);
        }
        let rope = &self.weights.rope;
        let table = rope.table(positions.iter().max().map_or(0, |p| p + 1));
        each_row(&mut b.qkv, c.qkv_width(), |i, row| {
            rope.apply(&table, row, c.heads + c.kv_heads, positions[i], false);
        });
        let mut rows = b.qkv.chunks_exact(c.qkv_width());
        for step in steps.iter_mut() {
            let start = step.cache.len() - step.tokens.len();
            for (t, row) in rows.by_ref().take(step.tokens.len()).enumerate() {
                step.cache.write(layer, start + t, &row[q..q + kv], &row[q + kv..]);
            }
        }
        let mut first = 0;
        let spans: Vec<Span<'_>> = steps
            .iter()
            .map(|s| {
                let (len, at) = (s.tokens.len(), first);
                first += len;
                Span { cache: s.cache, first: at, start: s.cache.len() - len, len }
            })
            .collect();
        attend(c, layer, &spans, &b.qkv, &mut b.heads);
        self.mask.silence(layer, c, &mut b.heads);
        if let (Some(latent), Some(sizes)) = (&block.latent, &c.latent) {
            let heads = latent.values(c, sizes, &b.heads, m, &mut parts(tap));
            parts(tap)(&["attn_output"], 0, c.heads * sizes.value, &heads);
            self.multiply(&block.out, &heads, m, x, true);
            return;
        }
        tap(Site::Out, &b.heads);
        self.multiply(&block.out, &b.heads, m, x, true);
        self.adapt(layer, Target::O, &b.heads, m, x, 0, c.width);
    }

    fn feed_forward_part(&self, layer: usize, block: &Block, x: &mut [f32], b: &mut Buffers, tap: &mut Tap<'_>) {
        let c = self.config();
        let m = x.len() / c.width;
        let normed = &mut b.normed[..m * c.width];
        norm_rows(x, &block.ffn_norm, c.rms_eps, normed);
        if let Some(experts) = &block.experts {
            experts.forward(normed, m, x, &mut parts(tap));
            return;
        }
        tap(Site::GateUp, normed);
        self.multiply(&block.gate_up, normed, m, &mut b.gate_up, false);
        self.adapt(layer, Target::Gate, normed, m, &mut b.gate_up, 0, 2 * c.ffn);
        self.adapt(layer, Target::Up, normed, m, &mut b.gate_up, c.ffn, 2 * c.ffn);
        swiglu_rows(&b.gate_up, c.ffn, &mut b.act);
        tap(Site::Down, &b.act);
        self.multiply(&block.down, &b.act, m, x, true);
        self.adapt(layer, Target::Down, &b.act, m, x, 0, c.width);
    }

    #[allow(clippy::too_many_arguments, reason = "a matrix product and where it goes")]
    fn adapt(&self, layer: usize, target: Target, x: &[f32], m: usize, y: &mut [f32], at: usize, stride: usize) {
        if let Some(lora) = &self.lora {
            lora.add(layer, target, x, m, y, at, stride);
        }
    }

    /// Logits of `m` rows of the residual stream, `m × vocabulary`.
    pub(crate) fn logits_of(&self, x: &[f32], m: usize) -> Result<Vec<f32>, ModelError> {
        let normed = self.normed(x, m);
        // One bad value anywhere in a row makes its norm, and so this sum, bad.
        if !normed.iter().sum::<f32>().is_finite() {
            return Err(ModelError::NotFinite {
                place: "the model's output".into(),
                hint: "the weights overflow: check the file, or the training that made it",
            });
        }
        Ok(self.output_of(&normed, m))
    }

    /// The same, with whatever numbers come out: for counting the bad ones.
    pub(crate) fn raw_logits_of(&self, x: &[f32], m: usize) -> Vec<f32> {
        self.output_of(&self.normed(x, m), m)
    }

    fn normed(&self, x: &[f32], m: usize) -> Vec<f32> {
        let c = self.config();
        let mut normed = vec![0.0; m * c.width];
        norm_rows(&x[..m * c.width], &self.weights.norm, c.rms_eps, &mut normed);
        normed
    }

    fn output_of(&self, normed: &[f32], m: usize) -> Vec<f32> {
        let mut logits = vec![0.0; m * self.config().vocab];
        self.multiply(&self.weights.output, normed, m, &mut logits, false);
        logits
    }
}
