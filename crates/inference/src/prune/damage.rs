//! What every layer and head group is worth: the model runs without it and is compared with itself.

use crate::eval::{Base, Divergence, Engine, position_scores_of};
use crate::model::{Decoder, Mask, ModelError};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    ops::ControlFlow,
};

/// The text to measure on.
#[derive(Debug, Clone, Copy)]
pub struct PruneOptions<'a> {
    pub tokens: &'a [u32],
    /// Tokens of a window, see [`crate::eval::divergence`].
    pub window: usize,
}

/// A part of a decoder that can be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    Layer {
        layer: usize,
    },
    /// The query heads that share key head `group`, and that key and value head.
    Group {
        layer: usize,
        group: usize,
    },
}

/// What the model loses without one part.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Damage {
    pub part: Part,
    /// Weights that go with it.
    pub weights: u64,
    /// The whole model as the base.
    pub divergence: Divergence,
}

/// Every part left out alone, least damage first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DamageReport {
    /// Weights of all blocks.
    pub block_weights: u64,
    pub parts: Vec<Damage>,
}

impl Part {
    fn mask(self) -> Mask {
        match self {
            Self::Layer { layer } => Mask { layers: BTreeSet::from([layer]), ..Mask::default() },
            Self::Group { layer, group } => {
                Mask { groups: BTreeMap::from([(layer, BTreeSet::from([group]))]), ..Mask::default() }
            }
        }
    }
}

/// Measures every layer, and every head group where a layer has several. `watch` sees runs over a window done and their
/// number.
///
/// # Errors
/// Those of [`crate::eval::position_scores`].
pub fn measure(
    model: &Decoder,
    options: PruneOptions<'_>,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<DamageReport, ModelError> {
    let c = model.config();
    let layer_weights = (c.width * (c.qkv_width() + 3 * c.ffn) + c.q_width() * c.width) as u64;
    let group_weights = (2 * c.width * c.head_dim * (c.group() + 1)) as u64;
    let mut parts: Vec<(Part, u64)> = Vec::new();
    if c.layers > 1 {
        parts.extend((0..c.layers).map(|layer| (Part::Layer { layer }, layer_weights)));
    }
    if c.kv_heads > 1 {
        let groups = (0..c.layers).flat_map(|layer| (0..c.kv_heads).map(move |group| Part::Group { layer, group }));
        parts.extend(groups.map(|part| (part, group_weights)));
    }
    let masks: Vec<Mask> = parts.iter().map(|(part, _)| part.mask()).collect();
    let divergences = measure_masks(model, masks, options, watch)?;
    let damage = |((part, weights), divergence)| Damage { part, weights, divergence };
    let mut parts: Vec<Damage> = parts.into_iter().zip(divergences).map(damage).collect();
    parts.sort_by(|a, b| a.divergence.kld.total_cmp(&b.divergence.kld).then(a.part.cmp(&b.part)));
    Ok(DamageReport { block_weights: layer_weights * c.layers as u64, parts })
}

fn measure_masks(
    model: &Decoder,
    masks: Vec<Mask>,
    options: PruneOptions<'_>,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<Divergence>, ModelError> {
    let masked: Vec<Decoder> = masks.into_iter().map(|m| model.with_mask(m)).collect::<Result<_, _>>()?;
    let others: Vec<&dyn Engine> = masked.iter().map(|m| m as _).collect();
    let scores = position_scores_of(Base::Model(model), &others, options.tokens, options.window, watch)?;
    Ok(scores.iter().map(crate::eval::PositionScores::summary).collect())
}

/// Chooses `count` layers one after another, each time the one whose loss does least beside those already chosen: layers
/// stand in for each other, so the order of the single damages is not enough. Returns them in the order of choice, with the
/// divergence of the model without all up to that one.
///
/// # Errors
/// Those of [`measure`], and [`ModelError::Input`] if no layer would be left.
pub fn choose_layers(
    model: &Decoder,
    count: usize,
    options: PruneOptions<'_>,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<(usize, Divergence)>, ModelError> {
    let layers = model.config().layers;
    if count >= layers {
        return Err(ModelError::input(format!("leaving out {count} of {layers} layers")));
    }
    let mut chosen: Vec<(usize, Divergence)> = Vec::with_capacity(count);
    for _ in 0..count {
        let gone: BTreeSet<usize> = chosen.iter().map(|(layer, _)| *layer).collect();
        let left: Vec<usize> = (0..layers).filter(|l| !gone.contains(l)).collect();
        let with = |l: &usize| Mask { layers: gone.iter().copied().chain([*l]).collect(), ..Mask::default() };
        let divergences = measure_masks(model, left.iter().map(with).collect(), options, watch)?;
        let best = left.into_iter().zip(divergences).min_by(|a, b| a.1.kld.total_cmp(&b.1.kld));
        chosen.extend(best);
    }
    Ok(chosen)
}

/// The `count` least damaging head groups of every layer: files have one number of heads for all layers.
///
/// # Errors
/// [`ModelError::Input`] if a layer would have no head left, or the report has no head groups.
pub fn choose_groups(report: &DamageReport, layers: usize, count: usize) -> Result<Mask, ModelError> {
    let mut groups: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for layer in 0..layers {
        let of_layer = report.parts.iter().filter_map(|d| match d.part {
            Part::Group { layer: l, group } if l == layer => Some(group),
            _ => None,
        });
        let of_layer: Vec<usize> = of_layer.collect();
        if count >= of_layer.len() {
            let what = format!("leaving out {count} of the {} measured head groups of layer {layer}", of_layer.len());
            return Err(ModelError::input(what));
        }
        groups.insert(layer, of_layer.into_iter().take(count).collect());
    }
    Ok(Mask { layers: BTreeSet::new(), groups })
}

impl DamageReport {
    /// A table, least damage first.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut out =
            String::from("| without | weights | KLD mean | KLD 99 % | same top-1 | PPL |\n|---|---|---|---|---|---|\n");
        for d in &self.parts {
            let name = match d.part {
                Part::Layer { layer } => format!("layer {layer}"),
                Part::Group { layer, group } => format!("layer {layer}, head group {group}"),
            };
            let share = 100.0 * d.weights as f64 / self.block_weights.max(1) as f64;
            // Writing into a string cannot fail.
            let _ = writeln!(
                out,
                "| {name} | {} ({share:.2} %) | {:.5} | {:.4} | {:.2} % | {:.3} |",
                d.weights,
                d.divergence.kld,
                d.divergence.kld_p99,
                100.0 * d.divergence.top1,
                d.divergence.other.perplexity
            );
        }
        out
    }
}
