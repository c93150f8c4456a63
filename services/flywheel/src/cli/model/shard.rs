//! `flywheel model shard`.

use super::progress::Session;
use super::show;
use super::values::bytes;
use crate::cli::Usage;
use crate::models::{open, refused};
use anyhow::{Result, bail};
use flywheel_inference::gguf::{Gguf, GgufError, TensorData, TensorSpec, write, write_shards};
use serde_json::json;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model; the first file of a set with `--join`.
    model: PathBuf,
    /// Beginning of the names of the files, `OUT-00001-of-….gguf`; the one file with `--join`.
    out: PathBuf,
    /// Most bytes of a file.
    #[arg(long, value_parser = bytes, default_value = "200MB", conflicts_with = "join")]
    max_size: u64,
    /// Make one file of a set.
    #[arg(long)]
    join: bool,
    /// For machines.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, session: &Session) -> Result<()> {
    let gguf = open(&args.model)?;
    if args.join && gguf.n_files() == 1 {
        bail!(Usage(format!("{} is one file already", args.model.display())));
    }
    let files = if args.join {
        vec![(args.out.clone(), write(&args.out, gguf.metadata(), tensors(&gguf, session)).map_err(refused)?)]
    } else {
        // the ending is part of the names that are made
        let prefix = if args.out.extension().is_some_and(|e| e == "gguf") {
            args.out.with_extension("")
        } else {
            args.out.clone()
        };
        write_shards(&prefix, gguf.metadata(), tensors(&gguf, session), args.max_size).map_err(refused)?
    };
    let whole: Vec<_> = files.iter().map(|(path, size)| json!({ "file": path, "bytes": size })).collect();
    let lines: Vec<String> = files.iter().map(|(path, size)| format!("{size:12} {}", path.display())).collect();
    show(args.json, &json!({ "files": whole }), &lines)
}

/// All tensors; a stopped run ends with the next one.
fn tensors<'a>(gguf: &'a Gguf, session: &'a Session) -> impl Iterator<Item = (TensorSpec, TensorData<'a>)> {
    gguf.tensors().iter().map(move |t| {
        let copy = move || match session.check() {
            Ok(()) => Ok(gguf.bytes(t).to_vec()),
            Err(e) => Err(GgufError::Write { what: e.message }),
        };
        (t.spec(), TensorData::Lazy(Box::new(copy)))
    })
}
