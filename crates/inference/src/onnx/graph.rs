//! What holds in every graph: checks on reading, attributes of nodes, and who uses a value.

use super::{
    OnnxError,
    proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto},
    tensor,
};
use std::collections::{HashMap, HashSet};

/// Oldest and newest standard operator set whose meaning is known here.
const OPSETS: std::ops::RangeInclusive<i64> = 7..=26;

impl NodeProto {
    /// The operator, if it is one of the standard set.
    pub(super) fn op(&self) -> Option<&str> {
        self.op_type.as_deref().filter(|_| is_standard(self.domain.as_deref()))
    }
    pub(super) fn attr(&self, name: &str) -> Option<&AttributeProto> {
        self.attribute.iter().find(|a| a.name.as_deref() == Some(name))
    }
    pub(super) fn int(&self, name: &str, default: i64) -> i64 {
        self.attr(name).and_then(|a| a.i).unwrap_or(default)
    }
    pub(super) fn float(&self, name: &str, default: f32) -> f32 {
        self.attr(name).and_then(|a| a.f).unwrap_or(default)
    }
    pub(super) fn ints(&self, name: &str) -> Option<&[i64]> {
        self.attr(name).map(|a| a.ints.as_slice())
    }
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.attr(name).and_then(|a| a.s.as_deref()).and_then(|s| std::str::from_utf8(s).ok())
    }
    /// Input `i` if it is given.
    pub(super) fn given(&self, i: usize) -> Option<&str> {
        self.input.get(i).map(String::as_str).filter(|name| !name.is_empty())
    }
    /// The first output if it is the only one.
    pub(super) fn only_output(&self) -> Option<&str> {
        let mut named = self.output.iter().filter(|o| !o.is_empty());
        let first = self.output.first().filter(|o| !o.is_empty())?;
        (named.next().is_some() && named.next().is_none()).then_some(first)
    }
    /// For messages.
    pub(super) fn label(&self) -> String {
        let op = self.op_type.as_deref().unwrap_or("?");
        match self.name.as_deref().filter(|n| !n.is_empty()).or(self.output.first().map(String::as_str)) {
            Some(name) => format!("{op} `{name}`"),
            None => op.to_owned(),
        }
    }
    pub(super) fn subgraphs(&self) -> impl Iterator<Item = &GraphProto> {
        self.attribute.iter().flat_map(|a| a.g.as_deref().into_iter().chain(&a.graphs))
    }
}

impl ValueInfoProto {
    pub(super) fn label(&self) -> &str {
        self.name.as_deref().unwrap_or("")
    }
}

impl TensorProto {
    pub(super) fn label(&self) -> &str {
        self.name.as_deref().unwrap_or("")
    }
}

pub(super) fn is_standard(domain: Option<&str>) -> bool {
    matches!(domain, None | Some("" | "ai.onnx"))
}

/// Version of the standard operators.
pub(super) fn opset(model: &ModelProto) -> Option<i64> {
    model.opset_import.iter().find(|o| is_standard(o.domain.as_deref())).and_then(|o| o.version)
}

/// Checks a whole model; returns nothing but refusals.
pub(super) fn check(model: &ModelProto) -> Result<(), OnnxError> {
    let ir = model.ir_version.unwrap_or(0);
    if ir < 3 {
        return Err(OnnxError::unsupported(format!("IR version {ir}; known are 3 and later")));
    }
    match opset(model) {
        Some(version) if OPSETS.contains(&version) => {}
        Some(v) => {
            let what = format!("operator set {v}; known are {} to {}", OPSETS.start(), OPSETS.end());
            return Err(OnnxError::unsupported(what));
        }
        None => return Err(OnnxError::graph("it imports no standard operator set")),
    }
    if !model.training_info.is_empty() {
        return Err(OnnxError::unsupported("training information: its bindings would break; export for inference"));
    }
    let graph = model.graph.as_deref().ok_or_else(|| OnnxError::graph("the model has none"))?;
    if !graph.sparse_initializer.is_empty() {
        return Err(OnnxError::unsupported("sparse initialisers"));
    }
    check_names(graph)?;
    check_tensors(graph)
}

/// Every value has one origin, and exists before it is read.
fn check_names(graph: &GraphProto) -> Result<(), OnnxError> {
    let mut known: HashSet<&str> = HashSet::new();
    for input in &graph.input {
        if input.label().is_empty() || !known.insert(input.label()) {
            return Err(OnnxError::graph(format!("graph input `{}` is without a name or given twice", input.label())));
        }
    }
    let mut constants = HashSet::new();
    for tensor in &graph.initializer {
        if tensor.label().is_empty() || !constants.insert(tensor.label()) {
            let what = format!("initialiser `{}` is without a name or given twice", tensor.label());
            return Err(OnnxError::graph(what));
        }
        known.insert(tensor.label());
    }
    for node in &graph.node {
        if node.op_type.as_deref().is_none_or(str::is_empty) {
            return Err(OnnxError::graph("a node has no operator"));
        }
        if let Some(name) = node.input.iter().find(|n| !n.is_empty() && !known.contains(n.as_str())) {
            let what = format!("{} reads `{name}`, which nothing before it makes", node.label());
            return Err(OnnxError::graph(what));
        }
        for output in node.output.iter().filter(|o| !o.is_empty()) {
            if !known.insert(output) {
                return Err(OnnxError::graph(format!("{} makes `{output}`, which exists already", node.label())));
            }
        }
    }
    match graph.output.iter().find(|o| !known.contains(o.label())) {
        Some(o) => Err(OnnxError::graph(format!("graph output `{}` is made by nothing", o.label()))),
        None => Ok(()),
    }
}

/// Constants of this graph and of all graphs inside it.
fn check_tensors(graph: &GraphProto) -> Result<(), OnnxError> {
    graph.initializer.iter().try_for_each(tensor::check)?;
    for attribute in graph.node.iter().flat_map(|n| &n.attribute) {
        attribute.t.as_deref().into_iter().chain(&attribute.tensors).try_for_each(tensor::check)?;
        attribute.g.as_deref().into_iter().chain(&attribute.graphs).try_for_each(check_tensors)?;
    }
    Ok(())
}

/// Who makes and who reads the values of a graph, as positions of nodes.
pub(super) struct Uses {
    producer: HashMap<String, usize>,
    readers: HashMap<String, Vec<usize>>,
    /// Outputs of the graph and names that occur inside subgraphs: they must go on existing under their name.
    kept: HashSet<String>,
}

impl Uses {
    pub fn of(graph: &GraphProto) -> Self {
        let mut this = Self { producer: HashMap::new(), readers: HashMap::new(), kept: HashSet::new() };
        this.kept.extend(graph.output.iter().map(|o| o.label().to_owned()));
        for (i, node) in graph.node.iter().enumerate() {
            for name in node.input.iter().filter(|n| !n.is_empty()) {
                this.readers.entry(name.clone()).or_default().push(i);
            }
            for name in node.output.iter().filter(|n| !n.is_empty()) {
                this.producer.insert(name.clone(), i);
            }
            node.subgraphs().for_each(|g| names_inside(g, &mut this.kept));
        }
        this
    }
    pub fn producer(&self, name: &str) -> Option<usize> {
        self.producer.get(name).copied()
    }
    /// The node that is the only reader of `name`, when nothing else needs the value.
    pub fn only_reader(&self, name: &str) -> Option<usize> {
        match self.readers.get(name).map(Vec::as_slice) {
            Some([one]) if !self.kept.contains(name) => Some(*one),
            _ => None,
        }
    }
    pub fn is_read(&self, name: &str) -> bool {
        self.kept.contains(name) || self.readers.contains_key(name)
    }
    pub fn is_kept(&self, name: &str) -> bool {
        self.kept.contains(name)
    }
}

/// Every name that a subgraph reads or returns, also its own: a name too many only prevents a rewrite.
pub(super) fn names_inside(graph: &GraphProto, out: &mut HashSet<String>) {
    out.extend(graph.output.iter().map(|o| o.label().to_owned()));
    for node in &graph.node {
        out.extend(node.input.iter().cloned());
        node.subgraphs().for_each(|g| names_inside(g, out));
    }
}

/// Initialisers that nothing can override: those that are not also graph inputs.
pub(super) fn constants(graph: &GraphProto) -> HashMap<&str, &TensorProto> {
    let inputs: HashSet<&str> = graph.input.iter().map(ValueInfoProto::label).collect();
    graph.initializer.iter().map(|t| (t.label(), t)).filter(|(name, _)| !inputs.contains(name)).collect()
}

/// Removes the nodes at positions that `keep` refuses.
pub(super) fn retain_nodes(graph: &mut GraphProto, keep: impl Fn(usize) -> bool) {
    let mut positions = 0..;
    graph.node.retain(|_| positions.next().is_none_or(&keep));
}
