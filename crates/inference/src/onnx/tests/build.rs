//! Graphs made by hand, and ONNX Runtime as the judge of rewritten ones.

use crate::model::tests::noise;
use crate::onnx::{OnnxModel, proto::*};
use std::process::Command;

pub(super) fn attr_int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(2), i: Some(value), ..Default::default() }
}
pub(super) fn attr_ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(7), ints: values.to_vec(), ..Default::default() }
}
pub(super) fn attr_text(name: &str, value: &str) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(3), s: Some(value.into()), ..Default::default() }
}
pub(super) fn attr_tensor(name: &str, value: TensorProto) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(4), t: Some(Box::new(value)), ..Default::default() }
}

/// A value with sizes or names of sizes.
pub(super) fn value(name: &str, elem: i32, dims: &[&str]) -> ValueInfoProto {
    let dim = dims.iter().map(|d| match d.parse() {
        Ok(size) => DimensionProto { dim_value: Some(size), ..Default::default() },
        Err(_) => DimensionProto { dim_param: Some((*d).into()), ..Default::default() },
    });
    let tensor = TensorTypeProto { elem_type: Some(elem), shape: Some(TensorShapeProto { dim: dim.collect() }) };
    let ty = TypeProto { tensor_type: Some(tensor), ..Default::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(ty), ..Default::default() }
}

pub(super) fn floats(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    TensorProto {
        dims: dims.to_vec(),
        data_type: Some(1),
        name: Some(name.into()),
        float_data: values.to_vec(),
        ..Default::default()
    }
}
pub(super) fn ints(name: &str, dims: &[i64], values: &[i64]) -> TensorProto {
    TensorProto {
        dims: dims.to_vec(),
        data_type: Some(7),
        name: Some(name.into()),
        int64_data: values.to_vec(),
        ..Default::default()
    }
}

#[derive(Default)]
pub(super) struct Build {
    pub graph: GraphProto,
    seed: u64,
}

impl Build {
    pub fn new(inputs: &[ValueInfoProto], outputs: &[ValueInfoProto]) -> Self {
        let graph = GraphProto {
            name: Some("g".into()),
            input: inputs.to_vec(),
            output: outputs.to_vec(),
            ..Default::default()
        };
        Self { graph, seed: 0 }
    }
    pub fn node(&mut self, op: &str, inputs: &[&str], output: &str, attribute: Vec<AttributeProto>) {
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(|i| (*i).into()).collect(),
            output: vec![output.into()],
            op_type: Some(op.into()),
            attribute,
            ..Default::default()
        });
    }
    pub fn constant(&mut self, tensor: TensorProto) {
        self.graph.initializer.push(tensor);
    }
    /// Random weights.
    pub fn weights(&mut self, name: &str, dims: &[i64], scale: f32) {
        self.seed += 1;
        let n = dims.iter().product::<i64>() as usize;
        self.constant(floats(name, dims, &noise(n, self.seed, scale)));
    }
    /// `Conv` of a 3×3 or 1×1 kernel that keeps the size, with or without bias.
    pub fn conv(&mut self, x: &str, y: &str, from: i64, to: i64, kernel: i64, bias: bool) {
        let (w, b) = (format!("{y}.w"), format!("{y}.b"));
        self.weights(&w, &[to, from, kernel, kernel], 0.5);
        let mut inputs = vec![x, &w];
        if bias {
            self.weights(&b, &[to], 0.5);
            inputs.push(&b);
        }
        let pad = kernel / 2;
        self.node("Conv", &inputs, y, vec![attr_ints("pads", &[pad, pad, pad, pad])]);
    }
    pub fn norm(&mut self, x: &str, y: &str, channels: i64) {
        let names = ["gamma", "beta", "mean", "var"].map(|part| format!("{y}.{part}"));
        for name in &names[..3] {
            self.weights(name, &[channels], 1.0);
        }
        self.seed += 1;
        let variance: Vec<f32> = noise(channels as usize, self.seed, 1.0).iter().map(|v| v.abs() + 0.3).collect();
        self.constant(floats(&names[3], &[channels], &variance));
        let inputs: Vec<&str> = [x].into_iter().chain(names.iter().map(String::as_str)).collect();
        self.node("BatchNormalization", &inputs, y, vec![]);
    }
    pub fn proto(self, opset: i64) -> ModelProto {
        ModelProto {
            ir_version: Some(8),
            opset_import: vec![OperatorSetIdProto { domain: None, version: Some(opset) }],
            graph: Some(Box::new(self.graph)),
            ..Default::default()
        }
    }
    pub fn model(self, opset: i64) -> OnnxModel {
        OnnxModel::from_proto(self.proto(opset)).unwrap()
    }
}

/// Loads both files, checks the second by the standard's own checker if it should pass, runs both on the same random inputs (free sizes
/// are 2) and prints the largest difference, relative to the largest value of the output.
const JUDGE: &str = "
import sys, numpy as np, onnx, onnxruntime as ort
if 'standard' in sys.argv: onnx.checker.check_model(sys.argv[2])
ort.set_default_logger_severity(3)
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
a, b = (ort.InferenceSession(p, options, providers=['CPUExecutionProvider']) for p in sys.argv[1:3])
rng = np.random.default_rng(1)
feed = {i.name: rng.standard_normal([d if isinstance(d, int) else 2 for d in i.shape], dtype=np.float32) for i in a.get_inputs()}
assert [i.name for i in a.get_inputs()] == [i.name for i in b.get_inputs()]
assert [o.name for o in a.get_outputs()] == [o.name for o in b.get_outputs()]
worst = 0.0
for x, y in zip(a.run(None, feed), b.run(None, feed)):
    assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, y.shape)
    assert np.isfinite(x).all() and np.abs(x).max() > 0
    worst = max(worst, float(np.abs(x - y).max() / max(1.0, np.abs(x).max())))
print(worst)
";

/// Largest difference of the outputs in ONNX Runtime; `None` with a printed line without it.
pub(super) fn difference(before: &OnnxModel, after: &OnnxModel, standard: bool) -> Option<f64> {
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let ready = Command::new(&python).args(["-c", "import numpy, onnx, onnxruntime"]).output();
    if !ready.is_ok_and(|out| out.status.success()) {
        println!("skipped: PYTHON has no numpy, onnx and onnxruntime");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("before.onnx"), folder.path().join("after.onnx"));
    before.write(&a).unwrap();
    after.write(&b).unwrap();
    let mut command = Command::new(&python);
    command.args(["-c", JUDGE]).args([&a, &b]);
    let out = command.args(standard.then_some("standard")).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(String::from_utf8(out.stdout).unwrap().trim().parse().unwrap())
}

/// The difference is below 1e-4, where it can be measured.
pub(super) fn assert_same(before: &OnnxModel, after: &OnnxModel, standard: bool) {
    if let Some(worst) = difference(before, after, standard) {
        assert!(worst <= 1e-4, "outputs differ by {worst}");
    }
}
