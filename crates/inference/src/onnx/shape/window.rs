//! Sizes of convolutions and poolings. Formulas: the operators `Conv`, `ConvTranspose` and `MaxPool` of the ONNX standard.

use super::{Shapes, Ty};
use crate::onnx::proto::NodeProto;

/// `[batch, channels, sizes of the window's results…]` of a convolution or pooling over `kernel`.
fn output(node: &NodeProto, x: &Ty, channels: Option<u64>, kernel: &[u64]) -> Option<Ty> {
    let rank = x.dims.len().checked_sub(2)?;
    if kernel.len() != rank {
        return None;
    }
    let numbers = |name: &str, i: usize, default: i64| node.ints(name).map_or(Some(default), |v| v.get(i).copied());
    let pad = node.text("auto_pad").unwrap_or("NOTSET");
    let mut dims = vec![x.dims[0], channels];
    for (i, k) in kernel.iter().enumerate() {
        let size = |input: u64| -> Option<u64> {
            let stride = u64::try_from(numbers("strides", i, 1)?).ok().filter(|s| *s > 0)?;
            if pad.starts_with("SAME") {
                return Some(input.div_ceil(stride));
            }
            let (before, after) = match pad {
                "VALID" => (0, 0),
                _ => (numbers("pads", i, 0)?, numbers("pads", i + rank, 0)?),
            };
            let dilation = u64::try_from(numbers("dilations", i, 1)?).ok()?;
            let reach = dilation.checked_mul(k.checked_sub(1)?)?.checked_add(1)?;
            let padded = input.checked_add_signed(before)?.checked_add_signed(after)?;
            (padded.checked_sub(reach)? / stride).checked_add(1)
        };
        dims.push(match x.dims[i + 2] {
            None => None,
            Some(input) => Some(size(input)?),
        });
    }
    Some(x.with(dims))
}

fn kernel(node: &NodeProto, weights: Option<&Ty>) -> Option<Vec<u64>> {
    match (node.ints("kernel_shape"), weights) {
        (Some(k), _) => k.iter().map(|k| u64::try_from(*k).ok()).collect(),
        (None, Some(w)) => w.dims.get(2..)?.iter().copied().collect(),
        (None, None) => None,
    }
}

pub(super) fn conv(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let (x, w) = (s.input(node, 0)?, s.input(node, 1)?);
    output(node, x, *w.dims.first()?, &kernel(node, Some(w))?)
}

/// Not with `ceil_mode`: whether a last window that begins in the padding counts differs between versions.
pub(super) fn pool(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0).filter(|_| node.int("ceil_mode", 0) == 0)?;
    output(node, x, *x.dims.get(1)?, &kernel(node, None)?)
}

pub(super) fn global_pool(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    let mut dims = vec![*x.dims.first()?, *x.dims.get(1)?];
    dims.resize(x.dims.len(), Some(1));
    Some(x.with(dims))
}

/// Only with plain padding: `auto_pad` and `output_shape` choose paddings by the result.
pub(super) fn conv_transpose(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let (x, w) = (s.input(node, 0)?, s.input(node, 1)?);
    let kernel = kernel(node, Some(w))?;
    let rank = x.dims.len().checked_sub(2)?;
    let plain = node.text("auto_pad").unwrap_or("NOTSET") == "NOTSET" && node.attr("output_shape").is_none();
    if kernel.len() != rank || !plain {
        return None;
    }
    let group = u64::try_from(node.int("group", 1)).ok()?;
    let channels = (*w.dims.get(1)?).and_then(|c| c.checked_mul(group));
    let mut dims = vec![x.dims[0], channels];
    for (i, k) in kernel.iter().enumerate() {
        let number = |name: &str, at: usize, default: i64| -> Option<i64> {
            node.ints(name).map_or(Some(default), |v| v.get(at).copied())
        };
        let size = |input: u64| -> Option<u64> {
            let input = i64::try_from(input).ok()?.checked_sub(1)?;
            let reach =
                number("dilations", i, 1)?.checked_mul(i64::try_from(*k).ok()?.checked_sub(1)?)?.checked_add(1)?;
            let size = number("strides", i, 1)?.checked_mul(input)?.checked_add(number("output_padding", i, 0)?)?;
            let size = size.checked_add(reach)?.checked_sub(number("pads", i, 0)?)?;
            u64::try_from(size.checked_sub(number("pads", i + rank, 0)?)?).ok()
        };
        dims.push(match x.dims[i + 2] {
            None => None,
            Some(input) => Some(size(input)?),
        });
    }
    Some(x.with(dims))
}
