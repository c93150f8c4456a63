//! Gradients of the loss at every frozen matrix and at the embedding, for sensitivity: nothing is trained.

use super::{
    Sample,
    buffers::Buffers,
    effective::Effective,
    layout::Layout,
    params::Params,
    pass::{Observer, Pass},
};
use crate::calibrate::{Stream, looked_up};
use crate::gguf::Gguf;
use crate::linalg::{Operand, dot, gemm};
use crate::model::{ModelConfig, ModelError, Target, Values, load_block, load_head};
use std::{cell::RefCell, collections::BTreeMap, ops::ControlFlow};

/// What the loss says about one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct MatrixGradient {
    /// Layer and matrix; `None` is the output matrix (the embedding when tied).
    pub matrix: Option<(usize, Target)>,
    /// Mean over tokens of the squared gradient at each output.
    pub output_square: Vec<f32>,
    /// `‖dL/dW‖` (Frobenius), root mean square over texts; `L` is the sum of a text's losses over its tokens.
    pub norm: f64,
}

/// What the loss says about all of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// The output, then layer by layer.
    pub matrices: Vec<MatrixGradient>,
    /// Mean over tokens of the squared gradient at each channel of an embedding that is only looked up; empty where it is
    /// the output, too.
    pub embedding_square: Vec<f32>,
}

#[derive(Default)]
struct Sums {
    square: Vec<f64>,
    rows: u64,
    norm2: f64,
}

/// One backward pass for each text, all its tokens but the first predicted. One block is in memory at a time, and what
/// enters each block. `watch` gets the blocks that were passed, there and back, and how many that will be.
///
/// # Errors
/// [`ModelError::Input`] for texts of fewer than 2 tokens or that do not fit; [`ModelError::NotFinite`];
/// [`ModelError::Unsupported`]; [`ModelError::Weight`]; [`ModelError::Cancelled`].
pub fn matrix_gradients(
    base: &Gguf,
    texts: &[Vec<u32>],
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Gradients, ModelError> {
    let config = ModelConfig::from_gguf(base, &mut Vec::new())?.plain("gradients")?;
    if let Some(i) = texts.iter().position(|t| t.len() < 2) {
        return Err(ModelError::input(format!("text {i} has fewer than two tokens; a gradient needs a prediction")));
    }
    let embedded = Stream::new(base, &config, texts)?;
    let samples: Vec<Sample> = texts.iter().map(|t| Sample::new(t.clone(), 1)).collect();
    let layouts = samples.iter().map(|s| Layout::new(&[s])).collect();
    let looked_up = looked_up(base).is_some();
    let mut run = Run { base, config: &config, layouts, looked_up, buffers: Buffers::default(), sums: BTreeMap::new() };
    let (mut done, total) = (0, 2 * config.layers);
    let mut passed = || {
        done += 1;
        if watch(done, total).is_break() { Err(ModelError::Cancelled) } else { Ok(()) }
    };
    let mut inputs = vec![embedded.hidden().to_vec()];
    for layer in 0..config.layers {
        let outputs = run.forward(layer, &inputs[layer])?;
        inputs.push(outputs);
        passed()?;
    }
    let mut slopes = run.output(&inputs.pop().unwrap_or_default())?;
    for layer in (0..config.layers).rev() {
        run.backward(layer, &inputs.pop().unwrap_or_default(), &mut slopes)?;
        passed()?;
    }
    let finish = |(matrix, s): (_, Sums)| MatrixGradient {
        matrix,
        output_square: s.square.iter().map(|v| (v / s.rows.max(1) as f64) as f32).collect(),
        norm: (s.norm2 / texts.len().max(1) as f64).sqrt(),
    };
    let embedding_square = if looked_up { mean_squares(&slopes, config.width) } else { Vec::new() };
    Ok(Gradients { matrices: run.sums.into_iter().map(finish).collect(), embedding_square })
}

/// Mean square of each column over the rows of all texts.
fn mean_squares(texts: &[Vec<f32>], columns: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; columns];
    let mut n = 0u64;
    for row in texts.iter().flat_map(|text| text.chunks_exact(columns)) {
        sums.iter_mut().zip(row).for_each(|(s, d)| *s += f64::from(*d) * f64::from(*d));
        n += 1;
    }
    sums.into_iter().map(|s| (s / n.max(1) as f64) as f32).collect()
}

struct Run<'a> {
    base: &'a Gguf,
    config: &'a ModelConfig,
    /// Of each text.
    layouts: Vec<Layout>,
    /// The embedding is not the output: slopes are wanted down to it.
    looked_up: bool,
    buffers: Buffers,
    sums: BTreeMap<Option<(usize, Target)>, Sums>,
}

impl Run<'_> {
    /// The residual stream of every text behind a block.
    fn forward(&self, layer: usize, inputs: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, ModelError> {
        let weights = load_block(self.base, &Values::new(), self.config, layer)?;
        let (params, effective) = (Params::none(&weights), Effective::default());
        let pass = Pass::plain(&weights, &params, &effective, &self.buffers);
        let one = |(layout, x): (&Layout, &Vec<f32>)| {
            let x = self.buffers.copy(x);
            weights.blocks.iter().fold(x, |x, block| pass.block(0, block, &pass.rows(layout), x).0).to_vec()
        };
        Ok(self.layouts.iter().zip(inputs).map(one).collect())
    }

    /// Slopes of the losses along the residual stream behind the last block.
    fn output(&mut self, inputs: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, ModelError> {
        let Self { base, config, layouts, buffers, sums, .. } = self;
        let weights = load_head(base, config)?;
        let (params, effective) = (Params::none(&weights), Effective::default());
        let mut see = |_: Option<(usize, Target)>, x: &[f32], m: usize, dy: &[f32], stride: usize| {
            sums.entry(None).or_default().add((config.vocab, config.width), x, m, dy, stride);
        };
        let observer: RefCell<&mut Observer<'_>> = RefCell::new(&mut see);
        let pass = Pass { observer: Some(&observer), ..Pass::plain(&weights, &params, &effective, buffers) };
        let mut all = Vec::with_capacity(inputs.len());
        for (i, (layout, x)) in layouts.iter().zip(inputs).enumerate() {
            let mut dx = vec![0.0; x.len()];
            let loss = pass.losses(x, &layout.predictions, None, 1.0, Some((&mut dx[..], &mut [][..])));
            if !loss.is_finite() {
                let place = format!("the loss of text {i}");
                return Err(ModelError::NotFinite { place, hint: "check the base model" });
            }
            all.push(dx);
        }
        Ok(all)
    }

    /// Turns slopes behind a block into those before it; of the first block only where they are wanted.
    fn backward(&mut self, layer: usize, inputs: &[Vec<f32>], slopes: &mut [Vec<f32>]) -> Result<(), ModelError> {
        let Self { base, config, layouts, looked_up, buffers, sums } = self;
        let below = layer > 0 || *looked_up;
        let weights = load_block(base, &Values::new(), config, layer)?;
        let (params, effective) = (Params::none(&weights), Effective::default());
        let mut see = |matrix: Option<(usize, Target)>, x: &[f32], m: usize, dy: &[f32], stride: usize| {
            let Some((_, target)) = matrix else { return };
            sums.entry(Some((layer, target))).or_default().add(target.shape(config), x, m, dy, stride);
        };
        let observer: RefCell<&mut Observer<'_>> = RefCell::new(&mut see);
        let pass = Pass { observer: Some(&observer), ..Pass::plain(&weights, &params, &effective, buffers) };
        for ((layout, x), dx) in layouts.iter().zip(inputs).zip(slopes) {
            let rows = pass.rows(layout);
            for block in &weights.blocks {
                let (_, saved) = pass.block(0, block, &rows, buffers.copy(x));
                pass.block_backward((0, below), block, &rows, saved, dx, &mut []);
            }
        }
        Ok(())
    }
}

impl Sums {
    /// Adds the rows of one text. The output matrix is seen in parts; a part's share of the norm leaves out products between
    /// parts.
    fn add(&mut self, (outputs, inputs): (usize, usize), x: &[f32], m: usize, dy: &[f32], stride: usize) {
        self.square.resize(outputs, 0.0);
        for row in 0..m {
            let dy = &dy[row * stride..][..outputs];
            self.square.iter_mut().zip(dy).for_each(|(s, d)| *s += f64::from(*d) * f64::from(*d));
        }
        self.rows += m as u64;
        self.norm2 += product_norm2(x, inputs, dy, outputs, stride, m);
    }
}

/// `‖Σₜ dyₜ xₜᵀ‖²` without the matrix: `Σₜₛ (dyₜ·dyₛ)(xₜ·xₛ)`.
fn product_norm2(x: &[f32], inputs: usize, dy: &[f32], outputs: usize, stride: usize, m: usize) -> f64 {
    let (mut a, mut b) = (vec![0.0; m * m], vec![0.0; m * m]);
    gemm(m, m, inputs, x, inputs, Operand::transposed(x, inputs), &mut a, m, false);
    gemm(m, m, outputs, dy, stride, Operand::transposed(dy, stride), &mut b, m, false);
    a.chunks_exact(m).zip(b.chunks_exact(m)).map(|(a, b)| f64::from(dot(a, b))).sum::<f64>().max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Storage;
    use crate::model::tests::{some_tokens, tiny_file, tiny_file_with};
    use crate::model::{Arch, Decoder};

    fn loss(file: &Gguf, text: &[u32]) -> f64 {
        let d = Decoder::load_with(file, Storage::F32).unwrap();
        let (params, effective, buffers) = (Params::none(&d.weights), Effective::default(), Buffers::default());
        Pass::plain(&d.weights, &params, &effective, &buffers).measure(&[&Sample::new(text.to_vec(), 1)])
    }

    /// The norm is the root of the squared slopes along all weights.
    #[test]
    fn norms_match_finite_differences() {
        let text = some_tokens(6, 3);
        let base = tiny_file(Arch::Qwen2);
        let all = matrix_gradients(&base, std::slice::from_ref(&text), &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!((all.matrices.len(), all.embedding_square.len()), (2 * 7 + 1, 0), "tied");
        for (layer, target) in [(1, Target::V), (0, Target::K)] {
            let name = target.tensor(layer);
            let bumped = |at: usize, by: f32| {
                let file = tiny_file_with(Arch::Qwen2, |_, parts| {
                    parts.iter_mut().find(|(n, ..)| *n == name).unwrap().2[at] += by;
                });
                loss(&file, &text)
            };
            let h = 4e-3;
            let slope = |i| (bumped(i, h) - bumped(i, -h)) / (2.0 * f64::from(h));
            let want = (0..16 * 24).map(|i| slope(i).powi(2)).sum::<f64>().sqrt();
            let got = all.matrices.iter().find(|g| g.matrix == Some((layer, target))).unwrap();
            assert!((got.norm / want - 1.0).abs() < 0.03, "{name}: {} {want}", got.norm);
            assert_eq!(got.output_square.len(), 16);
        }
    }

    #[test]
    fn output_gradients_are_those_of_the_softmax() {
        let text = some_tokens(5, 4);
        let file = tiny_file(Arch::Llama);
        let d = Decoder::load_with(&file, Storage::F32).unwrap();
        let all = matrix_gradients(&file, std::slice::from_ref(&text), &mut |_, _| ControlFlow::Continue(())).unwrap();
        let output = all.matrices.iter().find(|g| g.matrix.is_none()).unwrap();
        let mut want = vec![0.0f64; 50];
        d.visit_logits(&text, 0..4, &mut |p, row| {
            let sum = crate::linalg::log_sum_exp(row);
            for (v, l) in row.iter().enumerate() {
                let hit = f64::from(u8::from(text[p + 1] as usize == v));
                want[v] += (f64::from((l - sum).exp()) - hit).powi(2) / 4.0;
            }
            Ok(())
        })
        .unwrap();
        for (got, want) in output.output_square.iter().zip(&want) {
            assert!((f64::from(*got) - want).abs() < 2e-3, "{got} {want}");
        }
        let e = matrix_gradients(&file, &[vec![1]], &mut |_, _| ControlFlow::Continue(())).unwrap_err().to_string();
        assert!(e.contains("text 0"), "{e}");
    }

    /// Each token of the text occurs once, so that a row of the embedding has the gradient of one position.
    #[test]
    fn gradients_at_a_looked_up_embedding_match_finite_differences() {
        let text: Vec<u32> = (0..6).map(|i| 7 * i + 3).collect();
        let own_output = |at: usize, by: f32| {
            tiny_file_with(Arch::Qwen2, |_, parts| {
                parts[0].2[at] += by;
                parts.push(("output.weight".into(), vec![24, 50], crate::model::tests::noise(24 * 50, 77, 1.0)));
            })
        };
        let base = own_output(0, 0.0);
        let all = matrix_gradients(&base, std::slice::from_ref(&text), &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!((all.matrices.len(), all.embedding_square.len()), (2 * 7 + 1, 24));
        let h = 4e-3;
        for column in [0, 5, 17, 23] {
            let slope = |token: &u32| {
                let at = *token as usize * 24 + column;
                (loss(&own_output(at, h), &text) - loss(&own_output(at, -h), &text)) / (2.0 * f64::from(h))
            };
            let want = text.iter().map(|t| slope(t).powi(2)).sum::<f64>() / text.len() as f64;
            let got = f64::from(all.embedding_square[column]);
            assert!((got / want - 1.0).abs() < 0.05, "column {column}: {got} {want}");
        }
    }
}
