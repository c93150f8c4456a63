//! `cargo xtask bench large`: a model of 1.5 billion weights through the whole pipeline, every step in a process of its own,
//! then stock llama.cpp on the shards.

use super::{Args, Bench};
use crate::{large, process, python};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

const STEPS: [&str; 5] = ["evaluate", "float", "round", "quantize", "shards"];

/// Runs the steps in a folder beside the model and removes what they made.
pub fn drive(bench: &Bench, _: &Args) -> Result<Value> {
    let model = large::ensure()?;
    let text = std::env::var_os("FLYWHEEL_DATA").map_or_else(|| process::root().join("../shared/data"), Into::into);
    let text = text.join("text/wiki.dev.raw");
    if !text.exists() {
        bail!("{} is absent: FLYWHEEL_DATA names the folder of texts", text.display());
    }
    let folder = model.parent().context("the model has no folder")?.join("bench");
    let report = steps(bench, &model, &text, &folder);
    let _ = fs::remove_dir_all(&folder);
    report
}

fn steps(bench: &Bench, model: &Path, text: &Path, folder: &Path) -> Result<Value> {
    fs::create_dir_all(folder)?;
    let mut report = Map::new();
    for step in STEPS {
        let json = folder.join(format!("{step}.json"));
        let mut program = bench.program();
        program.arg(model).arg(text).arg(folder).args(["--only", step, "--json"]).arg(&json);
        process::run(&format!("bench large: {step}"), &mut program)?;
        let row: Map<String, Value> = serde_json::from_slice(&fs::read(&json)?)?;
        report.extend(row);
    }
    let first = report["shards"]["first"].as_str().context("no shards were written")?.to_owned();
    report.insert("stock".into(), stock(&first)?);
    Ok(Value::Object(report))
}

/// Whether stock llama.cpp opens the shards and runs a token.
fn stock(first: &str) -> Result<Value> {
    let Some(python) = python::ensure() else { return Ok(json!({ "skipped": "no Python with NumPy" })) };
    let script = process::root().join("tests/interop/parity.py");
    let mut command = std::process::Command::new(python);
    let out = process::run_quiet("stock llama.cpp opens the shards", command.arg(script).args(["open", first]))?;
    Ok(serde_json::from_slice(&out)?)
}
