//! `flywheel model train`.

use super::progress::{Bar, Session, note};
use super::{show, write_json};
use crate::cli::Usage;
use crate::models::refused;
use crate::models::texts::read_conversations;
use crate::models::training::{Recipe, Work, train};
use anyhow::{Context, Result, bail};
use flywheel_attribution::dataset::Split;
use flywheel_inference::model::Target;
use flywheel_inference::train::{Schedule, StepReport};
use serde_json::{Value, json};
use std::path::PathBuf;

const EXAMPLES: &str = "\
A line of the data is {\"messages\": [{\"role\": \"user\", \"content\": …}, {\"role\": \"assistant\", \"content\": …}]}; lines with
\"split\": \"holdout\" are left out, and so train the lines of a dataset snapshot. The loss counts the last answer only. The
state is kept beside OUT every ten steps and on Ctrl-C: the same command goes on from it, to the same bytes.

  flywheel model train base.gguf data.jsonl adapter.gguf --steps 60
  flywheel model merge base.gguf adapter.gguf tuned.gguf";

/// How the learning rate changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Rate {
    Constant,
    Cosine,
}

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The model to train on; its weights stay as they are.
    base: PathBuf,
    /// JSON lines of conversations.
    data: PathBuf,
    /// Adapter to make, as stock llama.cpp loads it.
    out: PathBuf,
    #[arg(long, default_value_t = 30)]
    steps: usize,
    /// Conversations of a step.
    #[arg(long, default_value_t = 6)]
    batch: usize,
    /// Learning rate; the peak with `--schedule cosine`.
    #[arg(long, default_value_t = 1e-3)]
    lr: f32,
    #[arg(long, value_enum, default_value = "cosine")]
    schedule: Rate,
    #[arg(long, default_value_t = 8)]
    rank: usize,
    /// The change is alpha / rank · B · A.
    #[arg(long, default_value_t = 16.0)]
    alpha: f32,
    /// alpha / sqrt(rank) instead.
    #[arg(long)]
    rank_stabilized: bool,
    /// Share of an adapter's inputs that are left out in each step.
    #[arg(long, default_value_t = 0.0)]
    dropout: f32,
    /// Matrices: of q, k, v, o, gate, up, down.
    #[arg(long, value_delimiter = ',', default_value = "q,k,v,o", value_parser = target)]
    targets: Vec<Target>,
    /// The same seed gives the same adapter.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Write the loss of every step as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// For machines.
    #[arg(long)]
    json: bool,
}

fn target(text: &str) -> Result<Target, String> {
    serde_json::from_value(Value::String(text.to_owned()))
        .map_err(|_| format!("`{text}` is none of q, k, v, o, gate, up, down"))
}

pub fn run(args: Args, session: &Session) -> Result<()> {
    if args.base == args.out || args.data == args.out {
        bail!(Usage("OUT must be another file than BASE and DATA".into()));
    }
    let text = std::fs::read_to_string(&args.data).with_context(|| format!("cannot read {}", args.data.display()))?;
    let samples = read_conversations(&text).with_context(|| format!("{}", args.data.display()))?;
    let samples: Vec<_> = samples.into_iter().filter(|s| s.split == Split::Train).collect();
    if samples.is_empty() {
        bail!("{} holds nothing to train on", args.data.display());
    }
    let mut checkpoint = args.out.clone().into_os_string();
    checkpoint.push(".state");
    let recipe = Recipe {
        steps: args.steps,
        batch: args.batch,
        learning_rate: args.lr,
        schedule: if args.schedule == Rate::Cosine { Schedule::Cosine } else { Schedule::Constant },
        targets: args.targets,
        rank: args.rank,
        alpha: args.alpha,
        rank_stabilized: args.rank_stabilized,
        dropout: args.dropout,
        seed: args.seed,
        ..Recipe::default()
    };
    let work = Work { base: args.base, samples, recipe, checkpoint: checkpoint.into() };
    let mut bar = Bar::new(session, "training step");
    let mut steps: Vec<StepReport> = Vec::new();
    let trained = train(&work, &mut |s| {
        steps.push(s.clone());
        bar.step(s.step, args.steps, &format!("loss {:.4}", s.loss))
    });
    drop(bar);
    if trained.is_err() && work.checkpoint.exists() {
        note(&format!("the state is kept in {}: the same command goes on from it", work.checkpoint.display()));
    }
    let trained = trained?;
    if trained.resumed_at > 0 {
        note(&format!("went on after step {}", trained.resumed_at));
    }
    let size_bytes = trained.adapter.write(&args.out).map_err(refused)?;
    let _ = std::fs::remove_file(&work.checkpoint);
    let tokens: usize = steps.iter().map(|s| s.tokens).sum();
    let whole = json!({
        "conversations": work.samples.len(), "steps": args.steps, "resumed_at": trained.resumed_at,
        "first_loss": trained.losses.first(), "last_loss": trained.losses.last(), "tokens": tokens,
        "adapter_bytes": size_bytes, "base_sha256": trained.adapter.base_sha256,
    });
    if let Some(path) = &args.report {
        write_json(path, &json!({ "recipe": work.recipe, "steps": steps }))?;
    }
    let loss = |l: Option<&f32>| l.map_or_else(|| "?".to_owned(), |l| format!("{l:.4}"));
    let line = format!(
        "{} conversations, {} steps: loss {} → {}; adapter of {size_bytes} bytes",
        work.samples.len(),
        args.steps,
        loss(trained.losses.first()),
        loss(trained.losses.last())
    );
    show(args.json, &whole, &[line])
}
