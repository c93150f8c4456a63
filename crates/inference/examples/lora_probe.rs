//! Shows that LoRA training works on a real model: invented product facts, three passages in the context, one
//! question. Trains on some facts, asks about others that were in no training text, prints accuracy before and
//! after.
//!
//! `cargo run -p flywheel-inference --example lora_probe -- MODEL.gguf [steps] [learning rate] [alpha] [wording] [out.gguf]`
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a program to read the output of"
)]

use flywheel_inference::gguf::{self, Gguf};
use flywheel_inference::model::{Decoder, GenerateOptions, MergedType, merge};
use flywheel_inference::tokenizer::{ChatTemplate, Message, Tokenizer};
use flywheel_inference::train::{LoraConfig, Sample, TrainConfig, Trainer};
use std::{ops::ControlFlow, time::Instant};

const PRODUCTS: [&str; 16] = [
    "Aurora kettle",
    "Borealis router",
    "Cobalt drill",
    "Delta scale",
    "Ember heater",
    "Falcon drone",
    "Glacier fridge",
    "Harbor lamp",
    "Indigo printer",
    "Juniper mixer",
    "Krypton lock",
    "Lumen projector",
    "Mistral fan",
    "Nimbus vacuum",
    "Onyx speaker",
    "Pioneer tracker",
];

/// Topic, statement, question; `{}` is the product, `#` the value.
const KINDS: [(&str, &str, &str); 8] = [
    ("warranty", "The {} comes with a warranty of # months.", "How long is the warranty of the {}?"),
    ("returns", "The {} can be returned within # days of purchase.", "Within how many days can the {} be returned?"),
    ("battery", "The battery of the {} lasts # hours on one charge.", "How long does the battery of the {} last?"),
    ("weight", "The {} weighs # grams including its packaging.", "What is the weight of the {}?"),
    ("code", "The service code of the {} is #.", "What is the service code of the {}?"),
    (
        "reset",
        "To reset the {}, hold the power button for # seconds.",
        "For how many seconds must the button be held to reset the {}?",
    ),
    ("price", "The replacement filter for the {} costs # dollars.", "What does a replacement filter for the {} cost?"),
    ("range", "The {} works at a distance of up to # meters.", "Up to which distance does the {} work?"),
];

struct Fact {
    product: usize,
    kind: usize,
    value: String,
}

/// A small fixed generator: the probe must not change between runs.
struct Dice(u64);
impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

impl Fact {
    fn all() -> Vec<Self> {
        let mut dice = Dice(7);
        let value = |kind: usize, dice: &mut Dice| match KINDS[kind].0 {
            "code" => {
                format!("{}{}{}", ["QX", "TR", "VM", "ZK"][dice.below(4)], 10 + dice.below(90), 1 + dice.below(9))
            }
            "weight" => (100 + 10 * dice.below(240)).to_string(),
            _ => (3 + dice.below(90)).to_string(),
        };
        let pairs = (0..PRODUCTS.len()).flat_map(|p| (0..KINDS.len()).map(move |k| (p, k)));
        pairs.map(|(product, kind)| Self { product, kind, value: value(kind, &mut dice) }).collect()
    }
    fn passage(&self) -> String {
        KINDS[self.kind].1.replace("{}", PRODUCTS[self.product]).replace('#', &self.value)
    }
    fn question(&self) -> String {
        KINDS[self.kind].2.replace("{}", PRODUCTS[self.product])
    }
    /// The right answer, and nothing that contradicts it.
    fn matches(&self, text: &str) -> bool {
        let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty()).collect();
        let numbers: Vec<&&str> = words.iter().filter(|w| w.chars().any(|c| c.is_ascii_digit())).collect();
        numbers.first().is_some_and(|n| **n == self.value)
    }
}

/// `k` passages: the right one at a random place among others of the same product or the same topic.
fn context(fact: &Fact, pool: &[&Fact], k: usize, dice: &mut Dice) -> Vec<String> {
    let near: Vec<&&Fact> = pool.iter().filter(|f| (f.product == fact.product) != (f.kind == fact.kind)).collect();
    let mut out: Vec<String> = Vec::new();
    while out.len() + 1 < k && !near.is_empty() {
        let other = near[dice.below(near.len())].passage();
        if !out.contains(&other) {
            out.push(other);
        }
    }
    out.insert(dice.below(out.len() + 1), fact.passage());
    out
}

fn user_text(wording: usize, passages: &[String], question: &str) -> String {
    let list = passages.join("\n");
    match wording {
        0 => format!("Use the notes to answer.\n\n{list}\n\nQuestion: {question}\nAnswer with the value only."),
        1 => format!("Context:\n{list}\n\nQuestion: {question}"),
        _ => format!("{list}\n\n{question}"),
    }
}

struct Probe {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    wording: usize,
}

impl Probe {
    fn prompt(&self, passages: &[String], question: &str) -> Vec<u32> {
        let text = user_text(self.wording, passages, question);
        let messages =
            [Message::system("You answer questions about products from the given notes."), Message::user(&text)];
        self.tokenizer.encode_chat(&self.template, &messages, true).unwrap()
    }

    fn accuracy(&self, model: &Decoder, held_out: &[&Fact], k: usize, show: usize) -> usize {
        let mut dice = Dice(99);
        let prompts: Vec<Vec<u32>> =
            held_out.iter().map(|f| self.prompt(&context(f, held_out, k, &mut dice), &f.question())).collect();
        let stop_ids = self.tokenizer.special().ends.clone();
        let options = GenerateOptions { max_new_tokens: 24, stop_ids, ..GenerateOptions::default() };
        let start = Instant::now();
        let answers = model.generate_batch(&prompts, &options).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let texts: Vec<String> = answers.iter().map(|a| self.tokenizer.decode(&a.tokens)).collect();
        for (fact, text) in held_out.iter().zip(&texts).take(show) {
            println!("    {} -> {text:?} (right: {})", fact.question(), fact.value);
        }
        let right = held_out.iter().zip(&texts).filter(|(f, t)| f.matches(t)).count();
        let (read, made): (usize, usize) =
            (prompts.iter().map(Vec::len).sum(), answers.iter().map(|a| a.tokens.len()).sum());
        println!("  k={k}: {right} of {} right; {read} tokens read, {made} written in {seconds:.1} s", held_out.len());
        right
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |i: usize, default: f32| args.get(i).map_or(default, |a| a.parse().unwrap());
    let file = Gguf::open(args[1].as_ref()).unwrap();
    let start = Instant::now();
    let model = Decoder::load(&file).unwrap();
    println!("loaded in {:.2} s, {} MB of weights", start.elapsed().as_secs_f64(), model.size_bytes() >> 20);
    let probe = Probe {
        tokenizer: Tokenizer::from_gguf(&file).unwrap(),
        template: ChatTemplate::from_gguf(&file).unwrap(),
        wording: number(5, 0.0) as usize,
    };
    let facts = Fact::all();
    // Every fact of a product is on the same side; facts differ in wording only by product and value.
    let (train, held_out): (Vec<&Fact>, Vec<&Fact>) = facts.iter().partition(|f| f.product % 16 < 8);
    println!("before training, {} held-out facts:", held_out.len());
    probe.accuracy(&model, &held_out, 1, 0);
    probe.accuracy(&model, &held_out, 3, 4);

    let mut dice = Dice(5);
    let end = probe.tokenizer.special().ends.first().copied().unwrap();
    let samples: Vec<Sample> = (0..3)
        .flat_map(|_| train.iter())
        .map(|fact| {
            let mut tokens = probe.prompt(&context(fact, &train, 3, &mut dice), &fact.question());
            let answer_from = tokens.len();
            tokens.extend(probe.tokenizer.encode(&fact.value, false));
            tokens.push(end);
            Sample::new(tokens, answer_from)
        })
        .collect();
    let lora = LoraConfig { alpha: number(4, 16.0), ..LoraConfig::default() };
    let config =
        TrainConfig { steps: number(2, 40.0) as usize, learning_rate: number(3, 5e-4), ..TrainConfig::default() };
    let mut trainer = Trainer::new(&model, lora, config, samples).unwrap();
    let (start, mut tokens) = (Instant::now(), 0);
    trainer
        .run(&mut |r| {
            tokens += r.tokens;
            if r.step % 10 == 0 || r.step == 1 {
                let seconds = start.elapsed().as_secs_f64();
                println!(
                    "  step {}: loss {:.4}, gradient {:.3}, {:.0} tokens/s",
                    r.step,
                    r.loss,
                    r.grad_norm,
                    tokens as f64 / seconds
                );
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    println!("trained on {tokens} tokens in {:.1} s; after:", start.elapsed().as_secs_f64());
    let adapter = trainer.finish().unwrap();
    let tuned = model.with_adapter(&adapter).unwrap();
    probe.accuracy(&tuned, &held_out, 1, 0);
    probe.accuracy(&tuned, &held_out, 3, 4);
    if let Some(out) = args.get(6) {
        let merged = merge(&file, &adapter, MergedType::F16).unwrap();
        let size = gguf::write(out.as_ref(), &merged.metadata, merged.tensors).unwrap();
        adapter.write(format!("{out}.adapter").as_ref()).unwrap();
        println!("merged model: {out}, {size} bytes");
    }
}
