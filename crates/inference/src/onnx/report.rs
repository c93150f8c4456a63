//! What a graph costs: operators, memory traffic, multiply-adds.

use super::{
    OnnxModel, fold,
    graph::constants,
    proto::NodeProto,
    shape::{Shapes, Ty, is_conv},
};
use serde::Serialize;
use std::collections::BTreeMap;

/// One node. Sizes are `None` where they do not follow from the graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeReport {
    pub name: String,
    pub operator: String,
    /// All inputs, weights included, each read once.
    pub read_bytes: Option<u64>,
    /// All outputs.
    pub written_bytes: Option<u64>,
    /// Products and sums of convolutions, `Gemm` and `MatMul`; 0 for other operators.
    pub multiply_adds: Option<u64>,
}

/// A whole graph, run once.
///
/// Traffic is that of a runtime that computes node by node with all values in memory. Operators that only give a value
/// another shape (`Reshape`, `Flatten`, `Squeeze`, `Unsqueeze`), `Identity`, `Dropout`, `Shape` and `Constant` move
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GraphReport {
    pub opset: i64,
    /// Number of nodes of each operator.
    pub operators: BTreeMap<String, usize>,
    pub initializers: usize,
    pub initializer_bytes: u64,
    /// Sums over the nodes whose sizes are known.
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub multiply_adds: u64,
    /// Nodes whose sizes are not known and that are in none of the sums.
    pub unmeasured: usize,
    pub nodes: Vec<NodeReport>,
}

impl GraphReport {
    /// Bytes read and written.
    #[must_use]
    pub fn traffic_bytes(&self) -> u64 {
        self.read_bytes.saturating_add(self.written_bytes)
    }
}

pub(super) fn of(model: &OnnxModel, sizes: &BTreeMap<String, u64>) -> GraphReport {
    let graph = model.graph();
    let shapes = fold::shapes(graph, sizes);
    let nodes: Vec<NodeReport> = graph.node.iter().map(|node| measure(node, &shapes)).collect();
    let mut operators = BTreeMap::new();
    for node in &nodes {
        *operators.entry(node.operator.clone()).or_insert(0) += 1;
    }
    let known = || nodes.iter().filter(|n| n.measured());
    let sum = |of: fn(&NodeReport) -> Option<u64>| known().filter_map(of).fold(0u64, u64::saturating_add);
    let bytes = constants(graph).keys().filter_map(|name| shapes.get(name)?.bytes()).fold(0u64, u64::saturating_add);
    GraphReport {
        opset: model.opset(),
        operators,
        initializers: graph.initializer.len(),
        initializer_bytes: bytes,
        read_bytes: sum(|n| n.read_bytes),
        written_bytes: sum(|n| n.written_bytes),
        multiply_adds: sum(|n| n.multiply_adds),
        unmeasured: nodes.len() - known().count(),
        nodes,
    }
}

impl NodeReport {
    fn measured(&self) -> bool {
        self.read_bytes.is_some() && self.written_bytes.is_some() && self.multiply_adds.is_some()
    }
}

fn measure(node: &NodeProto, s: &Shapes<'_>) -> NodeReport {
    let operator = match node.op() {
        Some(op) => op.to_owned(),
        None => format!("{}.{}", node.domain.as_deref().unwrap_or(""), node.op_type.as_deref().unwrap_or("")),
    };
    let name = node.name.clone().filter(|n| !n.is_empty()).or_else(|| node.output.first().cloned()).unwrap_or_default();
    const NOTHING: [&str; 8] =
        ["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape", "Constant"];
    if node.op().is_some_and(|op| NOTHING.contains(&op)) {
        return NodeReport { name, operator, read_bytes: Some(0), written_bytes: Some(0), multiply_adds: Some(0) };
    }
    let total = |names: &[String]| {
        let given = names.iter().filter(|n| !n.is_empty());
        given.map(|n| s.get(n)?.bytes()).try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
    };
    NodeReport {
        read_bytes: total(&node.input),
        written_bytes: total(&node.output),
        multiply_adds: multiply_adds(node, s),
        name,
        operator,
    }
}

/// Elements of the result, each a sum of as many products as one output sees inputs.
fn multiply_adds(node: &NodeProto, s: &Shapes<'_>) -> Option<u64> {
    let product = |dims: &[Option<u64>]| dims.iter().try_fold(1u64, |n, d| n.checked_mul((*d)?));
    let result = || node.output.first().and_then(|o| s.get(o)).and_then(Ty::elements);
    match node.op() {
        _ if is_conv(node) => result()?.checked_mul(product(s.input(node, 1)?.dims.get(1..)?)?),
        // Every input value meets every weight of its group once.
        Some("ConvTranspose") => s.input(node, 0)?.elements()?.checked_mul(product(s.input(node, 1)?.dims.get(1..)?)?),
        Some("MatMul") => result()?.checked_mul((*s.input(node, 0)?.dims.last()?)?),
        Some("Gemm") => {
            let inner = usize::from(node.int("transA", 0) == 0);
            result()?.checked_mul((*s.input(node, 0)?.dims.get(inner)?)?)
        }
        _ => Some(0),
    }
}
