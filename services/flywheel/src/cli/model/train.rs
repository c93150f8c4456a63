//! `flywheel model train`.

use super::progress::{Bar, Session, note};
use super::{show, write_json};
use crate::cli::Usage;
use crate::models::texts::read_conversations;
use crate::models::training::{Recipe, Trained, Watch, Work, train, train_norms, write_trained};
use crate::models::{open, refused};
use anyhow::{Context, Result, bail};
use flywheel_attribution::dataset::Split;
use flywheel_inference::model::{Adapter, ModelConfig, Target};
use flywheel_inference::train::{Distillation, Schedule, StepReport, WeightGrid};
use flywheel_types::Error;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
A line of the data is {\"messages\": [{\"role\": \"user\", \"content\": …}, {\"role\": \"assistant\", \"content\": …}]}; lines with
\"split\": \"holdout\" are left out (with --grid the divergence from the base is measured on them), and so train the lines of a
dataset snapshot. The loss counts the last answer only. The
state is kept beside OUT every ten steps and on Ctrl-C: the same command goes on from it, to the same bytes.

  flywheel model train base.gguf data.jsonl adapter.gguf --steps 60
  flywheel model merge base.gguf adapter.gguf tuned.gguf
  flywheel model train q4.gguf data.jsonl repaired.gguf --norms --teacher f16.gguf --teacher-share 1";

/// What an adapter is made of, in a recipe: nothing to tell of a run on norms.
const OF_ADAPTERS: [&str; 5] = ["targets", "rank", "alpha", "rank_stabilized", "dropout"];

/// Conversations that were left out of training and are measured.
const MEASURED: usize = 32;

/// How the learning rate changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Rate {
    Constant,
    Cosine,
}

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The model to train on; the file stays as it is.
    base: PathBuf,
    /// JSON lines of conversations.
    data: PathBuf,
    /// Adapter to make, as stock llama.cpp loads it; with --norms, the whole model.
    out: PathBuf,
    /// Train the norms of the model and no adapter: OUT is the model with new norms (F32), everything else byte for byte.
    #[arg(long, conflicts_with_all = ["rank", "alpha", "rank_stabilized", "dropout", "targets", "peft"])]
    norms: bool,
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
    /// Train for matrices in a weight format, a block type such as q4_0, or npu-int4, npu-int6, npu-int8 with `/COLUMNS` for groups:
    /// they are rounded in every step, the adapter folded in.
    #[arg(long, value_name = "FORMAT")]
    grid: Option<WeightGrid>,
    /// Compare with this model's predictions, too: it has the same vocabulary.
    #[arg(long, value_name = "MODEL")]
    teacher: Option<PathBuf>,
    /// Share of the teacher in the loss; 1 is the divergence from it alone.
    #[arg(long, default_value_t = 0.5, requires = "teacher")]
    teacher_share: f32,
    /// Both distributions are softened by this before they are compared.
    #[arg(long, default_value_t = 1.0, requires = "teacher")]
    temperature: f32,
    /// Write the adapter as a folder for PEFT, too.
    #[arg(long, value_name = "FOLDER")]
    peft: Option<PathBuf>,
    /// Matrices: of q, k, v, o, gate, up, down.
    #[arg(long, value_delimiter = ',', default_value = "q,k,v,o", value_parser = target)]
    targets: Vec<Target>,
    /// The same seed gives the same bytes.
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

pub fn run(args: &Args, session: &Session) -> Result<()> {
    let work = work(args)?;
    if args.norms {
        let (trained, steps) = watched(args, &work, session, train_norms)?;
        let size_bytes = write_trained(&work.base, &trained.made, &args.out, &|| session.check().is_ok())?;
        let values: usize = trained.made.values().map(Vec::len).sum();
        let more = json!({ "model_bytes": size_bytes, "norms": trained.made.len(), "trained_values": values });
        let made = format!("{values} values in {} norms, model of {size_bytes} bytes", trained.made.len());
        return finish(args, &work, &trained, &steps, more, &made);
    }
    let (trained, steps) = watched(args, &work, session, train)?;
    let size_bytes = trained.made.write(&args.out).map_err(refused)?;
    if let Some(folder) = &args.peft {
        write_peft(&work.base, &trained.made, folder)?;
    }
    let made = format!("adapter of {size_bytes} bytes");
    finish(args, &work, &trained, &steps, json!({ "adapter_bytes": size_bytes }), &made)
}

fn work(args: &Args) -> Result<Work> {
    if [Some(&args.base), Some(&args.data), args.teacher.as_ref()].contains(&Some(&args.out)) {
        bail!(Usage("OUT must be another file than BASE, DATA and the teacher".into()));
    }
    let text = std::fs::read_to_string(&args.data).with_context(|| format!("cannot read {}", args.data.display()))?;
    let samples = read_conversations(&text).with_context(|| format!("{}", args.data.display()))?;
    let (samples, held_out): (Vec<_>, Vec<_>) = samples.into_iter().partition(|s| s.split == Split::Train);
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
        targets: args.targets.clone(),
        rank: args.rank,
        alpha: args.alpha,
        rank_stabilized: args.rank_stabilized,
        dropout: args.dropout,
        grid: args.grid,
        seed: args.seed,
        ..Recipe::default()
    };
    let how = Distillation { temperature: args.temperature, share: args.teacher_share };
    Ok(Work {
        base: args.base.clone(),
        samples,
        recipe,
        checkpoint: checkpoint.into(),
        teacher: args.teacher.clone().map(|model| (model, how)),
        measured: held_out.into_iter().take(MEASURED).collect(),
    })
}

/// Trains and shows how far it is; also returns the steps of this attempt.
fn watched<T>(
    args: &Args,
    work: &Work,
    session: &Session,
    train: impl FnOnce(&Work, &mut Watch<'_>) -> Result<Trained<T>, Error>,
) -> Result<(Trained<T>, Vec<StepReport>)> {
    let mut bar = Bar::new(session, "training step");
    let mut steps: Vec<StepReport> = Vec::new();
    let trained = train(work, &mut |s| {
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
    Ok((trained, steps))
}

fn write_peft(base: &Path, adapter: &Adapter, folder: &Path) -> Result<()> {
    let config = ModelConfig::from_gguf(&open(base)?, &mut Vec::new()).map_err(refused)?;
    let name = base.file_stem().unwrap_or_default().to_string_lossy();
    Ok(adapter.write_peft(folder, &config, &name).map_err(refused)?)
}

/// Removes the state, writes the report and shows the result: `more` and `made` say what was made.
fn finish<T>(
    args: &Args,
    work: &Work,
    trained: &Trained<T>,
    steps: &[StepReport],
    more: Value,
    made: &str,
) -> Result<()> {
    let _ = std::fs::remove_file(&work.checkpoint);
    let tokens: usize = steps.iter().map(|s| s.tokens).sum();
    let mut whole = json!({
        "conversations": work.samples.len(), "steps": args.steps, "resumed_at": trained.resumed_at,
        "first_loss": trained.losses.first(), "last_loss": trained.losses.last(), "tokens": tokens,
        "base_sha256": trained.base_sha256, "divergence": trained.divergence,
    });
    if let (Value::Object(whole), Value::Object(more)) = (&mut whole, more) {
        whole.extend(more);
    }
    if let Some(path) = &args.report {
        let mut recipe = json!(work.recipe);
        if let (true, Value::Object(recipe)) = (args.norms, &mut recipe) {
            OF_ADAPTERS.iter().for_each(|field| drop(recipe.remove(*field)));
        }
        let trains = if args.norms { "norms" } else { "adapter" };
        write_json(path, &json!({ "trains": trains, "recipe": recipe, "steps": steps }))?;
    }
    let loss = |l: Option<&f32>| l.map_or_else(|| "?".to_owned(), |l| format!("{l:.4}"));
    let line = format!(
        "{} conversations, {} steps: loss {} → {}; {made}",
        work.samples.len(),
        args.steps,
        loss(trained.losses.first()),
        loss(trained.losses.last())
    );
    let far = trained.divergence.zip(args.grid).map(|([before, after], grid)| {
        format!("divergence from the base as {grid}, on what was left out: {before:.5} → {after:.5} nats a token")
    });
    show(args.json, &whole, &std::iter::once(line).chain(far).collect::<Vec<_>>())
}
