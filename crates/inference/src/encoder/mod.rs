//! Sentence encoder: BERT (MiniLM) with mean pooling and unit length, the model behind retrieval and
//! re-embedding.
//!
//! Reads a folder in the sentence-transformers layout: `model.safetensors`, `config.json`, `tokenizer.json` or
//! `vocab.txt`, and if present `sentence_bert_config.json` and `1_Pooling/config.json`. A text's vector does not depend on
//! what else is in the batch or on the number of threads.

mod config;
mod forward;
mod weights;

use crate::safetensors_file::SafetensorsError;
use crate::tokenizer::{TokenizerError, WordPiece};
use config::Config;
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// Why an encoder could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    #[error("{}: {what}", path.display())]
    File { path: PathBuf, what: String },
    #[error(transparent)]
    Weights(#[from] SafetensorsError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl EncoderError {
    fn file(path: &Path, what: impl ToString) -> Self {
        Self::File { path: path.to_owned(), what: what.to_string() }
    }
}

/// Tokens that go through the layers at a time: bounds memory, and keeps activations in the cache.
const PASS_TOKENS: usize = 1024;

/// An opened sentence encoder. Immutable; share it behind `Arc`.
#[derive(Debug)]
pub struct Encoder {
    config: Config,
    tokenizer: WordPiece,
    weights: weights::Weights,
}

impl Encoder {
    /// Opens a model folder.
    ///
    /// # Errors
    /// [`EncoderError`] for missing or inconsistent files and for anything but a BERT encoder with absolute
    /// positions, GELU and mean pooling.
    pub fn open(folder: &Path) -> Result<Self, EncoderError> {
        let config = Config::open(folder)?;
        let tokenizer = WordPiece::open(folder)?;
        if tokenizer.vocab_size() > config.vocab_size {
            let what = format!("{} tokens but {} embeddings", tokenizer.vocab_size(), config.vocab_size);
            return Err(EncoderError::file(folder, what));
        }
        let weights = weights::Weights::open(&folder.join("model.safetensors"), &config)?;
        Ok(Self { config, tokenizer, weights })
    }

    /// Length of a vector, for example 384.
    #[must_use]
    pub fn dims(&self) -> usize {
        self.config.hidden_size
    }
    /// Longest text that is read whole, in tokens (`[CLS]` and `[SEP]` included); more is cut off.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.config.max_tokens
    }
    /// Number of tokens of `text` before cutting, `[CLS]` and `[SEP]` included: to notice texts that are too long.
    #[must_use]
    pub fn count_tokens(&self, text: &str) -> usize {
        self.tokenizer.encode(text, usize::MAX).len()
    }

    /// One vector of unit length per text, in order; the dot product of two is their cosine similarity.
    #[must_use]
    pub fn embed<S: AsRef<str> + Sync>(&self, texts: &[S]) -> Vec<Vec<f32>> {
        let tokens: Vec<Vec<u32>> =
            texts.par_iter().map(|t| self.tokenizer.encode(t.as_ref(), self.config.max_tokens)).collect();
        let mut out = Vec::with_capacity(tokens.len());
        let mut rest = tokens.as_slice();
        while !rest.is_empty() {
            let mut sum = 0;
            let fits = rest.iter().take_while(|t| {
                sum += t.len();
                sum <= PASS_TOKENS
            });
            let (batch, after) = rest.split_at(fits.count().max(1));
            out.extend(forward::embed(&self.config, &self.weights, batch));
            rest = after;
        }
        out
    }
}

#[cfg(test)]
mod tests;
