//! Files that are made without a search have the bytes that stock gives them.

use super::{interpreter, there};
use crate::gguf::{self, Gguf, TensorType};
use crate::model::{Arch, ModelConfig, RopeConfig};
use crate::quantize::{Profile, QuantizeOptions, quantize};
use crate::tokenizer::learn_bpe;
use crate::train::random_model;
use std::{ops::ControlFlow, path::Path, process::Command};

fn base(path: &Path) -> Gguf {
    let c = ModelConfig {
        arch: Arch::Llama,
        layers: 2,
        width: 96,
        heads: 6,
        kv_heads: 3,
        head_dim: 16,
        ffn: 160,
        vocab: 260,
        context: 128,
        rms_eps: 1e-5,
        rope: RopeConfig { base: 10_000.0, dims: 16, linear_factor: 1.0, yarn: None },
        latent: None,
        experts: None,
    };
    let mut metadata = c.metadata("random");
    metadata.extend(learn_bpe(&["aa aa aa ab ab ab ba ba"], c.vocab, "gpt-2").unwrap());
    gguf::write(path, &metadata, random_model(&c, 3).unwrap()).unwrap();
    Gguf::open(path).unwrap()
}

#[test]
fn without_a_search_the_bytes_are_those_of_stock() {
    if !there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [from, own, other] = ["base", "own", "stock"].map(|name| folder.path().join(name).with_extension("gguf"));
    let base = base(&from);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/referee.py");
    for (profile, ty) in [
        (Profile::Q4_0, TensorType::Q4_0),
        (Profile::Q4_1, TensorType::Q4_1),
        (Profile::Q5_0, TensorType::Q5_0),
        (Profile::Q5_1, TensorType::Q5_1),
        (Profile::Q8_0, TensorType::Q8_0),
    ] {
        let options = QuantizeOptions { search: false, ..QuantizeOptions::new(profile) };
        quantize(&base, &own, &options, &mut |_| ControlFlow::Continue(())).unwrap();
        let file_type = profile.file_type().to_string();
        let mut stock = Command::new(interpreter());
        let done = stock.arg(&script).arg("quantize").args([&from, &other]).arg(file_type).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let (own, stock) = (Gguf::open(&own).unwrap(), Gguf::open(&other).unwrap());
        let mut same = 0;
        for tensor in own.tensors().iter().filter(|t| t.ty == ty && stock.tensor(&t.name).unwrap().ty == ty) {
            let theirs = stock.bytes(stock.tensor(&tensor.name).unwrap());
            assert!(own.bytes(tensor) == theirs, "{} of {ty}", tensor.name);
            same += 1;
        }
        assert!(same >= 2 * 7, "{ty}: only {same} tensors have this type in both files");
    }
}
