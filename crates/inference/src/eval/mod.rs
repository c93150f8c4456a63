//! Evaluation of a decoder: perplexity, divergence from another model, answers, speed.
//!
//! Results per item come back in the order of the items, so two models can be compared pair by pair.

mod answers;
mod divergence;
mod speed;

pub use answers::{AnswerResult, AnswerSet, MatchRule, Paired, Question, normalize, paired};
pub use divergence::{Divergence, Perplexity, divergence, perplexity};
pub use speed::{Probes, SpeedReport, speed};

#[cfg(test)]
mod tests;
