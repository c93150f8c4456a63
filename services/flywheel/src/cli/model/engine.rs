//! Which engine runs the model in `flywheel model eval`: ours, or llama.cpp as on phones.

use crate::models::refused;
use crate::models::training::open_adapter;
use anyhow::{Context, Result};
use flywheel_inference::eval::Engine;
use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::Decoder;
use std::path::Path;
use std::rc::Rc;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    Own,
    /// Needs a build with `--features llama-cpp`.
    LlamaCpp,
}

#[derive(Debug, clap::Args)]
pub struct EngineArgs {
    /// What runs the model.
    #[arg(long, value_enum, default_value = "own", conflicts_with = "ladder")]
    engine: Name,
}

/// A model ready to be measured.
pub struct Runs {
    /// For scores of texts. Ours leaves activations as they are: what is compared is the weights.
    pub texts: Rc<dyn Engine>,
    /// For answers and speed.
    pub answers: Rc<dyn Engine>,
}

impl EngineArgs {
    /// `gguf` is the opened `file`.
    pub fn open(&self, file: &Path, gguf: &Gguf, adapter: Option<&Path>) -> Result<Runs> {
        match self.engine {
            Name::Own => own(gguf, adapter),
            Name::LlamaCpp => llama_cpp(file, adapter),
        }
    }
}

fn own(gguf: &Gguf, adapter: Option<&Path>) -> Result<Runs> {
    let mut decoder = Decoder::load(gguf).map_err(refused)?;
    if let Some(path) = adapter {
        let adapter = open_adapter(path, gguf).with_context(|| format!("{}", path.display()))?;
        decoder = decoder.with_adapter(&adapter).map_err(refused)?;
    }
    Ok(Runs { texts: Rc::new(decoder.exact()), answers: Rc::new(decoder) })
}

#[cfg(feature = "llama-cpp")]
fn llama_cpp(file: &Path, adapter: Option<&Path>) -> Result<Runs> {
    let model = Rc::new(flywheel_inference::eval::LlamaCpp::open(file, adapter).map_err(refused)?);
    Ok(Runs { texts: model.clone(), answers: model })
}

#[cfg(not(feature = "llama-cpp"))]
fn llama_cpp(_: &Path, _: Option<&Path>) -> Result<Runs> {
    use crate::cli::Usage;
    let what = "this build has no llama.cpp; build with `cargo build --release -p flywheel --features llama-cpp` \
                (needs cmake, a C++ compiler and libclang), or leave out --engine";
    Err(Usage(what.into()).into())
}
