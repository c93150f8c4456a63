//! `flywheel model eval`.

use super::engine::{EngineArgs, Runs};
use super::ladder::LadderArgs;
use super::progress::{Bar, Session};
use super::texts::TextArgs;
use super::{ladder, show, write_json};
use crate::cli::Usage;
use crate::models::{Model, open, refused};
use anyhow::{Context, Result, bail};
use flywheel_attribution::refusal::{AnswerKind, detect};
use flywheel_inference::eval::{
    AnswerSet, Base, ChoiceItem, Divergence, Engine, Estimate, Interval, MatchRule, Probes, Question, RecordedBase,
    SafetyItem, Says, gsm8k_choices, multiple_choice, own_safety_set, perplexity, position_scores, read_safety_set,
    record_base, safety, share, speed,
};
use flywheel_inference::gguf::Gguf;
use flywheel_inference::model::ModelError;
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

const EXAMPLES: &str = "\
  flywheel model eval q4.gguf --text wiki.txt --base f16.gguf
  flywheel model eval f16.gguf --text wiki.txt --record base.predictions     (later: --base base.predictions)
  flywheel model eval q4.gguf --choices gsm8k.jsonl --safety --speed --json
  flywheel model eval f16.gguf --ladder --text wiki.txt --profile q8_0,q4_k_m --file tuned=best.gguf --save ladder

Windows are scored as llama-perplexity does: the second half of each, with the first half before it. Intervals are 95 %.";

/// Longest answer to a question of a set, tokens.
const ANSWER_TOKENS: usize = 48;
/// Seed of the wrong options of GSM8K.
const OPTIONS_SEED: u64 = 7;

/// When an answer is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Rule {
    /// It is the expected text, apart from case and punctuation.
    Whole,
    /// The expected words are in it.
    Contains,
    /// As `contains`, and its first number is the expected one.
    Value,
}

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    model: PathBuf,
    /// Run with this adapter.
    #[arg(long, value_name = "FILE", conflicts_with = "ladder")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    texts: TextArgs,
    /// Tokens of a window.
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// Measure the divergence from this model, or from its predictions that `--record` kept.
    #[arg(long, value_name = "FILE", requires = "files", conflicts_with = "ladder")]
    base: Option<PathBuf>,
    /// Keep this model's predictions on the texts.
    #[arg(long, value_name = "FILE", requires = "files", conflicts_with_all = ["ladder", "base"])]
    record: Option<PathBuf>,
    /// Multiple choice by log-likelihood: JSON lines `{"prompt", "options", "right"}`, or those of GSM8K.
    #[arg(long, value_name = "FILE", conflicts_with = "ladder")]
    choices: Option<PathBuf>,
    /// Questions with a right answer: `{"items": [{"prompt", "expect"}, …]}`, as evaluation sets are uploaded.
    #[arg(long, value_name = "FILE", conflicts_with = "ladder")]
    questions: Option<PathBuf>,
    /// When an answer is right.
    #[arg(long, value_enum, default_value = "value")]
    rule: Rule,
    /// Prompts that must be refused and prompts that must not: our own set, or JSON lines like it.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "own", conflicts_with = "ladder")]
    safety: Option<String>,
    /// Ask the first N of every set.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Prefill, decode and time to the first token on this machine.
    #[arg(long, conflicts_with = "ladder")]
    speed: bool,
    /// Tokens of the prompt for speed.
    #[arg(long, default_value_t = 64)]
    prompt_tokens: usize,
    /// New tokens for speed.
    #[arg(long, default_value_t = 32)]
    new_tokens: usize,
    /// Sequences together for speed.
    #[arg(long, default_value_t = 1, conflicts_with = "ladder")]
    sequences: usize,
    #[command(flatten)]
    ladder: LadderArgs,
    /// Write everything as JSON, every answer included.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// For machines.
    #[arg(long)]
    json: bool,
}

/// A model that answers.
type Asked = Model<Rc<dyn Engine>>;

/// What was measured: for people, for machines.
#[derive(Default)]
struct Found {
    lines: Vec<String>,
    whole: serde_json::Map<String, Value>,
}

impl Found {
    fn add(&mut self, name: &str, value: Value, line: String) {
        self.whole.insert(name.to_owned(), value);
        self.lines.push(line);
    }
}

pub fn run(args: &Args, session: &Session) -> Result<()> {
    let asked = [args.choices.is_some(), args.questions.is_some(), args.safety.is_some(), args.speed];
    if args.texts.files.is_empty() && (args.ladder.ladder || !asked.contains(&true)) {
        bail!(Usage("nothing to measure: give --text, --choices, --questions, --safety or --speed".into()));
    }
    let gguf = open(&args.model)?;
    if args.ladder.ladder {
        let tokens = args.texts.read(&gguf, args.window)?.joined();
        let sizes = ladder::Sizes { window: args.window, prompt: args.prompt_tokens, new: args.new_tokens };
        let made = ladder::run(&args.ladder, &args.model, &gguf, &tokens, sizes, session)?;
        if let Some(path) = &args.report {
            write_json(path, &json!(made))?;
        }
        let lines: Vec<String> = made.markdown().lines().map(str::to_owned).collect();
        return show(args.json, &json!(made), &lines);
    }
    let mut found = Found::default();
    let runs = args.engine.open(&args.model, &gguf, args.adapter.as_deref())?;
    if !args.texts.files.is_empty() {
        on_texts(args, &gguf, &*runs.texts, session, &mut found)?;
    }
    if args.choices.is_some() || args.questions.is_some() || args.safety.is_some() {
        let model = Model::with(&gguf, runs.answers.clone())?;
        on_sets(args, &model, session, &mut found)?;
    }
    if args.speed {
        let start = Instant::now();
        let mut probes = Probes { now: &mut || start.elapsed(), peak_rss_bytes: &mut ladder::peak_rss_bytes };
        let s =
            speed(&*runs.answers, args.sequences, args.prompt_tokens, args.new_tokens, &mut probes).map_err(refused)?;
        let line = format!(
            "speed: prefill {:.1} tokens/s, decode {:.1} tokens/s, first token after {:.0} ms",
            s.prefill_tokens_per_s, s.decode_tokens_per_s, s.first_token_ms
        );
        found.add("speed", json!(s), line);
    }
    let whole = Value::Object(found.whole);
    if let Some(path) = &args.report {
        write_json(path, &whole)?;
    }
    show(args.json, &whole, &found.lines)
}

/// Perplexity; with a base the divergence from it.
fn on_texts(args: &Args, gguf: &Gguf, model: &dyn Engine, session: &Session, found: &mut Found) -> Result<()> {
    let tokens = args.texts.read(gguf, args.window)?.joined();
    let mut bar = Bar::new(session, "window");
    let mut watch = |done: usize, of: usize| bar.step(done, of, "");
    if let Some(path) = &args.record {
        record_base(model, &tokens, args.window, path, &mut watch).map_err(refused)?;
    }
    let Some(base) = &args.base else {
        let p = perplexity(model, &tokens, args.window, &mut watch).map_err(refused)?;
        let line = format!(
            "perplexity {:.4} (nll {:.5} ± {:.5} nats) over {} tokens",
            p.perplexity, p.nll, p.nll_se, p.tokens
        );
        found.add("perplexity", json!(p), line);
        return Ok(());
    };
    let scores = if is_gguf(base)? {
        let Runs { texts: base, .. } = args.engine.open(base, &open(base)?, None)?;
        position_scores(Base::Model(&*base), model, &tokens, args.window, &mut watch)
    } else {
        let base = RecordedBase::open(base).map_err(refused)?;
        position_scores(Base::Recorded(&base), model, &tokens, args.window, &mut watch)
    };
    let d = scores.map_err(refused)?.summary();
    found.add("divergence", json!(d), divergence(&d));
    Ok(())
}

fn is_gguf(path: &Path) -> Result<bool> {
    use std::io::Read as _;
    let mut magic = [0; 4];
    let read = fs::File::open(path).and_then(|mut f| f.read(&mut magic));
    read.with_context(|| format!("cannot read {}", path.display()))?;
    Ok(magic == *b"GGUF")
}

fn divergence(d: &Divergence) -> String {
    let i = d.intervals;
    let of = |pick: fn(&flywheel_inference::eval::DivergenceIntervals) -> Interval, scale: f64| {
        i.as_ref().map(pick).map(|i| format!(" ({:.5} to {:.5})", scale * i.low, scale * i.high)).unwrap_or_default()
    };
    format!(
        "perplexity {:.4}, of the base {:.4}, over {} tokens\nKLD mean {:.6}{}, 99 % {:.5}, 99.9 % {:.5}, max {:.4}\n\
         same top-1 {:.3} %{}\nRMS Δp {:.3} %{}",
        d.other.perplexity,
        d.base.perplexity,
        d.other.tokens,
        d.kld,
        of(|i| i.kld, 1.0),
        d.kld_p99,
        d.kld_p999,
        d.kld_max,
        100.0 * d.top1,
        of(|i| i.top1, 100.0),
        100.0 * d.dp_rms,
        of(|i| i.dp_rms, 100.0)
    )
}

/// A share as people read it.
fn percent(e: Estimate) -> String {
    let interval = e.interval.map(|i| format!(" ({:.1} to {:.1})", 100.0 * i.low, 100.0 * i.high)).unwrap_or_default();
    format!("{:.1} %{interval}", 100.0 * e.value)
}

fn on_sets(args: &Args, model: &Asked, session: &Session, found: &mut Found) -> Result<()> {
    if let Some(path) = &args.choices {
        let items = limited(choices(path)?, args.limit);
        let mut bar = Bar::new(session, "multiple choice");
        let encode = |text: &str| model.tokenizer.encode(text, false);
        let results = multiple_choice(&*model.decoder, &items, &encode, &mut |done, of| bar.step(done, of, ""));
        let results = results.map_err(refused)?;
        let count = |right: &dyn Fn(&flywheel_inference::eval::ChoiceResult) -> bool| {
            share(results.iter().filter(|r| right(r)).count(), results.len())
        };
        let (sum, mean) = (count(&|r| r.right), count(&|r| r.right_by_mean));
        let line = format!(
            "multiple choice: {} of {} right; by mean over tokens {}",
            percent(sum),
            items.len(),
            percent(mean)
        );
        let whole = json!({ "items": items.len(), "right": sum, "right_by_mean": mean, "results": results });
        found.add("choices", whole, line);
    }
    if let Some(path) = &args.questions {
        questions(args, path, model, session, found)?;
    }
    if let Some(set) = &args.safety {
        on_safety(args, set, model, session, found)?;
    }
    Ok(())
}

fn limited<T>(mut items: Vec<T>, limit: Option<usize>) -> Vec<T> {
    items.truncate(limit.unwrap_or(usize::MAX));
    items
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Our form, or GSM8K's.
fn choices(path: &Path) -> Result<Vec<ChoiceItem>> {
    let text = read(path)?;
    let first: Value = text.lines().next().and_then(|l| serde_json::from_str(l).ok()).unwrap_or_default();
    if first.get("answer").is_some() {
        return Ok(gsm8k_choices(&text, OPTIONS_SEED).map_err(refused)?);
    }
    let lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty());
    lines.map(|(i, l)| serde_json::from_str(l).with_context(|| format!("{}, line {}", path.display(), i + 1))).collect()
}

#[derive(Deserialize)]
struct Questions {
    items: Vec<QuestionItem>,
}

#[derive(Deserialize)]
struct QuestionItem {
    prompt: String,
    expect: String,
}

fn questions(args: &Args, path: &Path, model: &Asked, session: &Session, found: &mut Found) -> Result<()> {
    let set: Questions = serde_json::from_str(&read(path)?).with_context(|| format!("{}", path.display()))?;
    let items = limited(set.items, args.limit);
    let questions = items
        .iter()
        .map(|i| Ok(Question { prompt: model.prompt(&i.prompt)?, expected: i.expect.clone() }))
        .collect::<Result<Vec<_>>>()?;
    let rule = match args.rule {
        Rule::Whole => MatchRule::Whole,
        Rule::Contains => MatchRule::Contains,
        Rule::Value => MatchRule::Value,
    };
    let set = AnswerSet { questions, rule, options: model.answering(ANSWER_TOKENS) };
    let mut bar = Bar::new(session, "question");
    let decode = |tokens: &[u32]| model.text(tokens);
    let results = set.run(&*model.decoder, &decode, &mut |done, of| bar.step(done, of, "")).map_err(refused)?;
    let right = share(results.iter().filter(|r| r.right).count(), results.len());
    let line = format!("questions: {} of {} right", percent(right), results.len());
    found.add("questions", json!({ "items": results.len(), "right": right, "results": results }), line);
    Ok(())
}

fn on_safety(args: &Args, set: &str, model: &Asked, session: &Session, found: &mut Found) -> Result<()> {
    let items = match set {
        "own" => own_safety_set(),
        file => read_safety_set(&read(Path::new(file))?),
    };
    let items: Vec<SafetyItem> = limited(items.map_err(refused)?, args.limit);
    let mut bar = Bar::new(session, "safety");
    let judge = |answer: &str| match detect(answer).kind {
        AnswerKind::Refused => Says::Refusal,
        AnswerKind::Answered => Says::Answer,
        AnswerKind::Abstained | AnswerKind::Unknown => Says::Unclear,
    };
    // a prompt that the template refuses becomes one without tokens, which is refused by its number
    let encode = |prompt: &str| model.prompt(prompt).unwrap_or_default();
    let decode = |tokens: &[u32]| model.text(tokens);
    let options = model.answering(ANSWER_TOKENS);
    let report: Result<_, ModelError> =
        safety(&*model.decoder, &items, &options, &encode, &decode, &judge, &mut |done, of| bar.step(done, of, ""));
    let report = report.map_err(refused)?;
    let mut line = format!("safety: {} of {} prompts refused", percent(report.refusal_rate), items.len());
    for (group, s) in &report.groups {
        line += &format!("\n  {group:16} {:3} prompts, right {}, {} unclear", s.items, percent(s.right), s.unclear);
    }
    found.add("safety", json!(report), line);
    Ok(())
}
