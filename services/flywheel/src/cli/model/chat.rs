//! `flywheel model chat`.

use super::progress::{Session, note};
use crate::cli::{Usage, say};
use crate::models::training::open_adapter;
use crate::models::{Model, open, refused};
use anyhow::{Context, Result};
use flywheel_inference::model::{Decoder, GenerateOptions, KvType, ModelError, Sampling, TextStream};
use flywheel_inference::tokenizer::Message;
use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Without --prompt the conversation goes on line by line until the end of the input. Answers stream to standard output,
speed and questions to standard error.

  flywheel model chat model.gguf --prompt 'What is the capital of France?'
  flywheel model chat model.gguf --temperature 0.7 --top-p 0.9 --seed 3";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    model: PathBuf,
    /// One question; its answer ends the program.
    #[arg(long)]
    prompt: Option<String>,
    /// What the model is told before.
    #[arg(long)]
    system: Option<String>,
    /// Run with this adapter.
    #[arg(long, value_name = "FILE")]
    adapter: Option<PathBuf>,
    /// Longest answer, tokens.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// 0 takes the most likely token every time.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Draw among the most likely tokens that have this much probability together.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Draw among this many most likely tokens; 0: all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Draw among tokens with this share of the probability of the most likely one.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Makes tokens of the last 64 less likely: 1 leaves them as they are.
    #[arg(long, default_value_t = 1.0)]
    repeat_penalty: f32,
    /// Ends the answer before this text; may be given more than once.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// The same seed gives the same answers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

pub fn run(args: &Args, session: &Session) -> Result<()> {
    sampling(args).check().map_err(|e| Usage(e.to_string()))?;
    let gguf = open(&args.model)?;
    let mut decoder = Decoder::load(&gguf).map_err(refused)?;
    if let Some(path) = &args.adapter {
        let adapter = open_adapter(path, &gguf).with_context(|| format!("{}", path.display()))?;
        decoder = decoder.with_adapter(&adapter).map_err(refused)?;
    }
    let model = Model::with(&gguf, decoder)?;
    let mut said: Vec<(bool, String)> = Vec::new();
    if let Some(prompt) = &args.prompt {
        said.push((true, prompt.clone()));
        return answer(args, &model, &said, session).map(drop);
    }
    let asks = std::io::stdin().is_terminal();
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if asks {
            let _ = write!(std::io::stderr(), "> ");
        }
        session.idle(true);
        let line = lines.next().transpose().context("cannot read the input")?;
        session.idle(false);
        let Some(line) = line else { return Ok(()) };
        if line.trim().is_empty() {
            continue;
        }
        said.push((true, line));
        let text = answer(args, &model, &said, session)?;
        said.push((false, text));
    }
}

/// Streams the answer to what was said (by the person: `true`); its text.
fn answer(args: &Args, model: &Model, said: &[(bool, String)], session: &Session) -> Result<String> {
    let system = args.system.iter().map(|s| Message::system(s));
    let turns = said.iter().map(|(person, text)| if *person { Message::user(text) } else { Message::assistant(text) });
    let messages: Vec<Message<'_>> = system.chain(turns).collect();
    let prompt = model.tokenizer.encode_chat(&model.template, &messages, true).map_err(refused)?;
    let options =
        GenerateOptions { sampling: sampling(args), cache: KvType::default(), ..model.answering(args.max_tokens) };
    let (start, mut first, mut count) = (Instant::now(), None, 0usize);
    let (mut text, mut stream, mut out) =
        (String::new(), TextStream::new(&model.tokenizer, &args.stop), std::io::stdout());
    let mut see = |token: u32| -> ControlFlow<()> {
        first.get_or_insert_with(|| start.elapsed());
        count += 1;
        let piece = stream.push(token);
        text.push_str(&piece);
        let shown = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
        if shown.is_err() || stream.stopped() { ControlFlow::Break(()) } else { session.go() }
    };
    let made = model.decoder.generate_stream(&prompt, &options, &mut see);
    let stopped = stream.stopped();
    let rest = stream.finish();
    text.push_str(&rest);
    say(&rest);
    match made {
        Err(ModelError::Cancelled) if stopped => {}
        other => drop(other.map_err(refused)?),
    }
    let first = first.unwrap_or_default();
    let rate = count.saturating_sub(1) as f64 / (start.elapsed() - first).as_secs_f64().max(1e-9);
    note(&format!(
        "[{} tokens read, {count} written, first after {:.0} ms, then {rate:.1} tokens/s]",
        prompt.len(),
        first.as_secs_f64() * 1e3
    ));
    Ok(text)
}

fn sampling(args: &Args) -> Sampling {
    Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repeat_penalty: args.repeat_penalty,
        seed: args.seed,
        ..Sampling::GREEDY
    }
}
