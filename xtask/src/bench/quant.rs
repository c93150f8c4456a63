//! Quantisation beside stock llama.cpp: each part is a measurement of its own and an entry of the report.

use super::decode::{figure, median, report, script};
use super::jobs::load_average;
use super::{Args, Bench};
use crate::{model, process, python};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs of each program on each file; the median of their ratios counts.
const ROUNDS: usize = 7;
/// Types whose speed is compared, their `llama_ftype`, and what both, or ours alone, are told. Stock searches for scales of Q4_0
/// only with an imatrix.
const RUNS: [(&str, &str, How); 5] = [
    ("Q4_0", "2", How::NoSearch),
    ("Q4_0", "2", How::Plain),
    ("Q4_0", "2", How::Imatrix),
    ("Q4_K_S", "14", How::Plain),
    ("Q4_K_S", "14", How::Imatrix),
];

#[derive(Clone, Copy, PartialEq)]
enum How {
    NoSearch,
    Plain,
    Imatrix,
}

impl How {
    fn name(self) -> &'static str {
        match self {
            Self::NoSearch => "without search",
            Self::Plain => "without imatrix",
            Self::Imatrix => "with imatrix",
        }
    }
}

/// All parts.
pub fn drive(bench: &Bench, _: &Args) -> Result<Value> {
    Ok(json!({ "speed": speed(bench)?, "quality": quality(bench)? }))
}

/// How fast `examples/bench_quantize` and stock make a file, taking turns.
fn speed(bench: &Bench) -> Result<Value> {
    let python = python::ensure().context("stock llama.cpp cannot be run")?;
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--package", bench.package, "--example", "bench_quantize"]);
    process::run("building the benchmark", &mut build)?;
    let folder = std::env::temp_dir().join(format!("flywheel-bench-quant-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let result = compare_speed(&python, &folder);
    fs::remove_dir_all(&folder)?;
    result
}

fn compare_speed(python: &Path, folder: &Path) -> Result<Value> {
    let program = process::bin_dir()?.join("examples/bench_quantize");
    process::run_quiet("making the base", Command::new(&program).arg("make").arg(folder))?;
    let (base, imatrix, out) = (folder.join("base.gguf"), folder.join("base.imatrix"), folder.join("out.gguf"));
    let before = load_average();
    let mut rows = Vec::new();
    println!("| type | | ours, s | stock, s | speed, ours / stock |\n|---|---|---|---|---|");
    for (name, file_type, how) in RUNS {
        let run = |ours: bool| -> Result<f64> {
            let mut command = Command::new(if ours { &program } else { python });
            if ours {
                command.args([&base, &out]).arg(name);
            } else {
                command.arg(script("referee.py")).arg("quantize").args([&base, &out]).arg(file_type);
            }
            match how {
                How::Imatrix => drop(command.arg("--imatrix").arg(&imatrix)),
                How::NoSearch if ours => drop(command.arg("--no-search")),
                How::NoSearch | How::Plain => {}
            }
            Ok(figure(&report(if ours { "flywheel" } else { "llama.cpp" }, command)?, "seconds"))
        };
        let (mut ours, mut stock) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            for turn in 0..2 {
                let own = (round + turn) % 2 == 0;
                if own { &mut ours } else { &mut stock }.push(run(own)?);
            }
        }
        let ratio = median(ours.iter().zip(&stock).map(|(a, b)| b / a).collect());
        let (a, b) = (median(ours.clone()), median(stock.clone()));
        println!("| {name} | {} | {a:.3} | {b:.3} | {ratio:.2} |", how.name());
        rows.push(json!({ "type": name, "how": how.name(), "ours_s": ours, "stock_s": stock, "ratio": ratio }));
    }
    Ok(json!({ "rows": rows, "load_average": { "before": before, "after": load_average() } }))
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
