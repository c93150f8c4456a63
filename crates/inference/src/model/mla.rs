//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one latent vector a
//! token, which alone is cached.
//!
//! The matrices that make keys and values of the latent are applied to the queries and to the mixed latents instead
//! ("absorbed", section 2.1.2 of the paper): all heads then share one key head, `[rotated part | latent]`, and one value
//! head, the latent. So the ordinary cache and attention run it, with `kv_heads` 1 and `head_dim` `rope + kv_rank`.

use super::forward::{each_row, norm_rows};
use super::weights::{Block, Loader};
use super::{ModelConfig, ModelError, rope::Yarn};
use crate::gguf::Gguf;
use crate::linalg::Packed;

/// Sizes above this are taken for damage.
pub(super) const LARGEST: usize = 1 << 24;

/// Sizes of latent attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentConfig {
    /// Values that queries are made through; `None`: straight from the residual stream.
    pub q_rank: Option<usize>,
    /// Values of the latent vector of a token.
    pub kv_rank: usize,
    /// Values of a query or key head without position.
    pub nope: usize,
    /// Rotated values of a query head, and of the one key part that all heads share.
    pub rope: usize,
    /// Values of a value head.
    pub value: usize,
    /// `q · k` is multiplied with this.
    pub scale: f32,
}

impl LatentConfig {
    /// # Errors
    /// [`ModelError::Unsupported`] for sizes that cannot be, [`ModelError::Gguf`] for missing keys.
    pub(super) fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let maybe = |name: &str| -> Result<Option<usize>, ModelError> {
            Ok(gguf.optional::<u32>(&format!("deepseek2.{name}"))?.map(|v| v as usize))
        };
        let size = |name: &str| -> Result<usize, ModelError> { Ok(gguf.u32(&format!("deepseek2.{name}"))? as usize) };
        // newer files give the sizes of the cached head, and those of the heads apart
        let either = |name: &str| match maybe(&format!("{name}_mla"))? {
            Some(n) => Ok(n),
            None => size(name),
        };
        let (key, value) = (either("attention.key_length")?, either("attention.value_length")?);
        let (rope, kv_rank) = (size("rope.dimension_count")?, size("attention.kv_lora_rank")?);
        let q_rank = maybe("attention.q_lora_rank")?.filter(|n| *n > 0);
        let sizes = [key, value, rope, kv_rank, q_rank.unwrap_or(1), size("attention.head_count")?];
        if sizes.iter().any(|n| *n == 0 || *n > LARGEST) || key <= rope {
            let what = format!(
                "heads of {key} with {rope} rotated values, value heads of {value}, latents of {kv_rank} and {q_rank:?}"
            );
            return Err(ModelError::unsupported(what));
        }
        let magnitude = match gguf.optional::<&str>("deepseek2.rope.scaling.type")? {
            Some("yarn") => Yarn::from_gguf(gguf, super::Arch::DeepSeek2)?.magnitude(),
            _ => 1.0,
        };
        let scale = magnitude * magnitude / (key as f32).sqrt();
        Ok(Self { q_rank, kv_rank, nope: key - rope, rope, value, scale })
    }

    /// Values of a query or key head.
    #[must_use]
    pub fn key(&self) -> usize {
        self.nope + self.rope
    }
    /// Weights of a block's attention.
    pub(super) fn weights(&self, width: usize, heads: usize) -> usize {
        let queries = heads * self.key();
        let query = self.q_rank.map_or(width * queries, |rank| rank * (width + queries));
        query + width * self.cached() + heads * (self.kv_rank * (self.nope + self.value) + self.value * width)
    }
    /// Values that are cached of a token: the rotated part and the latent.
    #[must_use]
    pub fn cached(&self) -> usize {
        self.rope + self.kv_rank
    }
}

/// The matrices of one block's latent attention, but for the output projection.
#[derive(Debug)]
pub(crate) struct Latent {
    /// To the latent of the queries, and its norm.
    down: Option<(Packed, Vec<f32>)>,
    /// To the query heads, `[nope | rope]` each.
    query: Packed,
    /// To the latent of keys and values and the shared rotated part.
    kv: Packed,
    kv_norm: Vec<f32>,
    /// Of each head: from `nope` values of the query to `kv_rank`.
    key: Vec<Packed>,
    /// Of each head: from `kv_rank` mixed values to `value`.
    value: Vec<Packed>,
}

/// Tensors of a block that latent attention reads.
pub(super) const PARTS: [&str; 11] = [
    "attn_norm.weight",
    "attn_q.weight",
    "attn_q_a.weight",
    "attn_q_a_norm.weight",
    "attn_q_b.weight",
    "attn_kv_a_mqa.weight",
    "attn_kv_a_norm.weight",
    "attn_kv_b.weight",
    "attn_k_b.weight",
    "attn_v_b.weight",
    "attn_output.weight",
];

impl Latent {
    pub(super) fn load(l: &Loader<'_>, i: usize, c: &ModelConfig, s: &LatentConfig) -> Result<Self, ModelError> {
        let name = |part: &str| format!("blk.{i}.{part}.weight");
        let heads = c.heads * s.key();
        let (down, query) = match s.q_rank {
            None => (None, l.matrix(&[&name("attn_q")], c.width, &[heads])?),
            Some(rank) => {
                let down = l.matrix(&[&name("attn_q_a")], c.width, &[rank])?;
                let norm = l.vector(&name("attn_q_a_norm"), rank)?;
                (Some((down, norm)), l.matrix(&[&name("attn_q_b")], rank, &[heads])?)
            }
        };
        let (key, value) = Self::heads(l, i, c, s)?;
        Ok(Self {
            down,
            query,
            kv: l.matrix(&[&name("attn_kv_a_mqa")], c.width, &[s.cached()])?,
            kv_norm: l.vector(&name("attn_kv_a_norm"), s.kv_rank)?,
            key,
            value,
        })
    }

    /// The matrices of the heads; older files have both in one tensor, a head's key rows before its value rows.
    fn heads(
        l: &Loader<'_>,
        i: usize,
        c: &ModelConfig,
        s: &LatentConfig,
    ) -> Result<(Vec<Packed>, Vec<Packed>), ModelError> {
        let name = |part: &str| format!("blk.{i}.{part}.weight");
        if !l.has(&name("attn_kv_b")) {
            let key = l.slices(&name("attn_k_b"), s.nope, s.kv_rank, c.heads)?;
            return Ok((key, l.slices(&name("attn_v_b"), s.kv_rank, s.value, c.heads)?));
        }
        let both = name("attn_kv_b");
        let values = l.values(&both, &[s.kv_rank, c.heads * (s.nope + s.value)])?;
        let (mut key, mut value) = (Vec::with_capacity(c.heads), Vec::with_capacity(c.heads));
        for head in values.chunks_exact((s.nope + s.value) * s.kv_rank) {
            let (k, v) = head.split_at(s.nope * s.kv_rank);
            key.push(l.pack(&both, &[&transposed(k, s.kv_rank)], s.nope)?);
            value.push(l.pack(&both, &[v], s.kv_rank)?);
        }
        Ok((key, value))
    }

    pub fn size_bytes(&self) -> usize {
        let heads = self.key.iter().chain(&self.value).map(Packed::size_bytes).sum::<usize>();
        heads
            + self.query.size_bytes()
            + self.kv.size_bytes()
            + self.down.as_ref().map_or(0, |(down, _)| down.size_bytes())
    }

    /// Rows of `[queries | key | value]` of normed rows, queries absorbed, nothing rotated yet.
    pub fn project(
        &self,
        c: &ModelConfig,
        s: &LatentConfig,
        normed: &[f32],
        m: usize,
        qkv: &mut [f32],
        see: &mut See<'_>,
    ) {
        let (cached, stride) = (s.cached(), c.qkv_width());
        let mut queries = vec![0.0; m * c.heads * s.key()];
        match &self.down {
            None => {
                see(&["attn_q", "attn_kv_a_mqa"], 0, c.width, normed);
                self.query.forward(normed, m, &mut queries, false);
            }
            Some((down, weight)) => {
                see(&["attn_q_a", "attn_kv_a_mqa"], 0, c.width, normed);
                let rank = weight.len();
                let (mut raw, mut latent) = (vec![0.0; m * rank], vec![0.0; m * rank]);
                down.forward(normed, m, &mut raw, false);
                norm_rows(&raw, weight, c.rms_eps, &mut latent);
                see(&["attn_q_b"], 0, rank, &latent);
                self.query.forward(&latent, m, &mut queries, false);
            }
        }
        let mut raw = vec![0.0; m * cached];
        self.kv.forward(normed, m, &mut raw, false);
        let mut latent = vec![0.0; m * s.kv_rank];
        let before: Vec<f32> = raw.chunks_exact(cached).flat_map(|row| &row[..s.kv_rank]).copied().collect();
        norm_rows(&before, &self.kv_norm, c.rms_eps, &mut latent);
        see(&["attn_kv_b"], 0, s.kv_rank, &latent);
        let q_width = c.q_width();
        each_row(qkv, stride, |t, row| {
            let (key, value) = row[q_width..].split_at_mut(cached);
            key[..s.rope].copy_from_slice(&raw[t * cached + s.kv_rank..][..s.rope]);
            key[s.rope..].copy_from_slice(&latent[t * s.kv_rank..][..s.kv_rank]);
            value[..s.kv_rank].copy_from_slice(&latent[t * s.kv_rank..][..s.kv_rank]);
            value[s.kv_rank..].fill(0.0);
        });
        self.absorb(c, s, &queries, m, qkv, see);
    }

    /// Writes the query heads; attention divides by `sqrt(head_dim)`, this model wants another scale.
    fn absorb(&self, c: &ModelConfig, s: &LatentConfig, queries: &[f32], m: usize, qkv: &mut [f32], see: &mut See<'_>) {
        let (stride, row, factor) = (c.qkv_width(), c.heads * s.key(), s.scale * (c.head_dim as f32).sqrt());
        for (head, matrix) in self.key.iter().enumerate() {
            let of = |t: usize| &queries[t * row + head * s.key()..][..s.key()];
            let nope: Vec<f32> = (0..m).flat_map(|t| &of(t)[..s.nope]).copied().collect();
            see(&["attn_k_b"], head, s.nope, &nope);
            let at = head * c.head_dim;
            matrix.forward_at(&nope, m, qkv, at + s.rope, stride, false);
            for t in 0..m {
                let out = &mut qkv[t * stride + at..][..c.head_dim];
                out[..s.rope].copy_from_slice(&of(t)[s.nope..]);
                out.iter_mut().for_each(|v| *v *= factor);
            }
        }
    }

    /// Value heads of rows of mixed latents.
    pub fn values(&self, c: &ModelConfig, s: &LatentConfig, mixed: &[f32], m: usize, see: &mut See<'_>) -> Vec<f32> {
        let width = c.heads * s.value;
        let mut out = vec![0.0; m * width];
        for (head, matrix) in self.value.iter().enumerate() {
            let of = |t: usize| &mixed[t * c.q_width() + head * c.head_dim..][..s.kv_rank];
            let latent: Vec<f32> = (0..m).flat_map(of).copied().collect();
            see(&["attn_v_b"], head, s.kv_rank, &latent);
            matrix.forward_at(&latent, m, &mut out, head * s.value, width, false);
        }
        out
    }
}

/// Sees rows on their way into tensors of a block: names, slice of a tensor of three dimensions, columns, rows.
pub(crate) type See<'a> = dyn FnMut(&'static [&'static str], usize, usize, &[f32]) + 'a;

/// Columns of `cols` as rows.
fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    let rows = values.len() / cols;
    (0..cols).flat_map(|c| (0..rows).map(move |r| values[r * cols + c])).collect()
}

/// A block with latent attention; the feed-forward part is dense or has experts.
pub(super) fn load_block(l: &Loader<'_>, i: usize, c: &ModelConfig, s: &LatentConfig) -> Result<Block, ModelError> {
    let name = |part: &str| format!("blk.{i}.{part}.weight");
    let experts = c.experts.filter(|e| i >= e.dense_blocks);
    let none = || Packed::empty(c.width);
    let (gate_up, down) = match experts {
        Some(_) => (none(), none()),
        None => {
            let gate_up = [name("ffn_gate"), name("ffn_up")];
            let gate_up = l.matrix(&[&gate_up[0], &gate_up[1]], c.width, &[c.ffn, c.ffn])?;
            (gate_up, l.matrix(&[&name("ffn_down")], c.ffn, &[c.width])?)
        }
    };
    Ok(Block {
        attn_norm: l.vector(&name("attn_norm"), c.width)?,
        qkv: none(),
        qkv_bias: None,
        head_norms: None,
        latent: Some(Latent::load(l, i, c, s)?),
        out: l.matrix(&[&name("attn_output")], c.heads * s.value, &[c.width])?,
        ffn_norm: l.vector(&name("ffn_norm"), c.width)?,
        gate_up,
        down,
        experts: experts.map(|e| super::moe::Experts::load(l, i, c, e)).transpose()?,
    })
}
