//! Evaluation of a decoder: perplexity, divergence from another model, answers, choices, refusals, scores of texts, what
//! makes its tokens, speed and memory, measured and predicted.
//!
//! Results per item come back in the order of the items, so two models can be compared pair by pair.

mod answers;
mod choice;
mod divergence;
mod engine;
mod identity;
mod interval;
mod ladder;
#[cfg(feature = "llama-cpp")]
mod llama_cpp;
mod memory;
mod plot;
mod recorded;
mod roofline;
mod safety;
mod speed;
mod texts;

pub use answers::{AnswerResult, AnswerSet, MatchRule, Paired, Question, normalize, paired};
pub use choice::{ChoiceItem, ChoiceResult, gsm8k_choices, multiple_choice};
pub use divergence::{
    Base, Divergence, DivergenceIntervals, PairedDivergence, Perplexity, PositionScores, divergence, perplexity,
    position_scores,
};
pub(crate) use divergence::{kl_divergence, position_scores_of};
pub use engine::{Engine, GeneratedWatch};
pub use identity::{TextIdentity, text_identity};
pub use interval::{Estimate, Interval, share};
pub use ladder::{
    Ladder, LadderError, LadderFile, LadderOptions, LadderProbes, LadderRow, Maker, ladder, ladder_files, model_ladder,
};
#[cfg(feature = "llama-cpp")]
pub use llama_cpp::LlamaCpp;
pub use memory::{WorkingMemory, working_memory};
pub use recorded::{RecordHead, RecordedBase, record_base};
pub use roofline::{Bound, DeviceClass, Prediction, StoredModel, measure_ceilings, predict};
pub use safety::{
    Must, SafetyItem, SafetyReport, SafetyResult, SafetyShares, Says, judged, own_safety_set, read_safety_set, safety,
};
pub use speed::{Probes, SpeedReport, speed};
pub use texts::{TextScore, score_texts};

#[cfg(test)]
mod tests;
