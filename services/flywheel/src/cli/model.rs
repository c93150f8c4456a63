//! `flywheel model`: the same functions that the jobs call, on files.

use super::{ModelCommand, say};
use crate::models::{quantize_file, refused};
use crate::pipeline::blocking::Watch;
use crate::pipeline::lora::{Recipe, Work, train};
use anyhow::{Context, Result, bail};
use flywheel_attribution::dataset::DatasetV1;
use flywheel_inference::gguf::Gguf;
use flywheel_inference::quantize::{Profile, QuantizeOptions};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Runs one command. Blocking.
///
/// # Errors
/// With the file's name and what to do.
pub fn run(command: ModelCommand) -> Result<()> {
    match command {
        ModelCommand::Inspect { file } => inspect(&file),
        ModelCommand::Quantize { input, output, profile, allow_requantize } => {
            let mut options = QuantizeOptions::new(profile.parse::<Profile>().map_err(refused)?);
            options.allow_requantize = allow_requantize;
            let report = quantize_file(&input, &output, &options, &mut |_| ControlFlow::Continue(()))?;
            say(&serde_json::to_string_pretty(&crate::pipeline::requantize::summary(&report))?);
            Ok(())
        }
        ModelCommand::Train { base, dataset, output, steps, lr, rank, profile, seed } => {
            let recipe = Recipe { steps, learning_rate: lr, rank, seed, profile, ..Recipe::default() };
            tune(base, &dataset, &output, recipe)
        }
    }
}

fn inspect(file: &Path) -> Result<()> {
    let gguf = Gguf::open(file).with_context(|| format!("{}", file.display()))?;
    say(&format!("GGUF v{}, {} bytes, alignment {}", gguf.version(), gguf.size_bytes(), gguf.alignment()));
    for (key, value) in gguf.metadata() {
        let text = format!("{value:?}");
        say(&format!("{key}: {}", text.chars().take(120).collect::<String>()));
    }
    for t in gguf.tensors() {
        say(&format!("{:40} {:?} {:?}", t.name, t.dims, t.ty));
    }
    Ok(())
}

/// Trains on a dataset (the JSON lines of a snapshot), merges and quantises.
fn tune(base: PathBuf, dataset: &Path, output: &Path, recipe: Recipe) -> Result<()> {
    let bytes = std::fs::read(dataset).with_context(|| format!("cannot read {}", dataset.display()))?;
    let samples = DatasetV1::read(&bytes).with_context(|| format!("{} is not a dataset", dataset.display()))?;
    if samples.is_empty() {
        bail!("{} holds no sample", dataset.display());
    }
    let profile = recipe.profile.clone();
    let merged = output.with_extension("merged.gguf");
    let work = Work { base, samples, recipe, checkpoint: output.with_extension("state"), merged: merged.clone() };
    let checkpoint = work.checkpoint.clone();
    let losses = train(work, &Watch::default())?;
    let _ = std::fs::remove_file(checkpoint);
    if profile == "f16" {
        std::fs::rename(&merged, output)?;
    } else {
        let options = QuantizeOptions::new(profile.parse::<Profile>().map_err(refused)?);
        quantize_file(&merged, output, &options, &mut |_| ControlFlow::Continue(()))?;
        std::fs::remove_file(&merged)?;
    }
    say(&format!("{{\"first_loss\": {:?}, \"last_loss\": {:?}}}", losses.first(), losses.last()));
    Ok(())
}
