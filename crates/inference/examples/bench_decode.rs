//! Speed of one GGUF file: `bench_decode FILE.gguf --json OUT [--draft FILE.gguf]`. `cargo xtask bench decode` runs it beside
//! stock llama.cpp (`tests/interop/bench_stock.py`, which measures the same things).
//!
//! OUT gets the seconds of loading (model and vocabulary), tokens a second of a prompt of 512, of 64 tokens after it, and
//! of 32 tokens after 64 by one sequence and by eight together. With `--draft` instead tokens a second of greedy
//! continuations of short texts, plain and with that draft model, and the share of its proposals that were kept.

use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::{
    Decoder, GenerateOptions, KvType, Request, Sampling, Scheduler, ServeOptions, Speculation,
};
use flywheel_inference::tokenizer::Tokenizer;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const USAGE: &str = "bench_decode FILE.gguf --json OUT [--draft FILE.gguf]";
/// Beginnings of texts of different kinds.
const TEXTS: [&str; 4] = [
    "The history of the steam engine begins",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Question: What is the capital of France, and what is it known for?\nAnswer:",
    "Once upon a time there was a small village at the edge of a forest, and",
];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    let (file, out) = (args.first().ok_or(USAGE)?, option("--json").ok_or(USAGE)?);
    let start = Instant::now();
    let (model, tokenizer) = load(file)?;
    let load_s = start.elapsed().as_secs_f64();
    let report = match option("--draft") {
        Some(draft) => speculative(&model, &load(draft)?.0, &tokenizer)?,
        None => {
            run(&model, 1, 64, 2)?; // buffers are made
            let (prefill, decode) = run(&model, 1, 512, 64)?;
            serde_json::json!({
                "load_s": load_s, "prefill_tok_s": prefill, "decode_tok_s": decode,
                "one_tok_s": run(&model, 1, 64, 32)?.1, "eight_tok_s": run(&model, 8, 64, 32)?.1,
            })
        }
    };
    std::fs::write(out, report.to_string())?;
    Ok(())
}

fn load(file: &str) -> Result<(Decoder, Tokenizer)> {
    let gguf = Gguf::open(Path::new(file))?;
    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    Ok((Decoder::load(&gguf)?, tokenizer))
}

/// Tokens a second of `sequences` prompts of `prompt` tokens, and of `new` tokens after each of them.
fn run(model: &Decoder, sequences: usize, prompt: usize, new: usize) -> Result<(f64, f64)> {
    let vocab = model.config().vocab;
    // Keys and values as stock llama.cpp keeps them where nothing else is asked for.
    let options = ServeOptions { max_batch: sequences, cache: KvType::F16, prefix_pages: 0 };
    let mut scheduler = Scheduler::new(model.clone(), options)?;
    for s in 0..sequences {
        scheduler.submit(Request {
            prompt: (0..prompt).map(|i| ((s * 101 + i * 37 + 17) % vocab) as u32).collect(),
            adapter: None,
            max_new_tokens: new + 1,
            stop_ids: Vec::new(),
            sampling: Sampling::GREEDY,
            stream: 0,
        })?;
    }
    let start = Instant::now();
    let mut seen = scheduler.step()?.len();
    let prefill = start.elapsed().as_secs_f64();
    if seen != sequences {
        return Err("the prompts do not fit into one pass".into());
    }
    let start = Instant::now();
    while scheduler.open_requests() > 0 {
        seen += scheduler.step()?.len();
    }
    let decode = start.elapsed().as_secs_f64();
    if seen != sequences * (new + 2) {
        return Err(format!("{seen} events of {sequences} sequences").into());
    }
    Ok(((sequences * prompt) as f64 / prefill, (sequences * new) as f64 / decode))
}

fn speculative(model: &Decoder, draft: &Decoder, tokenizer: &Tokenizer) -> Result<serde_json::Value> {
    const AHEAD: usize = 5;
    let options = GenerateOptions { max_new_tokens: 96, ..GenerateOptions::default() };
    let (mut plain, mut helped, mut tokens, mut sum) = (0.0, 0.0, 0, Speculation::default());
    for text in TEXTS {
        let prompt = tokenizer.encode(text, false);
        let start = Instant::now();
        let want = model.generate_batch(std::slice::from_ref(&prompt), &options)?.remove(0);
        plain += start.elapsed().as_secs_f64();
        let start = Instant::now();
        let (got, done) = model.generate_speculative(draft, &prompt, AHEAD, &options)?;
        helped += start.elapsed().as_secs_f64();
        if got != want {
            return Err("the text is another one with a draft model".into());
        }
        tokens += got.tokens.len();
        sum.drafted += done.drafted;
        sum.accepted += done.accepted;
        sum.passes += done.passes;
    }
    Ok(serde_json::json!({
        "ahead": AHEAD, "tokens": tokens, "plain_tok_s": tokens as f64 / plain, "speculative_tok_s": tokens as f64 / helped,
        "speed_up": plain / helped, "acceptance": sum.acceptance(), "tokens_per_pass": tokens as f64 / sum.passes as f64,
    }))
}
