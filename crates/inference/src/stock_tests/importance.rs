//! Importance that lacks something (llama.cpp #8661): the file stays whole, and no worse than without importance.

use super::deepseek::{FULL, made, tokens};
use crate::calibrate::calibrate;
use crate::eval::divergence;
use crate::gguf::{Gguf, TensorType};
use crate::model::{Decoder, Storage};
use crate::quantize::{Imatrix, Profile, QuantizeError, QuantizeOptions, quantize};
use std::ops::ControlFlow;

#[test]
fn zeros_in_one_tensor_are_named_filled_and_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let base = made(&FULL, TensorType::F32, &folder.path().join("base.gguf"));
    let decoder = |file: &Gguf| Decoder::load_with(file, Storage::F32).unwrap();
    let whole = decoder(&base);
    let text = tokens(600);
    let calibration = calibrate(&base, &[text[300..].to_vec()], &mut |_, _| ControlFlow::Continue(())).unwrap();
    let found = calibration.imatrix(vec!["test".into()]).unwrap();
    let (broken, zeros) = ("blk.0.ffn_down.weight", 48);
    let mut imatrix = Imatrix::new(vec!["test".into()], 1, 300);
    for name in found.tensors().filter(|name| found.unseen(name) == 0) {
        let mut values = found.get(name).unwrap();
        if name == broken {
            values[..zeros].fill(0.0);
        }
        let slices = base.tensor(name).unwrap().dims.get(2).map_or(1, |n| *n as usize);
        let columns = values.len() / slices;
        for (i, slice) in values.chunks(columns).enumerate() {
            imatrix.add_slice(name, (i, slices), slice, 1).unwrap();
        }
    }
    let out = folder.path().join("q.gguf");
    let make = |imatrix: Option<Imatrix>, fill: bool| {
        let options = QuantizeOptions { imatrix, fill_zero_importance: fill, ..QuantizeOptions::new(Profile::Q4_0) };
        quantize(&base, &out, &options, &mut |_| ControlFlow::Continue(()))
    };
    let refused = make(Some(imatrix.clone()), false).unwrap_err();
    assert!(matches!(&refused, QuantizeError::Importance { tensor, .. } if tensor == broken), "{refused}");
    assert!(!out.exists());
    let kld = |imatrix: Option<Imatrix>| {
        let report = make(imatrix, true).unwrap();
        let file = Gguf::open(&out).unwrap();
        for tensor in file.tensors() {
            assert!(file.dequantize(tensor).unwrap().iter().all(|v| v.is_finite()), "{}", tensor.name);
        }
        let d = divergence(&whole, &decoder(&file), &text[..300], 60, &mut |_, _| ControlFlow::Continue(())).unwrap();
        (d.kld, report)
    };
    let (without, _) = kld(None);
    let (with, report) = kld(Some(imatrix));
    let row = report.tensors.iter().find(|t| t.row.name == broken).unwrap();
    assert_eq!((row.weighted, row.filled_channels), (true, zeros));
    assert!(report.to_string().contains(broken), "{report}");
    assert!(with <= without, "{with} with a broken importance, {without} without any");
}
