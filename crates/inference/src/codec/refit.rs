//! Scales of a coded block moved to other values, as near as the format can store them.

use super::{Fit, legacy::half, superblock};
use crate::gguf::TensorType;

/// Whether sub-blocks have a minimum beside their scale.
pub(crate) fn has_minimum(ty: TensorType) -> bool {
    matches!(ty, TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K)
}

impl Fit {
    /// The same with scale and minimum of sub-block `s` as near to `step` and `min` as `ty` can store them. What all
    /// sub-blocks of a k-quant share stays.
    pub(crate) fn nearest(&self, ty: TensorType, s: usize, step: f32, min: f32) -> Self {
        let mut out = self.clone();
        match ty {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => {}
            TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 | TensorType::Iq4Nl => out.set_step(step),
            TensorType::Q4_1 | TensorType::Q5_1 => {
                out.set_step(step);
                let offset = half(-min);
                out.grid.min[0] = -offset.to_f32();
                out.header[2..4].copy_from_slice(&offset.to_le_bytes());
            }
            TensorType::Q4K | TensorType::Q5K => superblock::set_affine(&mut out, s, step, min),
            TensorType::Q6K => superblock::set_symmetric(&mut out, s, step),
        }
        out
    }

    fn set_step(&mut self, step: f32) {
        let scale = half(step);
        self.grid.step[0] = scale.to_f32();
        self.header[..2].copy_from_slice(&scale.to_le_bytes());
    }
}
