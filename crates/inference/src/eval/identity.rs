//! What turns text into tokens, as digests: two files with the same digests make the same tokens of the same text.

use crate::gguf::{Gguf, encode_str, encode_value};
use flywheel_types::Digest;
use serde::{Deserialize, Serialize};

const TOKENIZER: &str = "tokenizer.ggml.";
const VOCABULARY: [&str; 2] = ["tokenizer.ggml.token_type", "tokenizer.ggml.tokens"];
const TEMPLATE: &str = "tokenizer.chat_template";

/// SHA-256 over metadata of a GGUF file, with keys in alphabetical order (their order in the file means nothing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextIdentity {
    /// Token texts and token types, by id.
    pub vocabulary_sha256: Digest,
    /// Every `tokenizer.ggml.*` key with its type and value: vocabulary, merges or scores, pre-tokenizer, special ids,
    /// flags. Strict: a key that one file has and the other leaves to a default makes another digest.
    pub tokenizer_sha256: Digest,
    /// The template's text; `None` for a file without one.
    pub chat_template_sha256: Option<Digest>,
}

/// Digests of `gguf`.
#[must_use]
pub fn text_identity(gguf: &Gguf) -> TextIdentity {
    TextIdentity {
        vocabulary_sha256: digest(gguf, &|key| VOCABULARY.contains(&key)),
        tokenizer_sha256: digest(gguf, &|key| key.starts_with(TOKENIZER)),
        chat_template_sha256: gguf.str(TEMPLATE).ok().map(|text| Digest::of(text.as_bytes())),
    }
}

fn digest(gguf: &Gguf, wanted: &dyn Fn(&str) -> bool) -> Digest {
    let mut entries: Vec<_> = gguf.metadata().iter().filter(|(key, _)| wanted(key)).collect();
    entries.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    let mut bytes = Vec::new();
    for (key, value) in entries {
        encode_str(&mut bytes, key);
        encode_value(&mut bytes, value);
    }
    Digest::of(&bytes)
}
