//! `bench lora`: LoRA training of SmolLM2-135M beside PEFT + PyTorch: the same texts, start values, rank, steps and optimiser,
//! F32, one program after the other on the same machine.

use super::{Args, Bench};
use crate::{model, process, python};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const TEXT: &str = "text/wiki.dev.raw";

/// Runs both, prints a table and answers the report.
pub fn drive(bench: &Bench, _args: &Args) -> Result<Value> {
    let model = model::ensure()?.join(MODEL);
    let data = std::env::var_os("FLYWHEEL_DATA").map_or_else(|| process::root().join("../shared/data"), PathBuf::from);
    let text = std::path::absolute(data.join(TEXT))?;
    if !text.exists() {
        println!("skipped: {} is absent; name its folder with FLYWHEEL_DATA", text.display());
        return Ok(json!({ "skipped": "no text" }));
    }
    let out = std::env::temp_dir().join(format!("flywheel-bench-lora-{}", std::process::id()));
    // compiled before the clock runs
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--package", bench.package, "--example", bench.example]);
    process::run("building the benchmark", &mut build)?;
    let report = measure(bench, &model, &text, &out);
    let _ = fs::remove_dir_all(&out);
    report
}

fn measure(bench: &Bench, model: &Path, text: &Path, out: &Path) -> Result<Value> {
    process::run_quiet("training with flywheel", bench.program().arg(model).arg(text).arg(out))?;
    let read = |name: &str| -> Result<Value> { Ok(serde_json::from_slice(&fs::read(out.join(name))?)?) };
    let ours = read("report.json")?;
    let mut report = json!({ "flywheel": ours });
    if let Some(python) = python::ensure_peft() {
        let mut run = read("run.json")?;
        run["threads"] = std::thread::available_parallelism()?.get().into();
        fs::write(out.join("run.json"), run.to_string())?;
        let script = process::root().join("tests/interop/peft_train.py");
        let mut peer = Command::new(python);
        let printed = process::run_quiet("training with PEFT", peer.arg(script).arg(model).arg(out.join("run.json")))?;
        let line = String::from_utf8_lossy(&printed);
        let peft: Value = serde_json::from_str(line.lines().last().context("the peer printed nothing")?)?;
        report["ratios"] = ratios(&ours, &peft)?;
        report["peft"] = peft;
    }
    print(&report);
    Ok(report)
}

/// Ours over theirs.
fn ratios(ours: &Value, peft: &Value) -> Result<Value> {
    let last = |r: &Value| r["losses"].as_array().and_then(|l| l.last()?.as_f64()).context("no losses");
    let memory = |r: &Value| r["peak_rss_mib"].as_f64().context("no peak memory");
    Ok(json!({
        "final_loss": last(ours)? / last(peft)?,
        "speed": median_step(peft) / median_step(ours),
        "peak_memory": memory(ours)? / memory(peft)?,
    }))
}

/// Median seconds of a step, the first one left out.
fn median_step(report: &Value) -> f64 {
    let all = report["seconds"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut seconds: Vec<f64> = all.iter().skip(1).filter_map(Value::as_f64).collect();
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}

fn print(report: &Value) {
    let tokens = report["flywheel"]["tokens_per_step"].as_f64().unwrap_or(f64::NAN);
    println!("| program | first loss | final loss | tokens/s | peak memory, MiB |");
    println!("|---|---|---|---|---|");
    for name in ["flywheel", "peft"] {
        let row = &report[name];
        let Some(losses) = row["losses"].as_array() else { continue };
        let loss = |v: Option<&Value>| v.and_then(Value::as_f64).unwrap_or(f64::NAN);
        let (first, last) = (loss(losses.first()), loss(losses.last()));
        let memory = row["peak_rss_mib"].as_f64().unwrap_or(f64::NAN);
        println!("| {name} | {first:.4} | {last:.4} | {:.0} | {memory:.0} |", tokens / median_step(row));
    }
    if let Some(r) = report["ratios"].as_object() {
        println!("ours over theirs: {}", Value::Object(r.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_ours_over_theirs_and_leave_the_first_step_out() {
        let ours = json!({ "losses": [4.0, 2.0], "seconds": [90.0, 1.0, 2.0, 3.0], "peak_rss_mib": 100.0 });
        let peft = json!({ "losses": [4.0, 2.5], "seconds": [1.0, 4.0, 4.0, 4.0], "peak_rss_mib": 200.0 });
        let r = ratios(&ours, &peft).unwrap();
        assert_eq!(
            (r["final_loss"].as_f64(), r["speed"].as_f64(), r["peak_memory"].as_f64()),
            (Some(0.8), Some(2.0), Some(0.5))
        );
        assert!(ratios(&json!({}), &peft).is_err());
    }
}
