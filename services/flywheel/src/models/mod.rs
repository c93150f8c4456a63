//! Model files: open, build prompts, make tokens of texts, quantise. Jobs and the command line call the same functions.
//! Everything here computes for seconds to minutes and is called from blocking threads only.

pub mod quantized;
#[cfg(test)]
pub mod testing;
pub mod texts;
pub mod training;

use flywheel_inference::eval::{TextIdentity, text_identity};
use flywheel_inference::gguf::{Gguf, GgufError};
use flywheel_inference::model::{Decoder, GenerateOptions, KvType, Storage};
use flywheel_inference::tokenizer::{ChatTemplate, Message, Tokenizer};
use flywheel_types::Error;
use std::path::Path;

/// A model with its tokenizer and chat template. `D` runs it: our decoder, or any [`flywheel_inference::eval::Engine`].
pub struct Model<D = Decoder> {
    pub decoder: D,
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    /// What turns text into tokens, as digests.
    pub identity: TextIdentity,
    /// Size of the file.
    pub file_bytes: u64,
}

/// Code of [`refused`].
pub const REFUSED: &str = "model_refused";

/// A failure of the inference crate that the operator can act on: the file or its content is at fault.
pub fn refused(e: impl std::fmt::Display) -> Error {
    Error::invalid(REFUSED, e.to_string(), "check the model file; `flywheel model inspect FILE` shows what is in it")
}

/// Opens a model file.
///
/// # Errors
/// [`refused`] for bytes that are no known GGUF file; internal when the system cannot read it.
pub fn open(file: &Path) -> Result<Gguf, Error> {
    Gguf::open(file).map_err(|e| match e {
        GgufError::Io { .. } => Error::internal(e),
        other => refused(other),
    })
}

impl Model {
    /// Loads a GGUF file for jobs, which judge and train weights: activations, keys and values are not rounded to 8 bits, as
    /// every engine of a phone does that in its own way.
    ///
    /// # Errors
    /// `Invalid` naming what the file lacks or what is not known; as [`open`].
    pub fn load(gguf: &Gguf) -> Result<Self, Error> {
        Self::with(gguf, Decoder::load_with(gguf, Storage::F16).map_err(refused)?)
    }
}

impl<D> Model<D> {
    /// As [`Model::load`], with a decoder of the file that is loaded already.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn with(gguf: &Gguf, decoder: D) -> Result<Self, Error> {
        Ok(Self {
            decoder,
            tokenizer: Tokenizer::from_gguf(gguf).map_err(refused)?,
            template: ChatTemplate::from_gguf(gguf).map_err(refused)?,
            identity: text_identity(gguf),
            file_bytes: gguf.size_bytes(),
        })
    }

    /// Tokens of a single user message, ready for the answer.
    ///
    /// # Errors
    /// `Invalid` for what the template refuses.
    pub fn prompt(&self, user: &str) -> Result<Vec<u32>, Error> {
        self.tokenizer.encode_chat(&self.template, &[Message::user(user)], true).map_err(refused)
    }

    /// Greedy answers that end where the model ends them.
    #[must_use]
    pub fn answering(&self, max_new_tokens: usize) -> GenerateOptions {
        let stop_ids = self.tokenizer.special().ends.clone();
        GenerateOptions { max_new_tokens, stop_ids, cache: KvType::F16, ..GenerateOptions::default() }
    }

    /// Text of an answer.
    #[must_use]
    pub fn text(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens).trim().to_owned()
    }
}
