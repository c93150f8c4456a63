//! Measures the knowledge base with a real model: share of right answers with one, two and three notes, and what a
//! short LoRA training on one collection does to another. For choosing facts and wording.

use super::kb::{self, Fact};
use super::model::Engine;
use super::prompt;
use anyhow::Result;
use flywheel_inference::encoder::Encoder;
use flywheel_inference::train::{LoraConfig, Sample, TrainConfig, Trainer};
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
    /// Wording of the prompt; the app's own when left out.
    #[arg(long)]
    wording: Option<usize>,
}

fn user_text(args: &Args, notes: &[&Fact], q: &str) -> String {
    let mut list: Vec<&str> = notes.iter().map(|n| n.text.as_str()).collect();
    args.order.apply(&mut list, q);
    let Some(wording) = args.wording else { return prompt::user_text(list, q) };
    let list = list.join("\n");
    match wording {
        0 => format!("{list}\n\nQuestion: {q}\nAnswer with the value only."),
        1 => format!("{list}\n\nQuestion: {q}"),
        2 => format!("Notes:\n{list}\n\nQuestion: {q}\nShort answer:"),
        3 => format!("{list}\n\n{q} Answer in a few words."),
        4 => format!("Answer the question from the notes in one short sentence.\n\n{list}\n\nQuestion: {q}"),
        _ => format!("{list}\n\n{q}"),
    }
}

/// Ranks facts for a question as phones do.
struct Ranker<'a> {
    facts: &'a [Fact],
    texts: Vec<Vec<f32>>,
    questions: BTreeMap<&'a str, Vec<f32>>,
}

impl<'a> Ranker<'a> {
    fn new(facts: &'a [Fact], encoder: &Encoder) -> Self {
        let texts = encoder.embed(&facts.iter().map(|f| f.text.clone()).collect::<Vec<_>>());
        let asked: Vec<&str> = facts.iter().flat_map(|f| f.questions.iter().map(String::as_str)).collect();
        let vectors = encoder.embed(&asked.iter().map(|q| (*q).to_owned()).collect::<Vec<_>>());
        Self { facts, texts, questions: asked.into_iter().zip(vectors).collect() }
    }

    fn top(&self, question: &str, k: usize) -> Vec<&'a Fact> {
        let Some(asked) = self.questions.get(question) else { return Vec::new() };
        let dot = |v: &[f32]| v.iter().zip(asked).map(|(a, b)| a * b).sum::<f32>();
        let mut scored: Vec<(f32, usize)> = self.texts.iter().enumerate().map(|(i, v)| (dot(v), i)).collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scored.iter().take(k).map(|(_, i)| &self.facts[*i]).collect()
    }
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
    if args.steps > 0 {
        train(&mut engine, &ranker, args)?;
        measure(&engine, &ranker, args)?;
    }
    Ok(())
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

fn train(engine: &mut Engine, ranker: &Ranker<'_>, args: &Args) -> Result<()> {
    let cases = cases(ranker, args, Some("kitchen"), 3);
    let answers = engine.answer(&cases.iter().map(|c| c.user.clone()).collect::<Vec<_>>())?;
    let samples: Vec<Sample> = cases
        .iter()
        .zip(&answers)
        .filter(|(c, a)| c.retrieved && !c.fact.accepts(&a.text))
        .map(|(c, _)| engine.sample(&c.user, if args.sentence { &c.fact.text } else { &c.fact.value }))
        .collect::<Result<_>>()?;
    println!("{} samples", samples.len());
    let config = TrainConfig { steps: args.steps, learning_rate: args.lr, ..TrainConfig::default() };
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
