//! Trains the small F32 model that K-quants are measured on: `cargo xtask model tiny`.
//!
//! `cargo run -p flywheel-inference --example tiny_model -- DATA OUT`: DATA is the folder with the texts of the recipe, OUT
//! gets `tiny.gguf`, the texts that were learned and those that were left out (`train.NAME.txt`, `validation.NAME.txt`),
//! and a state from which an interrupted run goes on.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program to read the output of")]

mod recipe;

use flywheel_inference::gguf::{self, Gguf};
use flywheel_inference::model::{Decoder, Scored, Storage};
use flywheel_inference::tokenizer::{Tokenizer, learn_bpe};
use flywheel_inference::train::{Sample, Trainable, Trainer, random_model, with_tensors};
use sha2::{Digest, Sha256};
use std::error::Error;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Steps from one saved state to the next.
const SAVE_EVERY: usize = 50;

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(data), Some(out)) = (args.next(), args.next()) else {
        return Err("usage: tiny_model DATA OUT".into());
    };
    fs::create_dir_all(&out)?;
    let texts = recipe::TEXTS.iter().map(|t| parts(t, &data)).collect::<Result<Vec<Parts>>>()?;
    for text in &texts {
        fs::write(out.join(format!("train.{}.txt", text.name)), &text.train)?;
        fs::write(out.join(format!("validation.{}.txt", text.name)), &text.validation)?;
    }
    let base = start(&texts, &out)?;
    let tokenizer = Tokenizer::from_gguf(&base)?;
    let decoder = Decoder::load_with(&base, Storage::F32)?;
    let samples = samples(&tokenizer, &texts);
    let trained = train(&decoder, samples, &out.join("state.bin"))?;

    let path = out.join("tiny.gguf");
    gguf::write(&path, base.metadata(), with_tensors(&base, &trained.tensors())?)?;
    let sha256 = hex::encode(Sha256::digest(fs::read(&path)?));
    println!("{} has SHA-256 {sha256}", path.display());
    measure(&Gguf::open(&path)?, &tokenizer, &texts)?;
    if sha256 == recipe::RESULT {
        Ok(())
    } else {
        Err(format!("the recipe's result has SHA-256 {}: the trainer computes something else now", recipe::RESULT)
            .into())
    }
}

/// A text cut in two.
struct Parts {
    name: &'static str,
    train: String,
    validation: String,
}

fn parts(text: &recipe::Text, data: &Path) -> Result<Parts> {
    let path = data.join(text.file);
    let bytes = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let sha256 = hex::encode(Sha256::digest(&bytes));
    if sha256 != text.sha256 {
        return Err(format!("{} has SHA-256 {sha256}, the recipe's text has {}", path.display(), text.sha256).into());
    }
    let mut train = String::from_utf8(bytes)?;
    if path.extension().is_some_and(|e| e == "jsonl") {
        train = train.lines().map(problem).collect::<Result<_>>()?;
    }
    let from = train.len() - train.len() / recipe::VALIDATION;
    let cut = train.bytes().skip(from).position(|b| b == b'\n').map_or(train.len(), |at| from + at + 1);
    let validation = train.split_off(cut);
    Ok(Parts { name: text.name, train, validation })
}

/// A word problem and its answer as text.
fn problem(line: &str) -> Result<String> {
    let value: serde_json::Value = serde_json::from_str(line)?;
    let field = |name: &str| value[name].as_str().ok_or_else(|| format!("a line without `{name}`"));
    Ok(format!("{}\n{}\n\n", field("question")?, field("answer")?))
}

/// The model with random weights, as a file.
fn start(texts: &[Parts], out: &Path) -> Result<Gguf> {
    let learned: Vec<&str> = texts.iter().map(|t| t.train.as_str()).collect();
    let c = recipe::model();
    let mut metadata = c.metadata("Flywheel tiny");
    metadata.extend(learn_bpe(&learned, c.vocab, recipe::PRE)?);
    let path = out.join("start.gguf");
    gguf::write(&path, &metadata, random_model(&c, recipe::SEED)?)?;
    Ok(Gguf::open(&path)?)
}

/// Windows of all texts; what is left at the end of a text is not used.
fn samples(tokenizer: &Tokenizer, texts: &[Parts]) -> Vec<Sample> {
    let mut out = Vec::new();
    for text in texts {
        let tokens = tokenizer.encode(&text.train, false);
        println!("{}: {} tokens to learn", text.name, tokens.len());
        let windows = tokens.chunks_exact(recipe::WINDOW);
        out.extend(windows.map(|w| Sample::new(w.to_vec(), 1)));
    }
    out
}

fn train(decoder: &Decoder, samples: Vec<Sample>, state: &Path) -> Result<Trainer> {
    let mut trainer = Trainer::new(decoder, Trainable::Full, recipe::training(), samples)?;
    println!("{} weights", trainer.parameters());
    match fs::read(state) {
        Ok(bytes) => trainer.restore(&bytes)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e.into()),
    }
    let steps = recipe::training().steps;
    while trainer.steps_done() < steps {
        let (begin, mut losses, mut tokens) = (Instant::now(), Vec::new(), 0);
        let until = (trainer.steps_done() / SAVE_EVERY + 1) * SAVE_EVERY;
        let stopped = trainer.run(&mut |r| {
            losses.push(r.loss);
            tokens += r.tokens;
            if r.step >= until { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if trainer.steps_done() < until {
            stopped?;
        }
        let part = state.with_extension("part");
        fs::write(&part, trainer.save())?;
        fs::rename(&part, state)?;
        let loss = losses.iter().sum::<f32>() / losses.len() as f32;
        let speed = tokens as f64 / begin.elapsed().as_secs_f64();
        println!("step {} of {steps}: loss {loss:.4}, {speed:.0} tokens/s", trainer.steps_done());
    }
    Ok(trainer)
}

/// Prints the perplexity on what was left out.
fn measure(file: &Gguf, tokenizer: &Tokenizer, texts: &[Parts]) -> Result<()> {
    let decoder = Decoder::load_with(file, Storage::F32)?;
    for text in texts {
        let tokens = tokenizer.encode(&text.validation, false);
        let windows: Vec<Scored<'_>> =
            tokens.chunks_exact(recipe::WINDOW).take(16).map(|tokens| Scored { tokens, from: 1 }).collect();
        let nll: Vec<f32> = decoder.nll(&windows)?.concat();
        let mean = nll.iter().map(|v| f64::from(*v)).sum::<f64>() / nll.len() as f64;
        println!("{}: perplexity {:.2} a token on what was left out", text.name, mean.exp());
    }
    Ok(())
}
