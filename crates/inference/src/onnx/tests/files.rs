//! Bad files are refused with what is wrong, and good ones come back as they were.

use super::*;
use crate::onnx::{OnnxError, proto::*};
use prost::Message;

fn refused(change: impl FnOnce(&mut ModelProto)) -> String {
    let mut b = Build::new(&[value("x", 1, &["1", "3", "8", "8"])], &[value("y", 1, &["1", "4", "8", "8"])]);
    b.conv("x", "c", 3, 4, 3, true);
    b.node("Relu", &["c"], "y", vec![]);
    let mut proto = b.proto(13);
    change(&mut proto);
    OnnxModel::from_bytes(&proto.encode_to_vec()).unwrap_err().to_string()
}

fn graph(proto: &mut ModelProto) -> &mut GraphProto {
    proto.graph.as_mut().unwrap()
}

#[test]
fn files_come_back_as_they_were() {
    for model in [residual(), decoder(), attention()] {
        let bytes = model.to_bytes();
        let again = OnnxModel::from_bytes(&bytes).unwrap();
        assert_eq!(again, model);
        assert_eq!(again.to_bytes(), bytes);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.onnx");
        assert_eq!(model.write(&path).unwrap(), bytes.len() as u64);
        assert_eq!(OnnxModel::open(&path).unwrap(), model);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }
}

#[test]
fn graphs_that_cannot_run_are_refused() {
    for (text, change) in [
        ("reads `nothing`", (|p| graph(p).node[0].input[0] = "nothing".into()) as fn(&mut ModelProto)),
        ("reads `c`", |p| graph(p).node.reverse()),
        ("exists already", |p| graph(p).node[1].output[0] = "c".into()),
        ("output `z` is made by nothing", |p| graph(p).output.push(value("z", 1, &[]))),
        ("given twice", |p| graph(p).input.push(value("x", 1, &[]))),
        ("of shape [4, 3, 3, 3] has 107 data, not 108", |p| {
            graph(p).initializer[0].float_data.pop();
        }),
        ("which cannot be", |p| graph(p).initializer[0].dims = vec![i64::MAX, 4]),
        ("which cannot be", |p| graph(p).initializer[0].dims = vec![-1]),
        ("another file", |p| graph(p).initializer[0].data_location = Some(1)),
        ("IR version 2", |p| p.ir_version = Some(2)),
        ("operator set 99", |p| p.opset_import[0].version = Some(99)),
        ("no standard operator set", |p| p.opset_import.clear()),
        ("training information", |p| p.training_info.push(vec![])),
        ("sparse", |p| graph(p).sparse_initializer.push(vec![])),
        ("has none", |p| p.graph = None),
        ("no operator", |p| graph(p).node[0].op_type = None),
    ] {
        let got = refused(change);
        assert!(got.contains(text), "{got} should say {text}");
    }
}

#[test]
fn unknown_fields_are_refused_and_opaque_ones_survive() {
    let mut bytes = residual().to_bytes();
    // field 30 of ModelProto, a varint
    bytes.extend([0xf0, 0x01, 0x05]);
    let text = OnnxModel::from_bytes(&bytes).unwrap_err().to_string();
    assert!(text.contains("unknown field 30") && text.contains("ModelProto"), "{text}");

    let mut proto = ModelProto::decode(residual().to_bytes().as_slice()).unwrap();
    proto.functions.push(vec![1, 2, 3]);
    graph(&mut proto).node[0].metadata_props.push(vec![9]);
    graph(&mut proto).quantization_annotation.push(vec![8, 8]);
    let mut model = OnnxModel::from_proto(proto).unwrap();
    model.optimize(&OptimizeOptions::default());
    let back = ModelProto::decode(model.to_bytes().as_slice()).unwrap();
    let graph = back.graph.unwrap();
    assert_eq!((back.functions, &graph.quantization_annotation), (vec![vec![1, 2, 3]], &vec![vec![8, 8]]));
    assert_eq!(graph.node[0].metadata_props, [vec![9]]);
}

#[test]
fn cut_files_are_refused() {
    let bytes = decoder().to_bytes();
    for len in 0..bytes.len() {
        match OnnxModel::from_bytes(&bytes[..len]) {
            Err(OnnxError::Malformed { .. } | OnnxError::Graph { .. } | OnnxError::Unsupported { .. }) => {}
            // The opset comes first and the graph last: a cut between fields leaves no graph.
            other => panic!("{len} of {} bytes: {other:?}", bytes.len()),
        }
    }
}

#[test]
fn depth_and_numbers_are_bounded() {
    let mut inner = GraphProto::default();
    for _ in 0..12 {
        let attribute = AttributeProto { g: Some(Box::new(inner)), ..Default::default() };
        let node = NodeProto { attribute: vec![attribute], op_type: Some("If".into()), ..Default::default() };
        inner = GraphProto { node: vec![node], ..Default::default() };
    }
    let text = refused(|p| p.graph = Some(Box::new(inner)));
    assert!(text.contains("nested deeper"), "{text}");
    // a megabyte of empty nodes would be 200 MB of them
    let text = refused(|p| graph(p).node = vec![NodeProto::default(); 600_000]);
    assert!(text.contains("more than 524288 messages"), "{text}");
}
