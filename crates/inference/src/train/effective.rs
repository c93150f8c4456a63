//! The matrices that a pass computes with where they are not those of the decoder: trained as a whole.

use super::{
    dense::{Part, stacked},
    params::Params,
};
use crate::linalg::{Packed, Storage};
use crate::model::{Block, ModelError, Site, Target, Weights};

const SITES: [Site; 4] = [Site::Qkv, Site::Out, Site::GateUp, Site::Down];

/// Matrices that replace the frozen ones, `[layer][site]`.
#[derive(Debug, Default)]
pub(super) struct Effective {
    blocks: Vec<[Option<Packed>; 4]>,
    embedding: Option<Packed>,
    output: Option<Packed>,
}

impl Effective {
    /// Packs the trained values of `params`; nothing for a run on adapters or norms.
    pub fn new(w: &Weights, params: &Params) -> Result<Self, ModelError> {
        if params.part(Part::Embedding).is_none() {
            return Ok(Self::default());
        }
        let pack = |part: Part| {
            let values = params.part(part).map(|range| &params.values()[range]);
            values.map(|v| packed(&[v], w.config.width, &part.name())).transpose()
        };
        let mut this = Self { blocks: Vec::new(), embedding: pack(Part::Embedding)?, output: pack(Part::Output)? };
        for layer in 0..w.blocks.len() {
            let mut row = [const { None }; 4];
            for (slot, site) in row.iter_mut().zip(SITES) {
                let values = |t: &Target| params.part(Part::Matrix(layer, *t)).map(|range| &params.values()[range]);
                let parts: Option<Vec<&[f32]>> = stacked(site).iter().map(values).collect();
                let (_, inputs) = stacked(site)[0].shape(&w.config);
                let pack = |parts: Vec<&[f32]>| packed(&parts, inputs, &stacked(site)[0].tensor(layer));
                *slot = parts.map(pack).transpose()?;
            }
            this.blocks.push(row);
        }
        Ok(this)
    }

    /// The matrices of a site.
    pub fn site<'a>(&'a self, layer: usize, site: Site, block: &'a Block) -> &'a Packed {
        self.blocks.get(layer).and_then(|row| row[site as usize].as_ref()).unwrap_or(match site {
            Site::Qkv => &block.qkv,
            Site::Out => &block.out,
            Site::GateUp => &block.gate_up,
            Site::Down => &block.down,
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

fn packed(parts: &[&[f32]], cols: usize, name: &str) -> Result<Packed, ModelError> {
    let bad = |at| ModelError::weight(name, format!("value {at} is not finite; use a lower learning rate"));
    Packed::stack(parts, cols, Storage::F32).map_err(bad)
}
