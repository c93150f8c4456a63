//! Shapes and element types of values, as far as they follow from the graph.

mod ops;
mod window;

use super::{
    graph,
    proto::{GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto},
    tensor::{Constant, element_bits},
};
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

/// Constants above this many values are never shapes, axes or scales.
const SMALL: usize = 1 << 10;

/// Values of more dimensions are not followed: a chain of `Gather` could double their number at every node.
const MAX_RANK: usize = 32;

/// Element type and size of each dimension; `None` is a size that is not known.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Ty {
    pub elem: i32,
    pub dims: Vec<Option<u64>>,
}

impl Ty {
    pub fn elements(&self) -> Option<u64> {
        self.dims.iter().try_fold(1u64, |n, d| n.checked_mul((*d)?))
    }
    /// Size of the value, whole bytes.
    pub fn bytes(&self) -> Option<u64> {
        Some(self.elements()?.checked_mul(element_bits(self.elem)?)?.div_ceil(8))
    }
    pub fn with(&self, dims: Vec<Option<u64>>) -> Self {
        Self { elem: self.elem, dims }
    }
}

/// What is known while walking through a graph.
pub(super) struct Shapes<'a> {
    types: HashMap<String, Ty>,
    /// What the file says about values; empty when it is not to be believed.
    declared: HashMap<&'a str, Ty>,
    constants: HashMap<&'a str, &'a TensorProto>,
    computed: HashMap<String, Constant>,
}

impl<'a> Shapes<'a> {
    /// Only inputs and initialisers; [`Shapes::step`] does the rest. `sizes` gives values to named free dimensions. With
    /// `declared`, what the file says about a value is believed where nothing follows from the graph.
    pub fn new(graph: &'a GraphProto, sizes: &BTreeMap<String, u64>, declared: bool) -> Self {
        let of = |value: &'a ValueInfoProto| Some((value.label(), from_proto(value.r#type.as_ref()?, sizes)?));
        let inputs = graph.input.iter().filter_map(of).map(|(name, ty)| (name.to_owned(), ty));
        let initializers = graph.initializer.iter().map(|t| {
            let dims = t.dims.iter().map(|d| u64::try_from(*d).ok()).collect();
            (t.label().to_owned(), Ty { elem: t.data_type.unwrap_or(0), dims })
        });
        let said = graph.value_info.iter().chain(&graph.output).filter(|_| declared);
        Self {
            types: inputs.chain(initializers).filter(|(_, ty)| ty.dims.len() <= MAX_RANK).collect(),
            declared: said.filter_map(of).filter(|(_, ty)| ty.dims.len() <= MAX_RANK).collect(),
            constants: graph::constants(graph),
            computed: HashMap::new(),
        }
    }

    /// The first output of a node, from its inputs alone.
    pub fn infer(&self, node: &NodeProto) -> Option<Ty> {
        ops::first_output(node, self).filter(|ty| ty.dims.len() <= MAX_RANK)
    }

    /// Infers the outputs of the next node.
    pub fn step(&mut self, node: &NodeProto) {
        let mut inferred = self.infer(node);
        for output in &node.output {
            // The file may know more than follows: a size there is better than none.
            let ty = match (inferred.take(), self.declared.get(output.as_str())) {
                (Some(ty), Some(file)) if ty.elements().is_none() && file.elements().is_some() => Some(file.clone()),
                (Some(ty), _) => Some(ty),
                (None, file) => file.cloned(),
            };
            if let Some(ty) = ty.filter(|_| !output.is_empty()) {
                self.types.insert(output.clone(), ty);
            }
        }
    }

    /// A value that was computed instead of inferred.
    pub fn set(&mut self, name: &str, constant: Constant) {
        let dims = constant.dims.iter().map(|d| Some(*d as u64)).collect();
        self.types.insert(name.to_owned(), Ty { elem: constant.values.element(), dims });
        self.computed.insert(name.to_owned(), constant);
    }

    pub fn get(&self, name: &str) -> Option<&Ty> {
        self.types.get(name)
    }
    pub fn input(&self, node: &NodeProto, i: usize) -> Option<&Ty> {
        self.get(node.given(i)?)
    }
    /// A small constant input.
    pub fn constant(&self, node: &NodeProto, i: usize) -> Option<Cow<'_, Constant>> {
        self.value(node.given(i)?, SMALL)
    }
    /// The value of a constant with at most `most` elements.
    pub fn value(&self, name: &str, most: usize) -> Option<Cow<'_, Constant>> {
        if let Some(constant) = self.computed.get(name) {
            return (constant.values.len() <= most).then_some(Cow::Borrowed(constant));
        }
        let tensor = self.constants.get(name)?;
        let elements = tensor.dims.iter().try_fold(1i64, |n, d| n.checked_mul(*d))?;
        if elements <= most as i64 { Constant::read(tensor).map(Cow::Owned) } else { None }
    }
    /// Integers that are an attribute in old operator sets and input `i` in new ones.
    pub fn ints(&self, node: &NodeProto, name: &str, i: usize) -> Option<Vec<i64>> {
        match node.ints(name) {
            Some(values) => Some(values.to_vec()),
            None => self.constant(node, i)?.ints(),
        }
    }
}

fn from_proto(ty: &TypeProto, sizes: &BTreeMap<String, u64>) -> Option<Ty> {
    let tensor = ty.tensor_type.as_ref()?;
    let dims = tensor.shape.as_ref()?.dim.iter().map(|d| match (d.dim_value, &d.dim_param) {
        (Some(value), _) => u64::try_from(value).ok(),
        (None, Some(name)) => sizes.get(name).copied(),
        (None, None) => None,
    });
    Some(Ty { elem: tensor.elem_type?, dims: dims.collect() })
}

/// Position of an axis that may count from the end.
pub(super) fn axis(axis: i64, rank: usize) -> Option<usize> {
    let rank = i64::try_from(rank).ok()?;
    let at = if axis < 0 { axis.checked_add(rank)? } else { axis };
    (0..rank).contains(&at).then_some(at as usize)
}

/// First position and number of positions of a slice along a dimension of `dim`, as the operator `Slice` clamps them.
pub(super) fn slice(dim: u64, start: i64, end: i64, step: i64) -> Option<(u64, u64)> {
    let dim = i64::try_from(dim).ok()?;
    let from_end = |v: i64| if v < 0 { v.saturating_add(dim) } else { v };
    let (start, end) = (from_end(start), from_end(end));
    let (first, span) = match step {
        1.. => {
            let first = start.clamp(0, dim);
            (first, end.clamp(0, dim).checked_sub(first)?)
        }
        0 => return None,
        _ => {
            let first = start.clamp(0, (dim - 1).max(0));
            (first, first.checked_sub(end.clamp(-1, dim - 1))?)
        }
    };
    let len = if dim == 0 || span <= 0 { 0 } else { (span as u64).div_ceil(step.unsigned_abs()) };
    Some((first as u64, len))
}

/// Sizes of a result of broadcasting; `None` for shapes that do not fit.
pub(super) fn broadcast(a: &[Option<u64>], b: &[Option<u64>]) -> Option<Vec<Option<u64>>> {
    let rank = a.len().max(b.len());
    let at = |dims: &[Option<u64>], i: usize| if i + dims.len() < rank { Some(1) } else { dims[i + dims.len() - rank] };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (Some(1), other) | (other, Some(1)) => Some(other),
            (Some(x), Some(y)) => (x == y).then_some(Some(x)),
            // A size that is not known is 1 or the other one.
            (Some(x), None) | (None, Some(x)) => Some(Some(x)),
            (None, None) => Some(None),
        })
        .collect()
}

pub(super) use ops::is_conv;
