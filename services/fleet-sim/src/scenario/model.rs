//! A model as a phone runs it: chat prompt in, short answer out.

use super::prompt;
use anyhow::{Context, Result};
use fleet_sim::BrainAnswer;
use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::{Adapter, Decoder, GenerateOptions, KvType, Storage};
use flywheel_inference::tokenizer::{ChatTemplate, Tokenizer};
use flywheel_inference::train::Sample;
use std::path::Path;

/// Longest answer, tokens. A sentence that names the product takes 10 to 25; one that is cut off before the value is
/// wrong.
const MAX_ANSWER_TOKENS: usize = 32;

/// A loaded model file.
pub struct Engine {
    decoder: Decoder,
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

impl Engine {
    /// Loads a GGUF file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = Gguf::open(path).with_context(|| format!("cannot open the model {}", path.display()))?;
        let load = || -> Result<Self> {
            Ok(Self {
                // activations are not rounded: every engine does that in its own way, and the story is about weights
                decoder: Decoder::load_with(&file, Storage::F16)?,
                tokenizer: Tokenizer::from_gguf(&file)?,
                template: ChatTemplate::from_gguf(&file)?,
            })
        };
        load().with_context(|| format!("cannot load the model {}", path.display()))
    }

    fn prompt(&self, user: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(&self.template, &prompt::messages(user), true)?)
    }

    /// Answers all user texts, in order; they are processed together.
    pub fn answer(&self, users: &[String]) -> Result<Vec<BrainAnswer>> {
        let prompts = users.iter().map(|u| self.prompt(u)).collect::<Result<Vec<_>>>()?;
        let options = GenerateOptions {
            max_new_tokens: MAX_ANSWER_TOKENS,
            stop_ids: self.tokenizer.special().ends.clone(),
            cache: KvType::F16,
            ..GenerateOptions::default()
        };
        let made = self.decoder.generate_batch(&prompts, &options)?;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(prompts
            .iter()
            .zip(made)
            .map(|(p, m)| BrainAnswer {
                text: self.tokenizer.decode(&m.tokens).trim().to_owned(),
                input_tokens: count(p.len()),
                output_tokens: count(m.tokens.len()),
            })
            .collect())
    }

    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// A training text with this answer.
    pub fn sample(&self, user: &str, answer: &str) -> Result<Sample> {
        Ok(Sample::chat(&self.tokenizer, &self.template, &prompt::messages(user), answer)?)
    }

    /// From now on answers come from the model with this adapter.
    pub fn adapt(&mut self, adapter: &Adapter) -> Result<()> {
        self.decoder = self.decoder.with_adapter(adapter)?;
        Ok(())
    }
}
