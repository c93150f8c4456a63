//! The arithmetic of constant folding; every result equals what a runtime computes, or there is none.

use crate::onnx::{
    proto::NodeProto,
    shape::{Shapes, axis, slice},
    tensor::{BOOL, Constant, FLOAT, INT32, INT64, Values},
};

/// Row-major distances between neighbours of each dimension.
fn strides(dims: &[usize]) -> Vec<isize> {
    let mut out = vec![1isize; dims.len()];
    for i in (1..dims.len()).rev() {
        out[i - 1] = out[i] * dims[i] as isize;
    }
    out
}

/// Flat positions `offset + Σ index·stride` for all indices of `dims`, last dimension fastest.
fn positions(dims: &[usize], offset: isize, strides: &[isize]) -> Vec<usize> {
    let n: usize = dims.iter().product();
    let mut index = vec![0usize; dims.len()];
    let (mut out, mut at) = (Vec::with_capacity(n), offset);
    for _ in 0..n {
        out.push(at as usize);
        for d in (0..dims.len()).rev() {
            index[d] += 1;
            at += strides[d];
            if index[d] < dims[d] {
                break;
            }
            at -= strides[d] * dims[d] as isize;
            index[d] = 0;
        }
    }
    out
}

/// Positions of `from` for every element of the broadcast shape `to`.
fn spread(from: &[usize], to: &[usize]) -> Option<Vec<usize>> {
    let pad = to.len().checked_sub(from.len())?;
    let own = strides(from);
    let steps: Vec<isize> =
        (0..to.len()).map(|i| if i < pad || from[i - pad] == 1 { 0 } else { own[i - pad] }).collect();
    let fits = from.iter().zip(&to[pad..]).all(|(f, t)| f == t || *f == 1);
    fits.then(|| positions(to, 0, &steps))
}

/// Transpose, Slice, Expand: the same values in another order.
pub(super) fn strided_view(node: &NodeProto, s: &Shapes<'_>, x: &Constant, dims: Vec<usize>) -> Option<Constant> {
    let own = strides(&x.dims);
    let at = match node.op()? {
        "Transpose" => {
            let rank = x.dims.len();
            let perm: Vec<usize> = match node.ints("perm") {
                None => (0..rank).rev().collect(),
                Some(p) => p.iter().map(|p| axis(*p, rank)).collect::<Option<_>>()?,
            };
            let whole = perm.len() == rank && (0..rank).all(|i| perm.contains(&i));
            let steps: Vec<isize> = perm.iter().map(|p| own[*p]).collect();
            whole.then(|| positions(&dims, 0, &steps))?
        }
        "Expand" => spread(&x.dims, &dims)?,
        _ => {
            let (starts, ends) = (s.ints(node, "starts", 1)?, s.ints(node, "ends", 2)?);
            let axes = s.ints(node, "axes", 3).unwrap_or_else(|| (0..starts.len() as i64).collect());
            let steps = s.constant(node, 4).and_then(|c| c.ints()).unwrap_or_else(|| vec![1; starts.len()]);
            let (mut offset, mut strides, mut seen) = (0isize, own.clone(), Vec::new());
            for (i, a) in axes.iter().enumerate() {
                let d = axis(*a, x.dims.len()).filter(|d| !seen.contains(d))?;
                seen.push(d);
                let step = *steps.get(i)?;
                let (first, _) = slice(x.dims[d] as u64, *starts.get(i)?, *ends.get(i)?, step)?;
                offset += first as isize * own[d];
                // A step past the end is never taken.
                strides[d] = own[d] * step.clamp(-(x.dims[d] as i64) - 1, x.dims[d] as i64 + 1) as isize;
            }
            positions(&dims, offset, &strides)
        }
    };
    Constant::new(dims, x.values.pick(&at)?)
}

pub(super) fn gather(x: &Constant, indices: &Constant, at: i64, dims: Vec<usize>) -> Option<Constant> {
    let at = axis(at, x.dims.len())?;
    let (outer, inner): (usize, usize) = (x.dims[..at].iter().product(), x.dims[at + 1..].iter().product());
    let chosen: Vec<usize> = indices.ints()?.iter().map(|i| axis(*i, x.dims[at])).collect::<Option<_>>()?;
    let mut from = Vec::with_capacity(dims.iter().product());
    for o in 0..outer {
        for c in &chosen {
            let start = (o * x.dims[at] + c) * inner;
            from.extend(start..start + inner);
        }
    }
    Constant::new(dims, x.values.pick(&from)?)
}

pub(super) fn concat(parts: &[Constant], at: i64, dims: Vec<usize>) -> Option<Constant> {
    let at = axis(at, dims.len())?;
    let same = |part: &Constant| {
        part.dims.len() == dims.len() && part.dims.iter().zip(&dims).enumerate().all(|(i, (a, b))| i == at || a == b)
    };
    if !parts.iter().all(same) {
        return None;
    }
    fn join<T: Copy>(parts: &[(&[T], usize)], outer: usize) -> Vec<T> {
        (0..outer).flat_map(|o| parts.iter().flat_map(move |(v, n)| &v[o * n..(o + 1) * n])).copied().collect()
    }
    macro_rules! joined {
        ($kind:path) => {{
            let mut pieces = Vec::with_capacity(parts.len());
            for part in parts {
                let $kind(values) = &part.values else { return None };
                pieces.push((values.as_slice(), part.dims[at..].iter().product::<usize>()));
            }
            $kind(join(&pieces, dims[..at].iter().product()))
        }};
    }
    let values = match parts.first()?.values {
        Values::F32(_) => joined!(Values::F32),
        Values::I32(_) => joined!(Values::I32),
        Values::I64(_) => joined!(Values::I64),
        Values::Bool(_) => joined!(Values::Bool),
    };
    Constant::new(dims, values)
}

pub(super) fn cast(x: &Constant, to: i64) -> Option<Constant> {
    // Through f64 and i128 every value of these types is exact.
    let whole: Vec<Option<i128>> = match &x.values {
        Values::F32(v) => v.iter().map(|f| f.is_finite().then(|| f.trunc() as i128)).collect(),
        Values::I32(v) => v.iter().map(|i| Some(i128::from(*i))).collect(),
        Values::I64(v) => v.iter().map(|i| Some(i128::from(*i))).collect(),
        Values::Bool(v) => v.iter().map(|b| Some(i128::from(*b))).collect(),
    };
    let values = match (i32::try_from(to).ok()?, &x.values) {
        (FLOAT, Values::F32(v)) => Values::F32(v.clone()),
        (FLOAT, _) => Values::F32(whole.iter().map(|v| v.map(|v| v as f32)).collect::<Option<_>>()?),
        (INT32, _) => Values::I32(whole.iter().map(|v| i32::try_from((*v)?).ok()).collect::<Option<_>>()?),
        (INT64, _) => Values::I64(whole.iter().map(|v| i64::try_from((*v)?).ok()).collect::<Option<_>>()?),
        (BOOL, Values::F32(v)) => Values::Bool(v.iter().map(|f| *f != 0.0).collect()),
        (BOOL, _) => Values::Bool(whole.iter().map(|v| v.map(|v| v != 0)).collect::<Option<_>>()?),
        _ => return None,
    };
    Constant::new(x.dims.clone(), values)
}

pub(super) fn unary(op: &str, x: &Constant) -> Option<Constant> {
    let values = match (op, &x.values) {
        ("Neg", Values::F32(v)) => Values::F32(v.iter().map(|a| -a).collect()),
        ("Neg", Values::I64(v)) => Values::I64(v.iter().map(|a| a.checked_neg()).collect::<Option<_>>()?),
        ("Neg", Values::I32(v)) => Values::I32(v.iter().map(|a| a.checked_neg()).collect::<Option<_>>()?),
        ("Abs", Values::F32(v)) => Values::F32(v.iter().map(|a| a.abs()).collect()),
        ("Abs", Values::I64(v)) => Values::I64(v.iter().map(|a| a.checked_abs()).collect::<Option<_>>()?),
        ("Abs", Values::I32(v)) => Values::I32(v.iter().map(|a| a.checked_abs()).collect::<Option<_>>()?),
        ("Sqrt", Values::F32(v)) => Values::F32(v.iter().map(|a| a.sqrt()).collect()),
        ("Floor", Values::F32(v)) => Values::F32(v.iter().map(|a| a.floor()).collect()),
        ("Ceil", Values::F32(v)) => Values::F32(v.iter().map(|a| a.ceil()).collect()),
        _ => return None,
    };
    Constant::new(x.dims.clone(), values)
}

pub(super) fn binary(op: &str, a: &Constant, b: &Constant, dims: Vec<usize>) -> Option<Constant> {
    let (a, b) = (a.values.pick(&spread(&a.dims, &dims)?)?, b.values.pick(&spread(&b.dims, &dims)?)?);
    macro_rules! integers {
        ($kind:path, $a:expr, $b:expr) => {{
            let pairs = $a.iter().zip($b);
            let result: Option<Vec<_>> = match op {
                "Add" => pairs.map(|(a, b)| a.checked_add(*b)).collect(),
                "Sub" => pairs.map(|(a, b)| a.checked_sub(*b)).collect(),
                "Mul" => pairs.map(|(a, b)| a.checked_mul(*b)).collect(),
                _ => pairs.map(|(a, b)| a.checked_div(*b)).collect(),
            };
            $kind(result?)
        }};
    }
    let values = match (&a, &b) {
        (Values::F32(a), Values::F32(b)) if op == "Equal" => {
            Values::Bool(a.iter().zip(b).map(|(a, b)| a == b).collect())
        }
        (Values::I32(a), Values::I32(b)) if op == "Equal" => {
            Values::Bool(a.iter().zip(b).map(|(a, b)| a == b).collect())
        }
        (Values::I64(a), Values::I64(b)) if op == "Equal" => {
            Values::Bool(a.iter().zip(b).map(|(a, b)| a == b).collect())
        }
        (Values::F32(a), Values::F32(b)) => {
            let pairs = a.iter().zip(b);
            Values::F32(match op {
                "Add" => pairs.map(|(a, b)| a + b).collect(),
                "Sub" => pairs.map(|(a, b)| a - b).collect(),
                "Mul" => pairs.map(|(a, b)| a * b).collect(),
                _ => pairs.map(|(a, b)| a / b).collect(),
            })
        }
        (Values::I64(a), Values::I64(b)) => integers!(Values::I64, a, b),
        (Values::I32(a), Values::I32(b)) => integers!(Values::I32, a, b),
        _ => return None,
    };
    Constant::new(dims, values)
}

/// `Where`: condition, then, otherwise.
pub(super) fn choose(inputs: &[Constant], dims: Vec<usize>) -> Option<Constant> {
    let [condition, a, b] = inputs else { return None };
    let Values::Bool(condition) = condition.values.pick(&spread(&condition.dims, &dims)?)? else { return None };
    let (a, b) = (a.values.pick(&spread(&a.dims, &dims)?)?, b.values.pick(&spread(&b.dims, &dims)?)?);
    macro_rules! chosen {
        ($kind:path, $a:expr, $b:expr) => {
            $kind(condition.iter().zip($a.iter().zip($b)).map(|(c, (a, b))| if *c { *a } else { *b }).collect())
        };
    }
    let values = match (&a, &b) {
        (Values::F32(a), Values::F32(b)) => chosen!(Values::F32, a, b),
        (Values::I64(a), Values::I64(b)) => chosen!(Values::I64, a, b),
        (Values::I32(a), Values::I32(b)) => chosen!(Values::I32, a, b),
        (Values::Bool(a), Values::Bool(b)) => chosen!(Values::Bool, a, b),
        _ => return None,
    };
    Constant::new(dims, values)
}
