//! Which matrices a model can spare bits on: predictions beside measured damage.
//!
//! Two predictions: the gradient norm GNS `‖dL/dW‖ / ‖W‖`, and the expected loss `½ Σᵢ gᵢ (E H Eᵀ)ᵢᵢ` with the real
//! error `E` of a type, which allocation uses. The report holds both, what storing one matrix in that type really does,
//! and the rank correlation of each prediction with it. Gaussian noise on whole layers shows where along the depth the
//! model is fragile.

use super::error::round_trip;
use super::profile::fitting;
use super::tune::{Goal, TuneOptions};
use super::{Progress, QuantizeError, budget, fold};
use crate::calibrate::Stream;
use crate::eval::kl_divergence;
use crate::gguf::{Gguf, TensorType};
use crate::model::{Decoder, ModelConfig, ModelError, Step, Target, Values};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use std::{collections::BTreeMap, fmt, ops::ControlFlow};

/// Standard deviations of the noise.
pub const NOISE: [f32; 4] = [1e-5, 1e-4, 1e-3, 1e-2];
/// Texts and tokens of each on which damage is measured.
const TEXTS: usize = 2;
const TOKENS: usize = 128;

/// Harm to the predictions of the unchanged model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Harm {
    /// Mean Kullback-Leibler divergence, nats.
    pub kld: f64,
    /// Fall of the share of positions with the right most likely token.
    pub top1_fall: f64,
}

/// One matrix.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MatrixSensitivity {
    pub tensor: String,
    /// `‖dL/dW‖ / ‖W‖`.
    pub gns: f64,
    /// Expected rise of the loss, nats a token.
    pub expected_loss: f64,
    /// With this matrix alone stored as [`Sensitivity::ty`].
    pub measured: Harm,
}

/// One layer with Gaussian noise added to all its matrices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerNoise {
    pub layer: usize,
    pub sigma: f32,
    pub measured: Harm,
}

/// The whole report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sensitivity {
    /// The type that was tried.
    pub ty: TensorType,
    pub matrices: Vec<MatrixSensitivity>,
    pub noise: Vec<LayerNoise>,
    /// Spearman rank correlation with the measured divergence.
    pub gns_rank_correlation: f64,
    pub expected_loss_rank_correlation: f64,
}

/// Measures the block matrices of `base`; `texts` as for [`super::tune`]. `seed` decides the noise.
///
/// # Errors
/// As [`super::tune`].
pub fn sensitivity(
    base: &Gguf,
    texts: &[Vec<u32>],
    ty: TensorType,
    seed: u64,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Sensitivity, QuantizeError> {
    let config = ModelConfig::from_gguf(base, &mut Vec::new())?.plain("sensitivity")?;
    let gradients = budget::gradients(base, texts, progress)?;
    let norms: BTreeMap<_, f64> = gradients.matrices.iter().map(|g| (g.matrix, g.norm)).collect();
    let options = TuneOptions { fold: false, ..TuneOptions::new(Goal::Budget(0)) };
    let expected = budget::measure(base, &config, texts, &options, &gradients, progress)?;
    let expected: BTreeMap<&str, &budget::Candidates> = expected.iter().map(|c| (c.name.as_str(), c)).collect();
    let mut probe = Probe::new(base, &config, texts)?;
    let (mut matrices, mut noise) = (Vec::new(), Vec::new());
    for layer in 0..config.layers {
        let tensor = format!("blk.{layer}: measuring damage");
        if progress(Progress { done: layer, total: config.layers, tensor: &tensor }).is_break() {
            return Err(QuantizeError::Cancelled);
        }
        let values = fold::block_values(base, layer)?;
        let behind = probe.enter(layer)?;
        for target in Target::ALL {
            let name = target.tensor(layer);
            let Some(w) = values.get(&name) else { continue };
            let columns = target.shape(&config).1;
            let ty = fitting(ty, columns);
            let back = round_trip(ty, w, columns, None)
                .map_err(|source| QuantizeError::Codec { tensor: name.clone(), source })?;
            let norm = w.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().sqrt();
            matrices.push(MatrixSensitivity {
                gns: norms.get(&Some((layer, target))).copied().unwrap_or(0.0) / norm.max(f64::MIN_POSITIVE),
                expected_loss: expected.get(name.as_str()).and_then(|c| c.loss(ty)).unwrap_or(0.0),
                measured: probe.harm(layer, &Values::from([(name.clone(), back)]))?,
                tensor: name,
            });
        }
        for (i, sigma) in NOISE.into_iter().enumerate() {
            let stream = (layer * NOISE.len() + i) as u64;
            let measured = probe.harm(layer, &noisy(&values, sigma, seed, stream))?;
            noise.push(LayerNoise { layer, sigma, measured });
        }
        probe.hidden = behind;
    }
    let measured: Vec<f64> = matrices.iter().map(|m| m.measured.kld).collect();
    let rank = |f: fn(&MatrixSensitivity) -> f64| spearman(&matrices.iter().map(f).collect::<Vec<_>>(), &measured);
    let (gns_rank_correlation, expected_loss_rank_correlation) = (rank(|m| m.gns), rank(|m| m.expected_loss));
    Ok(Sensitivity { ty, matrices, noise, gns_rank_correlation, expected_loss_rank_correlation })
}

/// The matrices with noise added; vectors as they are.
fn noisy(values: &Values, sigma: f32, seed: u64, stream: u64) -> Values {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let matrices = values.iter().filter(|(name, _)| name.ends_with("weight") && !name.ends_with("_norm.weight"));
    matrices
        .map(|(name, values)| (name.clone(), values.iter().map(|w| w + sigma * fold::normal(&mut rng)).collect()))
        .collect()
}

/// The unchanged model at one layer, and its predictions.
struct Probe<'a> {
    base: &'a Gguf,
    config: &'a ModelConfig,
    decoder: Decoder,
    texts: Vec<Vec<u32>>,
    /// Residual stream before the current layer.
    hidden: Vec<Vec<f32>>,
    /// Predictions when the current layer is unchanged.
    logits: Vec<Vec<f32>>,
}

impl<'a> Probe<'a> {
    fn new(base: &'a Gguf, config: &'a ModelConfig, texts: &[Vec<u32>]) -> Result<Self, QuantizeError> {
        let texts: Vec<Vec<u32>> =
            texts.iter().filter(|t| t.len() > 1).take(TEXTS).map(|t| t[..t.len().min(TOKENS)].to_vec()).collect();
        let hidden = Stream::new(base, config, &texts)?.hidden().to_vec();
        let decoder = Decoder::load(base)?;
        Ok(Self { base, config, decoder, texts, hidden, logits: Vec::new() })
    }

    /// Logits when the layers from `first` on run on `x`.
    fn finish(&self, text: usize, first: usize, mut x: Vec<f32>) -> Result<Vec<f32>, ModelError> {
        let mut cache = self.decoder.new_sequence();
        let tokens = &self.texts[text];
        self.decoder.run_blocks(first, &mut [Step { cache: &mut cache, tokens }], &mut x, &mut |_, _| ());
        self.decoder.logits_of(&x, tokens.len())
    }

    /// The stream behind `layer` with `changed` tensors.
    fn behind(&self, layer: usize, changed: &Values) -> Result<Vec<Vec<f32>>, ModelError> {
        let block = Decoder::one_block(self.base, changed, self.config, layer)?;
        let run = |(x, tokens): (&Vec<f32>, &Vec<u32>)| {
            let (mut x, mut cache) = (x.clone(), block.new_sequence());
            block.run_blocks(0, &mut [Step { cache: &mut cache, tokens }], &mut x, &mut |_, _| ());
            x
        };
        Ok(self.hidden.iter().zip(&self.texts).map(run).collect())
    }

    fn harm(&self, layer: usize, changed: &Values) -> Result<Harm, ModelError> {
        let (mut kld, mut right, mut base_right, mut n) = (0.0, 0, 0, 0);
        for (i, x) in self.behind(layer, changed)?.into_iter().enumerate() {
            let logits = self.finish(i, layer + 1, x)?;
            let (tokens, vocab) = (&self.texts[i], self.config.vocab);
            let rows = self.logits[i].chunks_exact(vocab).zip(logits.chunks_exact(vocab)).zip(&tokens[1..]);
            for ((base, other), target) in rows {
                kld += kl_divergence(base, other);
                base_right += usize::from(crate::model::argmax(base) == *target as usize);
                right += usize::from(crate::model::argmax(other) == *target as usize);
                n += 1;
            }
        }
        let top1_fall = (base_right as f64 - right as f64) / n.max(1) as f64;
        Ok(Harm { kld: kld / n.max(1) as f64, top1_fall })
    }

    /// Makes `layer` the current one; returns the stream behind it.
    fn enter(&mut self, layer: usize) -> Result<Vec<Vec<f32>>, ModelError> {
        let behind = self.behind(layer, &Values::new())?;
        let logits = behind.iter().enumerate().map(|(i, x)| self.finish(i, layer + 1, x.clone()));
        self.logits = logits.collect::<Result<_, _>>()?;
        Ok(behind)
    }
}

/// Rank correlation; ties get the mean of their ranks.
fn spearman(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (ranks(a), ranks(b));
    let mean = (a.len() as f64 - 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt()
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let below = |v: f64| values.iter().filter(|o| **o < v).count() as f64;
    let equal = |v: f64| values.iter().filter(|o| **o == v).count() as f64;
    values.iter().map(|v| below(*v) + (equal(*v) - 1.0) / 2.0).collect()
}

impl fmt::Display for Sensitivity {
    /// Markdown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| matrix | GNS | expected loss as {0} | measured KLD as {0} |\n|---|---|---|---|", self.ty)?;
        for m in &self.matrices {
            writeln!(f, "| {} | {:.3e} | {:.3e} | {:.3e} |", m.tensor, m.gns, m.expected_loss, m.measured.kld)?;
        }
        writeln!(
            f,
            "\nRank correlation with the measured KLD: GNS {:.2}, expected loss {:.2}. Types are chosen by the expected \
             loss: it contains the error that a type really makes, which a gradient norm does not know.\n",
            self.gns_rank_correlation, self.expected_loss_rank_correlation
        )?;
        writeln!(f, "| layer | noise | KLD | top-1 fall |\n|---|---|---|---|")?;
        for n in &self.noise {
            writeln!(f, "| {} | {:.0e} | {:.3e} | {:.4} |", n.layer, n.sigma, n.measured.kld, n.measured.top1_fall)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Arch;
    use crate::model::tests::{some_tokens, tiny_file_with};

    #[test]
    fn more_noise_hurts_more_and_the_report_names_both_measures() {
        // Width 32, so that types of blocks of 32 fit.
        let base = tiny_file_with(Arch::Llama, |metadata, parts| {
            metadata.iter_mut().filter(|(k, _)| k.ends_with("embedding_length")).for_each(|(_, v)| *v = 32u32.into());
            metadata.iter_mut().filter(|(k, _)| k.ends_with("forward_length")).for_each(|(_, v)| *v = 64u32.into());
            for (i, (_, dims, values)) in parts.iter_mut().enumerate() {
                *dims = dims
                    .iter()
                    .map(|d| match d {
                        24 => 32,
                        40 => 64,
                        d => *d,
                    })
                    .collect();
                *values = crate::model::tests::noise(dims.iter().product::<u64>() as usize, i as u64, 0.5);
            }
        });
        let texts: Vec<Vec<u32>> = (0..3).map(|i| some_tokens(40, i)).collect();
        let mut go = |_: Progress<'_>| ControlFlow::Continue(());
        let run = |go: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>, seed| {
            sensitivity(&base, &texts, TensorType::Q4_0, seed, go).unwrap()
        };
        let report = run(&mut go, 1);
        assert_eq!((report.matrices.len(), report.noise.len()), (14, 2 * NOISE.len()));
        for layer in report.noise.chunks(NOISE.len()) {
            let kld: Vec<f64> = layer.iter().map(|n| n.measured.kld).collect();
            // The divergence grows with the square of the noise, above the rounding of f32 logits.
            assert!(kld[3] > 20.0 * kld[2] && kld[3] > 500.0 * kld[1].abs(), "{kld:?}");
        }
        for m in &report.matrices {
            assert!(m.gns > 0.0 && m.expected_loss > 0.0 && m.measured.kld > 0.0, "{m:?}");
        }
        assert!(report.expected_loss_rank_correlation > 0.5, "{report}");
        assert_eq!(run(&mut go, 1), report);
        assert_ne!(run(&mut go, 2).noise, report.noise);
        let text = report.to_string();
        assert!(text.contains("blk.1.ffn_down.weight") && text.contains("chosen by the expected"), "{text}");
    }

    #[test]
    fn rank_correlation_by_hand() {
        assert!((spearman(&[1.0, 2.0, 3.0], &[10.0, 20.0, 15.0]) - 0.5).abs() < 1e-12);
        assert!((spearman(&[1.0, 1.0, 3.0], &[5.0, 5.0, 9.0]) - 1.0).abs() < 1e-12);
    }
}
