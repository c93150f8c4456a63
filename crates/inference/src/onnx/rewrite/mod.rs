//! Rewriting of a graph, until nothing changes.

mod conv;
mod resize;

use super::{
    GraphReport, OnnxModel, fold,
    graph::{Uses, names_inside, retain_nodes},
    proto::{GraphProto, NodeProto, ValueInfoProto},
    report,
    shape::Shapes,
};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};

/// What to rewrite besides what is always done: constant folding, removal of `Identity` and of `Dropout` outside
/// training, folding of `BatchNormalization` into the weights of the convolution before it, removal of dead nodes and
/// unused initialisers. Models of IR version 3 become version 4, where initialisers need not be inputs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OptimizeOptions {
    /// Convolution and `Relu` become one `com.microsoft.FusedConv`. Only ONNX Runtime knows that operator (standard ONNX
    /// has no fused activation; other runtimes fuse the pair themselves), and only for `float`.
    pub fuse_relu: bool,
    /// `Resize` by whole factors becomes `Upsample`. That operator ends with operator set 9, so the whole model is
    /// lowered to set 9; it is done only if every operator of the graph means the same there.
    pub upsample: bool,
    /// Values of free dimensions by name, for the report.
    pub sizes: BTreeMap<String, u64>,
}

/// How often each rewrite was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Rewrites {
    /// Initialisers that were also inputs (IR version 3).
    pub inputs_removed: usize,
    pub identities_removed: usize,
    pub nodes_folded: usize,
    pub batch_norms_folded: usize,
    pub relus_fused: usize,
    pub resizes_replaced: usize,
    pub dead_nodes: usize,
    pub unused_initializers: usize,
}

/// The graph before and after, and what was done.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OptimizeReport {
    pub before: GraphReport,
    pub after: GraphReport,
    pub rewrites: Rewrites,
    /// What was asked for and not done, with the reason.
    pub notes: Vec<String>,
}

pub(super) fn run(model: &mut OnnxModel, options: &OptimizeOptions) -> OptimizeReport {
    let before = report::of(model, &options.sizes);
    let mut done = Rewrites { inputs_removed: constants_are_no_inputs(model), ..Rewrites::default() };
    let (mut notes, opset) = (Vec::new(), model.opset());
    loop {
        let last = done;
        done.identities_removed += remove_identities(&mut model.graph, opset);
        done.nodes_folded += fold::run(&mut model.graph);
        done.batch_norms_folded += conv::fold_batch_norms(&mut model.graph);
        remove_dead(&mut model.graph, &mut done);
        if done == last {
            break;
        }
    }
    if options.upsample {
        match resize::to_upsample(model) {
            Ok(replaced) => done.resizes_replaced = replaced,
            Err(why) => notes.push(format!("no Resize was replaced: {why}")),
        }
    }
    if options.fuse_relu {
        done.relus_fused = conv::fuse_relus(model);
    }
    remove_dead(&mut model.graph, &mut done);
    OptimizeReport { before, after: report::of(model, &options.sizes), rewrites: done, notes }
}

/// Up to IR version 3 initialisers had to be inputs as well, and no runtime let them be overridden.
fn constants_are_no_inputs(model: &mut OnnxModel) -> usize {
    if model.proto.ir_version.unwrap_or(0) >= 4 {
        return 0;
    }
    model.proto.ir_version = Some(4);
    let constants: HashSet<&str> = model.graph.initializer.iter().map(|t| t.label()).collect();
    let inputs = model.graph.input.len();
    model.graph.input.retain(|i| !constants.contains(i.label()));
    inputs - model.graph.input.len()
}

fn remove_identities(graph: &mut GraphProto, opset: i64) -> usize {
    let uses = Uses::of(graph);
    let mut renamed: HashMap<String, String> = HashMap::new();
    let gone: Vec<bool> = {
        let shapes = Shapes::new(graph, &BTreeMap::new(), false);
        let mut gone = Vec::with_capacity(graph.node.len());
        for node in &graph.node {
            let pass = passes_through(node, opset, &shapes, &uses).filter(|(_, output)| !uses.is_kept(output));
            gone.push(pass.is_some());
            if let Some((input, output)) = pass {
                let origin = renamed.get(input).cloned().unwrap_or_else(|| input.to_owned());
                renamed.insert(output.to_owned(), origin);
            }
        }
        gone
    };
    retain_nodes(graph, |i| !gone[i]);
    for name in graph.node.iter_mut().flat_map(|n| &mut n.input) {
        if let Some(origin) = renamed.get(name) {
            name.clone_from(origin);
        }
    }
    renamed.len()
}

/// Input and output of a node that returns its input.
fn passes_through<'a>(node: &'a NodeProto, opset: i64, s: &Shapes<'_>, uses: &Uses) -> Option<(&'a str, &'a str)> {
    let pass = match node.op()? {
        "Identity" => true,
        "Dropout" => {
            let training = match node.given(2).filter(|_| opset >= 12) {
                Some(_) => s.constant(node, 2)?.ints_or_bools()? != [0],
                None => false,
            };
            !training
        }
        _ => false,
    };
    let output = node.output.first().filter(|o| !o.is_empty())?;
    let alone = node.output.iter().skip(1).all(|mask| mask.is_empty() || !uses.is_read(mask));
    (pass && alone).then_some((node.given(0)?, output.as_str()))
}

/// Removes what leads to no output.
fn remove_dead(graph: &mut GraphProto, done: &mut Rewrites) {
    let mut needed: HashSet<String> = graph.output.iter().map(|o| o.label().to_owned()).collect();
    let mut alive = vec![true; graph.node.len()];
    for (node, alive) in graph.node.iter().zip(&mut alive).rev() {
        *alive = node.output.iter().any(|o| needed.contains(o));
        if *alive {
            needed.extend(node.input.iter().filter(|n| !n.is_empty()).cloned());
            node.subgraphs().for_each(|g| names_inside(g, &mut needed));
        }
    }
    done.dead_nodes += alive.iter().filter(|a| !**a).count();
    retain_nodes(graph, |i| alive[i]);
    let inputs: HashSet<String> = graph.input.iter().map(|i| i.label().to_owned()).collect();
    let all = graph.initializer.len();
    // Also an input: it is part of what callers see.
    graph.initializer.retain(|t| needed.contains(t.label()) || inputs.contains(t.label()));
    done.unused_initializers += all - graph.initializer.len();
    let made: HashSet<&str> = graph.node.iter().flat_map(|n| &n.output).map(String::as_str).collect();
    graph.value_info.retain(|v: &ValueInfoProto| made.contains(v.label()));
}
