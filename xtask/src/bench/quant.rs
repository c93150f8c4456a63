//! Quantisation beside stock llama.cpp: each part is a measurement of its own and an entry of the report.

use super::{Args, Bench};
use crate::{model, process, python};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

/// All parts.
pub fn drive(bench: &Bench, _: &Args) -> Result<Value> {
    Ok(json!({ "quality": quality(bench)? }))
}

/// How far files are from their base, judged by stock llama.cpp. What was made is kept in the target folder until the run
/// is complete, so that one that was stopped continues.
fn quality(bench: &Bench) -> Result<Value> {
    let python = python::ensure().context("stock llama.cpp runs in Python (`PYTHON` names one with numpy)")?;
    let data = std::env::var_os("FLYWHEEL_DATA").map_or_else(|| process::root().join("../shared/data"), PathBuf::from);
    let debug = process::bin_dir()?;
    let folder = debug.parent().context("the target folder has no parent")?.join("quant-quality");
    fs::create_dir_all(&folder)?;
    let report = folder.join("report.json");
    let mut program = bench.program();
    program.env(python::VARIABLE, python).env("FLYWHEEL_MODELS", model::ensure()?).env("FLYWHEEL_DATA", data);
    program.arg("--folder").arg(&folder).arg("--json").arg(&report);
    process::run("quality of quantised files", &mut program)?;
    let value = serde_json::from_slice(&fs::read(&report)?)?;
    fs::remove_dir_all(&folder)?;
    Ok(value)
}
