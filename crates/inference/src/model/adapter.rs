//! A LoRA adapter as data: its matrices, what they belong to, and its GGUF file as stock llama.cpp reads it.

use super::{Arch, ModelConfig, ModelError};
use crate::gguf::{self, Gguf, TensorData, TensorSpec, TensorType, Value};
use std::{borrow::Cow, collections::BTreeMap, path::Path};

/// Our own key in adapter files: the [`base_digest`](super::base_digest) the adapter was trained on.
const BASE_KEY: &str = "flywheel.adapter.base_sha256";

/// A matrix of a block that an adapter can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

impl Target {
    pub const ALL: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];
    /// The attention matrices: q, k, v, o.
    pub const ATTENTION: [Self; 4] = [Self::Q, Self::K, Self::V, Self::O];

    fn part(self) -> &'static str {
        match self {
            Self::Q => "attn_q",
            Self::K => "attn_k",
            Self::V => "attn_v",
            Self::O => "attn_output",
            Self::Gate => "ffn_gate",
            Self::Up => "ffn_up",
            Self::Down => "ffn_down",
        }
    }
    /// Name of the matrix in GGUF.
    #[must_use]
    pub fn tensor(self, layer: usize) -> String {
        format!("blk.{layer}.{}.weight", self.part())
    }
    /// `(outputs, inputs)`.
    #[must_use]
    pub fn shape(self, c: &ModelConfig) -> (usize, usize) {
        match self {
            Self::Q => (c.q_width(), c.width),
            Self::K | Self::V => (c.kv_width(), c.width),
            Self::O => (c.width, c.q_width()),
            Self::Gate | Self::Up => (c.ffn, c.width),
            Self::Down => (c.width, c.ffn),
        }
    }
    /// The opposite of [`Target::tensor`].
    fn parse(tensor: &str) -> Option<(usize, Self)> {
        let (layer, part) = tensor.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
        let target = Self::ALL.into_iter().find(|t| t.part() == part)?;
        Some((layer.parse().ok()?, target))
    }
}

/// `W' = W + alpha / rank · B · A` for each pair; `A` is `rank × inputs`, `B` is `outputs × rank`, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Architecture of the base.
    pub arch: Arch,
    pub alpha: f32,
    /// Digest of the base it was trained on; `None` in files made elsewhere.
    pub base_sha256: Option<String>,
    pairs: Pairs,
}

/// The two factors of one matrix's change, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    pub rank: usize,
    /// `rank × inputs`.
    pub a: Vec<f32>,
    /// `outputs × rank`.
    pub b: Vec<f32>,
}

/// By layer and target.
type Pairs = BTreeMap<(usize, Target), Pair>;

impl Adapter {
    /// # Errors
    /// [`ModelError::Adapter`] when there is no pair, or one has no rank or a value that is not finite.
    pub fn new(
        arch: Arch,
        alpha: f32,
        base_sha256: Option<String>,
        pairs: impl IntoIterator<Item = ((usize, Target), Pair)>,
    ) -> Result<Self, ModelError> {
        let this = Self { arch, alpha, base_sha256, pairs: pairs.into_iter().collect() };
        if this.pairs.is_empty() {
            return Err(ModelError::adapter("it changes no tensor"));
        }
        if !(alpha.is_finite() && alpha > 0.0) {
            return Err(ModelError::adapter(format!("alpha is {alpha}, must be above 0")));
        }
        for ((layer, target), pair) in &this.pairs {
            let name = target.tensor(*layer);
            if pair.rank == 0 || pair.a.is_empty() || pair.b.is_empty() {
                return Err(ModelError::adapter(format!("`{name}` has rank 0")));
            }
            if !pair.a.iter().chain(&pair.b).all(|v| v.is_finite()) {
                return Err(ModelError::adapter(format!("`{name}` has values that are not finite")));
            }
        }
        Ok(this)
    }
    /// The same adapter, to be applied to any base of its shape, also one that it was not trained on.
    #[must_use]
    pub fn for_any_base(self) -> Self {
        Self { base_sha256: None, ..self }
    }
    /// All pairs in order of layer and target.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, Target, &Pair)> {
        self.pairs.iter().map(|((layer, target), pair)| (*layer, *target, pair))
    }
    /// Factor in front of `B · A` for a pair of this rank.
    #[must_use]
    pub fn scale(&self, rank: usize) -> f32 {
        self.alpha / rank.max(1) as f32
    }
    /// The change of `target`'s weights in `layer`, `outputs × inputs`, if it is adapted.
    pub(crate) fn delta(&self, layer: usize, target: Target, inputs: usize) -> Option<Vec<f32>> {
        let Pair { rank, a, b } = self.pairs.get(&(layer, target))?;
        let (rank, outputs) = (*rank, b.len() / rank);
        let scaled: Vec<f32> = b.iter().map(|b| b * self.scale(rank)).collect();
        let mut delta = vec![0.0; outputs * inputs];
        let a = crate::linalg::Operand::rows(a, inputs);
        crate::linalg::gemm(outputs, inputs, rank, &scaled, rank, a, &mut delta, inputs, false);
        Some(delta)
    }

    pub(crate) fn check_shapes(&self, config: &ModelConfig) -> Result<(), ModelError> {
        config.check_plain("LoRA adapters")?;
        if self.arch != config.arch {
            let what = format!("made for `{}`, the model is `{}`", self.arch.name(), config.arch.name());
            return Err(ModelError::adapter(what));
        }
        for ((layer, target), Pair { rank, a, b }) in &self.pairs {
            let (outputs, inputs) = target.shape(config);
            if *layer >= config.layers || a.len() != rank * inputs || b.len() != outputs * rank {
                let what = format!(
                    "`{}`: A has {} and B {} values; the model's matrix is {outputs} × {inputs} in {} layers",
                    target.tensor(*layer),
                    a.len(),
                    b.len(),
                    config.layers
                );
                return Err(ModelError::adapter(what));
            }
        }
        Ok(())
    }

    /// Refuses a base other than the one trained on.
    pub(crate) fn check_base(&self, digest: &str) -> Result<(), ModelError> {
        match &self.base_sha256 {
            Some(want) if want != digest => Err(ModelError::adapter(format!(
                "trained on base {want}, this base is {digest}; use that base, train again on this one, or take the base's \
                 digest out of the adapter to apply it anyway"
            ))),
            _ => Ok(()),
        }
    }

    /// Writes the file that `llama-cli --lora` loads (`convert_lora_to_gguf.py` of llama.cpp): F32 pairs named
    /// `<tensor>.lora_a` with `ne = [inputs, rank]` and `<tensor>.lora_b` with `ne = [rank, outputs]`.
    ///
    /// # Errors
    /// [`ModelError::Gguf`].
    pub fn write(&self, path: &Path) -> Result<u64, ModelError> {
        let mut metadata: Vec<(String, Value)> = vec![
            ("general.type".into(), "adapter".into()),
            ("general.architecture".into(), self.arch.name().into()),
            ("adapter.type".into(), "lora".into()),
            ("adapter.lora.alpha".into(), self.alpha.into()),
        ];
        metadata.extend(self.base_sha256.iter().map(|d| (BASE_KEY.to_owned(), d.as_str().into())));
        let tensors = self.pairs().flat_map(|(layer, target, Pair { rank, a, b })| {
            let name = target.tensor(layer);
            [("lora_a", a, [a.len() / rank, *rank]), ("lora_b", b, [*rank, b.len() / rank])].map(
                |(part, data, dims)| {
                    let spec = TensorSpec {
                        name: format!("{name}.{part}"),
                        dims: dims.iter().map(|d| *d as u64).collect(),
                        ty: TensorType::F32,
                    };
                    let bytes: Vec<u8> = data.iter().flat_map(|v| v.to_le_bytes()).collect();
                    (spec, TensorData::Bytes(Cow::Owned(bytes)))
                },
            )
        });
        Ok(gguf::write(path, &metadata, tensors)?)
    }

    /// Reads an adapter file; the checks and their order are those of `llama-adapter.cpp`.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for anything that is not a whole LoRA adapter of a known architecture.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        for (key, want) in [("general.type", "adapter"), ("adapter.type", "lora")] {
            let found = gguf.str(key)?;
            if found != want {
                return Err(ModelError::adapter(format!("`{key}` is `{found}`, expected `{want}`")));
            }
        }
        let arch = Arch::parse(gguf.str("general.architecture")?)?;
        let alpha = gguf.f32("adapter.lora.alpha")?;
        let base = gguf.optional::<&str>(BASE_KEY)?.map(str::to_owned);
        let mut pairs = Pairs::new();
        for tensor in gguf.tensors() {
            let name = tensor.name.as_str();
            let Some(stem) = name.strip_suffix(".lora_a") else {
                let a_name = name.strip_suffix(".lora_b").map(|stem| format!("{stem}.lora_a"));
                match a_name {
                    Some(a) if gguf.find(&a).is_some() => continue,
                    Some(a) => {
                        return Err(ModelError::adapter(format!("`{name}` has no partner `{a}`")));
                    }
                    None => {
                        return Err(ModelError::adapter(format!("`{name}` is neither lora_a nor lora_b")));
                    }
                }
            };
            let slot = Target::parse(stem)
                .ok_or_else(|| ModelError::adapter(format!("`{stem}` is not a matrix that can be adapted here")))?;
            let b_name = format!("{stem}.lora_b");
            let partner =
                gguf.find(&b_name).ok_or_else(|| ModelError::adapter(format!("`{name}` has no partner `{b_name}`")))?;
            let (&[_, rank], &[b_rank, _]) = (tensor.dims.as_slice(), partner.dims.as_slice()) else {
                return Err(ModelError::adapter(format!("`{stem}`: both parts must be matrices")));
            };
            if let Some(bad) = [tensor, partner].into_iter().find(|t| t.ty.is_quantized()) {
                let what = format!("`{}` is {}; an adapter must be F32, F16 or BF16", bad.name, bad.ty);
                return Err(ModelError::adapter(what));
            }
            if rank != b_rank {
                return Err(ModelError::adapter(format!("`{stem}`: ranks {rank} and {b_rank} differ")));
            }
            let pair = Pair { rank: rank as usize, a: gguf.dequantize(tensor)?, b: gguf.dequantize(partner)? };
            pairs.insert(slot, pair);
        }
        Self::new(arch, alpha, base, pairs)
    }
}
