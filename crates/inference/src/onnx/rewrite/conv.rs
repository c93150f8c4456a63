//! What follows a convolution: batch normalisation goes into its weights, `Relu` into a fused operator.

use crate::onnx::{
    OnnxModel, fold,
    graph::{Uses, constants, retain_nodes},
    proto::{AttributeProto, GraphProto, NodeProto, OperatorSetIdProto, TensorProto},
    tensor::{Constant, FLOAT, Values},
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Folds `BatchNormalization` into the `Conv` before it where that is its only reader and all numbers are constants:
/// `W′ = W·γ/√(σ²+ε)`, `b′ = (b−μ)·γ/√(σ²+ε) + β` for each output channel (arXiv 1712.05877, section 3.2, without
/// quantisation). Computed in double precision, rounded once.
pub(super) fn fold_batch_norms(graph: &mut GraphProto) -> usize {
    let uses = Uses::of(graph);
    // A convolution takes over the name of what was folded into it, so that chains fold in one sweep.
    let mut maker: HashMap<String, usize> = HashMap::new();
    let mut gone = HashSet::new();
    for i in 0..graph.node.len() {
        let norm = &graph.node[i];
        let Some(x) = norm.given(0).filter(|_| norm.op() == Some("BatchNormalization")) else { continue };
        let Some(conv) = maker.get(x).copied().or_else(|| uses.producer(x)) else { continue };
        if graph.node[conv].op() != Some("Conv") || uses.only_reader(x) != Some(i) {
            continue;
        }
        let Some(output) = norm.only_output().map(str::to_owned) else { continue };
        let Some((weights, bias)) = folded(graph, &graph.node[conv], norm) else { continue };
        let (w, b) = (fresh(graph, &format!("{output}.weight")), fresh(graph, &format!("{output}.bias")));
        graph.initializer.extend([weights.to_proto(&w), bias.to_proto(&b)]);
        let node = &mut graph.node[conv];
        node.input.truncate(1);
        node.input.extend([w, b]);
        node.output = vec![output.clone()];
        maker.insert(output, conv);
        gone.insert(i);
    }
    retain_nodes(graph, |i| !gone.contains(&i));
    gone.len()
}

/// Weights and bias of the convolution with the normalisation in them.
fn folded(graph: &GraphProto, conv: &NodeProto, norm: &NodeProto) -> Option<(Constant, Constant)> {
    let known = constants(graph);
    let read = |name: &str| -> Option<Constant> {
        Constant::read(known.get(name)?).filter(|c| matches!(c.values, Values::F32(_)))
    };
    if conv.only_output().is_none() || norm.int("training_mode", 0) != 0 || norm.int("spatial", 1) != 1 {
        return None;
    }
    let mut weights = read(conv.given(1)?)?;
    let channels = *weights.dims.first()?;
    let vector = |name: &str| read(name).filter(|c| c.dims == [channels]);
    let (gamma, beta) = (vector(norm.given(1)?)?, vector(norm.given(2)?)?);
    let (mean, variance) = (vector(norm.given(3)?)?, vector(norm.given(4)?)?);
    let bias = match conv.given(2) {
        Some(name) => vector(name)?,
        None => Constant::new(vec![channels], Values::F32(vec![0.0; channels]))?,
    };
    let epsilon = f64::from(norm.float("epsilon", 1e-5));
    let Values::F32(w) = &mut weights.values else { return None };
    let row = w.len().checked_div(channels)?.max(1);
    let mut shifted = Vec::with_capacity(channels);
    for (c, row) in w.chunks_mut(row).enumerate() {
        let at = |v: &Constant| v.floats().and_then(|v| v.get(c)).map(|v| f64::from(*v));
        let scale = at(&gamma)? / (at(&variance)? + epsilon).sqrt();
        row.iter_mut().for_each(|w| *w = (f64::from(*w) * scale) as f32);
        shifted.push(((at(&bias)? - at(&mean)?) * scale + at(&beta)?) as f32);
    }
    // A variance below −ε makes no number: such a model is left as it is.
    let finite = w.iter().chain(&shifted).all(|v| v.is_finite());
    Some((weights, Constant::new(vec![channels], Values::F32(shifted))?)).filter(|_| finite)
}

/// `name`, with underscores until nothing is called so.
pub(super) fn fresh(graph: &GraphProto, name: &str) -> String {
    let mut name = name.to_owned();
    let taken = |name: &str| {
        graph.initializer.iter().any(|t| t.label() == name)
            || graph.input.iter().any(|v| v.label() == name)
            || graph.node.iter().any(|n| n.output.iter().chain(&n.input).any(|o| o == name))
    };
    while taken(&name) {
        name.push('_');
    }
    name
}

/// Makes `Conv` and a `Relu` that alone reads it one node; the domain of the fused operator is imported.
pub(super) fn fuse_relus(model: &mut OnnxModel) -> usize {
    const DOMAIN: &str = "com.microsoft";
    let graph = &mut model.graph;
    let uses = Uses::of(graph);
    let pairs: Vec<(usize, usize)> = {
        let shapes = fold::shapes(graph, &BTreeMap::new());
        let is_float = |conv: &NodeProto| shapes.input(conv, 1).is_some_and(|ty| ty.elem == FLOAT);
        let of = |(i, relu): (usize, &NodeProto)| {
            let x = relu.given(0).filter(|_| relu.op() == Some("Relu"))?;
            let conv = uses.producer(x)?;
            let single = relu.only_output().is_some() && graph.node[conv].only_output().is_some();
            (single
                && uses.only_reader(x) == Some(i)
                && graph.node[conv].op() == Some("Conv")
                && is_float(&graph.node[conv]))
            .then_some((conv, i))
        };
        graph.node.iter().enumerate().filter_map(of).collect()
    };
    for (conv, relu) in &pairs {
        let output = std::mem::take(&mut graph.node[*relu].output);
        let node = &mut graph.node[*conv];
        node.output = output;
        node.op_type = Some("FusedConv".into());
        node.domain = Some(DOMAIN.into());
        node.attribute.push(AttributeProto {
            name: Some("activation".into()),
            r#type: Some(3),
            s: Some(b"Relu".to_vec()),
            ..AttributeProto::default()
        });
    }
    let gone: HashSet<usize> = pairs.iter().map(|(_, relu)| *relu).collect();
    retain_nodes(graph, |i| !gone.contains(&i));
    let imported = model.proto.opset_import.iter().any(|o| o.domain.as_deref() == Some(DOMAIN));
    if !pairs.is_empty() && !imported {
        let domain = OperatorSetIdProto { domain: Some(DOMAIN.into()), version: Some(1) };
        model.proto.opset_import.push(domain);
    }
    pairs.len()
}

impl TensorProto {
    /// A one-dimensional `float` initialiser.
    pub(super) fn floats(name: &str, values: Vec<f32>) -> Self {
        let dims = vec![values.len() as i64];
        Self {
            dims,
            data_type: Some(FLOAT),
            name: Some(name.to_owned()),
            raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            ..Self::default()
        }
    }
}
