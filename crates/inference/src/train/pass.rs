//! One forward and backward pass over packed samples.

use super::{
    Sample,
    adapted::Seen,
    attention,
    buffers::{Buffers, Lent},
    dense::{Part, Stack},
    distill::Teacher,
    effective::Effective,
    layout::Layout,
    loss::Taught,
    params::Params,
};
use crate::linalg::{rms_norm_backward, swiglu_backward};
use crate::model::{
    Block, HeadNorms, RopeTable, Target, Weights, add_bias, each_row, norm_heads, norm_rows, swiglu_rows,
};
use std::cell::RefCell;

/// What a pass works with.
pub(super) struct Pass<'a> {
    pub weights: &'a Weights,
    pub effective: &'a Effective,
    pub params: &'a Params,
    pub dropout: f32,
    /// Seed, step and number of the pass: what dropout depends on.
    pub noise: [u64; 3],
    /// Adapters are inside the effective matrices.
    pub merged: bool,
    /// Keep the input of each block only.
    pub recompute: bool,
    pub teacher: Option<&'a Teacher>,
    /// Sees inputs and output gradients of the frozen matrices.
    pub observer: Option<&'a RefCell<&'a mut Observer<'a>>>,
    pub buffers: &'a Buffers,
}

/// Gets the matrix (`None`: the output), its inputs `x`, the number of rows, and the gradients of its outputs, which
/// have `stride` values per row.
pub(super) type Observer<'a> = dyn FnMut(Option<(usize, Target)>, &[f32], usize, &[f32], usize) + 'a;

/// What the backward pass needs of a block; the rest is cheap to compute again.
pub(super) struct Saved<'a> {
    /// Input of the block.
    x: Lent<'a>,
    /// Before the norms of the heads, where there are any.
    plain_qkv: Option<Lent<'a>>,
    /// After RoPE.
    qkv: Lent<'a>,
    heads: Lent<'a>,
    /// After attention.
    mid: Lent<'a>,
    gate_up: Lent<'a>,
    /// What the adapters' first factors made of the inputs, by stack.
    projected: [Option<Lent<'a>>; 4],
}

impl Saved<'_> {
    fn seen<'s>(&'s self, stack: Stack, x: &'s [f32], dy: &'s [f32], m: usize) -> Seen<'s> {
        Seen { x, projected: self.projected[stack as usize].as_deref(), dy, m }
    }
}

/// The rows of a pass.
pub(super) struct Rows {
    spans: Vec<attention::Span>,
    positions: Vec<usize>,
    table: RopeTable,
}

/// What is kept of a block until the backward pass comes back to it.
enum Kept<'a> {
    All(Box<Saved<'a>>),
    Input(Lent<'a>),
}

impl<'a> Pass<'a> {
    /// Without dropout, teacher or observer.
    pub fn plain(weights: &'a Weights, params: &'a Params, effective: &'a Effective, buffers: &'a Buffers) -> Self {
        Self {
            weights,
            effective,
            params,
            dropout: 0.0,
            noise: [0; 3],
            merged: false,
            recompute: false,
            teacher: None,
            observer: None,
            buffers,
        }
    }
}

impl<'a> Pass<'a> {
    /// Adds the gradient of `scale · sum of losses` to `grads`; returns the sum of losses.
    pub fn run(&self, samples: &[&Sample], scale: f32, grads: &mut [f32]) -> f64 {
        let c = &self.weights.config;
        let layout = Layout::new(samples);
        let rows = self.rows(&layout);
        let mut kept = Vec::with_capacity(c.layers);
        let x = self.blocks(&layout, &rows, |keep| kept.push(keep));
        let mut dx = self.buffers.zeros(x.len());
        let taught = self.taught(&layout);
        let loss = self.losses(&x, &layout.predictions, taught.as_ref(), scale, Some((&mut dx[..], &mut *grads)));
        for (layer, block) in self.weights.blocks.iter().enumerate().rev() {
            let keep = match kept.pop() {
                Some(Kept::All(saved)) => *saved,
                Some(Kept::Input(x)) => self.block(layer, block, &rows, x).1,
                None => continue,
            };
            // below the matrices of the first block there often is nothing to train
            let below = layer > 0 || self.params.part(Part::AttnNorm(0)).is_some();
            self.block_backward((layer, below), block, &rows, keep, &mut dx, grads);
        }
        if let Some(range) = self.params.part(Part::Embedding) {
            let all = &mut grads[range];
            for (token, dx) in layout.tokens.iter().zip(dx.chunks_exact(c.width)) {
                crate::linalg::add(&mut all[*token as usize * c.width..][..c.width], dx);
            }
        }
        loss
    }

    /// The sum of losses alone.
    pub fn measure(&self, samples: &[&Sample]) -> f64 {
        let layout = Layout::new(samples);
        let x = self.blocks(&layout, &self.rows(&layout), |_| ());
        self.losses(&x, &layout.predictions, self.taught(&layout).as_ref(), 1.0, None)
    }

    pub(super) fn rows(&self, layout: &Layout) -> Rows {
        let longest = layout.positions.iter().max().map_or(0, |p| p + 1);
        let (spans, positions) = (layout.spans.clone(), layout.positions.clone());
        Rows { spans, positions, table: self.weights.rope.table(longest) }
    }

    /// The residual stream after the last block.
    fn blocks(&self, layout: &Layout, rows: &Rows, mut keep: impl FnMut(Kept<'a>)) -> Lent<'a> {
        let width = self.weights.config.width;
        let mut x = self.buffers.any(layout.tokens.len() * width);
        let embedding = self.effective.embedding(self.weights);
        for (token, row) in layout.tokens.iter().zip(x.chunks_exact_mut(width)) {
            embedding.row(*token as usize, row);
        }
        for (layer, block) in self.weights.blocks.iter().enumerate() {
            let input = self.recompute.then(|| self.buffers.copy(&x));
            let (next, saved) = self.block(layer, block, rows, x);
            keep(input.map_or_else(|| Kept::All(Box::new(saved)), Kept::Input));
            x = next;
        }
        x
    }

    /// What the teacher makes of the rows.
    fn taught(&self, layout: &Layout) -> Option<Taught<'a>> {
        let teacher = self.teacher?;
        let weights = &*teacher.decoder.weights;
        let (params, effective) = (&Params::none(weights), &Effective::default());
        let pass = Pass::plain(weights, params, effective, self.buffers);
        let x = self.buffers.copy(&pass.blocks(layout, &pass.rows(layout), |_| ()));
        Some(Taught { weights, x, how: teacher.how })
    }

    pub(super) fn block(&self, layer: usize, block: &Block, rows: &Rows, x: Lent<'a>) -> (Lent<'a>, Saved<'a>) {
        let c = &self.weights.config;
        let m = rows.positions.len();
        let mut normed = self.buffers.any(m * c.width);
        norm_rows(&x, self.attn_norm(layer, block), c.rms_eps, &mut normed);
        let mut qkv = self.buffers.any(m * c.qkv_width());
        let at = |stack: Stack| (layer, stack, block);
        let projected_qkv = self.forward(at(Stack::Qkv), &normed, m, &mut qkv, false);
        let bias = block.qkv_bias.as_deref().map(|b| self.params.vector(Part::QkvBias(layer), b));
        add_bias(&mut qkv, bias);
        let plain_qkv = block.head_norms.as_ref().map(|_| self.buffers.copy(&qkv));
        norm_heads(c, self.head_norms(layer, block).as_ref(), &mut qkv);
        self.rotate(rows, &mut qkv, false);
        let mut heads = self.buffers.any(m * c.q_width());
        attention::forward(c, &rows.spans, &qkv, &mut heads);
        let mut mid = self.buffers.copy(&x);
        let projected_out = self.forward(at(Stack::Out), &heads, m, &mut mid, true);

        norm_rows(&mid, self.ffn_norm(layer, block), c.rms_eps, &mut normed);
        let mut gate_up = self.buffers.any(m * 2 * c.ffn);
        let projected_gate_up = self.forward(at(Stack::GateUp), &normed, m, &mut gate_up, false);
        let mut act = self.buffers.any(m * c.ffn);
        swiglu_rows(&gate_up, c.ffn, &mut act);
        let mut out = self.buffers.copy(&mid);
        let projected_down = self.forward(at(Stack::Down), &act, m, &mut out, true);
        let projected = [projected_qkv, projected_out, projected_gate_up, projected_down];
        (out, Saved { x, plain_qkv, qkv, heads, mid, gate_up, projected })
    }

    /// Turns the gradient of the block's output in `dx` into that of its input, all of it if something `below` the block's
    /// matrices wants it.
    pub(super) fn block_backward(
        &self,
        (layer, below): (usize, bool),
        block: &Block,
        rows: &Rows,
        keep: Saved<'_>,
        dx: &mut [f32],
        grads: &mut [f32],
    ) {
        self.feed_forward_backward(layer, block, &keep, dx, grads);
        let c = &self.weights.config;
        let m = rows.positions.len();
        let mut dheads = self.buffers.any(m * c.q_width());
        let seen = keep.seen(Stack::Out, &keep.heads, dx, m);
        self.backward((layer, Stack::Out, block), &seen, grads, Some(&mut dheads), false);
        let mut dqkv = self.buffers.any(m * c.qkv_width());
        attention::backward(c, &rows.spans, &keep.qkv, &dheads, &mut dqkv);
        self.rotate(rows, &mut dqkv, true);
        self.head_norms_backward(layer, block, keep.plain_qkv.as_deref(), &mut dqkv, grads);
        if let Some(range) = self.params.part(Part::QkvBias(layer)) {
            dqkv.chunks_exact(c.qkv_width()).for_each(|row| crate::linalg::add(&mut grads[range.clone()], row));
        }
        let mut normed = self.buffers.any(m * c.width);
        norm_rows(&keep.x, self.attn_norm(layer, block), c.rms_eps, &mut normed);
        let mut dnormed = below.then(|| self.buffers.any(m * c.width));
        let seen = keep.seen(Stack::Qkv, &normed, &dqkv, m);
        self.backward((layer, Stack::Qkv, block), &seen, grads, dnormed.as_deref_mut(), false);
        if let Some(dnormed) = dnormed {
            self.norm_backward(Part::AttnNorm(layer), &keep.x, &block.attn_norm, &dnormed, dx, grads);
        }
    }

    fn feed_forward_backward(&self, layer: usize, block: &Block, keep: &Saved<'_>, dx: &mut [f32], grads: &mut [f32]) {
        let c = &self.weights.config;
        let m = dx.len() / c.width;
        let mut dact = self.buffers.any(m * c.ffn);
        let act = self.wants(layer, &[Target::Down]).then(|| {
            let mut act = self.buffers.any(m * c.ffn);
            swiglu_rows(&keep.gate_up, c.ffn, &mut act);
            act
        });
        let seen = keep.seen(Stack::Down, act.as_deref().unwrap_or_default(), dx, m);
        self.backward((layer, Stack::Down, block), &seen, grads, Some(&mut dact), false);
        drop(act);
        let mut dgate_up = self.buffers.any(m * 2 * c.ffn);
        each_row(&mut dgate_up, 2 * c.ffn, |i, row| {
            let (gate, up) = keep.gate_up[i * 2 * c.ffn..][..2 * c.ffn].split_at(c.ffn);
            let (dgate, dup) = row.split_at_mut(c.ffn);
            swiglu_backward(gate, up, &dact[i * c.ffn..][..c.ffn], dgate, dup);
        });
        let mut dnormed = self.buffers.any(m * c.width);
        let normed = self.wants(layer, &[Target::Gate, Target::Up]).then(|| {
            let mut normed = self.buffers.any(m * c.width);
            norm_rows(&keep.mid, self.ffn_norm(layer, block), c.rms_eps, &mut normed);
            normed
        });
        let seen = keep.seen(Stack::GateUp, normed.as_deref().unwrap_or_default(), &dgate_up, m);
        self.backward((layer, Stack::GateUp, block), &seen, grads, Some(&mut dnormed), false);
        self.norm_backward(Part::FfnNorm(layer), &keep.mid, &block.ffn_norm, &dnormed, dx, grads);
    }

    /// Gradients of a norm over whole rows; `frozen` are its weights where they are not trained.
    fn norm_backward(&self, part: Part, x: &[f32], frozen: &[f32], dy: &[f32], dx: &mut [f32], grads: &mut [f32]) {
        let (width, eps) = (frozen.len(), self.weights.config.rms_eps);
        let weight = self.params.vector(part, frozen);
        self.params.norm_gradient(part, eps, x.chunks_exact(width).zip(dy.chunks_exact(width)), grads);
        each_row(dx, width, |i, dx| {
            rms_norm_backward(&x[i * width..][..width], weight, eps, &dy[i * width..][..width], dx);
        });
    }

    /// Turns the gradient of the normed heads in `dqkv` into that of the heads before.
    fn head_norms_backward(
        &self,
        layer: usize,
        block: &Block,
        plain_qkv: Option<&[f32]>,
        dqkv: &mut [f32],
        grads: &mut [f32],
    ) {
        let (Some(norms), Some(plain)) = (self.head_norms(layer, block), plain_qkv) else { return };
        let c = &self.weights.config;
        let (width, d) = (c.qkv_width(), c.head_dim);
        for (part, heads) in [(Part::QNorm(layer), 0..c.heads), (Part::KNorm(layer), c.heads..c.heads + c.kv_heads)] {
            let of = |row: usize, head: usize| row * width + head * d..row * width + (head + 1) * d;
            let rows = (0..dqkv.len() / width).flat_map(|row| heads.clone().map(move |head| of(row, head)));
            let pairs = rows.map(|at| (&plain[at.clone()], &dqkv[at]));
            self.params.norm_gradient(part, c.rms_eps, pairs, grads);
        }
        each_row(dqkv, width, |i, row| {
            let mut dy = vec![0.0; d];
            for (head, dx) in row.chunks_exact_mut(d).take(c.heads + c.kv_heads).enumerate() {
                dy.copy_from_slice(dx);
                dx.fill(0.0);
                let x = &plain[i * width + head * d..][..d];
                rms_norm_backward(x, norms.of(c, head), c.rms_eps, &dy, dx);
            }
        });
    }

    fn attn_norm<'w>(&'w self, layer: usize, block: &'w Block) -> &'w [f32] {
        self.params.vector(Part::AttnNorm(layer), &block.attn_norm)
    }
    fn ffn_norm<'w>(&'w self, layer: usize, block: &'w Block) -> &'w [f32] {
        self.params.vector(Part::FfnNorm(layer), &block.ffn_norm)
    }
    fn head_norms(&self, layer: usize, block: &Block) -> Option<HeadNorms> {
        let norms = block.head_norms.as_ref()?;
        let (q, k) = (Part::QNorm(layer), Part::KNorm(layer));
        Some(HeadNorms { q: self.params.vector(q, &norms.q).into(), k: self.params.vector(k, &norms.k).into() })
    }

    fn rotate(&self, rows: &Rows, qkv: &mut [f32], backward: bool) {
        let (c, rope) = (&self.weights.config, &self.weights.rope);
        each_row(qkv, c.qkv_width(), |i, row| {
            rope.apply(&rows.table, row, c.heads + c.kv_heads, rows.positions[i], backward);
        });
    }

    /// Whether the inputs of matrices are needed in the backward pass.
    fn wants(&self, layer: usize, targets: &[Target]) -> bool {
        let trained =
            |t: &Target| self.params.slot(layer, *t).is_some() || self.params.part(Part::Matrix(layer, *t)).is_some();
        self.observer.is_some() || targets.iter().any(trained)
    }

    pub(super) fn observe(&self, matrix: Option<(usize, Target)>, x: &[f32], m: usize, dy: &[f32], stride: usize) {
        if let Some(observer) = self.observer {
            (observer.borrow_mut())(matrix, x, m, dy, stride);
        }
    }
}
