//! The first output of an operator from its inputs; `None` for operators that are not known here.

use super::{Shapes, Ty, axis, broadcast, slice, window};
use crate::onnx::{
    proto::NodeProto,
    tensor::{BOOL, INT64},
};

/// A convolution, with or without the fused activation of ONNX Runtime.
pub(in crate::onnx) fn is_conv(node: &NodeProto) -> bool {
    node.op() == Some("Conv")
        || (node.domain.as_deref() == Some("com.microsoft") && node.op_type.as_deref() == Some("FusedConv"))
}

pub(super) fn first_output(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    if is_conv(node) {
        return window::conv(node, s);
    }
    match node.op()? {
        "Relu"
        | "LeakyRelu"
        | "PRelu"
        | "Sigmoid"
        | "Tanh"
        | "Exp"
        | "Log"
        | "Sqrt"
        | "Neg"
        | "Abs"
        | "Floor"
        | "Ceil"
        | "Round"
        | "Erf"
        | "Clip"
        | "Softmax"
        | "LogSoftmax"
        | "HardSigmoid"
        | "HardSwish"
        | "Elu"
        | "Gelu"
        | "Softplus"
        | "Identity"
        | "Dropout"
        | "BatchNormalization"
        | "InstanceNormalization"
        | "LayerNormalization"
        | "LRN"
        | "Not"
        | "Reciprocal" => s.input(node, 0).cloned(),
        "Add" | "Sub" | "Mul" | "Div" | "Pow" | "Min" | "Max" | "Sum" | "Mean" => spread(node, s, 0),
        "Equal" | "Less" | "Greater" | "LessOrEqual" | "GreaterOrEqual" | "And" | "Or" | "Xor" => {
            Some(Ty { elem: BOOL, ..spread(node, s, 0)? })
        }
        "Where" => spread(node, s, 1),
        "Cast" => Some(Ty { elem: i32::try_from(node.int("to", 0)).ok()?, ..s.input(node, 0)?.clone() }),
        "MaxPool" | "AveragePool" => window::pool(node, s),
        "GlobalAveragePool" | "GlobalMaxPool" => window::global_pool(node, s),
        "ConvTranspose" => window::conv_transpose(node, s),
        "Gemm" => gemm(node, s),
        "MatMul" => matmul(s.input(node, 0)?, s.input(node, 1)?),
        "Reshape" => reshape(node, s),
        "Flatten" => flatten(node, s),
        "Transpose" => transpose(node, s),
        "Concat" => concat(node, s),
        "Squeeze" => squeeze(node, s),
        "Unsqueeze" => unsqueeze(node, s),
        "Gather" => gather(node, s),
        "Slice" => sliced(node, s),
        "Resize" | "Upsample" => resize(node, s),
        "Expand" => {
            let x = s.input(node, 0)?;
            Some(x.with(broadcast(&x.dims, &sizes(&s.constant(node, 1)?.ints()?)?)?))
        }
        "Shape" => {
            let rank = s.input(node, 0)?.dims.len();
            let (_, len) = slice(rank as u64, node.int("start", 0), node.int("end", i64::MAX), 1)?;
            Some(Ty { elem: INT64, dims: vec![Some(len)] })
        }
        "ConstantOfShape" => {
            let elem = node.attr("value").and_then(|a| a.t.as_ref()).map_or(Some(1), |t| t.data_type)?;
            Some(Ty { elem, dims: sizes(&s.constant(node, 0)?.ints()?)? })
        }
        "Constant" => {
            let tensor = node.attr("value")?.t.as_ref()?;
            Some(Ty { elem: tensor.data_type?, dims: sizes(&tensor.dims)? })
        }
        "ReduceMean" | "ReduceSum" | "ReduceMax" | "ReduceMin" => reduce(node, s),
        "Pad" => pad(node, s),
        _ => None,
    }
}

fn sizes(values: &[i64]) -> Option<Vec<Option<u64>>> {
    values.iter().map(|v| u64::try_from(*v).ok().map(Some)).collect()
}

/// All inputs broadcast together; the element type of input `typed`.
fn spread(node: &NodeProto, s: &Shapes<'_>, typed: usize) -> Option<Ty> {
    let mut dims = Vec::new();
    for i in 0..node.input.len() {
        dims = broadcast(&dims, &s.input(node, i)?.dims)?;
    }
    Some(s.input(node, typed)?.with(dims))
}

fn gemm(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let (a, b) = (s.input(node, 0)?, s.input(node, 1)?);
    let (m, n) = (usize::from(node.int("transA", 0) != 0), usize::from(node.int("transB", 0) == 0));
    Some(a.with(vec![*a.dims.get(m)?, *b.dims.get(n)?]))
}

fn matmul(a: &Ty, b: &Ty) -> Option<Ty> {
    if a.dims.len() < 2 || b.dims.len() < 2 {
        return None;
    }
    let ((outer_a, inner_a), (outer_b, inner_b)) =
        (a.dims.split_at(a.dims.len() - 2), b.dims.split_at(b.dims.len() - 2));
    let mut dims = broadcast(outer_a, outer_b)?;
    dims.extend([inner_a[0], inner_b[1]]);
    Some(a.with(dims))
}

/// The shape that `Reshape` makes of `x`: 0 keeps a size, −1 takes what is left.
fn reshaped(x: &[Option<u64>], to: &[i64], allow_zero: bool) -> Option<Vec<Option<u64>>> {
    let mut free = None;
    let mut dims = Vec::with_capacity(to.len());
    for (i, size) in to.iter().enumerate() {
        dims.push(match *size {
            0 if !allow_zero => *x.get(i)?,
            -1 if free.replace(i).is_some() => return None,
            -1 => Some(1),
            n => Some(u64::try_from(n).ok()?),
        });
    }
    let product = |dims: &[Option<u64>]| dims.iter().try_fold(1u64, |n, d| n.checked_mul((*d)?));
    if let Some(free) = free {
        dims[free] = match (product(x), product(&dims)) {
            (Some(all), Some(rest)) if rest > 0 && all.is_multiple_of(rest) => Some(all / rest),
            (Some(_), Some(_)) => return None,
            _ => None,
        };
    }
    Some(dims)
}

fn reshape(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    Some(x.with(reshaped(&x.dims, &s.constant(node, 1)?.ints()?, node.int("allowzero", 0) != 0)?))
}

fn flatten(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    let (rank, at) = (i64::try_from(x.dims.len()).ok()?, node.int("axis", 1));
    let at = if at < 0 { at.checked_add(rank)? } else { at };
    let (a, b) = x.dims.split_at_checked(usize::try_from(at).ok()?)?;
    let product = |dims: &[Option<u64>]| dims.iter().try_fold(1u64, |n, d| n.checked_mul((*d)?));
    Some(x.with(vec![product(a), product(b)]))
}

fn transpose(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    match node.ints("perm") {
        None => Some(x.with(x.dims.iter().rev().copied().collect())),
        Some(perm) => {
            let dims = perm.iter().map(|p| x.dims.get(usize::try_from(*p).ok()?).copied());
            Some(x.with(dims.collect::<Option<_>>()?))
        }
    }
}

fn concat(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let mut out = s.input(node, 0)?.clone();
    let at = axis(node.int("axis", 0), out.dims.len())?;
    for i in 1..node.input.len() {
        let more = *s.input(node, i)?.dims.get(at)?;
        out.dims[at] = match (out.dims[at], more) {
            (Some(a), Some(b)) => Some(a.checked_add(b)?),
            _ => None,
        };
    }
    Some(out)
}

fn squeeze(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    let gone: Vec<usize> = match s.ints(node, "axes", 1) {
        Some(axes) => axes.iter().map(|a| axis(*a, x.dims.len())).collect::<Option<_>>()?,
        None if node.given(1).is_some() || x.dims.contains(&None) => return None,
        None => (0..x.dims.len()).filter(|i| x.dims[*i] == Some(1)).collect(),
    };
    Some(x.with(x.dims.iter().enumerate().filter(|(i, _)| !gone.contains(i)).map(|(_, d)| *d).collect()))
}

fn unsqueeze(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    let axes = s.ints(node, "axes", 1)?;
    let rank = x.dims.len() + axes.len();
    let mut new: Vec<usize> = axes.iter().map(|a| axis(*a, rank)).collect::<Option<_>>()?;
    new.sort_unstable();
    let mut dims = x.dims.clone();
    for at in new {
        if at > dims.len() {
            return None;
        }
        dims.insert(at, Some(1));
    }
    Some(x.with(dims))
}

fn gather(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let (x, indices) = (s.input(node, 0)?, s.input(node, 1)?);
    let at = axis(node.int("axis", 0), x.dims.len())?;
    Some(x.with([&x.dims[..at], &indices.dims, &x.dims[at + 1..]].concat()))
}

fn sliced(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let mut out = s.input(node, 0)?.clone();
    let (starts, ends) = (s.ints(node, "starts", 1)?, s.ints(node, "ends", 2)?);
    let axes = match s.ints(node, "axes", 3) {
        Some(axes) => axes,
        None if node.given(3).is_some() => return None,
        None => (0..starts.len() as i64).collect(),
    };
    let steps = match node.given(4) {
        Some(_) => s.constant(node, 4)?.ints()?,
        None => vec![1; starts.len()],
    };
    for (i, a) in axes.iter().enumerate() {
        let at = axis(*a, out.dims.len())?;
        out.dims[at] = match out.dims[at] {
            None => None,
            Some(dim) => Some(slice(dim, *starts.get(i)?, *ends.get(i)?, *steps.get(i)?)?.1),
        };
    }
    Some(out)
}

/// Sizes are given, or are those of the input times a scale, rounded down.
fn resize(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    if node.attr("axes").is_some() || node.attr("keep_aspect_ratio_policy").is_some() {
        return None;
    }
    if node.given(3).is_some() {
        let dims = sizes(&s.constant(node, 3)?.ints()?)?;
        return (dims.len() == x.dims.len()).then(|| x.with(dims));
    }
    let scales = match (node.attr("scales"), node.input.len()) {
        (Some(a), _) => a.floats.clone(),
        (None, ..=2) => s.constant(node, 1)?.floats()?.to_vec(),
        _ => s.constant(node, 2)?.floats()?.to_vec(),
    };
    if scales.len() != x.dims.len() {
        return None;
    }
    // Runtimes multiply in single precision; where double precision gives another size nothing is claimed.
    let scaled = |(dim, scale): (&Option<u64>, &f32)| {
        let (single, double) = ((*dim)? as f32 * scale, (*dim)? as f64 * f64::from(*scale));
        (f64::from(single.floor()) == double.floor()).then_some(double as u64)
    };
    Some(x.with(x.dims.iter().zip(&scales).map(scaled).collect()))
}

fn reduce(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    let axes: Vec<usize> = match s.ints(node, "axes", 1).filter(|axes| !axes.is_empty()) {
        Some(axes) => axes.iter().map(|a| axis(*a, x.dims.len())).collect::<Option<_>>()?,
        None if node.given(1).is_some() || node.int("noop_with_empty_axes", 0) != 0 => return None,
        None => (0..x.dims.len()).collect(),
    };
    let keep = node.int("keepdims", 1) != 0;
    let dims = x.dims.iter().enumerate();
    let dims = dims.filter_map(|(i, d)| if axes.contains(&i) { keep.then_some(Some(1)) } else { Some(*d) });
    Some(x.with(dims.collect()))
}

fn pad(node: &NodeProto, s: &Shapes<'_>) -> Option<Ty> {
    let x = s.input(node, 0)?;
    let (pads, rank) = (s.ints(node, "pads", 1)?, x.dims.len());
    if pads.len() != 2 * rank || node.given(3).is_some() {
        return None;
    }
    let dims = x.dims.iter().enumerate().map(|(i, d)| match d {
        None => Some(None),
        Some(d) => Some(Some(d.checked_add_signed(pads[i])?.checked_add_signed(pads[i + rank])?)),
    });
    Some(x.with(dims.collect::<Option<_>>()?))
}
