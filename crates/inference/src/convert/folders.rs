//! Model folders in the layout of their authors, as tests of the converter write them.

use super::{FloatType, convert};
use crate::gguf::Gguf;
use crate::model::Decoder;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value as Json, json};
use std::{fs, ops::ControlFlow, path::Path};

/// A tensor as PyTorch would hold it.
pub(crate) struct Torch {
    pub name: String,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    pub bytes: Vec<u8>,
}

impl Torch {
    pub fn f32(name: impl Into<String>, shape: Vec<usize>, values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { name: name.into(), shape, dtype: Dtype::F32, bytes }
    }
}

pub(crate) fn save(path: &Path, tensors: &[Torch]) {
    let views = tensors.iter().map(|t| (t.name.clone(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A vocabulary of five tokens; the file fills it up to the rows of the embedding.
pub(crate) fn tokenizer_json() -> Json {
    json!({
        "added_tokens": [{ "id": 4, "content": "<|end|>", "special": true }],
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true },
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "c": 2, "ab": 3 }, "merges": ["a b"] },
    })
}

pub(crate) fn write(folder: &Path, config: &Json, tokenizer: &Json, tensors: &[Torch]) {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    save(&folder.join("model.safetensors"), tensors);
}

/// The folder as the F32 file `out`.
pub(crate) fn converted(folder: &Path, out: &Path) -> Gguf {
    convert(folder, out, FloatType::F32, &mut |_| ControlFlow::Continue(())).unwrap();
    Gguf::open(out).unwrap()
}

/// Logits of every position, a row of the vocabulary each.
pub(crate) fn logits(model: &Decoder, tokens: &[u32]) -> Vec<f32> {
    let mut out = Vec::new();
    model
        .visit_logits(tokens, 0..tokens.len(), &mut |_, row| {
            out.extend_from_slice(row);
            Ok(())
        })
        .unwrap();
    out
}
