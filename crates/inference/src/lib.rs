//! Models on the server: GGUF files, block codecs, tokenizers, decoders, one sentence encoder, quantisation,
//! LoRA training and evaluation; ONNX graphs rewritten.
//!
//! Pure computation over files it is given: no network, no clock, no database. What it does not know (a tensor
//! type, a pre-tokenizer, a chat template) it refuses by name instead of guessing.

pub mod calibrate;
pub mod codec;
pub mod convert;
pub mod encoder;
pub mod eval;
mod files;
pub mod gguf;
mod linalg;
pub mod model;
pub mod onnx;
pub mod prune;
pub mod quantize;
pub mod safetensors_file;
pub mod tokenizer;
pub mod train;

#[cfg(test)]
mod stock_tests;
#[cfg(test)]
pub(crate) mod testing;
