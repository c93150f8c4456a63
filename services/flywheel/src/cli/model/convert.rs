//! `flywheel model convert`.

use super::progress::{Bar, Session};
use super::show;
use anyhow::{Context, Result};
use flywheel_inference::convert::{FloatType, convert};
use serde_json::json;
use std::path::PathBuf;

/// Type of the matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Float {
    F16,
    Bf16,
    F32,
}

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with `config.json`, `tokenizer.json` and the safetensors.
    folder: PathBuf,
    /// GGUF file to make.
    out: PathBuf,
    /// Type of the matrices; vectors stay F32.
    #[arg(long = "type", value_enum, default_value = "f16")]
    ty: Float,
    /// For machines.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, session: &Session) -> Result<()> {
    let ty = match args.ty {
        Float::F16 => FloatType::F16,
        Float::Bf16 => FloatType::BF16,
        Float::F32 => FloatType::F32,
    };
    let mut bar = Bar::new(session, "converting");
    let report = convert(&args.folder, &args.out, ty, &mut |p| bar.step(p.done, p.total, p.tensor));
    drop(bar);
    let report = report.with_context(|| format!("{}", args.folder.display()))?;
    let whole = json!({
        "architecture": report.architecture, "tensors": report.tensors, "size_bytes": report.size_bytes,
        "warnings": report.warnings,
    });
    let mut lines = vec![format!("{}: {} tensors, {} bytes", report.architecture, report.tensors, report.size_bytes)];
    lines.extend(report.warnings.iter().map(|w| format!("warning: {w}")));
    show(args.json, &whole, &lines)
}
