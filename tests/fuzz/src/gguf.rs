//! Model files: the reader, and what is built from its metadata and tensors.

use crate::scratch::Scratch;
use flywheel_inference::gguf::{self, Gguf, TensorData};
use flywheel_inference::model::{Adapter, Decoder, ModelConfig};
use flywheel_inference::tokenizer::{ChatTemplate, Tokenizer};

/// Tensors above this are not decoded, so that one input stays fast; elements.
const MAX_ELEMENTS: usize = 1 << 20;

/// The bytes as a model file.
pub fn run(data: &[u8]) {
    let Ok(file) = Gguf::from_bytes(data.to_vec()) else { return };
    assert_eq!(file.size_bytes(), data.len() as u64);
    assert!(file.alignment().is_power_of_two() && matches!(file.version(), 2 | 3));
    for (key, value) in file.metadata() {
        assert_eq!(file.get(key).map(gguf::Value::type_name), Some(value.type_name()), "every key is found");
    }
    for tensor in file.tensors() {
        assert_eq!(file.tensor(&tensor.name).expect("every tensor is found"), tensor);
        assert_eq!(file.bytes(tensor).len(), tensor.len, "a whole file holds its tensors");
        if tensor.n_elements() <= MAX_ELEMENTS {
            let values = file.dequantize(tensor).expect("an accepted tensor can be decoded");
            assert_eq!(values.len(), tensor.n_elements());
        }
    }
    users(&file);
    written_again(&file);
}

/// Whatever else reads a model file: an error or a value, never a panic.
fn users(file: &Gguf) {
    let mut warnings = Vec::new();
    if let Ok(config) = ModelConfig::from_gguf(file, &mut warnings) {
        assert!(config.layers > 0 && config.vocab > 0 && config.heads.is_multiple_of(config.kv_heads));
    }
    if let Ok(adapter) = Adapter::from_gguf(file) {
        assert!(adapter.pairs().all(|(_, _, pair)| pair.rank > 0 && adapter.scale(pair.rank).is_finite()));
    }
    if let Ok(decoder) = Decoder::load(file) {
        assert!(decoder.size_bytes() > 0);
    }
    if let Ok(tokenizer) = Tokenizer::from_gguf(file) {
        let ids = tokenizer.encode("How long is the warranty? 保修期多长？", false);
        assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
        let _ = tokenizer.decode(&ids);
    }
    let _ = ChatTemplate::from_gguf(file);
}

/// Our writer gives back what our reader accepted.
fn written_again(file: &Gguf) {
    let scratch = Scratch::empty();
    let path = scratch.path().join("again.gguf");
    let tensors = file.tensors().iter().map(|t| (t.spec(), TensorData::Bytes(file.bytes(t).into())));
    // alignments of a gibibyte are valid, but not worth the disk
    if file.alignment() > 4096 {
        return;
    }
    // the writer may refuse what the reader takes (it also refuses what only stock refuses)
    if gguf::write(&path, file.metadata(), tensors).is_err() {
        return;
    }
    let again = Gguf::open(&path).expect("what our writer wrote can be read");
    assert_eq!(again.metadata().len(), file.metadata().len());
    for (old, new) in file.tensors().iter().zip(again.tensors()) {
        assert_eq!((&old.name, &old.dims, old.ty), (&new.name, &new.dims, new.ty));
        assert_eq!(file.bytes(old), again.bytes(new));
    }
}
