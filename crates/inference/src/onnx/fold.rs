//! Constant folding: operators whose inputs are known are computed once, here.
//!
//! Computed are, on `float`, `int32`, `int64` and `bool`: Constant, Identity, Shape, Gather, Unsqueeze, Squeeze, Reshape,
//! Flatten, Transpose, Slice, Concat, Expand, ConstantOfShape, Cast, Add, Sub, Mul, Div, Neg, Abs, Sqrt, Floor, Ceil,
//! Equal, Where. `Gather` from a `Shape` is computed as soon as the sizes it takes are known, also when others are free.
//! What is undefined or differs between runtimes (integer overflow, division by zero, casts out of range) is left alone.

mod compute;

use super::{
    graph::{Uses, retain_nodes},
    proto::{GraphProto, NodeProto},
    shape::{Shapes, axis, slice},
    tensor::{Constant, Values, count},
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A result may have this many values, or as many as its inputs: folding must not blow up the file.
const SMALL_RESULT: usize = 1 << 14;
/// Largest input that is read.
const MAX_INPUT: usize = 1 << 26;
/// All results of one run, values.
const MAX_TOTAL: usize = 1 << 26;

/// Replaces nodes with known results by initialisers; returns how many.
pub(super) fn run(graph: &mut GraphProto) -> usize {
    let found = find(graph);
    let gone: HashSet<usize> = found.iter().map(|(i, ..)| *i).collect();
    retain_nodes(graph, |i| !gone.contains(&i));
    graph.initializer.extend(found.iter().map(|(_, name, constant)| constant.to_proto(name)));
    found.len()
}

/// Position of a node, the name of its result, the result.
fn find(graph: &GraphProto) -> Vec<(usize, String, Constant)> {
    let uses = Uses::of(graph);
    let mut found = Vec::new();
    walk(graph, Shapes::new(graph, &BTreeMap::new(), false), &mut |i, name, constant| {
        let wanted = !uses.is_kept(name);
        if wanted {
            found.push((i, name.to_owned(), constant.clone()));
        }
        wanted
    });
    found
}

/// Types of all values, with the shapes that the graph computes. `sizes` gives values to free dimensions by name.
pub(super) fn shapes<'a>(graph: &'a GraphProto, sizes: &BTreeMap<String, u64>) -> Shapes<'a> {
    walk(graph, Shapes::new(graph, sizes, true), &mut |_, _, _| true)
}

/// Goes through all nodes; `known` sees what can be computed and says whether to use it.
fn walk<'a>(
    graph: &'a GraphProto,
    mut shapes: Shapes<'a>,
    known: &mut dyn FnMut(usize, &str, &Constant) -> bool,
) -> Shapes<'a> {
    let mut total = 0usize;
    let mut sizes: HashMap<&str, Vec<Option<u64>>> = HashMap::new();
    for (i, node) in graph.node.iter().enumerate() {
        let name = node.only_output();
        if let (Some("Shape"), Some(name)) = (node.op(), name)
            && let Some(dims) = shape_of(node, &shapes)
        {
            sizes.insert(name, dims);
        }
        let result = name.and_then(|name| Some((name, evaluate(node, &shapes, &sizes)?)));
        match result {
            Some((name, constant)) if total + constant.values.len() <= MAX_TOTAL && known(i, name, &constant) => {
                total += constant.values.len();
                shapes.set(name, constant);
            }
            _ => shapes.step(node),
        }
    }
    shapes
}

/// What `Shape` returns, with the sizes that are free.
fn shape_of(node: &NodeProto, s: &Shapes<'_>) -> Option<Vec<Option<u64>>> {
    let dims = &s.input(node, 0)?.dims;
    let (first, len) = slice(dims.len() as u64, node.int("start", 0), node.int("end", i64::MAX), 1)?;
    dims.get(first as usize..(first + len) as usize).map(<[_]>::to_vec)
}

fn evaluate(node: &NodeProto, s: &Shapes<'_>, sizes: &HashMap<&str, Vec<Option<u64>>>) -> Option<Constant> {
    let op = node.op()?;
    match op {
        "Constant" => return constant(node),
        "Shape" => {
            let dims = sizes.get(node.only_output()?)?;
            let values: Vec<i64> = dims.iter().map(|d| i64::try_from((*d)?).ok()).collect::<Option<_>>()?;
            return Constant::new(vec![values.len()], Values::I64(values));
        }
        "Gather" if let Some(dims) = node.given(0).and_then(|name| sizes.get(name)) => {
            return taken(node, dims, s.constant(node, 1)?.as_ref());
        }
        _ => {}
    }
    let inputs: Vec<Constant> = (0..node.input.len())
        .map(|i| s.value(node.given(i)?, MAX_INPUT).map(std::borrow::Cow::into_owned))
        .collect::<Option<_>>()?;
    if inputs.is_empty() {
        return None;
    }
    let most = inputs.iter().map(|c| c.values.len()).sum::<usize>().max(SMALL_RESULT);
    match op {
        "Identity" => inputs.into_iter().next(),
        "Unsqueeze" | "Squeeze" | "Reshape" | "Flatten" => {
            Constant::new(result_dims(node, s, most)?, inputs.into_iter().next()?.values)
        }
        "Transpose" | "Slice" | "Expand" => {
            let dims = result_dims(node, s, most)?;
            compute::strided_view(node, s, &inputs[0], dims)
        }
        "Gather" => compute::gather(&inputs[0], inputs.get(1)?, node.int("axis", 0), result_dims(node, s, most)?),
        "Concat" => compute::concat(&inputs, node.int("axis", 0), result_dims(node, s, most)?),
        "ConstantOfShape" => filled(node, result_dims(node, s, most)?),
        "Cast" => compute::cast(&inputs[0], node.int("to", 0)),
        "Neg" | "Abs" | "Sqrt" | "Floor" | "Ceil" => compute::unary(op, &inputs[0]),
        "Add" | "Sub" | "Mul" | "Div" | "Equal" => {
            compute::binary(op, &inputs[0], inputs.get(1)?, result_dims(node, s, most)?)
        }
        "Where" => compute::choose(&inputs, result_dims(node, s, most)?),
        _ => None,
    }
}

/// Sizes of the result, if they are known and not above `most` values together.
fn result_dims(node: &NodeProto, s: &Shapes<'_>, most: usize) -> Option<Vec<usize>> {
    let ty = s.infer(node)?;
    let dims: Vec<usize> = ty.dims.iter().map(|d| usize::try_from((*d)?).ok()).collect::<Option<_>>()?;
    (count(&dims)? <= most).then_some(dims)
}

fn constant(node: &NodeProto) -> Option<Constant> {
    let scalar = |values| Constant::new(Vec::new(), values);
    let list = |values: Values| Constant::new(vec![values.len()], values);
    let [attribute] = node.attribute.as_slice() else { return None };
    match attribute.name.as_deref()? {
        "value" => Constant::read(attribute.t.as_deref()?),
        "value_float" => scalar(Values::F32(vec![attribute.f?])),
        "value_int" => scalar(Values::I64(vec![attribute.i?])),
        "value_floats" => list(Values::F32(attribute.floats.clone())),
        "value_ints" => list(Values::I64(attribute.ints.clone())),
        _ => None,
    }
}

/// `Gather` from a shape: only the sizes that are taken must be known.
fn taken(node: &NodeProto, dims: &[Option<u64>], indices: &Constant) -> Option<Constant> {
    if axis(node.int("axis", 0), 1)? != 0 {
        return None;
    }
    let take = |i: &i64| i64::try_from((*dims.get(axis(*i, dims.len())?)?)?).ok();
    let values = indices.ints()?.iter().map(take).collect::<Option<_>>()?;
    Constant::new(indices.dims.clone(), Values::I64(values))
}

fn filled(node: &NodeProto, dims: Vec<usize>) -> Option<Constant> {
    let n = count(&dims)?;
    let values = match node.attr("value") {
        None => Values::F32(vec![0.0; n]),
        Some(a) => Constant::read(a.t.as_deref()?)?.values.pick(&vec![0; n])?,
    };
    Constant::new(dims, values)
}
