//! Causal attention inside each packed sample, forward and backward, in f32.

use crate::linalg::{Operand, SharedMut, dot, gemm, softmax_prefix};
use crate::model::ModelConfig;
use rayon::prelude::*;
use std::ops::Range;

/// Views into one sample's rows of `[q | k | v]`.
struct Head<'a> {
    c: &'a ModelConfig,
    len: usize,
    qkv: &'a [f32],
    kv_head: usize,
}

impl Head<'_> {
    fn q(&self, head: usize) -> &[f32] {
        &self.qkv[head * self.c.head_dim..]
    }
    fn k(&self) -> &[f32] {
        &self.qkv[self.c.q_width() + self.kv_head * self.c.head_dim..]
    }
    fn v(&self) -> &[f32] {
        &self.qkv[self.c.q_width() + self.c.kv_width() + self.kv_head * self.c.head_dim..]
    }
    fn scale(&self) -> f32 {
        1.0 / (self.c.head_dim as f32).sqrt()
    }

    /// Attention weights of one query head, `len × len`, zero above the diagonal.
    fn weights(&self, head: usize) -> Vec<f32> {
        let (n, d, stride) = (self.len, self.c.head_dim, self.c.qkv_width());
        let mut p = vec![0.0; n * n];
        gemm(n, n, d, self.q(head), stride, Operand::transposed(self.k(), stride), &mut p, n, false);
        let scale = self.scale();
        for (i, row) in p.chunks_exact_mut(n).enumerate() {
            row[..=i].iter_mut().for_each(|s| *s *= scale);
            softmax_prefix(row, i + 1);
        }
        p
    }
}

fn heads<'a>(c: &'a ModelConfig, spans: &[Range<usize>], qkv: &'a [f32]) -> Vec<(usize, Head<'a>)> {
    let stride = c.qkv_width();
    let all = |span: &Range<usize>| {
        let (first, len) = (span.start, span.len());
        let qkv = &qkv[first * stride..span.end * stride];
        (0..c.kv_heads).map(move |kv_head| (first, Head { c, len, qkv, kv_head })).collect::<Vec<_>>()
    };
    spans.iter().flat_map(all).collect()
}

/// `out` gets the heads' outputs side by side, `q_width` values per row.
pub(super) fn forward(c: &ModelConfig, spans: &[Range<usize>], qkv: &[f32], out: &mut [f32]) {
    let (d, group) = (c.head_dim, c.group());
    let out = SharedMut::new(out);
    heads(c, spans, qkv).into_par_iter().for_each(|(first, h)| {
        let mut o = vec![0.0; h.len * d];
        for head in h.kv_head * group..(h.kv_head + 1) * group {
            let p = h.weights(head);
            gemm(h.len, d, h.len, &p, h.len, Operand::rows(h.v(), c.qkv_width()), &mut o, d, false);
            scatter(&o, d, out, first, head * d, c.q_width());
        }
    });
}

/// Gradient of [`forward`]: overwrites `dqkv`, given the gradient `dout` of its output.
pub(super) fn backward(c: &ModelConfig, spans: &[Range<usize>], qkv: &[f32], dout: &[f32], dqkv: &mut [f32]) {
    let (d, group, stride) = (c.head_dim, c.group(), c.qkv_width());
    let dqkv = SharedMut::new(dqkv);
    heads(c, spans, qkv).into_par_iter().for_each(|(first, h)| {
        let n = h.len;
        let (mut dk, mut dv, mut dq) = (vec![0.0; n * d], vec![0.0; n * d], vec![0.0; n * d]);
        for head in h.kv_head * group..(h.kv_head + 1) * group {
            let p = h.weights(head);
            let dy = &dout[first * c.q_width() + head * d..];
            let mut ds = vec![0.0; n * n];
            gemm(n, n, d, dy, c.q_width(), Operand::transposed(h.v(), stride), &mut ds, n, false);
            gemm(n, d, n, &transpose(&p, n), n, Operand::rows(dy, c.q_width()), &mut dv, d, true);
            softmax_backward(&p, &mut ds, n, h.scale());
            gemm(n, d, n, &ds, n, Operand::rows(h.k(), stride), &mut dq, d, false);
            gemm(n, d, n, &transpose(&ds, n), n, Operand::rows(h.q(head), stride), &mut dk, d, true);
            scatter(&dq, d, dqkv, first, head * d, stride);
        }
        scatter(&dk, d, dqkv, first, c.q_width() + h.kv_head * d, stride);
        scatter(&dv, d, dqkv, first, c.q_width() + c.kv_width() + h.kv_head * d, stride);
    });
}

/// `ds = p * (dp - sum(p * dp)) * scale`, in place of `dp`; above the diagonal `p`, and so the result, is 0.
fn softmax_backward(p: &[f32], dp: &mut [f32], n: usize, scale: f32) {
    for (p, dp) in p.chunks_exact(n).zip(dp.chunks_exact_mut(n)) {
        let mean = dot(p, dp);
        dp.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - mean) * scale);
    }
}

fn transpose(x: &[f32], n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n * n];
    for (i, row) in x.chunks_exact(n).enumerate() {
        for (j, v) in row.iter().enumerate() {
            out[j * n + i] = *v;
        }
    }
    out
}

/// Copies rows of `width` values to column `at` of rows `first..` of a wider matrix.
fn scatter(rows: &[f32], width: usize, out: SharedMut, first: usize, at: usize, stride: usize) {
    for (i, row) in rows.chunks_exact(width).enumerate() {
        // SAFETY: every task writes columns of its own head in rows of its own sample.
        unsafe { out.slice((first + i) * stride + at, width) }.copy_from_slice(row);
    }
}
