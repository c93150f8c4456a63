//! Mixture of experts (DeepSeek-V2, arXiv 2405.04434 section 2.2): a router sends every token to a few experts; shared experts
//! see all tokens.

use super::forward::swiglu_rows;
use super::mla::{LARGEST, See};
use super::weights::Loader;
use super::{ModelConfig, ModelError};
use crate::gguf::Gguf;
use crate::linalg::Packed;

/// Sums of weights below this are not divided by, as in stock llama.cpp (the smallest normal half).
const LEAST_SUM: f32 = 6.103_515_6e-5;

/// How logits of the router become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    Softmax,
    Sigmoid,
}

/// Sizes of the experts and the rule of the router.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertConfig {
    pub count: usize,
    /// Experts that a token goes through.
    pub used: usize,
    /// Inner size of an expert.
    pub ffn: usize,
    /// Inner size of the shared experts together.
    pub shared: usize,
    /// Leading blocks without experts.
    pub dense_blocks: usize,
    /// Weights are multiplied with this.
    pub scale: f32,
    /// Whether the weights of a token's experts are made to sum to 1 before.
    pub normalize: bool,
    pub gating: Gating,
}

impl ExpertConfig {
    /// # Errors
    /// [`ModelError::Unsupported`] for sizes that cannot be and rules that are not known, [`ModelError::Gguf`].
    pub(super) fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let key = |name: &str| format!("deepseek2.{name}");
        let size = |name: &str| -> Result<usize, ModelError> { Ok(gguf.u32(&key(name))? as usize) };
        let gating = match gguf.optional::<u32>(&key("expert_gating_func"))? {
            None | Some(0 | 1) => Gating::Softmax,
            Some(2) => Gating::Sigmoid,
            Some(other) => return Err(ModelError::unsupported(format!("expert gating function {other}"))),
        };
        if let Some(groups) = gguf.optional::<u32>(&key("expert_group_count"))?.filter(|n| *n > 1) {
            return Err(ModelError::unsupported(format!("a router over {groups} groups of experts")));
        }
        let ffn = size("expert_feed_forward_length")?;
        let this = Self {
            count: size("expert_count")?,
            used: size("expert_used_count")?,
            ffn,
            shared: ffn.saturating_mul(size("expert_shared_count")?),
            dense_blocks: size("leading_dense_block_count")?,
            // stock takes 0 for "no scale"
            scale: gguf.optional::<f32>(&key("expert_weights_scale"))?.filter(|s| *s != 0.0).unwrap_or(1.0),
            normalize: gguf.optional::<bool>(&key("expert_weights_norm"))?.unwrap_or(false),
            gating,
        };
        let sizes = [this.count, this.used, this.ffn, this.shared];
        if sizes.iter().any(|n| *n == 0 || *n > LARGEST) || this.used > this.count || !this.scale.is_finite() {
            return Err(ModelError::unsupported(format!("experts that cannot be: {this:?}")));
        }
        Ok(this)
    }

    /// Weights of a block that one token is multiplied with: router, its experts, shared experts.
    pub(super) fn token_weights(&self, width: usize) -> usize {
        width * (self.count + 3 * (self.used * self.ffn + self.shared))
    }
}

/// Gate and up stacked, and down.
#[derive(Debug)]
struct Expert {
    gate_up: Packed,
    down: Packed,
}

/// The feed-forward part of a block with experts.
#[derive(Debug)]
pub(crate) struct Experts {
    config: ExpertConfig,
    router: Packed,
    /// Added for the choice of experts, not for their weights.
    bias: Option<Vec<f32>>,
    experts: Vec<Expert>,
    shared: Expert,
}

/// Tensors of a block that experts read; the first three belong to the leading dense blocks.
pub(super) const PARTS: [&str; 12] = [
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
    "ffn_norm.weight",
    "ffn_gate_inp.weight",
    "exp_probs_b.bias",
    "ffn_gate_exps.weight",
    "ffn_up_exps.weight",
    "ffn_down_exps.weight",
    "ffn_gate_shexp.weight",
    "ffn_up_shexp.weight",
    "ffn_down_shexp.weight",
];

impl Experts {
    pub(super) fn load(l: &Loader<'_>, i: usize, c: &ModelConfig, e: ExpertConfig) -> Result<Self, ModelError> {
        let name = |part: &str| format!("blk.{i}.{part}.weight");
        let bias = format!("blk.{i}.exp_probs_b.bias");
        let (gate_name, down_name) = (name("ffn_gate_exps"), name("ffn_down_exps"));
        let gate = l.values(&gate_name, &[c.width, e.ffn, e.count])?;
        let up = l.values(&name("ffn_up_exps"), &[c.width, e.ffn, e.count])?;
        let down = l.slices(&down_name, e.ffn, c.width, e.count)?;
        let one = c.width * e.ffn;
        let experts = gate
            .chunks_exact(one)
            .zip(up.chunks_exact(one))
            .zip(down)
            .map(|((gate, up), down)| Ok(Expert { gate_up: l.pack(&gate_name, &[gate, up], c.width)?, down }));
        let shared = [name("ffn_gate_shexp"), name("ffn_up_shexp")];
        Ok(Self {
            config: e,
            router: l.matrix(&[&name("ffn_gate_inp")], c.width, &[e.count])?,
            bias: if l.has(&bias) { Some(l.vector(&bias, e.count)?) } else { None },
            experts: experts.collect::<Result<_, ModelError>>()?,
            shared: Expert {
                gate_up: l.matrix(&[&shared[0], &shared[1]], c.width, &[e.shared, e.shared])?,
                down: l.matrix(&[&name("ffn_down_shexp")], e.shared, &[c.width])?,
            },
        })
    }

    pub fn size_bytes(&self) -> usize {
        let of = |e: &Expert| e.gate_up.size_bytes() + e.down.size_bytes();
        self.router.size_bytes() + of(&self.shared) + self.experts.iter().map(of).sum::<usize>()
    }

    /// Adds what the experts make of normed rows to `x`. A row's experts are added in the order of their numbers, so that
    /// the sum does not depend on the other rows.
    pub fn forward(&self, normed: &[f32], m: usize, x: &mut [f32], see: &mut See<'_>) {
        let width = normed.len() / m;
        let mut of_expert: Vec<Vec<(usize, f32)>> = vec![Vec::new(); self.config.count];
        see(&["ffn_gate_inp"], 0, width, normed);
        let mut logits = vec![0.0; m * self.config.count];
        self.router.forward(normed, m, &mut logits, false);
        for (row, logits) in logits.chunks_exact_mut(self.config.count).enumerate() {
            for (expert, weight) in chosen(&self.config, self.bias.as_deref(), logits) {
                of_expert[expert].push((row, weight));
            }
        }
        for (i, (expert, rows)) in self.experts.iter().zip(&of_expert).enumerate().filter(|(_, (_, r))| !r.is_empty()) {
            let input: Vec<f32> = rows.iter().flat_map(|(r, _)| &normed[r * width..][..width]).copied().collect();
            see(&["ffn_gate_exps", "ffn_up_exps"], i, width, &input);
            let act = inner(expert, &input, rows.len(), self.config.ffn);
            see(&["ffn_down_exps"], i, self.config.ffn, &act);
            let mut out = vec![0.0; rows.len() * width];
            expert.down.forward(&act, rows.len(), &mut out, false);
            for ((row, weight), out) in rows.iter().zip(out.chunks_exact(width)) {
                x[row * width..][..width].iter_mut().zip(out).for_each(|(x, o)| *x += weight * o);
            }
        }
        see(&["ffn_gate_shexp", "ffn_up_shexp"], 0, width, normed);
        let act = inner(&self.shared, normed, m, self.config.shared);
        see(&["ffn_down_shexp"], 0, self.config.shared, &act);
        self.shared.down.forward(&act, m, x, true);
    }
}

fn inner(expert: &Expert, rows: &[f32], m: usize, ffn: usize) -> Vec<f32> {
    let mut gate_up = vec![0.0; m * 2 * ffn];
    expert.gate_up.forward(rows, m, &mut gate_up, false);
    let mut act = vec![0.0; m * ffn];
    swiglu_rows(&gate_up, ffn, &mut act);
    act
}

/// The experts of a token and their weights, by rising number of the expert; `logits` are overwritten.
fn chosen(e: &ExpertConfig, bias: Option<&[f32]>, logits: &mut [f32]) -> Vec<(usize, f32)> {
    match e.gating {
        Gating::Softmax => crate::linalg::softmax_prefix(logits, e.count),
        Gating::Sigmoid => logits.iter_mut().for_each(|l| *l = 1.0 / (1.0 + (-*l).exp())),
    }
    let rank = |i: usize| logits[i] + bias.map_or(0.0, |b| b[i]);
    let mut order: Vec<usize> = (0..e.count).collect();
    // of equals, and of what is no number, the first
    order.sort_by(|a, b| rank(*b).total_cmp(&rank(*a)));
    order.truncate(e.used);
    order.sort_unstable();
    let sum: f32 = order.iter().map(|i| logits[*i]).sum();
    let factor = if e.normalize { e.scale / sum.max(LEAST_SUM) } else { e.scale };
    order.into_iter().map(|i| (i, logits[i] * factor)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(gating: Gating, normalize: bool) -> ExpertConfig {
        ExpertConfig { count: 4, used: 2, ffn: 1, shared: 1, dense_blocks: 0, scale: 3.0, normalize, gating }
    }

    #[test]
    fn a_router_weighs_by_hand() {
        let third = 1.0f32 / (1.0 + (2.0f32).exp() + (1.0f32).exp() + (-1.0f32).exp());
        let logits = || [0.0f32, 2.0, 1.0, -1.0];
        let got = chosen(&config(Gating::Softmax, false), None, &mut logits());
        assert_eq!((got[0].0, got[1].0), (1, 2));
        assert!(
            (got[0].1 - 3.0 * third * 2f32.exp()).abs() < 1e-5 && (got[1].1 - 3.0 * third * 1f32.exp()).abs() < 1e-5
        );
        let got = chosen(&config(Gating::Softmax, true), None, &mut logits());
        assert!((got[0].1 + got[1].1 - 3.0).abs() < 1e-5);
        assert!((got[0].1 / got[1].1 - 1f32.exp()).abs() < 1e-4);
        // the bias decides who is asked, and not what the answer counts
        let got = chosen(&config(Gating::Sigmoid, false), Some(&[9.0, 0.0, 0.0, 8.0]), &mut logits());
        assert_eq!((got[0].0, got[1].0), (0, 3));
        assert!((got[0].1 - 1.5).abs() < 1e-6);
        // equal experts: the first ones
        let got = chosen(&config(Gating::Softmax, false), None, &mut [1.0; 4]);
        assert_eq!((got[0].0, got[1].0), (0, 1));
    }
}
