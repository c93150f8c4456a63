//! Pure decisions about failures: which answers are refusals, which prompt template was used, which knowledge
//! chunk, template or slice causes the excess of rejected answers, what a correction changed, which samples may
//! train, and whether a re-embedded chunk is better. No clock, no randomness, no I/O: the same input gives the
//! same output, bit for bit.
//!
//! | module | question |
//! |---|---|
//! | [`refusal`] | did the model refuse, abstain or answer? |
//! | [`template`] | which prompt template is behind this prompt? |
//! | [`culprit`] | which chunk or template causes failures, and what may be done about it by itself? |
//! | [`slice`] | which bundle × device × locale combination holds the excess? |
//! | [`diff`] | what did the correction change? |
//! | [`dataset`] | which corrections become training samples? |
//! | [`retrieval`] | how do lexical, dense and late-interaction scores rank chunks, before and after re-embedding? |

pub mod culprit;
pub mod dataset;
pub mod diff;
mod hash;
pub mod refusal;
pub mod retrieval;
pub mod slice;
pub mod template;
