//! What enters the matrices of a block on the calibration texts, and the folds that follow from it.

use super::error::Matrix;
use super::{QuantizeError, awq, fold};
use crate::calibrate::{Hessian, InputStats, Stream, broken, each_output_input, output_tensor, readers};
use crate::gguf::{Gguf, TensorType};
use crate::model::{Decoder, ModelConfig, ModelError, Site, Values};
use std::collections::BTreeMap;

/// What enters the matrices at one site.
#[derive(Debug, Clone)]
pub(super) struct Input {
    pub stats: InputStats,
    /// Mean of outer products.
    pub h: Vec<f32>,
    /// Mean squares, with zeros filled.
    pub importance: Vec<f32>,
}

impl Input {
    /// The same inputs with channels divided by `columns`.
    pub fn divide(&mut self, columns: &[f32]) {
        let n = columns.len();
        for (i, row) in self.h.chunks_exact_mut(n).enumerate() {
            row.iter_mut().zip(columns).for_each(|(v, s)| *v /= columns[i] * s);
        }
        self.importance.iter_mut().zip(columns).for_each(|(v, s)| *v /= s * s);
    }
}

/// Inputs of all matrices of a block on the texts of the stream.
pub(super) fn inputs(
    stream: &Stream<'_>,
    block: &Decoder,
    config: &ModelConfig,
    layer: usize,
) -> Result<BTreeMap<Site, Input>, ModelError> {
    let mut sums = BTreeMap::new();
    stream.look(block, &mut |text, site, rows| {
        let first = readers(site)[0];
        let n = first.shape(config).1;
        let (stats, h) = sums.entry(site).or_insert_with(|| (InputStats::new(n), Hessian::new(n)));
        stats.add(rows).map_err(|(column, value)| broken(&first.tensor(layer), text, column, value))?;
        h.add(rows);
        Ok(())
    })?;
    Ok(sums.into_iter().map(|(site, (stats, h))| (site, input(stats, h))).collect())
}

fn input(stats: InputStats, h: Hessian) -> Input {
    let importance = super::filled(stats.mean_square());
    Input { stats, h: h.into_mean(), importance }
}

/// Inputs of the matrix that makes the logits, when the stream is behind the last block.
pub(super) fn output_input(base: &Gguf, config: &ModelConfig, stream: &Stream<'_>) -> Result<Input, ModelError> {
    let (mut stats, mut h) = (InputStats::new(config.width), Hessian::new(config.width));
    each_output_input(base, config, stream, &mut |text, rows| {
        stats.add(rows).map_err(|(column, value)| broken(output_tensor(base), text, column, value))?;
        h.add(rows);
        Ok(())
    })?;
    Ok(input(stats, h))
}

/// Finds and applies the folds of a block; `types` are those the matrices will have. Returns the scales by site.
pub(super) fn fold_block(
    values: &mut Values,
    inputs: &mut BTreeMap<Site, Input>,
    config: &ModelConfig,
    layer: usize,
    types: &dyn Fn(&str) -> TensorType,
) -> Result<BTreeMap<Site, Vec<f32>>, QuantizeError> {
    let mut out = BTreeMap::new();
    for site in fold::SITES {
        let Some(input) = inputs.get_mut(&site) else { continue };
        let names: Vec<String> = readers(site).iter().map(|t| t.tensor(layer)).collect();
        let columns = input.importance.len();
        let matrices: Vec<Matrix<'_>> = names
            .iter()
            .filter_map(|name| values.get(name).map(|values| Matrix { values, columns, ty: types(name) }))
            .filter(|m| m.ty.is_quantized())
            .collect();
        let found =
            if matrices.is_empty() { None } else { awq::search(site, config, &input.stats, &input.h, &matrices) };
        if let Some(scales) = found {
            fold::apply(values, layer, site, config, &scales)?;
            input.divide(&fold::columns(site, config, &scales));
            out.insert(site, scales);
        }
    }
    Ok(out)
}
