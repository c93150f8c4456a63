//! Single rules: what is folded to which values, and what must not be rewritten.

use super::*;
use crate::onnx::proto::*;

#[test]
fn folded_values_are_those_of_onnx_runtime() {
    // Each row computes one constant, which is added to the input as an output of its own.
    let mut b = Build::new(&[value("x", 1, &["1"])], &[]);
    b.constant(floats("f", &[2, 3], &[1.5, -2.25, 0.5, 7.0, -0.75, 4.0]));
    b.constant(floats("g", &[3], &[2.0, -3.0, 0.25]));
    b.constant(floats("sq", &[3], &[2.0, 3.0, 0.1]));
    b.constant(ints("i", &[2, 3], &[5, -7, 2, 0, 9, -4]));
    b.constant(ints("j", &[2, 1], &[-2, 3]));
    for (name, values) in [
        ("at", &[1i64, -2][..]),
        ("axes0", &[0]),
        ("axes1", &[1]),
        ("to", &[3, 2, -1]),
        ("from", &[-1]),
        ("end", &[-9]),
    ] {
        b.constant(ints(name, &[values.len() as i64], values));
    }
    b.constant(ints("back", &[1], &[-2]));
    b.constant(ints("wide", &[3], &[2, 2, 3]));
    let fill = attr_tensor("value", ints("", &[1], &[7]));
    let rows: Vec<(&str, Vec<&str>, Vec<AttributeProto>)> = vec![
        ("Gather", vec!["f", "at"], vec![attr_int("axis", 1)]),
        ("Transpose", vec!["i"], vec![attr_ints("perm", &[1, 0])]),
        ("Unsqueeze", vec!["f", "axes1"], vec![]),
        ("Reshape", vec!["f", "to"], vec![]),
        ("Flatten", vec!["f"], vec![attr_int("axis", 0)]),
        ("Slice", vec!["f", "from", "end", "axes1", "back"], vec![]),
        ("Slice", vec!["i", "axes1", "wide1", "axes1"], vec![]),
        ("Concat", vec!["f", "f"], vec![attr_int("axis", -1)]),
        ("Expand", vec!["f", "wide"], vec![]),
        ("ConstantOfShape", vec!["wide"], vec![fill]),
        ("Cast", vec!["f"], vec![attr_int("to", 7)]),
        ("Cast", vec!["i"], vec![attr_int("to", 9)]),
        ("Add", vec!["f", "g"], vec![]),
        ("Sub", vec!["i", "j"], vec![]),
        ("Mul", vec!["f", "g"], vec![]),
        ("Div", vec!["f", "g"], vec![]),
        ("Div", vec!["i", "j"], vec![]),
        ("Neg", vec!["i"], vec![]),
        ("Abs", vec!["f"], vec![]),
        ("Sqrt", vec!["sq"], vec![]),
        ("Floor", vec!["f"], vec![]),
        ("Ceil", vec!["f"], vec![]),
        ("Equal", vec!["i", "j"], vec![]),
    ];
    b.constant(ints("wide1", &[1], &[i64::MAX]));
    let n = rows.len();
    for (k, (op, inputs, attributes)) in rows.into_iter().enumerate() {
        b.node(op, &inputs, &format!("c{k}"), attributes);
        b.node("Cast", &[&format!("c{k}")], &format!("f{k}"), vec![attr_int("to", 1)]);
        b.node("Add", &[&format!("f{k}"), "x"], &format!("y{k}"), vec![]);
        b.graph.output.push(ValueInfoProto { r#type: Some(untyped()), ..value(&format!("y{k}"), 1, &[]) });
    }
    b.node("Where", &["mask", "f", "g"], "chosen", vec![]);
    b.graph.node.insert(0, mask("i"));
    b.node("Add", &["chosen", "x"], "last", vec![]);
    b.graph.output.push(ValueInfoProto { r#type: Some(untyped()), ..value("last", 1, &[]) });
    let before = b.model(13);
    let mut after = before.clone();
    let report = after.optimize(&OptimizeOptions::default());
    assert_eq!(operators(&after), format!("Add {}", n + 1), "everything else is known");
    assert_eq!(report.rewrites.nodes_folded, 2 * n + 2);
    // the checker wants the shape of every output
    assert_same(&before, &after, false);
}

/// `float`, of any shape.
fn untyped() -> TypeProto {
    let tensor_type = Some(TensorTypeProto { elem_type: Some(1), shape: None });
    TypeProto { tensor_type, ..Default::default() }
}

/// Casts `from` to truth values called `mask`.
fn mask(from: &str) -> NodeProto {
    NodeProto {
        input: vec![from.into()],
        output: vec!["mask".into()],
        op_type: Some("Cast".into()),
        attribute: vec![attr_int("to", 9)],
        ..Default::default()
    }
}

#[test]
fn undefined_arithmetic_is_left_alone() {
    let mut b = Build::new(&[value("x", 7, &["1"])], &[value("y", 7, &["1"]), value("z", 7, &["1"])]);
    b.constant(ints("most", &[1], &[i64::MAX]));
    b.constant(ints("zero", &[1], &[0]));
    b.node("Add", &["most", "most"], "over", vec![]);
    b.node("Div", &["most", "zero"], "bad", vec![]);
    b.node("Add", &["x", "over"], "y", vec![]);
    b.node("Add", &["x", "bad"], "z", vec![]);
    let mut model = b.model(13);
    assert_eq!(model.optimize(&OptimizeOptions::default()).rewrites, Default::default());
}

#[test]
fn folding_does_not_blow_up_the_file() {
    let mut b = Build::new(&[value("x", 1, &["1"])], &[value("y", 1, &["1000", "1000"])]);
    b.constant(ints("shape", &[2], &[1000, 1000]));
    b.node("ConstantOfShape", &["shape"], "zeros", vec![]);
    b.node("Add", &["x", "zeros"], "y", vec![]);
    let mut model = b.model(13);
    assert_eq!(model.optimize(&OptimizeOptions::default()).rewrites.nodes_folded, 0);
}

#[test]
fn a_convolution_that_is_read_twice_keeps_its_normalisation() {
    let io = |name: &str| value(name, 1, &["1", "2", "4", "4"]);
    let mut b = Build::new(&[io("x")], &[io("y"), io("c")]);
    b.conv("x", "c", 2, 2, 3, true);
    b.norm("c", "y", 2);
    let mut model = b.model(13);
    assert_eq!(model.optimize(&OptimizeOptions::default()).rewrites, Default::default());
}

#[test]
fn weights_that_callers_can_replace_are_no_constants() {
    let io = |name: &str| value(name, 1, &["1", "2", "4", "4"]);
    let mut b = Build::new(&[io("x"), value("c.w", 1, &["2", "2", "3", "3"])], &[io("y")]);
    b.conv("x", "c", 2, 2, 3, false);
    b.norm("c", "y", 2);
    let mut proto = b.proto(13);
    let mut newer = OnnxModel::from_proto(proto.clone()).unwrap();
    assert_eq!(newer.optimize(&OptimizeOptions::default()).rewrites, Default::default());
    // before version 4 they had to be inputs and could not be replaced
    proto.ir_version = Some(3);
    let mut older = OnnxModel::from_proto(proto).unwrap();
    let done = older.optimize(&OptimizeOptions::default()).rewrites;
    assert_eq!((done.inputs_removed, done.batch_norms_folded, older.graph().input.len()), (1, 1, 1));
}

#[test]
fn names_used_inside_subgraphs_stay() {
    let mut b = Build::new(&[value("c", 9, &[]), value("x", 1, &["4"])], &[value("y", 1, &["4"])]);
    b.node("Identity", &["x"], "outer", vec![]);
    let branch = |op: &str| {
        let mut inner = Build::new(&[], &[value(&format!("{op}.out"), 1, &["4"])]);
        inner.node(op, &["outer"], &format!("{op}.out"), vec![]);
        let g = Some(Box::new(inner.graph));
        AttributeProto { r#type: Some(5), g, ..Default::default() }
    };
    let then = AttributeProto { name: Some("then_branch".into()), ..branch("Neg") };
    let other = AttributeProto { name: Some("else_branch".into()), ..branch("Abs") };
    b.node("If", &["c"], "y", vec![then, other]);
    let mut model = b.model(13);
    let before = model.clone();
    let report = model.optimize(&OptimizeOptions { upsample: true, ..Default::default() });
    assert_eq!((report.rewrites, &model), (Default::default(), &before));
}

/// A `Resize` of a 1×1×4×4 image by 2 with these attributes, and a node that reads it.
fn resized(attributes: Vec<AttributeProto>, then: (&str, Vec<AttributeProto>)) -> Vec<String> {
    let mut b = Build::new(&[value("x", 1, &["1", "1", "4", "4"])], &[value("y", 1, &["1", "1", "8", "8"])]);
    b.constant(floats("by2", &[4], &[1.0, 1.0, 2.0, 2.0]));
    b.node("Resize", &["x", "", "by2"], "up", attributes);
    b.node(then.0, &["up"], "y", then.1);
    let mut model = b.model(13);
    let report = model.optimize(&OptimizeOptions { upsample: true, ..Default::default() });
    assert_eq!(model.opset(), if report.notes.is_empty() { 9 } else { 13 });
    report.notes
}

#[test]
fn only_equal_resizes_are_replaced() {
    let relu = || ("Relu", vec![]);
    assert!(resized(vec![attr_text("mode", "nearest")], relu()).is_empty());
    let linear = resized(vec![attr_text("mode", "linear")], relu());
    assert!(linear[0].contains("Resize `up` interpolates in another way"), "{linear:?}");
    assert!(!resized(vec![attr_text("mode", "cubic")], relu()).is_empty());
    let ceil = vec![attr_text("coordinate_transformation_mode", "asymmetric"), attr_text("nearest_mode", "ceil")];
    assert!(!resized(ceil, relu()).is_empty());
    // Softmax means something else before set 13
    let softmax = resized(vec![], ("Softmax", vec![attr_int("axis", 1)]));
    assert!(softmax[0].contains("Softmax `y` is not known to be the same in set 9"), "{softmax:?}");
}
