//! What training wins back of a weight format's cost: KL divergence from the float model before and after, on text that was not
//! trained on.
//!
//! `repair MODEL.gguf TRAIN.txt VALIDATION.txt GRID lora|norms [steps]`: GRID is a block type such as Q4_0, or npu-int4, npu-int6,
//! npu-int8 with an optional group, as in npu-int4/32.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program to read the output of")]

use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::{Decoder, Storage, Target};
use flywheel_inference::tokenizer::Tokenizer;
use flywheel_inference::train::{Distillation, LoraConfig, Sample, Schedule, TrainConfig, Trainable, Trainer};
use std::error::Error;
use std::time::Instant;
use std::{fs, ops::ControlFlow};

const WINDOW: usize = 256;
/// Windows that are measured.
const MEASURED: usize = 24;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, train, validation, grid, what, rest @ ..] = args.as_slice() else {
        return Err("usage: repair MODEL.gguf TRAIN.txt VALIDATION.txt GRID lora|norms [steps]".into());
    };
    let steps = rest.first().map_or(Ok(60), |s| s.parse())?;
    let file = Gguf::open(model.as_ref())?;
    let tokenizer = Tokenizer::from_gguf(&file)?;
    let base = Decoder::load_with(&file, Storage::F32)?;
    let windows = |path: &str| -> Result<Vec<Sample>, std::io::Error> {
        let tokens = tokenizer.encode(&fs::read_to_string(path)?, false);
        Ok(tokens.chunks_exact(WINDOW).map(|w| Sample::new(w.to_vec(), 1)).collect())
    };
    let (samples, mut measured) = (windows(train)?, windows(validation)?);
    measured.truncate(MEASURED);
    let (trainable, learning_rate) = match what.as_str() {
        "lora" => {
            let lora = LoraConfig { rank: 16, alpha: 16.0, targets: Target::ALL.into(), ..LoraConfig::default() };
            (Trainable::Lora(lora), 1e-3)
        }
        "norms" => (Trainable::Norms, 3e-3),
        other => return Err(format!("`{other}` is neither lora nor norms").into()),
    };
    let config = TrainConfig {
        steps,
        batch: 8,
        learning_rate,
        schedule: Schedule::Cosine,
        warmup_steps: steps / 10,
        pass_tokens: 8 * WINDOW,
        grid: Some(grid.parse()?),
        ..TrainConfig::default()
    };
    let how = Distillation { temperature: 1.0, share: 1.0 };
    let mut trainer = Trainer::new(&base, trainable, config, samples)?.distill(&base, how)?;
    let begin = Instant::now();
    let before = trainer.divergence(&base, &measured)?;
    trainer.run(&mut |_| ControlFlow::Continue(()))?;
    let after = trainer.divergence(&base, &measured)?;
    println!(
        "{grid} {what}: {} values, {steps} steps: KLD {before:.5} → {after:.5} ({:+.1} %), {:.0} s",
        trainer.parameters(),
        100.0 * (after / before - 1.0),
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}
