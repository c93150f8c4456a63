//! `Resize` by whole factors to `Upsample`, with the model lowered to operator set 9, the last that has it.
//!
//! `Upsample` takes the value at `⌊i/s⌋` (nearest) or interpolates at `i/s` (linear). `Resize` does the same when its
//! coordinates are `asymmetric` and it rounds down. With whole factors, `half_pixel` coordinates rounded to the nearest
//! are the same too: `(i+0.5)/s − 0.5` lies less than one half from `⌊i/s⌋`.

use super::conv;
use crate::onnx::{
    OnnxModel, fold,
    proto::{AttributeProto, NodeProto, TensorProto},
    shape::Shapes,
    tensor::{FLOAT, INT64},
};
use std::collections::BTreeMap;

/// Last operator set with `Upsample`.
const OPSET: i64 = 9;

/// Replaces every `Resize`, or none; returns how many.
///
/// # Errors
/// Why it cannot be done.
pub(super) fn to_upsample(model: &mut OnnxModel) -> Result<usize, String> {
    let (opset, graph) = (model.opset(), &model.graph);
    let replaced = graph.node.iter().filter(|n| n.op() == Some("Resize")).count();
    if replaced == 0 {
        return Ok(0);
    }
    if !model.proto.functions.is_empty() {
        return Err("the model has functions, whose operators are not looked into".into());
    }
    let shapes = fold::shapes(graph, &BTreeMap::new());
    let mut nodes = Vec::with_capacity(graph.node.len());
    let mut scales = Vec::new();
    for node in &graph.node {
        if node.op() == Some("Resize") {
            let factors = factors(node, opset, &shapes).map_err(|why| format!("{} {why}", node.label()))?;
            let name = conv::fresh(graph, &format!("{}.scales", node.output.first().map_or("", String::as_str)));
            nodes.push(upsample(node, &name));
            scales.push(TensorProto::floats(&name, factors));
        } else if node.op().is_some() {
            let lowered = lowered(node, &shapes);
            nodes.push(lowered.ok_or_else(|| format!("{} is not known to be the same in set {OPSET}", node.label()))?);
        } else if node.subgraphs().next().is_some() {
            return Err(format!("{} has graphs inside", node.label()));
        } else {
            nodes.push(node.clone());
        }
    }
    model.graph.node = nodes;
    model.graph.initializer.extend(scales);
    for import in &mut model.proto.opset_import {
        if crate::onnx::graph::is_standard(import.domain.as_deref()) {
            import.version = Some(OPSET);
        }
    }
    Ok(replaced)
}

/// Scales of a `Resize` that does what `Upsample` does.
fn factors(node: &NodeProto, opset: i64, s: &Shapes<'_>) -> Result<Vec<f32>, &'static str> {
    let x = s.input(node, 0).filter(|x| x.elem == FLOAT).ok_or("is not of `float` values of known rank")?;
    let mode = node.text("mode").unwrap_or("nearest");
    let coordinates = match opset {
        10 => "asymmetric",
        _ => node.text("coordinate_transformation_mode").unwrap_or("half_pixel"),
    };
    let rounding = match opset {
        10 => "floor",
        _ => node.text("nearest_mode").unwrap_or("round_prefer_floor"),
    };
    let same = match (mode, coordinates, rounding) {
        ("nearest", "asymmetric", "floor") | ("linear", "asymmetric", _) => true,
        ("nearest", "half_pixel", rounding) => rounding.starts_with("round_prefer"),
        _ => false,
    };
    if !same {
        return Err("interpolates in another way");
    }
    let plain = ["antialias", "exclude_outside"].iter().all(|name| node.int(name, 0) == 0);
    if !plain || node.attr("axes").is_some() || node.text("keep_aspect_ratio_policy").is_some_and(|p| p != "stretch") {
        return Err("has an option that Upsample does not have");
    }
    let scales = scales(node, opset, s, &x.dims).ok_or("has scales that are not constant")?;
    let whole = |s: &f32| *s >= 1.0 && s.fract() == 0.0 && *s <= 1024.0;
    // ONNX Runtime's Upsample interpolates images only.
    let fits = scales.len() == 4 && x.dims.len() == 4 && scales[..2] == [1.0, 1.0] && scales.iter().all(whole);
    if fits { Ok(scales) } else { Err("does not scale images by whole factors") }
}

fn scales(node: &NodeProto, opset: i64, s: &Shapes<'_>, dims: &[Option<u64>]) -> Option<Vec<f32>> {
    let given = s.constant(node, if opset == 10 { 1 } else { 2 });
    if let Some(scales) = given.as_ref().and_then(|c| c.floats()).filter(|v| !v.is_empty()) {
        return Some(scales.to_vec());
    }
    let sizes = s.constant(node, 3)?.ints()?;
    let ratio = |(to, from): (&i64, &Option<u64>)| {
        let (to, from) = (u64::try_from(*to).ok()?, (*from)?);
        (from > 0 && to.is_multiple_of(from)).then(|| (to / from) as f32)
    };
    (sizes.len() == dims.len()).then(|| sizes.iter().zip(dims).map(ratio).collect())?
}

fn upsample(resize: &NodeProto, scales: &str) -> NodeProto {
    let mode = AttributeProto {
        name: Some("mode".into()),
        r#type: Some(3),
        s: Some(resize.text("mode").unwrap_or("nearest").into()),
        ..AttributeProto::default()
    };
    NodeProto {
        op_type: Some("Upsample".into()),
        input: vec![resize.input.first().cloned().unwrap_or_default(), scales.to_owned()],
        attribute: vec![mode],
        ..resize.clone()
    }
}

/// The node as set 9 has it, if it means the same there: attributes that came later are dropped at their neutral value.
fn lowered(node: &NodeProto, s: &Shapes<'_>) -> Option<NodeProto> {
    let elem = s.input(node, 0)?.elem;
    let (attributes, neutral): (&[&str], &[(&str, i64)]) = match node.op()? {
        "Conv" => (&["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"], &[]),
        "ConvTranspose" => {
            let all: &[&str] = &["auto_pad", "dilations", "group", "kernel_shape", "output_padding", "pads", "strides"];
            (all, &[])
        }
        "BatchNormalization" => (&["epsilon", "momentum"], &[("training_mode", 0)]),
        "MaxPool" => (&["auto_pad", "kernel_shape", "pads", "storage_order", "strides"], &[("ceil_mode", 0)]),
        "AveragePool" => (&["auto_pad", "count_include_pad", "kernel_shape", "pads", "strides"], &[("ceil_mode", 0)]),
        "Relu" | "Sigmoid" | "Tanh" | "Exp" | "Sqrt" | "Abs" | "Neg" | "Add" | "Sub" | "Mul" | "Div" | "MatMul"
        | "GlobalAveragePool" | "GlobalMaxPool" | "Identity" => (&[], &[]),
        "LeakyRelu" | "Elu" => (&["alpha"], &[]),
        "Gemm" => (&["alpha", "beta", "transA", "transB"], &[]),
        "Concat" | "Flatten" => (&["axis"], &[]),
        "Transpose" => (&["perm"], &[]),
        "Reshape" => (&[], &[("allowzero", 0)]),
        _ => return None,
    };
    let form = match node.op()? {
        // Axes that count from the end came with set 11, `Gemm` without C as well.
        "Concat" => node.int("axis", -1) >= 0,
        "Flatten" => node.int("axis", 1) >= 0,
        "Gemm" => node.given(2).is_some(),
        "BatchNormalization" => node.only_output().is_some(),
        "MaxPool" => node.only_output().is_some(),
        _ => true,
    };
    let typed =
        elem == FLOAT || (elem == INT64 && matches!(node.op()?, "Identity" | "Concat" | "Reshape" | "Transpose"));
    if !form || !typed {
        return None;
    }
    let mut out = node.clone();
    out.attribute.clear();
    for attribute in &node.attribute {
        let name = attribute.name.as_deref()?;
        let ones = name == "dilations" && attribute.ints.iter().all(|d| *d == 1);
        let dropped = neutral.iter().any(|(n, value)| *n == name && attribute.i.unwrap_or(0) == *value) || ones;
        if attributes.contains(&name) {
            out.attribute.push(attribute.clone());
        } else if !dropped {
            return None;
        }
    }
    Some(out)
}
