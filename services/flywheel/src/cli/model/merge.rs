//! `flywheel model merge`.

use super::progress::{Session, note};
use super::show;
use crate::models::open;
use crate::models::training::{open_adapter, write_merged};
use anyhow::{Context, Result};
use flywheel_inference::model::MergedType;
use serde_json::json;
use std::path::PathBuf;

/// Type of the matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Float {
    F16,
    F32,
}

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model that the adapter was trained on.
    base: PathBuf,
    /// The adapter: a GGUF file, or a folder that PEFT wrote.
    adapter: PathBuf,
    /// File to make.
    out: PathBuf,
    /// Type of the matrices; vectors stay F32.
    #[arg(long = "type", value_enum, default_value = "f16")]
    ty: Float,
    /// Accept a base that the adapter was not trained on, as long as the shapes fit. Measure the result.
    #[arg(long)]
    allow_other_base: bool,
    /// For machines.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, session: &Session) -> Result<()> {
    let mut adapter =
        open_adapter(&args.adapter, &open(&args.base)?).with_context(|| format!("{}", args.adapter.display()))?;
    let trained_on = adapter.base_sha256.clone();
    if args.allow_other_base {
        adapter.base_sha256 = None;
    }
    if adapter.base_sha256.is_none() {
        note("the base is not checked: whether this adapter was made for it is not known");
    }
    let ty = match args.ty {
        Float::F16 => MergedType::F16,
        Float::F32 => MergedType::F32,
    };
    let go_on = || session.check().is_ok();
    let size_bytes = write_merged(&args.base, &adapter, &args.out, ty, &go_on)?;
    let matrices = adapter.pairs().count();
    let whole = json!({ "size_bytes": size_bytes, "matrices": matrices, "trained_on": trained_on });
    show(args.json, &whole, &[format!("{matrices} matrices changed, {size_bytes} bytes")])
}
