//! Types under a limit of bytes: every matrix is tried in every type, and the knapsack takes the combination with the
//! least expected loss.
//!
//! The expected rise of the loss is `½ Σᵢ gᵢ (E H Eᵀ)ᵢᵢ`: the REAL error `E` of the type, what enters the matrix (`H`),
//! and how much the loss cares about each output (`g`, mean squared gradients). Gradient norms of the weights alone are
//! no guide: a matrix can matter much and still be rounded well.
//!
//! An embedding that is only looked up takes part by the same formula. As a matrix that is multiplied with one-hot tokens its
//! outputs are the channels of the residual stream, and `H` holds how often each token occurs: the expected rise is
//! `½ Σⱼ gⱼ · mean eⱼ²` over the tokens of the texts, with `e` the error of the row that a token looks up.

use super::error::{Damage, round_trip, sample};
use super::inputs::{Input, fold_block, inputs, output_input};
use super::knapsack::{self, Item};
use super::parts::Chosen;
use super::profile::{Choice, fitting, is_matrix};
use super::run::file_type;
use super::tune::{Choices, TuneOptions};
use super::{Progress, Provenance, QuantizeError, fold, metadata};
use crate::calibrate::{Stream, looked_up, output_tensor, readers};
use crate::codec::CodecError;
use crate::gguf::{Gguf, TensorInfo, TensorSpec, TensorType, file_bytes};
use crate::model::{Decoder, ModelConfig, Site, Target};
use crate::train::{Gradients, matrix_gradients};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, ops::ControlFlow};

/// Types to choose from, where rows are whole blocks of them.
const TYPES: [TensorType; 9] = [
    TensorType::Q4_0,
    TensorType::Iq4Nl,
    TensorType::Q4K,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5K,
    TensorType::Q5_1,
    TensorType::Q6K,
    TensorType::Q8_0,
];
/// The type for which channel scales are folded before the types are compared.
const FOLD_TYPE: TensorType = TensorType::Iq4Nl;
/// Backward passes keep what enters each block: only the beginning of a text is used, and only of so many texts.
const GRADIENT_TOKENS: usize = 256;
const GRADIENT_TEXTS: usize = 12;

/// Rows of a matrix, or tokens that look up a row, that are tried in every type, spread evenly.
const ROWS: usize = 256;

/// What the choice promises.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// Expected rise of the loss, nats a token.
    pub loss: f64,
    /// The same when all free matrices get one type, for the best such type that fits; `None` if none fits.
    pub uniform_loss: Option<f64>,
    pub uniform_type: Option<TensorType>,
    /// Limit and size of the file, bytes.
    pub budget_bytes: u64,
    pub size_bytes: u64,
}

/// One matrix and its ways to be stored.
#[derive(Debug)]
pub(super) struct Candidates {
    pub name: String,
    types: Vec<TensorType>,
    items: Vec<Item>,
}

impl Candidates {
    /// Expected loss as `ty`.
    pub fn loss(&self, ty: TensorType) -> Option<f64> {
        self.types.iter().position(|t| *t == ty).map(|i| self.items[i].loss)
    }
}

/// Measures and chooses.
///
/// # Errors
/// [`QuantizeError::Budget`] with the smallest possible size; those of calibration and coding.
pub(super) fn choices(
    base: &Gguf,
    config: &ModelConfig,
    texts: &[Vec<u32>],
    options: &TuneOptions,
    budget: u64,
    from: &Provenance,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Chosen, QuantizeError> {
    let gradients = gradients(base, texts, progress)?;
    let candidates = measure(base, config, texts, options, &gradients, progress)?;
    let mut choices: Choices = base
        .tensors()
        .iter()
        .map(|t| {
            let ty = fixed_type(t, options);
            (t.name.clone(), Choice { wanted: ty, actual: if is_matrix(t) { fitting(ty, t.row_len()) } else { ty } })
        })
        .collect();
    let size = |choices: &Choices| -> Result<u64, QuantizeError> {
        let specs: Vec<TensorSpec> =
            base.tensors().iter().map(|t| TensorSpec { ty: choices[&t.name].actual, ..t.spec() }).collect();
        Ok(file_bytes(&metadata(base, file_type(base, options.goal, choices), Some(from)), &specs)?)
    };
    let set = |choices: &mut Choices, pick: &dyn Fn(&Candidates) -> TensorType| {
        for c in &candidates {
            let ty = pick(c);
            choices.insert(c.name.clone(), Choice { wanted: ty, actual: ty });
        }
    };
    // Everything but the free matrices: the file with their smallest types less those types.
    let smallest = |c: &Candidates| (0..c.items.len()).min_by_key(|i| c.items[*i].bytes).unwrap_or(0);
    set(&mut choices, &|c| c.types[smallest(c)]);
    let least = size(&choices)?;
    let free: u64 = candidates.iter().map(|c| c.items[smallest(c)].bytes).sum();
    let lists: Vec<Vec<Item>> = candidates.iter().map(|c| c.items.clone()).collect();
    let limit = (budget + free).checked_sub(least).ok_or(QuantizeError::Budget { budget, least })?;
    let mut chosen = knapsack::choose(&lists, limit).map_err(|_| QuantizeError::Budget { budget, least })?;
    let loss = |chosen: &[usize]| lists.iter().zip(chosen).map(|(l, i)| l[*i].loss).sum::<f64>();
    let uniform = uniform(&candidates, limit);
    if let Some((_, same)) = uniform.as_ref().filter(|(_, same)| loss(same) < loss(&chosen)) {
        chosen.clone_from(same);
    }
    let picked: BTreeMap<&str, TensorType> =
        candidates.iter().zip(&chosen).map(|(c, i)| (c.name.as_str(), c.types[*i])).collect();
    set(&mut choices, &|c| picked[c.name.as_str()]);
    let predicted = Predicted {
        loss: loss(&chosen),
        uniform_loss: uniform.as_ref().map(|(_, same)| loss(same)),
        uniform_type: uniform.map(|(ty, _)| ty),
        budget_bytes: budget,
        size_bytes: size(&choices)?,
    };
    Ok((choices, Some(predicted)))
}

/// The choice of one type for all matrices that have it (their next larger type for others) with the least loss within
/// the limit.
fn uniform(candidates: &[Candidates], limit: u64) -> Option<(TensorType, Vec<usize>)> {
    let mut best: Option<(f64, TensorType, Vec<usize>)> = None;
    for ty in TYPES {
        let wanted = ty.bits_per_weight();
        let at = |c: &Candidates| {
            let same = c.types.iter().position(|t| *t == ty);
            same.or_else(|| c.types.iter().position(|t| t.bits_per_weight() >= wanted)).unwrap_or(0)
        };
        let chosen: Vec<usize> = candidates.iter().map(at).collect();
        let items = candidates.iter().zip(&chosen).map(|(c, i)| c.items[*i]);
        let (bytes, loss) = items.fold((0, 0.0), |(b, l), item| (b + item.bytes, l + item.loss));
        if bytes <= limit && best.as_ref().is_none_or(|(l, ..)| loss < *l) {
            best = Some((loss, ty, chosen));
        }
    }
    best.map(|(_, ty, chosen)| (ty, chosen))
}

/// Type of what is not chosen by loss: overrides and vectors; of matrices, until theirs is chosen.
fn fixed_type(tensor: &TensorInfo, options: &TuneOptions) -> TensorType {
    if let Some(ty) = options.overrides.get(&tensor.name) {
        return *ty;
    }
    match (is_matrix(tensor), tensor.ty.is_quantized()) {
        (false, true) => tensor.ty,
        (false, false) => TensorType::F32,
        (true, _) => options.floors.get(&tensor.name).copied().unwrap_or(TensorType::Q4K),
    }
}

/// Gradients at all matrices on the beginnings of some texts.
pub(super) fn gradients(
    base: &Gguf,
    texts: &[Vec<u32>],
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Gradients, QuantizeError> {
    let step = texts.len().div_ceil(GRADIENT_TEXTS).max(1);
    let beginnings: Vec<Vec<u32>> = texts
        .iter()
        .step_by(step)
        .map(|t| t[..t.len().min(GRADIENT_TOKENS)].to_vec())
        .filter(|t| t.len() > 1)
        .collect();
    let mut watch = |done, total| progress(Progress { done, total, tensor: "gradients, block by block" });
    Ok(matrix_gradients(base, &beginnings, &mut watch)?)
}

/// Every matrix in every type that it may have.
pub(super) fn measure(
    base: &Gguf,
    config: &ModelConfig,
    texts: &[Vec<u32>],
    options: &TuneOptions,
    gradients: &Gradients,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Vec<Candidates>, QuantizeError> {
    let mut stream = Stream::new(base, config, texts)?;
    let mut out = Vec::new();
    // Before the first block the stream is what the tokens looked up.
    let embedding = match looked_up(base).filter(|name| !options.overrides.contains_key(*name)) {
        Some(name) => Some(embedding(base.tensor(name)?, &stream, &gradients.embedding_square, options)?),
        None => None,
    };
    for layer in 0..config.layers {
        let name = format!("blk.{layer}: measuring types");
        if progress(Progress { done: layer, total: config.layers, tensor: &name }).is_break() {
            return Err(QuantizeError::Cancelled);
        }
        let mut values = fold::block_values(base, layer)?;
        let block = Decoder::one_block(base, &values, config, layer)?;
        let mut inputs = inputs(&stream, &block, config, layer)?;
        let mut scales = BTreeMap::new();
        if options.fold {
            let ty = |name: &str| base.find(name).map_or(TensorType::F32, |t| fitting(FOLD_TYPE, t.row_len()));
            scales = fold_block(&mut values, &mut inputs, config, layer, &ty)?;
        }
        for (site, input) in &inputs {
            for target in readers(*site) {
                let tensor = base.tensor(&target.tensor(layer))?;
                if options.overrides.contains_key(&tensor.name) {
                    continue;
                }
                let gradient = scaled_gradient(gradients, layer, *target, &scales);
                out.push(candidates(tensor, &values[&tensor.name], input, &gradient, options, None)?);
            }
        }
        stream.advance(&block, &mut |_, _, _| Ok(()))?;
    }
    let tensor = base.tensor(output_tensor(base))?;
    if !options.overrides.contains_key(&tensor.name) {
        let input = output_input(base, config, &stream)?;
        let gradient = output_square(gradients, None);
        let values = base.dequantize(tensor)?;
        out.push(candidates(tensor, &values, &input, &gradient, options, Some(TensorType::Q6K))?);
    }
    out.extend(embedding);
    Ok(out)
}

fn output_square(gradients: &Gradients, matrix: Option<(usize, Target)>) -> Vec<f32> {
    gradients.matrices.iter().find(|g| g.matrix == matrix).map(|g| g.output_square.clone()).unwrap_or_default()
}

/// Gradients at a matrix's outputs after folding: an output divided by `s` has a gradient `s` times as large.
fn scaled_gradient(gradients: &Gradients, layer: usize, target: Target, scales: &BTreeMap<Site, Vec<f32>>) -> Vec<f32> {
    let mut out = output_square(gradients, Some((layer, target)));
    let site = match target {
        Target::Up => Site::Down,
        Target::V => Site::Out,
        _ => return out,
    };
    if let Some(scales) = scales.get(&site) {
        out.iter_mut().zip(scales).for_each(|(g, s)| *g *= s * s);
    }
    out
}

/// All allowed types of an embedding that is only looked up. No floor: rows are rounded without importance, and what that
/// does to the rows in use is measured.
fn embedding(
    tensor: &TensorInfo,
    stream: &Stream<'_>,
    gradient: &[f32],
    options: &TuneOptions,
) -> Result<Candidates, QuantizeError> {
    let columns = tensor.row_len();
    let tokens = stream.hidden().iter().map(|x| x.len() / columns).sum::<usize>();
    let rows = stream.hidden().iter().flat_map(|x| x.chunks_exact(columns));
    let rows: Vec<f32> = rows.step_by(tokens.div_ceil(ROWS).max(1)).flatten().copied().collect();
    let count = (rows.len() / columns) as f64;
    priced(tensor, allowed(tensor, options, None), |ty| {
        let back = round_trip(ty, &rows, columns, None)?;
        let pairs = rows.iter().zip(&back).zip(gradient.iter().cycle());
        let sum: f64 = pairs.map(|((a, b), g)| f64::from(*g) * f64::from(a - b).powi(2)).sum();
        Ok(0.5 * sum / count)
    })
}

/// All allowed types of a matrix with size and expected loss. `floor`: the least type unless the options say another.
fn candidates(
    tensor: &TensorInfo,
    values: &[f32],
    input: &Input,
    gradient: &[f32],
    options: &TuneOptions,
    floor: Option<TensorType>,
) -> Result<Candidates, QuantizeError> {
    let columns = tensor.row_len();
    let (rows, step) = sample(values, columns, ROWS);
    let gradient: Vec<f32> = gradient.iter().step_by(step).copied().collect();
    let share = rows.len() as f64 / values.len() as f64;
    priced(tensor, allowed(tensor, options, floor), |ty| {
        let back = round_trip(ty, &rows, columns, Some(&input.importance))?;
        Ok(Damage::between(&rows, &back, &input.h, columns).loss(&gradient) / share)
    })
}

/// The types that a matrix may have: those whose blocks its rows are, from the floor on.
fn allowed(tensor: &TensorInfo, options: &TuneOptions, floor: Option<TensorType>) -> Vec<TensorType> {
    let columns = tensor.row_len();
    let floor = options.floors.get(&tensor.name).copied().or(floor);
    let least = floor.map_or(0.0, |t| fitting(t, columns).bits_per_weight());
    let fits = |t: &TensorType| columns.is_multiple_of(t.block_len()) && t.bits_per_weight() >= least;
    let types: Vec<TensorType> = TYPES.into_iter().filter(fits).collect();
    if types.is_empty() { vec![TensorType::F16] } else { types }
}

/// The types with the bytes of the whole tensor and what `loss` says.
fn priced(
    tensor: &TensorInfo,
    types: Vec<TensorType>,
    loss: impl Fn(TensorType) -> Result<f64, CodecError>,
) -> Result<Candidates, QuantizeError> {
    let item = |ty: &TensorType| {
        let loss = loss(*ty).map_err(|source| QuantizeError::Codec { tensor: tensor.name.clone(), source })?;
        Ok(Item { bytes: (tensor.n_elements() / ty.block_len() * ty.block_bytes()) as u64, loss })
    };
    let items = types.iter().map(item).collect::<Result<Vec<_>, QuantizeError>>()?;
    Ok(Candidates { name: tensor.name.clone(), types, items })
}
