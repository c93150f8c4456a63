//! What an evaluation needs of the engine that runs the model, so that the same measurements can be made with ours and with
//! the phones' own.

use crate::model::{Decoder, GenerateOptions, Generated, LogitVisitor, ModelError};
use std::{fmt::Debug, ops::ControlFlow, ops::Range};

/// Sees a finished text with the index of its prompt, and can stop the work.
pub type GeneratedWatch<'a> = dyn FnMut(usize, &Generated) -> ControlFlow<()> + 'a;

/// A model that can be evaluated. Tokens are those of the file's vocabulary, whichever engine runs it.
pub trait Engine: Debug {
    /// Tokens of the vocabulary, which is the width of a row of logits.
    fn vocab(&self) -> usize;

    /// Identity of the weights, see [`crate::model::base_digest`].
    fn base_digest(&self) -> &str;

    /// Logits that follow each of `positions` (rising) of `tokens`: `visit(position, row)`.
    ///
    /// # Errors
    /// [`ModelError::Input`] for tokens that cannot be run, [`ModelError::NotFinite`], or what `visit` returned.
    fn visit_logits(
        &self,
        tokens: &[u32],
        positions: Range<usize>,
        visit: &mut LogitVisitor<'_>,
    ) -> Result<(), ModelError>;

    /// Sum of the log-likelihoods (nats) of each option's tokens after `prompt`.
    ///
    /// # Errors
    /// As [`Engine::visit_logits`], and [`ModelError::Input`] for a prompt or an option without tokens.
    fn option_log_likelihoods(&self, prompt: &[u32], options: &[Vec<u32>]) -> Result<Vec<f64>, ModelError>;

    /// Generates for all prompts; results in their order.
    ///
    /// # Errors
    /// As [`Engine::visit_logits`], and [`ModelError::Input`] for options that this engine does not know;
    /// [`ModelError::Cancelled`].
    fn generate(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        watch: &mut GeneratedWatch<'_>,
    ) -> Result<Vec<Generated>, ModelError>;
}

impl Engine for Decoder {
    fn vocab(&self) -> usize {
        self.config().vocab
    }

    fn base_digest(&self) -> &str {
        Self::base_digest(self)
    }

    fn visit_logits(
        &self,
        tokens: &[u32],
        positions: Range<usize>,
        visit: &mut LogitVisitor<'_>,
    ) -> Result<(), ModelError> {
        Self::visit_logits(self, tokens, positions, visit)
    }

    fn option_log_likelihoods(&self, prompt: &[u32], options: &[Vec<u32>]) -> Result<Vec<f64>, ModelError> {
        Self::option_log_likelihoods(self, prompt, options)
    }

    fn generate(
        &self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        watch: &mut GeneratedWatch<'_>,
    ) -> Result<Vec<Generated>, ModelError> {
        self.generate_batch_watched(prompts, options, watch)
    }
}
