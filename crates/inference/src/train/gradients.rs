//! Gradients of the loss at every frozen matrix, for sensitivity: nothing is trained.

use super::{Sample, buffers::Buffers, effective::Effective, params::Params, pass};
use crate::linalg::{Operand, dot, gemm};
use crate::model::{Decoder, ModelError, Target};
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

#[derive(Default)]
struct Sums {
    square: Vec<f64>,
    rows: u64,
    norm2: f64,
}

/// One backward pass for each text, all its tokens but the first predicted. Memory: the model and one text's activations.
///
/// # Errors
/// [`ModelError::Input`] for texts of fewer than 2 tokens or that do not fit; [`ModelError::NotFinite`];
/// [`ModelError::Cancelled`].
pub fn matrix_gradients(
    decoder: &Decoder,
    texts: &[Vec<u32>],
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<MatrixGradient>, ModelError> {
    let (params, buffers) = (Params::none(&decoder.weights), Buffers::default());
    let mut sums: BTreeMap<Option<(usize, Target)>, Sums> = BTreeMap::new();
    for (i, text) in texts.iter().enumerate() {
        decoder.check_tokens(text, &format!("text {i}"))?;
        if text.len() < 2 {
            return Err(ModelError::input(format!("text {i} has one token; a gradient needs a prediction")));
        }
        let loss = one_text(decoder, &params, &buffers, text, &mut sums);
        if !loss.is_finite() {
            let place = format!("the loss of text {i}");
            return Err(ModelError::NotFinite { place, hint: "check the base model" });
        }
        if watch(i + 1, texts.len()).is_break() {
            return Err(ModelError::Cancelled);
        }
    }
    let finish = |(matrix, s): (_, Sums)| MatrixGradient {
        matrix,
        output_square: s.square.iter().map(|v| (v / s.rows.max(1) as f64) as f32).collect(),
        norm: (s.norm2 / texts.len().max(1) as f64).sqrt(),
    };
    Ok(sums.into_iter().map(finish).collect())
}

/// Adds one text; returns its loss.
fn one_text(
    decoder: &Decoder,
    params: &Params,
    buffers: &Buffers,
    text: &[u32],
    sums: &mut BTreeMap<Option<(usize, Target)>, Sums>,
) -> f64 {
    let sample = Sample::new(text.to_vec(), 1);
    // The output matrix is seen in parts; a part's share of the norm leaves out products between parts.
    let mut see = |matrix: Option<(usize, Target)>, x: &[f32], m: usize, dy: &[f32], stride: usize| {
        let c = decoder.config();
        let (outputs, inputs) = matrix.map_or((c.vocab, c.width), |(_, target)| target.shape(c));
        let s = sums.entry(matrix).or_default();
        s.square.resize(outputs, 0.0);
        for row in 0..m {
            let dy = &dy[row * stride..][..outputs];
            s.square.iter_mut().zip(dy).for_each(|(s, d)| *s += f64::from(*d) * f64::from(*d));
        }
        s.rows += m as u64;
        s.norm2 += product_norm2(x, inputs, dy, outputs, stride, m);
    };
    let observer: RefCell<&mut pass::Observer<'_>> = RefCell::new(&mut see);
    let effective = Effective::default();
    let plain = pass::Pass::plain(&decoder.weights, params, &effective, buffers);
    let pass = pass::Pass { observer: Some(&observer), ..plain };
    pass.run(&[&sample], 1.0, &mut [])
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
    use crate::model::Arch;
    use crate::model::tests::{some_tokens, tiny_file, tiny_file_with};

    fn loss(file: &crate::gguf::Gguf, text: &[u32]) -> f64 {
        let d = Decoder::load_with(file, Storage::F32).unwrap();
        one_text(&d, &Params::none(&d.weights), &Buffers::default(), text, &mut BTreeMap::new())
    }

    /// The norm is the root of the squared slopes along all weights.
    #[test]
    fn norms_match_finite_differences() {
        let text = some_tokens(6, 3);
        let base = Decoder::load_with(&tiny_file(Arch::Qwen2), Storage::F32).unwrap();
        let all = matrix_gradients(&base, std::slice::from_ref(&text), &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!(all.len(), 2 * 7 + 1);
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
            let got = all.iter().find(|g| g.matrix == Some((layer, target))).unwrap();
            assert!((got.norm / want - 1.0).abs() < 0.03, "{name}: {} {want}", got.norm);
            assert_eq!(got.output_square.len(), 16);
        }
    }

    #[test]
    fn output_gradients_are_those_of_the_softmax() {
        let text = some_tokens(5, 4);
        let d = Decoder::load_with(&tiny_file(Arch::Llama), Storage::F32).unwrap();
        let all = matrix_gradients(&d, std::slice::from_ref(&text), &mut |_, _| ControlFlow::Continue(())).unwrap();
        let output = all.iter().find(|g| g.matrix.is_none()).unwrap();
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
        let e = matrix_gradients(&d, &[vec![1]], &mut |_, _| ControlFlow::Continue(())).unwrap_err().to_string();
        assert!(e.contains("text 0"), "{e}");
    }
}
