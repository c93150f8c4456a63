//! Measures the knowledge base with a real model: share of right answers with one, two and three notes, and what a
//! short LoRA training on one collection does to another. For choosing facts and wording.

use super::heldout::{HeldOut, Ranker};
use super::kb::{self, Fact};
use super::model::Engine;
use super::{prompt, repair};
use anyhow::Result;
use flywheel_inference::encoder::Encoder;
use flywheel_inference::eval::MatchRule;
use flywheel_inference::train::{LoraConfig, Sample, Schedule, TrainConfig, Trainer};
use flywheel_types::Digest;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// GGUF file of the base model.
    model: PathBuf,
    /// Only this collection.
    #[arg(long)]
    collection: Option<String>,
    /// Numbers of notes to try.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    k: Vec<usize>,
    /// Print wrong answers.
    #[arg(long)]
    wrong: bool,
    /// Only the phrasing with this index.
    #[arg(long)]
    phrasing: Option<usize>,
    /// LoRA steps; 0 trains nothing.
    #[arg(long, default_value_t = 0)]
    steps: usize,
    #[arg(long, default_value_t = 5e-4)]
    lr: f32,
    /// Knowledge base; the built-in one when left out.
    #[arg(long)]
    kb: Option<PathBuf>,
    /// Folder of the sentence encoder.
    #[arg(long)]
    encoder: PathBuf,
    /// Train on the whole sentence of the fact, not the value.
    #[arg(long)]
    sentence: bool,
    /// Order of the notes.
    #[arg(long, value_enum, default_value_t = prompt::Order::BestFirst)]
    order: prompt::Order,
    /// Samples of a LoRA step.
    #[arg(long, default_value_t = 6)]
    batch: usize,
    /// Seed of the training.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Share of the right but wordy answers that people reject, so that the annotators correct them, too.
    #[arg(long, default_value_t = 0.3)]
    wordy: f64,
    /// Measure the evaluation sets of the story, too.
    #[arg(long)]
    held_out: bool,
}

fn user_text(args: &Args, notes: &[&Fact], q: &str) -> String {
    let mut list: Vec<&str> = notes.iter().map(|n| n.text.as_str()).collect();
    args.order.apply(&mut list, q);
    prompt::user_text(list, q)
}

/// One question with its notes.
struct Case<'a> {
    fact: &'a Fact,
    user: String,
    retrieved: bool,
}

fn cases<'a>(ranker: &Ranker<'a>, args: &Args, collection: Option<&str>, k: usize) -> Vec<Case<'a>> {
    let mut out = Vec::new();
    for fact in ranker.facts.iter().filter(|f| collection.is_none_or(|c| *c == f.collection)) {
        for (i, q) in fact.questions.iter().enumerate() {
            if args.phrasing.is_some_and(|p| p != i) {
                continue;
            }
            let notes = ranker.top(q, k);
            let retrieved = notes.iter().any(|n| n.chunk_id == fact.chunk_id);
            let user = user_text(args, &notes, q);
            out.push(Case { fact, user, retrieved });
        }
    }
    out
}

pub fn run(args: &Args) -> Result<()> {
    let facts = match &args.kb {
        Some(file) => kb::parse(&std::fs::read_to_string(file)?)?,
        None => kb::load()?,
    };
    let ranker = Ranker::new(&facts, &Encoder::open(&args.encoder)?);
    let mut engine = Engine::open(&args.model)?;
    println!("{} facts", facts.len());
    measure(&engine, &ranker, args)?;
    let before = held_out(&engine, &ranker, args)?;
    if args.steps > 0 {
        train(&mut engine, &ranker, args)?;
        measure(&engine, &ranker, args)?;
        let after = held_out(&engine, &ranker, args)?;
        let changed = |a: bool| before.iter().zip(&after).filter(|(b, c)| **b != **c && **c == a).count();
        println!("held-out: {} gained, {} lost", changed(true), changed(false));
    }
    Ok(())
}

/// Which questions of the hard evaluation set are answered right.
fn held_out(engine: &Engine, ranker: &Ranker<'_>, args: &Args) -> Result<Vec<bool>> {
    if !args.held_out {
        return Ok(Vec::new());
    }
    let sets = HeldOut::new(ranker);
    let mut right = Vec::new();
    for set in [&sets.easy, &sets.hard] {
        let answers = engine.answer(&set.iter().map(|i| i.prompt.clone()).collect::<Vec<_>>())?;
        right = set.iter().zip(&answers).map(|(i, a)| MatchRule::Value.accepts(&a.text, &i.expect)).collect();
        println!("held-out: {} of {}", right.iter().filter(|r| **r).count(), right.len());
    }
    Ok(right)
}

fn measure(engine: &Engine, ranker: &Ranker<'_>, args: &Args) -> Result<()> {
    for k in &args.k {
        let cases = cases(ranker, args, args.collection.as_deref(), *k);
        let started = std::time::Instant::now();
        let answers = engine.answer(&cases.iter().map(|c| c.user.clone()).collect::<Vec<_>>())?;
        let mut by: BTreeMap<&str, (usize, usize, usize)> = BTreeMap::new();
        for (case, answer) in cases.iter().zip(&answers) {
            let right = case.fact.accepts(&answer.text);
            let entry = by.entry(case.fact.collection.as_str()).or_default();
            entry.0 += usize::from(right);
            entry.1 += 1;
            entry.2 += usize::from(case.retrieved);
            if args.wrong && !right {
                println!(
                    "   {} [{}] -> {:?}, right {:?}, retrieved {}",
                    case.fact.chunk_id,
                    last_question(&case.user),
                    answer.text,
                    case.fact.value,
                    case.retrieved
                );
            }
        }
        let tokens: u32 = answers.iter().map(|a| a.input_tokens).sum();
        println!(
            "k={k}: (right, asked, retrieved) {by:?}; {tokens} tokens in {:.1} s",
            started.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn last_question(user: &str) -> &str {
    user.split("Question: ").nth(1).and_then(|r| r.lines().next()).unwrap_or("")
}

/// A number in [0, 1) that belongs to this text.
fn drawn(text: &str) -> f64 {
    f64::from(Digest::of(text.as_bytes()).0[0]) / 256.0
}

fn train(engine: &mut Engine, ranker: &Ranker<'_>, args: &Args) -> Result<()> {
    let cases = cases(ranker, args, Some(repair::CORRECTED), 3);
    let answers = engine.answer(&cases.iter().map(|c| c.user.clone()).collect::<Vec<_>>())?;
    let samples: Vec<Sample> = cases
        .iter()
        .zip(&answers)
        .filter(|(c, a)| c.retrieved && a.text != c.fact.value)
        .filter(|(c, a)| !c.fact.accepts(&a.text) || drawn(&c.user) < args.wordy)
        .map(|(c, _)| engine.sample(&c.user, if args.sentence { &c.fact.text } else { &c.fact.value }))
        .collect::<Result<_>>()?;
    println!("{} samples", samples.len());
    let config = TrainConfig {
        steps: args.steps,
        batch: args.batch,
        learning_rate: args.lr,
        seed: args.seed,
        schedule: Schedule::Cosine,
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(engine.decoder(), LoraConfig::default(), config, samples)?;
    let (started, mut tokens) = (std::time::Instant::now(), 0);
    trainer.run(&mut |r| {
        tokens += r.tokens;
        if r.step % 5 == 0 {
            println!(
                "  step {}: loss {:.4}, {:.0} tokens/s",
                r.step,
                r.loss,
                tokens as f64 / started.elapsed().as_secs_f64()
            );
        }
        ControlFlow::Continue(())
    })?;
    engine.adapt(&trainer.finish()?)
}
