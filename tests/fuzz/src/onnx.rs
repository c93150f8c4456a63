//! ONNX graphs: the reader, the report and every rewrite.

use flywheel_inference::onnx::{OnnxModel, OptimizeOptions, proto::ValueInfoProto};
use std::collections::BTreeMap;

/// The first byte chooses the rewrites, the rest is a file.
pub fn run(data: &[u8]) {
    let (choice, bytes) = crate::choice(data);
    let Ok(mut model) = OnnxModel::from_bytes(bytes) else { return };
    let written = model.to_bytes();
    let again = OnnxModel::from_bytes(&written).expect("what was written can be read");
    // not the models: a number that is none differs from itself
    assert_eq!(again.to_bytes(), written);

    let options = OptimizeOptions {
        fuse_relu: choice & 1 != 0,
        upsample: choice & 2 != 0,
        sizes: BTreeMap::from([("batch".to_owned(), 2)]),
    };
    let (inputs, outputs) = (names(&model.graph().input), names(&model.graph().output));
    let report = model.optimize(&options);
    let done = report.rewrites;
    assert!(report.after.nodes.len() <= report.before.nodes.len(), "no rewrite adds nodes");
    assert_eq!(names(&model.graph().output), outputs);
    if done.inputs_removed == 0 {
        assert_eq!(names(&model.graph().input), inputs);
    }
    let rewritten = model.to_bytes();
    let again = OnnxModel::from_bytes(&rewritten).expect("a rewritten graph is a valid graph");
    assert_eq!(again.report(&options.sizes), report.after);
    let second = model.optimize(&options);
    assert_eq!(second.rewrites, Default::default(), "rewriting again changes nothing");
    assert_eq!(model.to_bytes(), rewritten);
}

fn names(values: &[ValueInfoProto]) -> Vec<String> {
    values.iter().map(|v| v.name.clone().unwrap_or_default()).collect()
}
