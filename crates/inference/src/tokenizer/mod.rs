//! Tokenizers as the model file describes them: byte-level BPE and SentencePiece from GGUF metadata or from the
//! `tokenizer.json` of a model folder, WordPiece for sentence encoders, chat templates.
//!
//! Token ids equal those of stock llama.cpp. A tokenizer model or pre-tokenizer that is not in the table is an
//! error: a near miss would still produce text, only worse text.

mod bpe;
mod chat;
mod hf;
mod hf_pre;
mod hf_table;
mod learn;
mod pretokenize;
mod spm;
mod stream;
mod vocab;
mod wordpiece;

pub use chat::{ChatError, ChatTemplate, Message, Role};
pub use hf::{HfFiles, HfTokenizer};
pub use learn::{END_OF_TEXT, learn_bpe};
pub use stream::StreamDecoder;
pub use vocab::{Kind, SpecialIds};
pub use wordpiece::WordPiece;

use crate::gguf::{Gguf, GgufError, Metadata};
use std::borrow::Cow;
use vocab::Vocab;

/// Why a tokenizer could not be built.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error("tokenizer model `{name}` is not supported; known are `gpt2` (byte-level BPE) and `llama` (SentencePiece)")]
    UnknownModel { name: String },
    #[error("pre-tokenizer `{name}` is not known, and a default would garble the text; known are {known}")]
    UnknownPre { name: String, known: String },
    #[error("the vocabulary is broken: {what}")]
    Vocabulary { what: String },
    #[error("{}: {what}", path.display())]
    File { path: std::path::PathBuf, what: String },
}

impl TokenizerError {
    fn vocabulary(what: impl Into<String>) -> Self {
        Self::Vocabulary { what: what.into() }
    }
}

#[derive(Debug)]
enum Model {
    Bpe(bpe::Bpe),
    Spm(spm::Spm),
}

/// A tokenizer of a GGUF file. Cheap to share, no interior state.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    model: Model,
}

/// A stretch of text: special tokens are looked for only where the template, not a person, wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part<'a> {
    pub text: Cow<'a, str>,
    pub parse_special: bool,
}

/// Result of looking for special tokens.
enum Fragment<'a> {
    Token(u32),
    Text(Cow<'a, str>),
}

impl Tokenizer {
    /// Reads `tokenizer.ggml.*`.
    ///
    /// # Errors
    /// [`TokenizerError`] for an unknown model or pre-tokenizer, or an inconsistent vocabulary.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        Self::from_metadata(gguf)
    }

    /// The tokenizer of a safetensors model folder.
    ///
    /// # Errors
    /// As [`HfTokenizer::open`], and as [`Tokenizer::from_gguf`].
    pub fn open(folder: &std::path::Path) -> Result<Self, TokenizerError> {
        let hf = HfTokenizer::open(folder)?;
        Self::from_metadata(&Metadata::new(hf.metadata(hf.vocab_size())?))
    }

    /// The same as [`Tokenizer::from_gguf`] for metadata that is not in a file.
    ///
    /// # Errors
    /// As [`Tokenizer::from_gguf`].
    pub fn from_metadata(gguf: &Metadata) -> Result<Self, TokenizerError> {
        let name = gguf.str("tokenizer.ggml.model")?;
        let vocab = Vocab::from_metadata(gguf)?;
        let model = match name {
            "gpt2" => {
                let pre = gguf.optional::<&str>("tokenizer.ggml.pre")?.unwrap_or("");
                Model::Bpe(bpe::Bpe::new(&vocab, pre, gguf.required("tokenizer.ggml.merges")?)?)
            }
            "llama" => {
                let scores = gguf.required::<&[f32]>("tokenizer.ggml.scores")?;
                let prefix = gguf.optional("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
                Model::Spm(spm::Spm::new(&vocab, scores, prefix)?)
            }
            other => return Err(TokenizerError::UnknownModel { name: other.to_owned() }),
        };
        Ok(Self { vocab, model })
    }

    /// Token ids of `text`, without a leading bos. With `parse_special`, control tokens written out in the text
    /// (`<|im_start|>`) become those tokens; never pass text of a user that way.
    #[must_use]
    pub fn encode(&self, text: &str, parse_special: bool) -> Vec<u32> {
        self.encode_parts(&[Part { text: text.into(), parse_special }])
    }

    /// Token ids of the concatenated parts. Ordinary text is tokenised across the borders of parts, as if it
    /// were one string; only the search for special tokens respects them.
    #[must_use]
    pub fn encode_parts(&self, parts: &[Part<'_>]) -> Vec<u32> {
        let mut fragments: Vec<Fragment<'_>> = Vec::new();
        for part in parts {
            for fragment in self.vocab.split_special(&part.text, part.parse_special) {
                match (fragments.last_mut(), fragment) {
                    (Some(Fragment::Text(before)), Fragment::Text(text)) => before.to_mut().push_str(&text),
                    (_, fragment) => fragments.push(fragment),
                }
            }
        }
        let mut out = Vec::new();
        let mut after_special = true;
        for fragment in fragments {
            match fragment {
                Fragment::Token(id) => {
                    out.push(id);
                    after_special = true;
                }
                Fragment::Text(text) => {
                    match &self.model {
                        Model::Bpe(bpe) => bpe.encode(&text, &mut out),
                        Model::Spm(spm) => spm.encode(&self.vocab, &text, after_special, &mut out),
                    }
                    after_special = false;
                }
            }
        }
        out
    }

    /// Token ids of a rendered conversation: template text is parsed for special tokens, message text is not.
    ///
    /// # Errors
    /// As [`ChatTemplate::parts`].
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        messages: &[Message<'_>],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ChatError> {
        Ok(self.encode_parts(&template.parts(messages, add_generation_prompt)?))
    }

    /// Text of `ids`, control tokens left out. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary
    /// are skipped.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(&self.piece(id, false));
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        match &self.model {
            // The space that encoding put in front is not part of the text.
            Model::Spm(spm) if spm.add_space_prefix => text.strip_prefix(' ').map_or(text.clone(), str::to_owned),
            _ => text,
        }
    }

    /// Bytes of one token; empty for control tokens unless `special`, and for ids beyond the vocabulary.
    #[must_use]
    pub fn piece(&self, id: u32, special: bool) -> Cow<'_, [u8]> {
        match self.vocab.kind(id) {
            None => Cow::Borrowed(&[]),
            Some(Kind::Control | Kind::Unknown) => {
                if special {
                    Cow::Borrowed(self.vocab.text(id).as_bytes())
                } else {
                    Cow::Borrowed(&[])
                }
            }
            Some(Kind::UserDefined) => Cow::Borrowed(self.vocab.text(id).as_bytes()),
            Some(Kind::Normal | Kind::Byte | Kind::Unused) => match &self.model {
                Model::Bpe(bpe) => Cow::Owned(bpe.bytes(self.vocab.text(id))),
                Model::Spm(_) => Cow::Owned(spm::bytes(self.vocab.text(id), self.vocab.kind(id))),
            },
        }
    }

    /// A decoder that gives out whole characters as tokens arrive.
    #[must_use]
    pub fn stream(&self) -> StreamDecoder<'_> {
        StreamDecoder::new(self)
    }
    /// Number of tokens.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab.len()
    }
    #[must_use]
    pub fn special(&self) -> &SpecialIds {
        &self.vocab.special
    }
    /// Whether generation stops at this token (end of text, turn or message).
    #[must_use]
    pub fn is_end(&self, id: u32) -> bool {
        self.vocab.special.ends.contains(&id)
    }
    /// Id of a token by its exact text as stored in the vocabulary.
    #[must_use]
    pub fn id_of(&self, text: &str) -> Option<u32> {
        self.vocab.id(text)
    }
    /// Text of a token as stored in the vocabulary.
    #[must_use]
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.kind(id).map(|_| self.vocab.text(id))
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod vocab_tests;
