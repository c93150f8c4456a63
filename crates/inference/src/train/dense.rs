//! Whole tensors that a run can train: the embedding, norms, biases and matrices of a decoder.

use crate::model::{Target, Values, Weights};
use std::sync::Arc;

/// One trainable tensor (q, k and v biases count as one). Norms of a layer are in the order of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Embedding,
    OutputNorm,
    /// Only where the embedding does not serve as output.
    Output,
    AttnNorm(usize),
    QNorm(usize),
    KNorm(usize),
    FfnNorm(usize),
    QkvBias(usize),
    Matrix(usize, Target),
}

impl Part {
    /// All tensors of a model; `norms` leaves out everything else.
    pub fn of(w: &Weights, norms: bool) -> Vec<Self> {
        let mut all = vec![Self::OutputNorm];
        if !norms {
            all.push(Self::Embedding);
            if !tied(w) {
                all.push(Self::Output);
            }
        }
        for (i, block) in w.blocks.iter().enumerate() {
            all.extend([Self::AttnNorm(i), Self::FfnNorm(i)]);
            if block.head_norms.is_some() {
                all.extend([Self::QNorm(i), Self::KNorm(i)]);
            }
            if !norms {
                all.extend(block.qkv_bias.as_ref().map(|_| Self::QkvBias(i)));
                all.extend(Target::ALL.map(|t| Self::Matrix(i, t)));
            }
        }
        all.sort_unstable();
        all
    }

    /// Whether weight decay applies: matrices only, as is usual for transformers.
    pub fn decays(self) -> bool {
        matches!(self, Self::Embedding | Self::Output | Self::Matrix(..))
    }

    /// Name in a GGUF file; of the biases, the common part.
    pub fn name(self) -> String {
        match self {
            Self::Embedding => "token_embd.weight".into(),
            Self::OutputNorm => "output_norm.weight".into(),
            Self::Output => "output.weight".into(),
            Self::AttnNorm(i) => format!("blk.{i}.attn_norm.weight"),
            Self::QNorm(i) => format!("blk.{i}.attn_q_norm.weight"),
            Self::KNorm(i) => format!("blk.{i}.attn_k_norm.weight"),
            Self::FfnNorm(i) => format!("blk.{i}.ffn_norm.weight"),
            Self::QkvBias(i) => format!("blk.{i}.attn_qkv.bias"),
            Self::Matrix(i, target) => target.tensor(i),
        }
    }

    /// The values that the decoder has now, row-major.
    pub fn values(self, w: &Weights) -> Vec<f32> {
        let block = |i: usize| &w.blocks[i];
        let head_norm = |i: usize, q: bool| {
            block(i).head_norms.as_ref().map(|n| if q { n.q.clone() } else { n.k.clone() }).unwrap_or_default()
        };
        match self {
            Self::Embedding => w.embedding.to_rows(0..w.config.vocab),
            Self::Output => w.output.to_rows(0..w.config.vocab),
            Self::OutputNorm => w.norm.clone(),
            Self::AttnNorm(i) => block(i).attn_norm.clone(),
            Self::FfnNorm(i) => block(i).ffn_norm.clone(),
            Self::QNorm(i) => head_norm(i, true),
            Self::KNorm(i) => head_norm(i, false),
            Self::QkvBias(i) => block(i).qkv_bias.clone().unwrap_or_default(),
            Self::Matrix(i, target) => matrix(w, i, target),
        }
    }

    /// Adds the part's tensors to `out`: biases as three.
    pub fn put(self, w: &Weights, values: &[f32], out: &mut Values) {
        let Self::QkvBias(i) = self else {
            out.insert(self.name(), values.to_vec());
            return;
        };
        let mut rest = values;
        for target in [Target::Q, Target::K, Target::V] {
            let (bias, others) = rest.split_at(target.shape(&w.config).0);
            out.insert(target.tensor(i).replace(".weight", ".bias"), bias.to_vec());
            rest = others;
        }
    }
}

/// Whether the embedding is the output matrix, too.
pub(super) fn tied(w: &Weights) -> bool {
    Arc::ptr_eq(&w.embedding, &w.output)
}

/// The frozen values of a matrix, `outputs × inputs`.
pub(super) fn matrix(w: &Weights, layer: usize, target: Target) -> Vec<f32> {
    let (c, block) = (&w.config, &w.blocks[layer]);
    let (site, at) = place(c, target);
    let packed = match site {
        Stack::Qkv => &block.qkv,
        Stack::Out => &block.out,
        Stack::GateUp => &block.gate_up,
        Stack::Down => &block.down,
    };
    packed.to_rows(at..at + target.shape(c).0)
}

/// Matrices of a block that are stored one below the other, as the same rows go through all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stack {
    Qkv,
    Out,
    GateUp,
    Down,
}

/// The stack that a matrix is in, and its first row there.
pub(super) fn place(c: &crate::model::ModelConfig, target: Target) -> (Stack, usize) {
    match target {
        Target::Q => (Stack::Qkv, 0),
        Target::K => (Stack::Qkv, c.q_width()),
        Target::V => (Stack::Qkv, c.q_width() + c.kv_width()),
        Target::O => (Stack::Out, 0),
        Target::Gate => (Stack::GateUp, 0),
        Target::Up => (Stack::GateUp, c.ffn),
        Target::Down => (Stack::Down, 0),
    }
}

/// The matrices that a stack holds, in order.
pub(super) fn stacked(site: Stack) -> &'static [Target] {
    match site {
        Stack::Qkv => &[Target::Q, Target::K, Target::V],
        Stack::Out => &[Target::O],
        Stack::GateUp => &[Target::Gate, Target::Up],
        Stack::Down => &[Target::Down],
    }
}
