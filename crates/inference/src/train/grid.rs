//! Quantisation-aware training: matrices are rounded to a target format in every forward pass, and gradients go straight
//! through the rounding (arXiv 1308.3432).

use crate::codec;
use crate::gguf::TensorType;
use crate::model::ModelError;
use crate::quantize::npu::{Group, NpuProfile};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The format that the matrices of the blocks will have. The embedding and the output stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightGrid {
    /// A block type of GGUF, as [`codec::quantize`] makes it without importance.
    Gguf(TensorType),
    /// Integers with power-of-two scales; `group` columns of a row share one, 0 for a whole row.
    Npu { profile: NpuProfile, group: usize },
}

impl fmt::Display for WeightGrid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gguf(ty) => write!(f, "{ty}"),
            Self::Npu { profile, group: 0 } => write!(f, "npu-int{} per row", profile.bits()),
            Self::Npu { profile, group } => write!(f, "npu-int{} in groups of {group}", profile.bits()),
        }
    }
}

impl std::str::FromStr for WeightGrid {
    type Err = String;
    /// A block type (`Q4_0`), or `npu-int4`, `npu-int6`, `npu-int8`, with `/COLUMNS` for groups within rows.
    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            format!("`{text}` is no weight format; known are block types such as q4_0, and npu-int4 or npu-int4/128")
        };
        if !text.starts_with("npu") {
            let ty: TensorType = text.parse().map_err(|_| unknown())?;
            return if ty.is_quantized() { Ok(Self::Gguf(ty)) } else { Err(unknown()) };
        }
        let (profile, group) = text.split_once('/').unwrap_or((text, "0"));
        let profile = profile.parse().map_err(|_| unknown())?;
        Ok(Self::Npu { profile, group: group.parse().map_err(|_| unknown())? })
    }
}

impl WeightGrid {
    /// Replaces each value by what the format would keep of it; `name` is for messages.
    pub(super) fn round(self, values: &mut [f32], row_len: usize, name: &str) -> Result<(), ModelError> {
        match self {
            Self::Gguf(ty) => {
                let rounded = codec::quantize(ty, values, row_len, None)
                    .and_then(|bytes| codec::dequantize_into(ty, &bytes, values));
                rounded.map_err(|e| ModelError::weight(name, format!("{e}; choose another grid to train for")))
            }
            Self::Npu { profile, group } => {
                let group = if group == 0 { row_len } else { group };
                values.par_chunks_mut(row_len).for_each(|row| {
                    row.chunks_mut(group).for_each(|weights| round_group(weights, profile.bits()));
                });
                Ok(())
            }
        }
    }
}

fn round_group(weights: &mut [f32], bits: u32) {
    let group = Group::fit(weights, None, bits);
    weights.iter_mut().for_each(|w| *w = group.value(group.level(*w, bits).0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_become_those_of_the_format() {
        let start: Vec<f32> = crate::model::tests::noise(4 * 64, 3, 0.3);
        let rounded = |grid: WeightGrid| {
            let mut v = start.clone();
            grid.round(&mut v, 64, "w").unwrap();
            let mut again = v.clone();
            grid.round(&mut again, 64, "w").unwrap();
            let error = v.iter().zip(&start).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            let moved = again.iter().zip(&v).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            assert!(moved < 0.02 * error + 1e-9, "{grid}: what is on the grid stays there: {moved} of {error}");
            (v, error)
        };
        let (q4, coarse) = rounded(WeightGrid::Gguf(TensorType::Q4_0));
        let bytes = codec::quantize(TensorType::Q4_0, &start, 64, None).unwrap();
        assert_eq!(q4, codec::dequantize(TensorType::Q4_0, &bytes, start.len()).unwrap());
        let npu = |profile, group| rounded(WeightGrid::Npu { profile, group });
        let (row, group) = (npu(NpuProfile::Int4, 0).1, npu(NpuProfile::Int4, 16).1);
        assert!(group <= row && npu(NpuProfile::Int6, 0).1 < row && coarse > 0.0, "{group} {row}");
        let levels: std::collections::BTreeSet<u32> =
            npu(NpuProfile::Int4, 0).0[..64].iter().map(|v| v.to_bits()).collect();
        assert!(levels.len() <= 16, "a row of 4 bits has {} values", levels.len());
    }

    #[test]
    fn a_format_that_does_not_fit_the_rows_is_refused_by_name() {
        let e = WeightGrid::Gguf(TensorType::Q4K).round(&mut [0.0; 64], 64, "blk.0.attn_q.weight").unwrap_err();
        assert!(e.to_string().contains("blk.0.attn_q.weight") && e.to_string().contains("256"), "{e}");
    }
}
