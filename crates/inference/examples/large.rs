//! The class of models that phones run: loads one of 1.5 billion weights, evaluates 4,096 tokens, makes it F16, quantises
//! that under a limit of bytes and cuts the result into shards. Every step says how long it took and what memory it had.
//!
//! `large MODEL.gguf TEXT FOLDER [--json FILE] [--only STEP]`; `cargo xtask bench large --json FILE` runs each step in a
//! process of its own, so that memory is of that step alone. Steps: evaluate, float, round (Q4_K_M without calibration),
//! quantize (under the limit), shards.
#![expect(clippy::print_stdout, reason = "a command-line program prints its report")]

use flywheel_inference::eval::perplexity;
use flywheel_inference::gguf::{Gguf, write_shards};
use flywheel_inference::model::Decoder;
use flywheel_inference::quantize::{Goal, Profile, QuantizeOptions, TuneOptions, quantize, tune};
use flywheel_inference::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::error::Error;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Tokens that are evaluated, in windows.
const TOKENS: usize = 4096;
const WINDOW: usize = 512;
/// Calibration texts and their tokens.
const TEXTS: usize = 4;
const TEXT_TOKENS: usize = 256;
/// Bytes of a shard, as a store for phones allows.
const SHARD_BYTES: u64 = 200_000_000;
const STEPS: [&str; 5] = ["evaluate", "float", "round", "quantize", "shards"];

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Job {
    model: PathBuf,
    text: String,
    float: PathBuf,
    rounded: PathBuf,
    quantized: PathBuf,
    shards: PathBuf,
}

fn main() -> Result<()> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let mut option = |name: &str| -> Option<String> {
        let at = args.iter().position(|a| a == name).filter(|at| at + 1 < args.len())?;
        args.remove(at);
        Some(args.remove(at))
    };
    let (json_file, only) = (option("--json"), option("--only"));
    let [model, text, folder] = args.as_slice() else {
        return Err("usage: large MODEL.gguf TEXT FOLDER [--json FILE] [--only STEP]".into());
    };
    let folder = Path::new(folder);
    std::fs::create_dir_all(folder)?;
    let job = Job {
        model: model.into(),
        text: std::fs::read_to_string(text)?,
        float: folder.join("f16.gguf"),
        rounded: folder.join("q4_k_m.gguf"),
        quantized: folder.join("auto.gguf"),
        shards: folder.join("auto"),
    };
    let mut report = serde_json::Map::new();
    for step in STEPS.into_iter().filter(|s| only.as_deref().is_none_or(|o| o == *s)) {
        let row = measured(|| match step {
            "evaluate" => evaluate(&job),
            "float" => rounded(&job.model, &job.float, Profile::F16),
            "round" => rounded(&job.float, &job.rounded, Profile::Q4KM),
            "quantize" => budget(&job),
            _ => shards(&job),
        })?;
        println!("{step}: {row}");
        report.insert(step.to_owned(), row);
    }
    if let Some(path) = json_file {
        std::fs::write(path, serde_json::to_string_pretty(&Value::Object(report))? + "\n")?;
    }
    Ok(())
}

/// Runs a step and adds its time, the processor's time and the most memory that is not a mapped file.
fn measured(step: impl FnOnce() -> Result<Value>) -> Result<Value> {
    let (peak, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let watch = std::thread::spawn({
        let (peak, stop) = (peak.clone(), stop.clone());
        move || {
            while !stop.load(Ordering::Relaxed) {
                peak.fetch_max(status("RssAnon:"), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    });
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let result = step();
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    stop.store(true, Ordering::Relaxed);
    watch.join().map_err(|_| "the memory watcher failed")?;
    let mut row = result?;
    row["seconds"] = json!(seconds);
    row["cpu_seconds"] = json!(cpu);
    row["peak_anonymous_bytes"] = json!(peak.load(Ordering::Relaxed));
    row["peak_rss_bytes"] = json!(status("VmHWM:"));
    Ok(row)
}

/// A line of `/proc/self/status`, bytes; 0 where there is none.
fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix(key));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Processor time of all threads, seconds; Linux counts it in hundredths.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 = after.split_whitespace().skip(11).take(2).filter_map(|v| v.parse::<u64>().ok()).sum();
    ticks as f64 / 100.0
}

fn tokens(file: &Gguf, text: &str, n: usize) -> Result<Vec<u32>> {
    let text: String = text.chars().take(n * 12).collect();
    let mut tokens = Tokenizer::from_gguf(file)?.encode(&text, false);
    if tokens.len() < n {
        return Err(format!("the text has {} tokens, {n} are needed", tokens.len()).into());
    }
    tokens.truncate(n);
    Ok(tokens)
}

fn evaluate(job: &Job) -> Result<Value> {
    let start = Instant::now();
    let file = Gguf::open(&job.model)?;
    let model = Decoder::load(&file)?;
    let load = start.elapsed().as_secs_f64();
    let tokens = tokens(&file, &job.text, TOKENS)?;
    let start = Instant::now();
    let p = perplexity(&model, &tokens, WINDOW, &mut |_, _| ControlFlow::Continue(()))?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(json!({
        "file_bytes": file.size_bytes(), "load_seconds": load, "weights_bytes": model.size_bytes(),
        "tokens": TOKENS, "tokens_per_second": TOKENS as f64 / seconds, "perplexity": p.perplexity,
    }))
}

fn rounded(from: &Path, to: &Path, profile: Profile) -> Result<Value> {
    let base = Gguf::open(from)?;
    let options = QuantizeOptions { allow_requantize: true, ..QuantizeOptions::new(profile) };
    let report = quantize(&base, to, &options, &mut |_| ControlFlow::Continue(()))?;
    let weights: u64 = report.tensors.iter().map(|t| t.row.weights).sum();
    Ok(json!({ "bytes": report.size_bytes, "weights": weights }))
}

/// The limit is the size of the file that was downloaded.
fn budget(job: &Job) -> Result<Value> {
    let base = Gguf::open(&job.float)?;
    let budget = std::fs::metadata(&job.model)?.len();
    let all = tokens(&base, &job.text, TOKENS + TEXTS * TEXT_TOKENS)?;
    // behind what is evaluated
    let texts: Vec<Vec<u32>> = all[TOKENS..].chunks_exact(TEXT_TOKENS).map(<[u32]>::to_vec).collect();
    let options = TuneOptions { datasets: vec!["wiki.dev".into()], ..TuneOptions::new(Goal::Budget(budget)) };
    let start = Instant::now();
    let report = tune(&base, &job.quantized, &texts, &options, &mut |p| {
        println!("{:.0} s: {} of {} {}", start.elapsed().as_secs_f64(), p.done, p.total, p.tensor);
        ControlFlow::Continue(())
    })?;
    Ok(json!({
        "calibration_tokens": TEXTS * TEXT_TOKENS, "budget_bytes": budget, "bytes": report.size_bytes,
        "predicted": report.predicted,
    }))
}

fn shards(job: &Job) -> Result<Value> {
    let file = Gguf::open(if job.quantized.exists() { &job.quantized } else { &job.rounded })?;
    let written = write_shards(&job.shards, file.metadata(), file.contents(), SHARD_BYTES)?;
    let sizes: Vec<u64> = written.iter().map(|(_, bytes)| *bytes).collect();
    let first = written.first().map(|(path, _)| path.display().to_string());
    Ok(json!({ "files": sizes.len(), "largest_bytes": sizes.iter().max(), "first": first }))
}
