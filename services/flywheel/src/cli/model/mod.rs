//! `flywheel model`: work on model files without a server. The jobs call the same functions.

mod calibrate;
mod chat;
mod convert;
mod engine;
mod eval;
mod inspect;
mod ladder;
mod merge;
mod progress;
mod prune;
mod quantize;
mod shard;
mod texts;
mod train;
mod values;

use super::{Stopped, say};
use anyhow::{Context, Result};
use clap::Subcommand;
use progress::Session;
use serde_json::Value;
use std::path::Path;

#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Show what is in a GGUF file: sizes, types, true bits per weight, digests, and what will not work.
    Inspect(inspect::Args),
    /// Make a GGUF file of a safetensors folder.
    Convert(convert::Args),
    /// Make an importance matrix from texts, for ours and for stock llama.cpp's quantiser.
    Calibrate(calibrate::Args),
    /// Make a small file of a float model, for stock llama.cpp, or a tensor pack for NPUs.
    Quantize(quantize::Args),
    /// Train a LoRA adapter, or the norms of a model, on conversations.
    Train(train::Args),
    /// Fold an adapter into the model it was trained on.
    Merge(merge::Args),
    /// Measure a model: perplexity, divergence from a base, answers, choices, safety, speed, or the whole ladder of sizes.
    Eval(eval::Args),
    /// Talk to a model.
    Chat(chat::Args),
    /// Cut a model into files of a limited size, or join them again.
    Shard(shard::Args),
    /// Measure what each layer and head group is worth, and write a model without the least of them.
    Prune(prune::Args),
}

/// Runs one command; Ctrl-C stops it at its next look, and leaves no unfinished file.
///
/// # Errors
/// With the file's name and what to do; [`Stopped`].
pub async fn run(command: ModelCommand) -> Result<()> {
    let session = Session::default();
    tokio::spawn(session.clone().listen());
    tokio::task::spawn_blocking(move || {
        let done = dispatch(command, &session);
        match done {
            Err(e) if session.is_stopped() => Err(Stopped(format!("stopped: {e}")).into()),
            other => other,
        }
    })
    .await?
}

fn dispatch(command: ModelCommand, session: &Session) -> Result<()> {
    match command {
        ModelCommand::Inspect(a) => inspect::run(&a),
        ModelCommand::Convert(a) => convert::run(&a, session),
        ModelCommand::Calibrate(a) => calibrate::run(&a, session),
        ModelCommand::Quantize(a) => quantize::run(&a, session),
        ModelCommand::Train(a) => train::run(&a, session),
        ModelCommand::Merge(a) => merge::run(&a, session),
        ModelCommand::Eval(a) => eval::run(&a, session),
        ModelCommand::Chat(a) => chat::run(&a, session),
        ModelCommand::Shard(a) => shard::run(&a, session),
        ModelCommand::Prune(a) => prune::run(&a, session),
    }
}

/// A result for people, or for machines.
fn show(json: bool, value: &Value, lines: &[String]) -> Result<()> {
    if json {
        say(&serde_json::to_string_pretty(value)?);
    } else {
        lines.iter().for_each(|line| say(line));
    }
    Ok(())
}

/// Writes a file that appears when it is whole.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.part", std::process::id()));
    let temp = path.with_file_name(name);
    std::fs::write(&temp, bytes)
        .and_then(|()| std::fs::rename(&temp, path))
        .inspect_err(|_| drop(std::fs::remove_file(&temp)))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a report for machines.
fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    bytes.push(b'\n');
    write(path, &bytes)
}
