//! LoRA training for `cargo xtask bench lora`: trains an adapter on every matrix of a model and reports losses, speed and memory.
//!
//! `lora_bench MODEL.gguf TEXT OUT [steps]`: OUT gets `run.json` and the start adapter in PEFT's form, so that another program
//! can make the same run from the same values, and `report.json`.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program to read the output of")]

use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::{Decoder, Storage, Target};
use flywheel_inference::tokenizer::Tokenizer;
use flywheel_inference::train::{LoraConfig, Sample, Schedule, TrainConfig, Trainer};
use serde_json::json;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Tokens of a text; all texts of one length leave nothing to pad.
const WINDOW: usize = 256;
const BATCH: usize = 4;

fn main() -> Result<()> {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [model, text, out, rest @ ..] = args.as_slice() else {
        return Err("usage: lora_bench MODEL.gguf TEXT OUT [steps]".into());
    };
    let steps = rest.first().map_or(Ok(20), |s| s.to_string_lossy().parse())?;
    fs::create_dir_all(out)?;
    let file = Gguf::open(model)?;
    let tokens = Tokenizer::from_gguf(&file)?.encode(&fs::read_to_string(text)?, false);
    let samples: Vec<Sample> =
        tokens.chunks_exact(WINDOW).take(steps * BATCH).map(|w| Sample::new(w.to_vec(), 1)).collect();
    if samples.len() < steps * BATCH {
        return Err(format!(
            "{} has {} windows of {WINDOW} tokens, {} are needed",
            text.display(),
            samples.len(),
            steps * BATCH
        )
        .into());
    }
    let decoder = Decoder::load_with(&file, Storage::F32)?;
    drop(file);
    let lora = LoraConfig { rank: 16, alpha: 32.0, targets: Target::ALL.into(), ..LoraConfig::default() };
    let config = TrainConfig {
        steps,
        batch: BATCH,
        learning_rate: 2e-4,
        schedule: Schedule::Cosine,
        pass_tokens: BATCH * WINDOW,
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(&decoder, lora, config.clone(), samples.clone())?;
    trainer.adapter()?.write_peft(&out.join("start"), decoder.config(), "base")?;
    let report = train(&mut trainer, &samples, &config, out)?;
    fs::write(out.join("report.json"), serde_json::to_vec_pretty(&report)?)?;
    println!("{report:#}");
    Ok(())
}

fn train(trainer: &mut Trainer, samples: &[Sample], config: &TrainConfig, out: &Path) -> Result<serde_json::Value> {
    let (mut losses, mut seconds, mut batches) = (Vec::new(), Vec::new(), Vec::new());
    while trainer.steps_done() < config.steps {
        batches.push(trainer.next_samples().iter().map(|i| samples[*i].tokens.clone()).collect::<Vec<_>>());
        let begin = Instant::now();
        losses.push(trainer.step()?.loss);
        seconds.push(begin.elapsed().as_secs_f64());
    }
    let run = json!({
        "adapter": std::path::absolute(out.join("start"))?,
        "batches": batches,
        "learning_rate": config.learning_rate,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "epsilon": config.epsilon,
        "clip_norm": config.clip_norm,
    });
    fs::write(out.join("run.json"), serde_json::to_vec(&run)?)?;
    Ok(json!({
        "losses": losses,
        "seconds": seconds,
        "tokens_per_step": BATCH * WINDOW,
        "parameters": trainer.parameters(),
        "peak_rss_mib": peak_rss_mib()?,
    }))
}

fn peak_rss_mib() -> Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find_map(|l| l.strip_prefix("VmHWM:")).ok_or("the kernel does not tell the peak memory")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<f64>()? / 1024.0)
}
