//! Which type each tensor gets: the named mixes of llama.cpp, and its fallbacks for rows that are not whole
//! blocks.

use crate::gguf::{Gguf, TensorInfo, TensorType};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr};

/// A named mix of tensor types, as `llama-quantize` makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Profile {
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    /// Q4_K with more bits in the first and last layers.
    Q4KS,
    /// Q4_K with Q6_K for half of the value and down projections.
    Q4KM,
    Q5KS,
    Q5KM,
    Q6K,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Self; 12] = [
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4KS,
        Self::Q4KM,
        Self::Q5KS,
        Self::Q5KM,
        Self::Q6K,
    ];

    /// Name as llama.cpp writes it, for example `Q4_K_M`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4KS => "Q4_K_S",
            Self::Q4KM => "Q4_K_M",
            Self::Q5KS => "Q5_K_S",
            Self::Q5KM => "Q5_K_M",
            Self::Q6K => "Q6_K",
        }
    }
    /// `general.file_type` (`llama_ftype`).
    #[must_use]
    pub fn file_type(self) -> u32 {
        match self {
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 7,
            Self::Q5_0 => 8,
            Self::Q5_1 => 9,
            Self::Q4KS => 14,
            Self::Q4KM => 15,
            Self::Q5KS => 16,
            Self::Q5KM => 17,
            Self::Q6K => 18,
            Self::BF16 => 32,
        }
    }
    /// Type of most tensors.
    #[must_use]
    pub fn base(self) -> TensorType {
        match self {
            Self::F16 => TensorType::F16,
            Self::BF16 => TensorType::BF16,
            Self::Q4_0 => TensorType::Q4_0,
            Self::Q4_1 => TensorType::Q4_1,
            Self::Q5_0 => TensorType::Q5_0,
            Self::Q5_1 => TensorType::Q5_1,
            Self::Q8_0 => TensorType::Q8_0,
            Self::Q4KS | Self::Q4KM => TensorType::Q4K,
            Self::Q5KS | Self::Q5KM => TensorType::Q5K,
            Self::Q6K => TensorType::Q6K,
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The text is not the name of a profile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a quantisation profile; known are F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K_S, Q4_K_M, Q5_K_S, Q5_K_M, Q6_K"
)]
pub struct UnknownProfile(String);

impl FromStr for Profile {
    type Err = UnknownProfile;
    fn from_str(s: &str) -> Result<Self, UnknownProfile> {
        Self::ALL.into_iter().find(|p| p.name().eq_ignore_ascii_case(s)).ok_or_else(|| UnknownProfile(s.to_owned()))
    }
}
impl TryFrom<String> for Profile {
    type Error = UnknownProfile;
    fn try_from(s: String) -> Result<Self, UnknownProfile> {
        s.parse()
    }
}
impl From<Profile> for String {
    fn from(p: Profile) -> Self {
        p.name().to_owned()
    }
}

/// What the choice depends on besides the tensor itself.
#[derive(Debug)]
pub(super) struct Chooser {
    profile: Profile,
    has_output: bool,
    /// Layers, counted by their down projections.
    layers: usize,
    has_imatrix: bool,
}

/// The type wanted by the mix, and the one that the shape allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Choice {
    pub wanted: TensorType,
    pub actual: TensorType,
}

impl Chooser {
    pub fn new(base: &Gguf, profile: Profile, has_imatrix: bool) -> Self {
        let has = |suffix: &str| base.tensors().iter().filter(|t| t.name.ends_with(suffix)).count();
        Self {
            profile,
            has_output: base.find("output.weight").is_some(),
            layers: has("ffn_down.weight").max(has("attn_v.weight")),
            has_imatrix,
        }
    }

    /// [`Chooser::choose`], or what `overrides` say.
    pub fn choose_with(&self, tensor: &TensorInfo, overrides: &BTreeMap<String, TensorType>) -> Choice {
        match overrides.get(&tensor.name) {
            Some(&wanted) => Choice { wanted, actual: fitting(wanted, tensor.row_len()) },
            None => self.choose(tensor),
        }
    }

    pub fn choose(&self, tensor: &TensorInfo) -> Choice {
        if !is_matrix(tensor) {
            // Norms, biases and routers: small, sensitive, and required as F32 by the phones' engine.
            let ty = if tensor.ty.is_quantized() { tensor.ty } else { TensorType::F32 };
            return Choice { wanted: ty, actual: ty };
        }
        let wanted = self.wanted(tensor);
        Choice { wanted, actual: fitting(wanted, tensor.row_len()) }
    }

    fn wanted(&self, tensor: &TensorInfo) -> TensorType {
        let base = self.profile.base();
        if !base.is_quantized() {
            return base;
        }
        let name = tensor.name.as_str();
        // The output layer decides every token; without one, the tied embedding is the output layer.
        if name == "output.weight" || (!self.has_output && name == "token_embd.weight") {
            return if base == TensorType::Q8_0 { base } else { TensorType::Q6K };
        }
        let layer = layer(name);
        let more = layer.is_some_and(|l| self.more_bits(l));
        let first_eighth = layer.is_some_and(|l| l < self.layers / 8);
        let is = |part: &str| name.ends_with(part);
        match self.profile {
            Profile::Q4KM | Profile::Q5KM if more && (is("attn_v.weight") || is("ffn_down.weight")) => TensorType::Q6K,
            Profile::Q4KM if is("attn_qkv.weight") => TensorType::Q5K,
            Profile::Q5KM if is("attn_qkv.weight") => TensorType::Q6K,
            Profile::Q4KS if is("attn_v.weight") && layer.is_some_and(|l| l < 4) => TensorType::Q5K,
            Profile::Q4KS if is("ffn_down.weight") && first_eighth => TensorType::Q5K,
            Profile::Q4_0 if self.has_imatrix && is("ffn_down.weight") && first_eighth => TensorType::Q4_1,
            Profile::Q5_0 if self.has_imatrix && is("ffn_down.weight") && first_eighth => TensorType::Q5_1,
            _ => base,
        }
    }

    /// The first and last eighth of the layers, and every third between.
    fn more_bits(&self, layer: usize) -> bool {
        let eighth = self.layers / 8;
        layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth) % 3 == 2
    }
}

/// Whether the tensor is one of the large matrices that are quantised.
pub(super) fn is_matrix(tensor: &TensorInfo) -> bool {
    tensor.dims.len() >= 2
        && tensor.name.ends_with("weight")
        && !tensor.name.ends_with("_norm.weight")
        && !tensor.name.ends_with("ffn_gate_inp.weight")
}

pub(super) fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// The nearest type that rows of this length allow: k-quants need multiples of 256, the others of 32.
pub(super) fn fitting(wanted: TensorType, row_len: usize) -> TensorType {
    if row_len.is_multiple_of(wanted.block_len()) {
        return wanted;
    }
    if !row_len.is_multiple_of(32) {
        return TensorType::F16;
    }
    match wanted {
        TensorType::Q4K => TensorType::Q5_0,
        TensorType::Q5K => TensorType::Q5_1,
        TensorType::Q6K => TensorType::Q8_0,
        other => other,
    }
}
