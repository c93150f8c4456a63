//! Tests of ONNX graphs: three made here in the public format and judged by ONNX Runtime, single rules, and bad files.

mod build;
mod files;
mod rules;

use super::{OnnxModel, OptimizeOptions};
use build::*;
use std::collections::BTreeMap;

/// Every count of an operator, `Conv 3, Relu 2`.
fn operators(model: &OnnxModel) -> String {
    let report = model.report(&BTreeMap::new());
    report.operators.iter().map(|(op, n)| format!("{op} {n}")).collect::<Vec<_>>().join(", ")
}

fn batch_of_two() -> BTreeMap<String, u64> {
    BTreeMap::from([("batch".to_owned(), 2)])
}

/// A residual network: convolutions with normalisation, a skip connection, pooling and a classifier.
fn residual() -> OnnxModel {
    let mut b = Build::new(&[value("x", 1, &["batch", "3", "16", "16"])], &[value("y", 1, &["batch", "10"])]);
    b.conv("x", "c1", 3, 8, 3, false);
    b.norm("c1", "n1", 8);
    b.node("Relu", &["n1"], "r1", vec![]);
    b.conv("r1", "c2", 8, 8, 3, true);
    b.norm("c2", "n2", 8);
    b.conv("x", "c3", 3, 8, 1, false);
    b.norm("c3", "n3", 8);
    b.node("Add", &["n2", "n3"], "sum", vec![]);
    b.node("Relu", &["sum"], "r2", vec![]);
    b.node("GlobalAveragePool", &["r2"], "pooled", vec![]);
    b.node("Flatten", &["pooled"], "flat", vec![]);
    b.weights("fc.w", &[10, 8], 0.5);
    b.weights("fc.b", &[10], 0.5);
    b.node("Gemm", &["flat", "fc.w", "fc.b"], "y", vec![attr_int("transB", 1)]);
    b.model(13)
}

/// A decoder of images: both kinds of enlargement, joined with what came before.
fn decoder() -> OnnxModel {
    let mut b = Build::new(&[value("x", 1, &["1", "4", "6", "6"])], &[value("y", 1, &["1", "3", "24", "24"])]);
    b.conv("x", "c1", 4, 4, 3, true);
    b.node("Relu", &["c1"], "r1", vec![]);
    b.constant(floats("by2", &[4], &[1.0, 1.0, 2.0, 2.0]));
    let nearest = vec![attr_text("mode", "nearest"), attr_text("coordinate_transformation_mode", "half_pixel")];
    b.node("Resize", &["r1", "", "by2"], "up1", nearest);
    let nearest = vec![
        attr_text("mode", "nearest"),
        attr_text("coordinate_transformation_mode", "asymmetric"),
        attr_text("nearest_mode", "floor"),
    ];
    b.node("Resize", &["x", "", "by2"], "skip", nearest);
    b.node("Concat", &["up1", "skip"], "both", vec![attr_int("axis", 1)]);
    b.conv("both", "c2", 8, 3, 3, true);
    b.norm("c2", "n2", 3);
    b.constant(ints("to24", &[4], &[1, 3, 24, 24]));
    let linear = vec![attr_text("mode", "linear"), attr_text("coordinate_transformation_mode", "asymmetric")];
    b.node("Resize", &["n2", "", "", "to24"], "up2", linear);
    b.node("Sigmoid", &["up2"], "y", vec![]);
    b.model(13)
}

/// Attention as exporters write it: shapes are computed, constants are scaled, and leftovers of training remain.
fn attention() -> OnnxModel {
    let mut b = Build::new(&[value("x", 1, &["batch", "6", "16"])], &[value("y", 1, &["batch", "6", "16"])]);
    let scalar = |name: &str, v: i64| ints(name, &[], &[v]);
    b.constant(scalar("zero", 0));
    b.constant(scalar("one", 1));
    b.constant(ints("axis0", &[1], &[0]));
    b.node("Shape", &["x"], "shape", vec![]);
    b.node("Gather", &["shape", "one"], "length", vec![attr_int("axis", 0)]);
    b.node("Unsqueeze", &["length", "axis0"], "length1", vec![]);
    b.node("Constant", &[], "tail", vec![attr_tensor("value", ints("", &[2], &[4, 4]))]);
    b.node("Constant", &[], "head", vec![attr_tensor("value", ints("", &[1], &[-1]))]);
    b.node("Concat", &["head", "length1", "tail"], "split", vec![attr_int("axis", 0)]);
    for part in ["q", "k", "v"] {
        b.weights(&format!("{part}.w"), &[16, 16], 0.4);
        b.node("MatMul", &["x", &format!("{part}.w")], &format!("{part}.flat"), vec![]);
        b.node("Reshape", &[&format!("{part}.flat"), "split"], &format!("{part}.heads"), vec![]);
        let perm: &[i64] = if part == "k" { &[0, 2, 3, 1] } else { &[0, 2, 1, 3] };
        b.node("Transpose", &[&format!("{part}.heads")], part, vec![attr_ints("perm", perm)]);
    }
    b.node("MatMul", &["q", "k"], "raw", vec![]);
    b.constant(floats("width", &[], &[4.0]));
    b.node("Sqrt", &["width"], "root", vec![]);
    b.node("Div", &["raw", "root"], "scores", vec![]);
    b.node("Softmax", &["scores"], "weights", vec![attr_int("axis", -1)]);
    b.node("Dropout", &["weights"], "dropped", vec![]);
    b.node("MatMul", &["dropped", "v"], "mixed", vec![]);
    b.node("Transpose", &["mixed"], "back", vec![attr_ints("perm", &[0, 2, 1, 3])]);
    b.constant(ints("merged", &[3], &[0, 0, -1]));
    b.node("Reshape", &["back", "merged"], "joined", vec![]);
    b.weights("bias", &[16], 0.5);
    b.constant(floats("half", &[1], &[0.5]));
    b.node("Mul", &["bias", "half"], "halved", vec![]);
    b.node("Add", &["joined", "halved"], "biased", vec![]);
    b.node("Identity", &["biased"], "same", vec![]);
    b.node("Add", &["same", "x"], "y", vec![]);
    b.node("Relu", &["biased"], "nobody", vec![]);
    b.weights("unused", &[40], 1.0);
    b.model(14)
}

#[test]
fn a_residual_network_loses_its_normalisation() {
    let before = residual();
    let mut after = before.clone();
    let report = after.optimize(&OptimizeOptions { sizes: batch_of_two(), ..Default::default() });
    assert_eq!(operators(&after), "Add 1, Conv 3, Flatten 1, Gemm 1, GlobalAveragePool 1, Relu 2");
    assert_eq!((report.rewrites.batch_norms_folded, report.rewrites.unused_initializers), (3, 16));
    // three normalisations read and wrote 2·8·16·16 floats each, and read 4·8 numbers; two biases of 8 came
    let saved = report.before.traffic_bytes() - report.after.traffic_bytes();
    assert_eq!(saved, 3 * (2 * 2 * 8 * 256 * 4 + 4 * 8 * 4) - 2 * 8 * 4);
    assert_eq!((report.before.unmeasured, report.after.unmeasured), (0, 0));
    assert_eq!(report.before.multiply_adds, report.after.multiply_adds);
    assert_same(&before, &after, true);

    let mut fused = before.clone();
    let report = fused.optimize(&OptimizeOptions { fuse_relu: true, ..Default::default() });
    assert_eq!(report.rewrites.relus_fused, 1, "the other Relu follows the sum");
    assert!(operators(&fused).contains("com.microsoft.FusedConv 1"));
    assert_same(&before, &fused, false);
}

#[test]
fn a_decoder_gets_upsample_and_operator_set_9() {
    let before = decoder();
    let mut after = before.clone();
    let report = after.optimize(&OptimizeOptions { upsample: true, ..Default::default() });
    assert_eq!(report.notes, Vec::<String>::new());
    assert_eq!((report.rewrites.resizes_replaced, after.opset()), (3, 9));
    assert_eq!(operators(&after), "Concat 1, Conv 2, Relu 1, Sigmoid 1, Upsample 3");
    assert_same(&before, &after, true);
    let mut plain = before.clone();
    plain.optimize(&OptimizeOptions::default());
    assert_eq!(plain.opset(), 13, "only on request");
    assert_same(&before, &plain, true);
}

#[test]
fn attention_loses_what_exporters_leave() {
    let before = attention();
    let mut after = before.clone();
    let report = after.optimize(&OptimizeOptions { sizes: batch_of_two(), ..Default::default() });
    assert_eq!(operators(&after), "Add 2, Div 1, MatMul 5, Reshape 4, Softmax 1, Transpose 4");
    let done = report.rewrites;
    // Shape and Relu have no reader left, Identity and Dropout pass through, the rest is known
    assert_eq!((done.dead_nodes, done.identities_removed, done.nodes_folded), (2, 2, 7));
    assert_eq!(report.after.unmeasured, 0);
    assert!(report.after.traffic_bytes() < report.before.traffic_bytes());
    // 3 products of 12 rows by 16×16, scores and mixture of 2·4 heads, 6×6×4 each
    assert_eq!(report.after.multiply_adds, 3 * 12 * 256 + 2 * (8 * 36 * 4));
    assert_same(&before, &after, true);
}

#[test]
fn rewriting_again_changes_nothing() {
    let options = OptimizeOptions { fuse_relu: true, upsample: true, sizes: batch_of_two() };
    for mut model in [residual(), decoder(), attention()] {
        model.optimize(&options);
        let once = model.clone();
        let report = model.optimize(&options);
        assert_eq!((&model, report.rewrites), (&once, Default::default()));
        assert_eq!(report.before, report.after);
    }
}

#[test]
fn costs_of_a_convolution_are_counted() {
    let mut b = Build::new(&[value("x", 1, &["1", "3", "8", "8"])], &[value("y", 1, &["1", "4", "8", "8"])]);
    b.conv("x", "y", 3, 4, 3, true);
    let report = b.model(13).report(&BTreeMap::new());
    let node = &report.nodes[0];
    assert_eq!(node.read_bytes, Some(4 * (3 * 64 + 4 * 27 + 4)));
    assert_eq!((node.written_bytes, node.multiply_adds), (Some(4 * 256), Some(256 * 27)));
    assert_eq!((report.traffic_bytes(), report.initializer_bytes), (node.read_bytes.unwrap() + 1024, 4 * (108 + 4)));
    // without a size for the batch nothing is claimed
    let report = residual().report(&BTreeMap::new());
    assert_eq!((report.unmeasured, report.read_bytes), (12 - 1, 0));
}
