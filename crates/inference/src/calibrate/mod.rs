//! Calibration: what enters every matrix of a decoder on sample texts.
//!
//! The texts run block by block; one block and the residual stream of the texts are in memory, so a model larger
//! than memory can be calibrated from its mapped file.

mod hessian;
mod stats;
mod stream;

pub use hessian::{Hessian, row_errors};
pub use stats::InputStats;
pub(crate) use stream::{Stream, broken};

use crate::gguf::Gguf;
use crate::model::{Decoder, ModelConfig, ModelError, Site, Target, norm_rows};
use crate::quantize::Imatrix;
use std::{collections::BTreeMap, ops::ControlFlow};

/// The inputs that some matrices have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibratedInput {
    /// The matrices, for example q, k and v of a block.
    pub tensors: Vec<String>,
    /// Which slice of those matrices, and of how many: 0 of 1 but for tensors of three dimensions (experts, latent heads).
    /// Slices that no token reached have no entry.
    pub slice: (usize, usize),
    pub stats: InputStats,
}

/// Result of [`calibrate`]: inputs in order of the forward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    pub inputs: Vec<CalibratedInput>,
    texts: u32,
    text_tokens: u32,
}

impl Calibration {
    /// The importance matrix, for files of `llama-imatrix` layout. `datasets` names the texts.
    ///
    /// # Errors
    /// [`ModelError::Gguf`] for sums that f32 cannot hold.
    pub fn imatrix(&self, datasets: Vec<String>) -> Result<Imatrix, ModelError> {
        let mut out = Imatrix::new(datasets, self.texts, self.text_tokens);
        for input in &self.inputs {
            let sum2 = input.stats.sum2();
            for tensor in &input.tensors {
                out.add_slice(tensor, input.slice, &sum2, input.stats.count)?;
            }
        }
        Ok(out)
    }
    /// Statistics of the inputs of a matrix; of the first slice that was reached, where it has several.
    #[must_use]
    pub fn input(&self, tensor: &str) -> Option<&InputStats> {
        self.inputs.iter().find(|i| i.tensors.iter().any(|t| t == tensor)).map(|i| &i.stats)
    }
    /// Matrices with input channels that were always zero, and the number of those: calibrate on more text.
    pub fn dead_channels(&self) -> impl Iterator<Item = (&str, usize)> {
        self.inputs.iter().flat_map(|i| {
            let dead = i.stats.dead_channels().len();
            i.tensors.iter().filter(move |_| dead > 0).map(move |t| (t.as_str(), dead))
        })
    }
}

/// The matrices that read what is at `site`.
pub(crate) fn readers(site: Site) -> &'static [Target] {
    match site {
        Site::Qkv => &[Target::Q, Target::K, Target::V],
        Site::Out => &[Target::O],
        Site::GateUp => &[Target::Gate, Target::Up],
        Site::Down => &[Target::Down],
        Site::Part { .. } => &[],
    }
}

/// Names of the matrices that read what is at `site` of a block, and their columns.
fn place(site: Site, layer: usize, config: &ModelConfig) -> (Vec<String>, usize) {
    match (site, readers(site)) {
        (Site::Part { tensors, columns, .. }, _) => {
            (tensors.iter().map(|part| format!("blk.{layer}.{part}.weight")).collect(), columns)
        }
        (_, targets) => {
            let columns = targets.first().map_or(0, |t| t.shape(config).1);
            (targets.iter().map(|t| t.tensor(layer)).collect(), columns)
        }
    }
}

/// The matrices of the file among `tensors`, and which slice of them `site` is about. A site may name both forms of a
/// matrix, of which a file has one.
fn sliced(gguf: &Gguf, site: Site, tensors: Vec<String>) -> Option<(Vec<String>, (usize, usize))> {
    let there: Vec<String> = tensors.into_iter().filter(|name| gguf.find(name).is_some()).collect();
    let dims = &gguf.find(there.first()?)?.dims;
    let slices = dims.get(2).map_or(1, |n| *n as usize);
    let slice = match site {
        Site::Part { slice, .. } if slices > 1 => slice,
        _ => 0,
    };
    Some((there, (slice, slices)))
}

/// Name of the matrix that makes the logits: the embedding itself when tied.
pub(crate) fn output_tensor(gguf: &Gguf) -> &'static str {
    if gguf.find("output.weight").is_some() { "output.weight" } else { "token_embd.weight" }
}

/// Name of the embedding where another matrix makes the logits: its rows are looked up, and nothing is multiplied with it.
pub(crate) fn looked_up(gguf: &Gguf) -> Option<&'static str> {
    gguf.find("output.weight").map(|_| "token_embd.weight")
}

/// Runs `texts` (each on its own, up to the model's context) through the model in `gguf`; `watch` sees blocks done
/// and their number.
///
/// # Errors
/// [`ModelError::NotFinite`] naming matrix, column and text; [`ModelError::Input`] for texts that cannot be run;
/// [`ModelError::Cancelled`]; those of loading.
pub fn calibrate(
    gguf: &Gguf,
    texts: &[Vec<u32>],
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Calibration, ModelError> {
    let config = ModelConfig::from_gguf(gguf, &mut Vec::new())?;
    let mut stream = Stream::new(gguf, &config, texts)?;
    let mut inputs = Vec::new();
    for layer in 0..config.layers {
        if watch(layer, config.layers).is_break() {
            return Err(ModelError::Cancelled);
        }
        let block = Decoder::one_block(gguf, &BTreeMap::new(), &config, layer)?;
        let mut sites = BTreeMap::new();
        stream.advance(&block, &mut |text, site, rows| {
            let stats = sites.entry(site).or_insert_with(|| InputStats::new(place(site, layer, &config).1));
            stats.add(rows).map_err(|(column, value)| {
                let (names, _) = place(site, layer, &config);
                broken(names.first().map_or("?", String::as_str), text, column, value)
            })
        })?;
        inputs.extend(sites.into_iter().filter_map(|(site, stats)| {
            let (tensors, slice) = sliced(gguf, site, place(site, layer, &config).0)?;
            Some(CalibratedInput { tensors, slice, stats })
        }));
    }
    let mut stats = InputStats::new(config.width);
    let name = output_tensor(gguf);
    each_output_input(gguf, &config, &stream, &mut |text, rows| {
        stats.add(rows).map_err(|(column, value)| broken(name, text, column, value))
    })?;
    inputs.push(CalibratedInput { tensors: vec![name.to_owned()], slice: (0, 1), stats });
    if watch(config.layers, config.layers).is_break() {
        return Err(ModelError::Cancelled);
    }
    let text_tokens = texts.iter().map(Vec::len).max().unwrap_or(0) as u32;
    Ok(Calibration { inputs, texts: texts.len() as u32, text_tokens })
}

/// Gets the number of a text and its rows.
pub(crate) type SeeRows<'a> = dyn FnMut(usize, &[f32]) -> Result<(), ModelError> + 'a;

/// Shows `see(text, rows)` the inputs of the output matrix, when the stream is behind the last block.
pub(crate) fn each_output_input(
    gguf: &Gguf,
    config: &ModelConfig,
    stream: &Stream<'_>,
    see: &mut SeeRows<'_>,
) -> Result<(), ModelError> {
    let norm = gguf.dequantize(gguf.tensor("output_norm.weight")?)?;
    for (i, x) in stream.hidden().iter().enumerate() {
        let mut rows = vec![0.0; x.len()];
        norm_rows(x, &norm, config.rms_eps, &mut rows);
        see(i, &rows)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
