//! Causal attention inside each packed sample and over the beginning that all have in common, forward and backward, in
//! f32.

use crate::linalg::{Operand, SharedMut, dot, gemm, gemm_columns, softmax_prefix};
use crate::model::ModelConfig;
use rayon::prelude::*;
use std::ops::Range;

/// Rows that are computed together; what lies above the diagonal inside a band is computed in vain.
const BAND: usize = 96;

/// Rows of one text in a pass: the first `shared` rows, which it has in common with all texts, and its own.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub shared: usize,
    pub own: Range<usize>,
}

/// One key/value head of one text, over all rows of `[q | k | v]`.
struct Head<'a> {
    c: &'a ModelConfig,
    span: &'a Span,
    qkv: &'a [f32],
    kv_head: usize,
}

impl Head<'_> {
    /// Own rows.
    fn n(&self) -> usize {
        self.span.own.len()
    }
    /// Rows that the last of them sees.
    fn seen(&self) -> usize {
        self.span.shared + self.n()
    }
    fn q(&self, head: usize) -> &[f32] {
        &self.qkv[self.span.own.start * self.c.qkv_width() + head * self.c.head_dim..]
    }
    fn k_column(&self) -> usize {
        self.c.q_width() + self.kv_head * self.c.head_dim
    }
    fn v_column(&self) -> usize {
        self.k_column() + self.c.kv_width()
    }
    /// The head's columns from `at` on of all rows that are seen, `seen × head_dim`.
    fn gathered(&self, at: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.seen() * self.c.head_dim);
        for r in (0..self.span.shared).chain(self.span.own.clone()) {
            out.extend_from_slice(&self.qkv[r * self.c.qkv_width() + at..][..self.c.head_dim]);
        }
        out
    }
    fn scale(&self) -> f32 {
        1.0 / (self.c.head_dim as f32).sqrt()
    }

    /// Attention weights of a band of one query head's rows over the gathered keys that its last row sees; zero for what a
    /// row does not see.
    fn weights(&self, head: usize, band: &Range<usize>, k: &[f32]) -> Vec<f32> {
        let (n, t, d, stride) = (band.len(), self.span.shared + band.end, self.c.head_dim, self.c.qkv_width());
        let mut p = vec![0.0; n * t];
        let q = &self.q(head)[band.start * stride..];
        gemm(n, t, d, q, stride, Operand::transposed(k, d), &mut p, t, false);
        let scale = self.scale();
        for (row, i) in p.chunks_exact_mut(t).zip(band.clone()) {
            let seen = self.span.shared + i + 1;
            row[..seen].iter_mut().for_each(|s| *s *= scale);
            softmax_prefix(row, seen);
        }
        p
    }

    /// Own rows in bands: a band looks at no more keys than its last row sees.
    fn bands(&self) -> impl Iterator<Item = Range<usize>> {
        let n = self.n();
        (0..n).step_by(BAND).map(move |from| from..n.min(from + BAND))
    }

    /// Gradients of the head's queries, written to `dqkv`, and of the keys and values it sees, `seen × head_dim` each.
    fn backward(&self, dout: &[f32], dqkv: SharedMut) -> [Vec<f32>; 2] {
        let (c, t, d, stride) = (self.c, self.seen(), self.c.head_dim, self.c.qkv_width());
        let (k, v) = (self.gathered(self.k_column()), self.gathered(self.v_column()));
        let (mut dk, mut dv) = (vec![0.0; t * d], vec![0.0; t * d]);
        for head in self.kv_head * c.group()..(self.kv_head + 1) * c.group() {
            for band in self.bands() {
                let (n, t, row) = (band.len(), self.span.shared + band.end, self.span.own.start + band.start);
                let p = self.weights(head, &band, &k);
                let dy = &dout[row * c.q_width() + head * d..];
                let (mut ds, mut dq) = (vec![0.0; n * t], vec![0.0; n * d]);
                gemm(n, t, d, dy, c.q_width(), Operand::transposed(&v, d), &mut ds, t, false);
                gemm_columns(t, d, n, &p, t, Operand::rows(dy, c.q_width()), &mut dv, d, true);
                softmax_backward(&p, &mut ds, t, self.scale());
                gemm(n, d, t, &ds, t, Operand::rows(&k, d), &mut dq, d, false);
                let q = &self.q(head)[band.start * stride..];
                gemm_columns(t, d, n, &ds, t, Operand::rows(q, stride), &mut dk, d, true);
                scatter(&dq, d, dqkv, row, head * d, stride);
            }
        }
        [dk, dv]
    }
}

fn heads<'a>(c: &'a ModelConfig, spans: &'a [Span], qkv: &'a [f32]) -> Vec<Head<'a>> {
    let all = |span: &'a Span| (0..c.kv_heads).map(move |kv_head| Head { c, span, qkv, kv_head });
    spans.iter().flat_map(all).collect()
}

/// `out` gets the heads' outputs side by side, `q_width` values per row.
pub(super) fn forward(c: &ModelConfig, spans: &[Span], qkv: &[f32], out: &mut [f32]) {
    let (d, group) = (c.head_dim, c.group());
    let out = SharedMut::new(out);
    heads(c, spans, qkv).into_par_iter().for_each(|h| {
        let (k, v) = (h.gathered(h.k_column()), h.gathered(h.v_column()));
        for head in h.kv_head * group..(h.kv_head + 1) * group {
            for band in h.bands() {
                let (n, t) = (band.len(), h.span.shared + band.end);
                let p = h.weights(head, &band, &k);
                let mut o = vec![0.0; n * d];
                gemm(n, d, t, &p, t, Operand::rows(&v, d), &mut o, d, false);
                scatter(&o, d, out, h.span.own.start + band.start, head * d, c.q_width());
            }
        }
    });
}

/// Gradient of [`forward`]: overwrites `dqkv`, given the gradient `dout` of its output.
pub(super) fn backward(c: &ModelConfig, spans: &[Span], qkv: &[f32], dout: &[f32], dqkv: &mut [f32]) {
    let (d, stride) = (c.head_dim, c.qkv_width());
    let target = SharedMut::new(dqkv);
    let heads = heads(c, spans, qkv);
    let gradients: Vec<[Vec<f32>; 2]> = heads
        .par_iter()
        .map(|h| {
            let parts = h.backward(dout, target);
            for (part, at) in parts.iter().zip([h.k_column(), h.v_column()]) {
                scatter(&part[h.span.shared * d..], d, target, h.span.own.start, at, stride);
            }
            parts
        })
        .collect();
    // several texts add to the shared rows: one after the other, so that every run gives the same bits
    for (h, parts) in heads.iter().zip(gradients) {
        for (part, at) in parts.iter().zip([h.k_column(), h.v_column()]) {
            for (row, from) in part.chunks_exact(d).take(h.span.shared).enumerate() {
                crate::linalg::add(&mut dqkv[row * stride + at..][..d], from);
            }
        }
    }
}

/// `ds = p * (dp - sum(p * dp)) * scale`, in place of `dp`, for rows of `t`; where `p` is 0 the result is, too.
fn softmax_backward(p: &[f32], dp: &mut [f32], t: usize, scale: f32) {
    for (p, dp) in p.chunks_exact(t).zip(dp.chunks_exact_mut(t)) {
        let mean = dot(p, dp);
        dp.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - mean) * scale);
    }
}

/// Copies rows of `width` values to column `at` of rows `first..` of a wider matrix.
fn scatter(rows: &[f32], width: usize, out: SharedMut, first: usize, at: usize, stride: usize) {
    for (i, row) in rows.chunks_exact(width).enumerate() {
        // SAFETY: every task writes columns of its own head in the own rows of its text.
        unsafe { out.slice((first + i) * stride + at, width) }.copy_from_slice(row);
    }
}
