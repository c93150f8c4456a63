//! The forward pass: texts of a batch lie one after the other, without padding; only attention looks at their
//! borders.

use super::{
    config::Config,
    weights::{Layer, Linear, Norm, Weights},
};
use crate::linalg::{Operand, add, gemm, softmax_prefix};
use rayon::prelude::*;

/// One vector of unit length per sequence of token ids.
pub(super) fn embed(config: &Config, weights: &Weights, batch: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let h = config.hidden_size;
    let mut x = embeddings(weights, h, batch);
    norm_rows(&mut x, &weights.norm, config.layer_norm_eps);
    for layer in &weights.layers {
        block(config, layer, batch, &mut x);
    }
    let mut out = Vec::with_capacity(batch.len());
    let mut rest = x.as_slice();
    for tokens in batch {
        let (rows, after) = rest.split_at(tokens.len() * h);
        out.push(pool(rows, h));
        rest = after;
    }
    out
}

fn embeddings(weights: &Weights, h: usize, batch: &[Vec<u32>]) -> Vec<f32> {
    let mut x = Vec::with_capacity(batch.iter().map(Vec::len).sum::<usize>() * h);
    for tokens in batch {
        for (position, &token) in tokens.iter().enumerate() {
            let word = &weights.words[token as usize * h..][..h];
            let place = &weights.positions[position * h..][..h];
            x.extend(word.iter().zip(place).map(|(w, p)| w + p));
        }
    }
    x
}

/// Post-norm transformer block (arXiv 1810.04805).
fn block(config: &Config, layer: &Layer, batch: &[Vec<u32>], x: &mut [f32]) {
    let h = config.hidden_size;
    let n = x.len() / h;
    let qkv = linear(&layer.qkv, x, n);
    let mixed = attention(config, batch, &qkv);
    let mut y = linear(&layer.attention_out, &mixed, n);
    add(&mut y, x);
    norm_rows(&mut y, &layer.attention_norm, config.layer_norm_eps);
    let mut inner = linear(&layer.up, &y, n);
    inner.par_chunks_mut(1 << 13).for_each(|part| part.iter_mut().for_each(|v| *v = gelu(*v)));
    x.copy_from_slice(&linear(&layer.down, &inner, n));
    add(x, &y);
    norm_rows(x, &layer.output_norm, config.layer_norm_eps);
}

fn linear(layer: &Linear, x: &[f32], n: usize) -> Vec<f32> {
    let width = layer.bias.len();
    let mut out = vec![0.0; n * width];
    layer.weight.forward(x, n, &mut out, false);
    out.par_chunks_mut(width).for_each(|row| add(row, &layer.bias));
    out
}

/// Softmax attention within each text; `qkv` rows hold query, key and value of a token.
fn attention(config: &Config, batch: &[Vec<u32>], qkv: &[f32]) -> Vec<f32> {
    let h = config.hidden_size;
    let mut out = vec![0.0; qkv.len() / 3];
    let mut parts = Vec::with_capacity(batch.len());
    let (mut inputs, mut outputs) = (qkv, out.as_mut_slice());
    for tokens in batch {
        let (input, after) = inputs.split_at(tokens.len() * 3 * h);
        let (output, after_out) = outputs.split_at_mut(tokens.len() * h);
        parts.push((tokens.len(), input, output));
        (inputs, outputs) = (after, after_out);
    }
    parts.into_par_iter().for_each(|(len, qkv, out)| attend(config, len, qkv, out));
    out
}

fn attend(config: &Config, len: usize, qkv: &[f32], out: &mut [f32]) {
    let (h, heads) = (config.hidden_size, config.num_attention_heads);
    let width = h / heads;
    let scale = 1.0 / (width as f32).sqrt();
    let mut scores = vec![0.0; len * len];
    for head in 0..heads {
        let (q, k, v) = (head * width, h + head * width, 2 * h + head * width);
        gemm(len, len, width, &qkv[q..], 3 * h, Operand::transposed(&qkv[k..], 3 * h), &mut scores, len, false);
        for row in scores.chunks_mut(len) {
            row.iter_mut().for_each(|s| *s *= scale);
            softmax_prefix(row, len);
        }
        let out = &mut out[head * width..];
        gemm(len, width, len, &scores, len, Operand::rows(&qkv[v..], 3 * h), out, h, false);
    }
}

/// LayerNorm of each row (arXiv 1607.06450); sums in `f64`, so that their order hardly matters.
fn norm_rows(x: &mut [f32], norm: &Norm, eps: f32) {
    let h = norm.weight.len();
    x.par_chunks_mut(h).with_min_len(16).for_each(|row| {
        let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / h as f64;
        let variance = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / h as f64;
        let inverse = 1.0 / (variance + f64::from(eps)).sqrt();
        for ((v, w), b) in row.iter_mut().zip(&norm.weight).zip(&norm.bias) {
            *v = ((f64::from(*v) - mean) * inverse) as f32 * w + b;
        }
    });
}

/// Exact GELU (arXiv 1606.08415): `x · Φ(x)`.
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// Mean over tokens, scaled to unit length.
fn pool(rows: &[f32], h: usize) -> Vec<f32> {
    let mut sum = vec![0.0f64; h];
    for row in rows.chunks(h) {
        sum.iter_mut().zip(row).for_each(|(s, v)| *s += f64::from(*v));
    }
    let length = sum.iter().map(|s| s * s).sum::<f64>().sqrt();
    // A zero vector has no direction; it stays zero and is similar to nothing.
    let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
    sum.iter().map(|s| (s * scale) as f32).collect()
}
