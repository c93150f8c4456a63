//! Evaluation of a decoder: perplexity, divergence from another model, answers, scores of texts, what makes its
//! tokens, speed and memory.
//!
//! Results per item come back in the order of the items, so two models can be compared pair by pair.

mod answers;
mod divergence;
mod identity;
mod memory;
mod speed;
mod texts;

pub use answers::{AnswerResult, AnswerSet, MatchRule, Paired, Question, normalize, paired};
pub(crate) use divergence::Pairs;
pub use divergence::{Divergence, Perplexity, divergence, perplexity};
pub use identity::{TextIdentity, text_identity};
pub use memory::{WorkingMemory, working_memory};
pub use speed::{Probes, SpeedReport, speed};
pub use texts::{TextScore, score_texts};

#[cfg(test)]
mod tests;
