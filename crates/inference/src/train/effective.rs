//! The matrices that a pass computes with where they are not those of the decoder: trained as
//! a whole, or rounded to the grid of a format.

use super::{
    dense::{Part, Stack, matrix, stacked},
    grid::WeightGrid,
    params::Params,
};
use crate::linalg::{Packed, Storage};
use crate::model::{Block, ModelError, Target, Weights};
use std::borrow::Cow;

const STACKS: [Stack; 4] = [Stack::Qkv, Stack::Out, Stack::GateUp, Stack::Down];

/// Matrices that replace the frozen ones, `[layer][site]`.
#[derive(Debug, Default)]
pub(super) struct Effective {
    blocks: Vec<[Option<Packed>; 4]>,
    embedding: Option<Packed>,
    output: Option<Packed>,
}

impl Effective {
    /// Packs trained matrices, and all matrices of blocks as `grid` would keep them; nothing for a run on adapters or norms
    /// without a grid.
    pub fn new(w: &Weights, params: &Params, grid: Option<WeightGrid>) -> Result<Self, ModelError> {
        let blocks = w.blocks.iter().map(|_| [const { None }; 4]).collect();
        let mut this = Self { blocks, embedding: None, output: None };
        this.build(w, params, grid, true)?;
        Ok(this)
    }

    /// The same after `params` changed.
    pub fn update(&mut self, w: &Weights, params: &Params, grid: Option<WeightGrid>) -> Result<(), ModelError> {
        self.build(w, params, grid, false)
    }

    fn build(&mut self, w: &Weights, params: &Params, grid: Option<WeightGrid>, all: bool) -> Result<(), ModelError> {
        let pack = |part: Part| {
            let values = params.part(part).map(|range| &params.values()[range]);
            values.map(|v| packed(&[v], w.config.width, &part.name())).transpose()
        };
        (self.embedding, self.output) = (pack(Part::Embedding)?, pack(Part::Output)?);
        let trained = |layer: usize, t: Target| params.part(Part::Matrix(layer, t)).is_some();
        for (layer, row) in self.blocks.iter_mut().enumerate() {
            for (slot, site) in row.iter_mut().zip(STACKS) {
                let targets = stacked(site);
                let whole = targets.iter().any(|t| trained(layer, *t));
                let adapted = targets.iter().any(|t| params.slot(layer, *t).is_some());
                if whole || grid.is_some() && (all || adapted) {
                    let values = |t: &Target| matrix_values(w, params, grid, layer, *t);
                    let parts = targets.iter().map(values).collect::<Result<Vec<_>, _>>()?;
                    let parts: Vec<&[f32]> = parts.iter().map(|p| &**p).collect();
                    let (_, inputs) = targets[0].shape(&w.config);
                    *slot = Some(packed(&parts, inputs, &targets[0].tensor(layer))?);
                }
            }
        }
        Ok(())
    }

    /// The matrices of a site.
    pub fn site<'a>(&'a self, layer: usize, site: Stack, block: &'a Block) -> &'a Packed {
        self.blocks.get(layer).and_then(|row| row[site as usize].as_ref()).unwrap_or(match site {
            Stack::Qkv => &block.qkv,
            Stack::Out => &block.out,
            Stack::GateUp => &block.gate_up,
            Stack::Down => &block.down,
        })
    }
    pub fn embedding<'a>(&'a self, w: &'a Weights) -> &'a Packed {
        self.embedding.as_ref().unwrap_or(&w.embedding)
    }
    /// The output matrix: a trained embedding where it is the output, too.
    pub fn output<'a>(&'a self, w: &'a Weights) -> &'a Packed {
        let tied = || self.embedding.as_ref().filter(|_| super::dense::tied(w));
        self.output.as_ref().or_else(tied).unwrap_or(&w.output)
    }
}

/// What a pass computes with for one matrix: trained or frozen values, an adapter folded in, rounded.
fn matrix_values<'a>(
    w: &Weights,
    params: &'a Params,
    grid: Option<WeightGrid>,
    layer: usize,
    target: Target,
) -> Result<Cow<'a, [f32]>, ModelError> {
    let mut values = match params.part(Part::Matrix(layer, target)) {
        Some(range) => Cow::Borrowed(&params.values()[range]),
        None => Cow::Owned(matrix(w, layer, target)),
    };
    if let Some(grid) = grid {
        let values = values.to_mut();
        if let Some(slot) = params.slot(layer, target) {
            crate::linalg::add(values, &params.delta(slot));
        }
        grid.round(values, target.shape(&w.config).1, &target.tensor(layer))?;
    }
    Ok(values)
}

fn packed(parts: &[&[f32]], cols: usize, name: &str) -> Result<Packed, ModelError> {
    let bad = |at| ModelError::weight(name, format!("value {at} is not finite; use a lower learning rate"));
    Packed::stack(parts, cols, Storage::F32).map_err(bad)
}
