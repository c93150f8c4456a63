//! Files of safetensors models: weights, `tokenizer.json`, and whole folders on their way to GGUF.

use crate::scratch::Scratch;
use crate::{choice, pieces};
use flywheel_inference::convert::{FloatType, convert};
use flywheel_inference::gguf::{Gguf, Metadata, Value};
use flywheel_inference::model::Decoder;
use flywheel_inference::safetensors_file::SafetensorsFile;
use flywheel_inference::tokenizer::{HfFiles, HfTokenizer, Tokenizer};
use std::ops::ControlFlow;
use std::path::Path;

/// Weights by themselves, or with the first byte odd a folder: `config.json`, `tokenizer.json`, weights.
pub fn safetensors(data: &[u8]) {
    let (kind, data) = choice(data);
    if kind % 2 == 1 {
        return folder(data);
    }
    let Ok(file) = SafetensorsFile::from_bytes(Path::new("fuzz.safetensors"), data.to_vec()) else { return };
    let names = file.names();
    assert!(names.is_sorted());
    let mut bytes = 0;
    for name in &names {
        let view = file.find(name).expect("every name is found");
        bytes += view.bytes.len();
        if let Ok(values) = view.values() {
            assert_eq!(values.len(), view.shape.iter().product::<usize>());
            assert!(values.iter().all(|v| v.is_finite()));
        }
        assert!(file.get(name, view.shape).is_ok());
    }
    assert!(bytes <= data.len(), "tensors lie beside one another in the file");
}

/// A model that is converted can be opened, and holds what its report says.
fn folder(data: &[u8]) {
    let scratch = Scratch::empty();
    for (name, piece) in ["config.json", "tokenizer.json", "model.safetensors"].iter().zip(pieces(data)) {
        std::fs::write(scratch.path().join(name), piece).expect("the scratch folder can be written");
    }
    let out = scratch.path().join("out.gguf");
    match convert(scratch.path(), &out, FloatType::F16, &mut |_| ControlFlow::Continue(())) {
        Err(_) => assert!(!out.exists(), "a refused model leaves no file"),
        Ok(report) => {
            let file = Gguf::open(&out).expect("what was converted can be read");
            assert_eq!((file.tensors().len(), file.size_bytes()), (report.tensors, report.size_bytes));
            // a settings file may still describe what the decoder does not run
            let _ = Decoder::load(&file);
        }
    }
}

/// `tokenizer.json`, then `tokenizer_config.json` and `config.json` if there is more.
pub fn tokenizer_json(data: &[u8]) {
    let texts: Vec<String> = pieces(data).take(3).map(|p| String::from_utf8_lossy(p).into_owned()).collect();
    let text = |i: usize| texts.get(i).map(String::as_str);
    let files =
        HfFiles { tokenizer: text(0).unwrap_or(""), tokenizer_config: text(1), config: text(2), chat_template: None };
    let Ok(hf) = HfTokenizer::parse(files) else { return };
    let size = hf.vocab_size();
    assert!(size > 0 && size <= 2 * data.len(), "ids are bounded by the tokens that are there");
    let Ok(entries) = hf.metadata(size + 3) else { return };
    let metadata = Metadata::new(entries);
    let tokens = metadata.required::<&[String]>("tokenizer.ggml.tokens").expect("tokens are there");
    assert_eq!(tokens.len(), size + 3);
    for role in ["bos", "eos", "unknown", "padding"] {
        if let Some(Value::U32(id)) = metadata.get(&format!("tokenizer.ggml.{role}_token_id")) {
            assert!((*id as usize) < size, "{role} is a token");
        }
    }
    let Ok(tokenizer) = Tokenizer::from_metadata(&metadata) else { return };
    let ids = tokenizer.encode("How long is the warranty? 保修期多长？", false);
    assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
    let _ = tokenizer.decode(&ids);
}
