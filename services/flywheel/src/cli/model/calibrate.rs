//! `flywheel model calibrate`.

use super::progress::{Bar, Session};
use super::texts::TextArgs;
use super::{show, write, write_json};
use crate::models::quantized::failed;
use crate::models::{open, refused};
use anyhow::Result;
use flywheel_inference::calibrate::{Calibration, calibrate};
use flywheel_inference::gguf::{Gguf, TensorType};
use flywheel_inference::quantize::sensitivity;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model; best the float one.
    model: PathBuf,
    /// Importance matrix to make, in llama.cpp's GGUF layout.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    texts: TextArgs,
    /// Tokens of a piece of plain text; each piece stands for itself.
    #[arg(long, default_value_t = 512)]
    chunk: usize,
    /// Also write which matrices and layers are sensitive: Markdown, or JSON for a name that ends in `.json`.
    #[arg(long, value_name = "FILE")]
    sensitivity: Option<PathBuf>,
    /// The type that sensitivity is measured for.
    #[arg(long, default_value = "Q4_0")]
    sensitivity_type: TensorType,
    /// Seed of the noise that sensitivity is measured with.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// For machines.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, session: &Session) -> Result<()> {
    if args.texts.files.is_empty() {
        return Err(crate::cli::Usage("calibration needs texts: --text FILE".into()).into());
    }
    let gguf = open(&args.model)?;
    let texts = args.texts.read(&gguf, args.chunk)?;
    let mut bar = Bar::new(session, "calibrating block");
    let found = calibrate(&gguf, &texts.texts, &mut |done, of| bar.step(done, of, "")).map_err(refused);
    drop(bar);
    let found = found?;
    found.imatrix(texts.names.clone()).map_err(refused)?.write(&args.out).map_err(refused)?;
    if let Some(path) = &args.sensitivity {
        sensitive(args, &gguf, &texts.texts, path, session)?;
    }
    let whole = report(&found, &texts.names, texts.texts.len(), texts.tokens());
    let mut lines = vec![format!("{} tokens in {} texts", texts.tokens(), texts.texts.len())];
    let outliers = |i: &flywheel_inference::calibrate::CalibratedInput| i.stats.outlier_channels().len();
    lines.push(format!(
        "{} inputs, {} with outlier channels (standard deviation above 2.5 times the mean)",
        found.inputs.len(),
        found.inputs.iter().filter(|i| outliers(i) > 0).count()
    ));
    lines.extend(found.dead_channels().map(|(tensor, dead)| {
        format!("warning: {dead} input channels of {tensor} were always zero: calibrate on more text")
    }));
    show(args.json, &whole, &lines)
}

fn report(found: &Calibration, names: &[String], texts: usize, tokens: usize) -> Value {
    let inputs: Vec<Value> = found
        .inputs
        .iter()
        .map(|i| {
            json!({
                "tensors": i.tensors, "tokens": i.stats.count, "running_range": i.stats.running_range(),
                "outlier_channels": i.stats.outlier_channels(), "dead_channels": i.stats.dead_channels().len(),
            })
        })
        .collect();
    json!({ "datasets": names, "texts": texts, "tokens": tokens, "inputs": inputs })
}

fn sensitive(args: &Args, gguf: &Gguf, texts: &[Vec<u32>], path: &Path, session: &Session) -> Result<()> {
    let mut bar = Bar::new(session, "sensitivity");
    let found =
        sensitivity(gguf, texts, args.sensitivity_type, args.seed, &mut |p| bar.step(p.done, p.total, p.tensor));
    drop(bar);
    let found = found.map_err(failed)?;
    if path.extension().is_some_and(|e| e == "json") {
        return write_json(path, &json!(found));
    }
    write(path, found.to_string().as_bytes())
}
