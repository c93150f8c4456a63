//! Small ONNX graphs, one for every rewrite.

use super::Corpus;
use flywheel_inference::onnx::{OnnxModel, proto::*};

fn text(name: &str, value: &str) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(3), s: Some(value.into()), ..Default::default() }
}
fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(7), ints: values.to_vec(), ..Default::default() }
}
fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(2), i: Some(value), ..Default::default() }
}

fn value(name: &str, dims: &[i64]) -> ValueInfoProto {
    let dim = dims.iter().map(|d| match d {
        0 => DimensionProto { dim_param: Some("batch".into()), ..Default::default() },
        d => DimensionProto { dim_value: Some(*d), ..Default::default() },
    });
    let tensor = TensorTypeProto { elem_type: Some(1), shape: Some(TensorShapeProto { dim: dim.collect() }) };
    let ty = TypeProto { tensor_type: Some(tensor), ..Default::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..Default::default() }
}

fn floats(name: &str, dims: &[i64]) -> TensorProto {
    let n = dims.iter().product::<i64>();
    TensorProto {
        dims: dims.to_vec(),
        data_type: Some(1),
        name: Some(name.into()),
        float_data: (0..n).map(|i| 0.25 + i as f32 / 8.0).collect(),
        ..Default::default()
    }
}
fn numbers(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        dims: vec![values.len() as i64],
        data_type: Some(7),
        name: Some(name.into()),
        raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        ..Default::default()
    }
}

fn node(op: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        input: inputs.iter().map(|i| (*i).into()).collect(),
        output: vec![output.into()],
        op_type: Some(op.into()),
        attribute,
        ..Default::default()
    }
}

/// The bytes of a model from `x` to `y`, with the byte that chooses the rewrites in front.
fn model(choice: u8, dims: &[i64], initializer: Vec<TensorProto>, node: Vec<NodeProto>) -> Vec<u8> {
    let graph = GraphProto {
        node,
        initializer,
        input: vec![value("x", dims)],
        output: vec![value("y", &[])],
        ..Default::default()
    };
    let proto = ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: None, version: Some(13) }],
        graph: Some(Box::new(graph)),
        ..Default::default()
    };
    let model = OnnxModel::from_proto(proto).expect("the graph is valid");
    [vec![choice], model.to_bytes()].concat()
}

pub fn onnx(out: &Corpus) {
    let norm = ["gamma", "beta", "mean", "var"].map(|n| floats(n, &[2]));
    let conv = vec![
        node("Conv", &["x", "w"], "c", vec![ints("pads", &[1, 1, 1, 1])]),
        node("BatchNormalization", &["c", "gamma", "beta", "mean", "var"], "n", vec![]),
        node("Relu", &["n"], "y", vec![]),
    ];
    let weights = || [&[floats("w", &[2, 1, 3, 3])][..], &norm].concat();
    out.add("conv", model(1, &[0, 1, 4, 4], weights(), conv));
    let resize = vec![
        node("Resize", &["x", "", "scales"], "r", vec![text("mode", "nearest")]),
        node("Concat", &["r", "r"], "y", vec![int("axis", 1)]),
    ];
    let mut scales = floats("scales", &[4]);
    scales.float_data = vec![1.0, 1.0, 2.0, 2.0];
    out.add("resize", model(2, &[1, 1, 2, 2], vec![scales], resize));
    let shapes = vec![
        node("Identity", &["x"], "i", vec![]),
        node("Shape", &["i"], "s", vec![]),
        node("Gather", &["s", "one"], "g", vec![int("axis", 0)]),
        node("Mul", &["g", "two"], "m", vec![]),
        node("Concat", &["minus", "m"], "to", vec![int("axis", 0)]),
        node("Slice", &["table", "one", "two"], "cut", vec![]),
        node("Transpose", &["cut"], "t", vec![ints("perm", &[1, 0])]),
        node("Reshape", &["i", "to"], "r", vec![]),
        node("Add", &["r", "t"], "y", vec![]),
        node("Relu", &["y"], "dead", vec![]),
    ];
    let known = vec![numbers("one", &[1]), numbers("two", &[2]), numbers("minus", &[-1]), floats("table", &[4, 2])];
    out.add("shapes", model(0, &[0, 2], known, shapes));
}
