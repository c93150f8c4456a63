//! Tensor types (block layouts) and the entry of one tensor in a file.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Element type of a tensor. Only types that [`crate::codec`] can decode are listed; a file with another
/// one is refused when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TensorType {
    F32,
    F16,
    BF16,
    /// 32 weights, one scale: 4.5 bits per weight.
    Q4_0,
    /// 32 weights, scale and minimum: 5 bits per weight.
    Q4_1,
    /// 5.5 bits per weight.
    Q5_0,
    /// 6 bits per weight.
    Q5_1,
    /// 8.5 bits per weight.
    Q8_0,
    /// 32 weights, one scale, 16 unevenly spaced levels: 4.5 bits per weight.
    Iq4Nl,
    /// 256 weights with 6-bit sub-scales and minima: 4.5 bits per weight.
    Q4K,
    /// 5.5 bits per weight.
    Q5K,
    /// 256 weights with 8-bit sub-scales: 6.5625 bits per weight.
    Q6K,
}

impl TensorType {
    /// Every supported type.
    pub const ALL: [Self; 12] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Iq4Nl,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Type id in the file (`ggml_type`).
    #[must_use]
    pub const fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Iq4Nl => 20,
            Self::BF16 => 30,
        }
    }
    /// The type with this id, if it is supported.
    #[must_use]
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.id() == id)
    }
    /// Weights in one block; rows are whole blocks.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }
    /// Bytes of one block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }
    /// Bytes of a row of `n` weights; `None` if `n` is not a whole number of blocks.
    #[must_use]
    pub const fn row_bytes(self, n: usize) -> Option<usize> {
        if n.is_multiple_of(self.block_len()) { (n / self.block_len()).checked_mul(self.block_bytes()) } else { None }
    }
    /// Whether values are stored in blocks with scales, so that storing loses precision on purpose.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }
    /// Storage cost, bits per weight.
    #[must_use]
    pub fn bits_per_weight(self) -> f64 {
        8.0 * self.block_bytes() as f64 / self.block_len() as f64
    }
    /// Name as llama.cpp prints it, for example `Q4_K`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Iq4Nl => "IQ4_NL",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The text is not the name of a tensor type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a tensor type that is known here, such as Q4_K or Q8_0")]
pub struct UnknownTensorType(String);

impl FromStr for TensorType {
    type Err = UnknownTensorType;
    fn from_str(s: &str) -> Result<Self, UnknownTensorType> {
        Self::ALL.into_iter().find(|t| t.name().eq_ignore_ascii_case(s)).ok_or_else(|| UnknownTensorType(s.to_owned()))
    }
}
impl TryFrom<String> for TensorType {
    type Error = UnknownTensorType;
    fn try_from(s: String) -> Result<Self, UnknownTensorType> {
        s.parse()
    }
}
impl From<TensorType> for String {
    fn from(t: TensorType) -> Self {
        t.name().to_owned()
    }
}

/// Name, shape and type of a tensor that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Shorter than 64 bytes.
    pub name: String,
    /// ggml order: `dims[0]` is the row length. One to four dimensions.
    pub dims: Vec<u64>,
    pub ty: TensorType,
}

/// One tensor of an opened file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// ggml order: `dims[0]` is the row length (input width of a linear layer), `dims[1]` the number of rows.
    pub dims: Vec<u64>,
    pub ty: TensorType,
    /// Bytes from the start of the data section of its file.
    pub offset: u64,
    /// Bytes of data, without padding.
    pub len: usize,
    /// Number of the shard that holds the data, from 0.
    pub(super) shard: usize,
}

impl TensorInfo {
    /// Weights in one row.
    #[must_use]
    pub fn row_len(&self) -> usize {
        // Checked when the file was opened: every product of dimensions fits usize.
        self.dims.first().map_or(0, |&d| d as usize)
    }
    /// Product of all dimensions but the first.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.dims.iter().skip(1).map(|&d| d as usize).product()
    }
    /// Number of weights.
    #[must_use]
    pub fn n_elements(&self) -> usize {
        self.row_len() * self.rows()
    }
    /// The same tensor as something to write.
    #[must_use]
    pub fn spec(&self) -> TensorSpec {
        TensorSpec { name: self.name.clone(), dims: self.dims.clone(), ty: self.ty }
    }
}
