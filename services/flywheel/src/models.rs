//! Model files on the server: open, answer a set of prompts, train. Everything here computes for seconds to minutes
//! and is called from blocking threads only.

use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::{Decoder, GenerateOptions};
use flywheel_inference::quantize::{QuantizeOptions, QuantizeReport, quantize};
use flywheel_inference::tokenizer::{ChatTemplate, Message, Tokenizer};
use flywheel_types::Error;
use std::ops::ControlFlow;
use std::path::Path;

/// A model with its tokenizer and chat template.
pub struct Model {
    pub decoder: Decoder,
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
}

/// A failure of the inference crate that the operator can act on: the file or its content is at fault.
pub fn refused(e: impl std::fmt::Display) -> Error {
    Error::invalid(
        "model_refused",
        e.to_string(),
        "check the model file; `flywheel model inspect FILE` shows what is in it",
    )
}

impl Model {
    /// Loads a GGUF file.
    ///
    /// # Errors
    /// `Invalid` naming what the file lacks or what is not known.
    pub fn open(file: &Path) -> Result<Self, Error> {
        let gguf = Gguf::open(file).map_err(refused)?;
        Ok(Self {
            decoder: Decoder::load(&gguf).map_err(refused)?,
            tokenizer: Tokenizer::from_gguf(&gguf).map_err(refused)?,
            template: ChatTemplate::from_gguf(&gguf).map_err(refused)?,
        })
    }

    /// Tokens of a single user message, ready for the answer.
    ///
    /// # Errors
    /// `Invalid` for what the template refuses.
    pub fn prompt(&self, user: &str) -> Result<Vec<u32>, Error> {
        self.tokenizer.encode_chat(&self.template, &[Message::user(user)], true).map_err(refused)
    }

    /// Greedy answers to user messages, in order.
    ///
    /// # Errors
    /// Of the decoder.
    pub fn answer(&self, users: &[&str], max_new_tokens: usize) -> Result<Vec<String>, Error> {
        let prompts = users.iter().map(|u| self.prompt(u)).collect::<Result<Vec<_>, _>>()?;
        let options = GenerateOptions { max_new_tokens, stop_ids: self.stop_ids(), ..GenerateOptions::default() };
        let answers = self.decoder.generate_batch(&prompts, &options).map_err(refused)?;
        Ok(answers.iter().map(|g| self.tokenizer.decode(&g.tokens).trim().to_owned()).collect())
    }

    fn stop_ids(&self) -> Vec<u32> {
        let special = self.tokenizer.special();
        let end = self.tokenizer.id_of(self.template.end_of_answer());
        special.eos.into_iter().chain(special.eot).chain(end).collect()
    }
}

/// Quantises a file.
///
/// # Errors
/// `Invalid` naming the tensor that cannot be quantised and what to do.
pub fn quantize_file(input: &Path, output: &Path, options: &QuantizeOptions) -> Result<QuantizeReport, Error> {
    let base = Gguf::open(input).map_err(refused)?;
    quantize(&base, output, options, &mut |_| ControlFlow::Continue(())).map_err(refused)
}

/// Whether `expected` stands in `answer` as a word or number of its own.
#[must_use]
pub fn contains_value(answer: &str, expected: &str) -> bool {
    let (answer, expected) = (answer.to_lowercase(), expected.trim().to_lowercase());
    if expected.is_empty() {
        return false;
    }
    answer.match_indices(&expected).any(|(at, found)| {
        let before = answer[..at].chars().next_back();
        let mut after = answer[at + found.len()..].chars();
        let (next, then) = (after.next(), after.next());
        let glued = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let decimal = matches!(next, Some('.' | ',')) && then.is_some_and(|c| c.is_ascii_digit());
        let fraction = before == Some('.') && answer[..at - 1].ends_with(|c: char| c.is_ascii_digit());
        !glued(before) && !glued(next) && !decimal && !fraction
    })
}

#[cfg(test)]
mod tests {
    use super::contains_value;

    #[test]
    fn values_match_as_words() {
        assert!(contains_value("It is 14 days.", "14"));
        assert!(contains_value("约14天", "14"));
        assert!(contains_value("The Original Box", "original box"));
        for (answer, value) in [("140 days", "14"), ("14.5 days", "14"), ("1.14", "14"), ("x", "")] {
            assert!(!contains_value(answer, value), "{answer}");
        }
    }
}
