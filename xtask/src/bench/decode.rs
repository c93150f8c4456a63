//! `bench decode`: load time, prefill and decoding of SmolLM2-135M in three types, beside stock llama.cpp on the same files. Both
//! take turns, each run in a process of its own; ratios are of neighbours, and their median counts.

use super::jobs::load_average;
use super::{Args, Bench};
use crate::{model, process, python};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs of each program on each file; the median of their ratios counts.
const ROUNDS: usize = 9;
/// Name, `llama_ftype` and whether prefill of this type is what is compared.
const TYPES: &[(&str, &str)] = &[("F16", "1"), ("Q8_0", "7"), ("Q4_0", "2")];
/// Field of both reports, its name in the table, and whether less is better.
const FIELDS: &[(&str, &str, bool)] = &[
    ("load_s", "load, s", true),
    ("prefill_tok_s", "prefill of 512, tok/s", false),
    ("decode_tok_s", "decode of 64, tok/s", false),
    ("one_tok_s", "1 stream, tok/s", false),
    ("eight_tok_s", "8 streams, tok/s", false),
];

/// Runs everything, prints a table and answers the report.
pub fn drive(bench: &Bench, args: &Args) -> Result<Value> {
    if args.peer {
        bail!("`decode` always runs its peer");
    }
    let python = python::ensure().context("stock llama.cpp cannot be run")?;
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--package", bench.package, "--example", bench.example]);
    process::run("building the benchmark", &mut build)?;
    let files = files(&python)?;
    let threads = std::thread::available_parallelism()?.get();
    let load_before = load_average();
    let mut results = Vec::new();
    println!("| file | figure | ours | stock | ours / stock |\n|---|---|---|---|---|");
    for (name, path) in &files {
        let (mut ours, mut stock) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            // who is first alternates: the page cache and the clock of the processor favour nobody
            for turn in 0..2 {
                if (round + turn) % 2 == 0 {
                    ours.push(run_ours(bench, path, None)?);
                } else {
                    stock.push(run_stock(&python, path, threads)?);
                }
            }
        }
        results.push(summary(name, &ours, &stock));
    }
    let speculative = speculation(bench, &files)?;
    println!("speculative decoding, F16 with Q4_0 as its draft: {speculative}");
    Ok(json!({
        "bench": "decode", "model": model::SMOLLM2, "threads": threads, "rounds": ROUNDS, "results": results,
        "speculative": speculative, "load_average": { "before": load_before, "after": load_average() },
    }))
}

/// The model in every type, made by stock from the cached file and kept beside it.
fn files(python: &Path) -> Result<Vec<(&'static str, PathBuf)>> {
    let folder = model::folder()?;
    let mut source = folder.join(model::SMOLLM2);
    if !source.exists() {
        bail!("{} is absent; `cargo xtask model` fetches it", source.display());
    }
    let mut files = Vec::new();
    for (name, ftype) in TYPES {
        let file = folder.join("bench").join(format!("SmolLM2-135M-Instruct.{name}.gguf"));
        if !file.exists() {
            std::fs::create_dir_all(folder.join("bench"))?;
            let part = file.with_extension("part");
            let mut quantize = Command::new(python);
            quantize.arg(script("referee.py")).arg("quantize").arg(&source).arg(&part).arg(ftype);
            process::run_quiet(&format!("making {}", file.display()), &mut quantize)?;
            std::fs::rename(&part, &file)?;
        }
        if *name == "F16" {
            source = file.clone();
        }
        files.push((*name, file));
    }
    Ok(files)
}

pub fn script(name: &str) -> PathBuf {
    process::root().join("tests/interop").join(name)
}

fn run_ours(bench: &Bench, file: &Path, draft: Option<&Path>) -> Result<Value> {
    let mut program = Command::new(process::bin_dir()?.join("examples").join(bench.example));
    program.arg(file);
    if let Some(draft) = draft {
        program.arg("--draft").arg(draft);
    }
    report("flywheel", program)
}

fn run_stock(python: &Path, file: &Path, threads: usize) -> Result<Value> {
    let mut program = Command::new(python);
    program.arg(script("bench_stock.py")).arg(file).args(["--threads", &threads.to_string()]);
    report("llama.cpp", program)
}

/// Runs a program that writes its report to `--json FILE`.
pub fn report(name: &str, mut program: Command) -> Result<Value> {
    let file = std::env::temp_dir().join(format!("flywheel-bench-decode-{}.json", std::process::id()));
    program.arg("--json").arg(&file);
    process::run_quiet(name, &mut program)?;
    let report = serde_json::from_slice(&std::fs::read(&file)?)?;
    std::fs::remove_file(&file)?;
    Ok(report)
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

pub fn figure(run: &Value, field: &str) -> f64 {
    run[field].as_f64().unwrap_or(f64::NAN)
}

/// Medians of both and of the ratios of neighbours; a line of the table for each figure.
fn summary(name: &str, ours: &[Value], stock: &[Value]) -> Value {
    let mut out = json!({ "file": name, "ours": ours, "stock": stock });
    let mut line = |field: &str, title: &str, a: Vec<f64>, b: Vec<f64>, unit: usize| {
        let ratios: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a / b).collect();
        let spread =
            |v: &[f64]| (v.iter().copied().fold(f64::INFINITY, f64::min), v.iter().copied().fold(0.0, f64::max));
        let (low, high) = spread(&ratios);
        let (a, b, ratio) = (median(a), median(b), median(ratios));
        println!("| {name} | {title} | {a:.unit$} | {b:.unit$} | {ratio:.2} ({low:.2} to {high:.2}) |");
        out[field] = json!({ "ours": a, "stock": b, "ratio": ratio, "lowest": low, "highest": high });
    };
    for (field, title, less) in FIELDS {
        let of = |runs: &[Value]| runs.iter().map(|r| figure(r, field)).collect::<Vec<_>>();
        line(field, title, of(ours), of(stock), if *less { 3 } else { 1 });
    }
    let gain = |runs: &[Value]| runs.iter().map(|r| figure(r, "eight_tok_s") / figure(r, "one_tok_s")).collect();
    line("eight_by_one", "8 streams / 1 stream", gain(ours), gain(stock), 2);
    out
}

/// Three runs; the one with the median speed-up.
fn speculation(bench: &Bench, files: &[(&'static str, PathBuf)]) -> Result<Value> {
    let find = |name: &str| files.iter().find(|f| f.0 == name).map(|f| f.1.as_path()).context("no such file");
    let mut runs = (0..3).map(|_| run_ours(bench, find("F16")?, Some(find("Q4_0")?))).collect::<Result<Vec<_>>>()?;
    runs.sort_by(|a, b| figure(a, "speed_up").total_cmp(&figure(b, "speed_up")));
    Ok(runs.swap_remove(1))
}
