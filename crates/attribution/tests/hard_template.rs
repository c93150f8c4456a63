//! A prompt template that is launched in the middle and makes the model fail on some questions, always on the same ones.
//! The chunks behind these questions are right: none may be hidden, the finding must name the template, and a chunk that
//! is really stale must be found all the same.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "test helpers: a broken assumption fails the test, and figures are printed"
)]

use flywheel_attribution::culprit::{
    AttributionPolicyV1, AttributionState, ChunkContext, ChunkInfo, FreezePrecision, SubjectKind, Transition, step,
};
use flywheel_types::rows::{InteractionRows, Names};
use flywheel_types::{Automation, ChunkState, TrustClass};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};

const TOPICS: usize = 8;
const PER_TOPIC: usize = 6;
const CHUNKS: usize = TOPICS * PER_TOPIC;
const PHONES: usize = 2_000;
/// Answers of six hours.
const ANSWERS: usize = 1_200;
const STALE: usize = 0;
/// Day of the launch.
const LAUNCH: u32 = 2;
const START: u32 = 480_000;

#[derive(Clone, Copy)]
struct World {
    stale: bool,
    /// Every question on a chunk divisible by this fails under the new template; 0: half of all answers of any question.
    hard: usize,
    /// Share of the new template in the traffic.
    share: f64,
}

fn name(c: usize) -> String {
    format!("c{c}@1")
}

fn info() -> ChunkInfo {
    ChunkInfo {
        state: ChunkState::Active,
        since_hour: START,
        tags: vec![],
        collection: Some("support".to_owned()),
        only_source: false,
        coverage_loss: Some(0.0),
        canary_epoch: 1,
    }
}

/// Templates t1, t2, t3 retrieve 1, 2 and 3 chunks; the first is the one the question is about.
fn failure(w: World, template: usize, chunks: &[usize], hidden_first: bool) -> f64 {
    let about = chunks[0];
    if hidden_first {
        return 0.6; // the answer is not in the prompt
    }
    match template {
        _ if w.stale && about == STALE => 0.9,
        3 if w.hard == 0 => 0.5,
        3 if about % w.hard == 1 => 0.97,
        _ => 0.1,
    }
}

fn tick(w: World, r: &mut ChaCha8Rng, names: &mut Names, ctx: &ChunkContext, hour: u32) -> InteractionRows {
    let mut rows = InteractionRows { chunk_start: vec![0], ..InteractionRows::default() };
    let launched = hour >= START + LAUNCH * 24;
    for i in 0..ANSWERS {
        let phone = r.random_range(0..PHONES);
        let template = if launched && r.random_bool(w.share) { 3 } else { r.random_range(1..=2usize) };
        let topic = r.random_range(0..TOPICS) * PER_TOPIC;
        let mut chunks: Vec<usize> = Vec::new();
        while chunks.len() < template {
            let c = topic + r.random_range(0..PER_TOPIC);
            if !chunks.contains(&c) {
                chunks.push(c);
            }
        }
        let hidden: Vec<bool> = chunks
            .iter()
            .map(|c| match ctx.chunks[&name(*c)].state {
                ChunkState::CanaryFrozen => (phone * 31 + c).is_multiple_of(10),
                ChunkState::Frozen => true,
                _ => false,
            })
            .collect();
        let p = failure(w, template, &chunks, hidden[0]);
        rows.interaction.push(format!("{hour}-{i}"));
        rows.hour.push(hour + (i * 6 / ANSWERS) as u32);
        rows.template.push(names.template.intern(&format!("t{template}")));
        rows.bundle.push(names.bundle.intern("b"));
        rows.device_class.push(names.device_class.intern(["low", "high"][phone % 2]));
        rows.locale.push(names.locale.intern(["en", "zh"][phone / 2 % 2]));
        rows.install.push(names.install.intern(&format!("p{phone}")));
        rows.trust.push(TrustClass::Keyed);
        rows.rejected.push(r.random_bool(p));
        rows.refused.push(false);
        rows.chunk.extend(chunks.iter().map(|c| names.chunk.intern(&name(*c))));
        rows.chunk_hidden.extend(hidden);
        rows.chunk_start.push(rows.chunk.len() as u32);
    }
    rows
}

/// Chunks that were ever hidden, templates that were ever proposed, and the reasons for them.
fn run(w: World, seed: u64, days: u32) -> (BTreeSet<String>, BTreeSet<String>, Vec<String>) {
    let policy = AttributionPolicyV1::default();
    let mut r = ChaCha8Rng::seed_from_u64(seed);
    let mut state = AttributionState::default();
    let mut ctx = ChunkContext {
        now_hour: START,
        automation: Automation::Act,
        precision: FreezePrecision::default(),
        chunks: (0..CHUNKS).map(|c| (name(c), info())).collect::<BTreeMap<_, _>>(),
    };
    let (mut hidden, mut templates) = (BTreeSet::new(), BTreeSet::new());
    let mut reasons = Vec::new();
    for hour in (0..days * 4).map(|t| START + t * 6) {
        let mut names = Names::default();
        let rows = tick(w, &mut r, &mut names, &ctx, hour);
        ctx.now_hour = hour + 6;
        let report = step(&policy, &mut state, &names, &rows, &ctx).unwrap();
        for p in &report.proposals {
            if p.kind == SubjectKind::Template {
                assert!(matches!(p.transition, Transition::NeedsPerson { .. }) && !p.automatic);
                templates.insert(p.name.clone());
                reasons.push(p.reason.clone());
                continue;
            }
            // A person who agrees with everything: innocence must not depend on the budget.
            let Some(to) = p.transition.target() else { continue };
            let info = ctx.chunks.get_mut(&p.name).unwrap();
            if info.state.can_become(to) {
                (info.state, info.since_hour) = (to, ctx.now_hour);
            }
            if matches!(to, ChunkState::CanaryFrozen | ChunkState::Frozen) {
                hidden.insert(p.name.clone());
            }
        }
    }
    (hidden, templates, reasons)
}

fn only(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|n| (*n).to_owned()).collect()
}

#[test]
fn a_template_that_fails_on_some_questions_is_found_and_no_innocent_chunk_is_hidden() {
    for seed in 1..=10 {
        let (hidden, templates, reasons) = run(World { stale: true, hard: 6, share: 0.33 }, seed, 9);
        let limited = reasons.iter().filter(|r| r.contains("fails only under prompt template `t3`")).count();
        println!("seed {seed}: hidden {hidden:?}, templates {templates:?}, {limited} of {} name chunks", reasons.len());
        assert_eq!(hidden, only(&["c0@1"]), "seed {seed}");
        assert_eq!(templates, only(&["t3"]), "seed {seed}");
    }
}

#[test]
fn also_when_the_template_takes_most_of_the_traffic() {
    for seed in 1..=5 {
        let (hidden, templates, _) = run(World { stale: true, hard: 6, share: 0.7 }, seed, 9);
        assert_eq!((hidden, templates), (only(&["c0@1"]), only(&["t3"])), "seed {seed}");
    }
}

#[test]
fn a_template_that_fails_as_a_whole_blames_no_chunk() {
    for seed in 1..=5 {
        let (hidden, templates, _) = run(World { stale: true, hard: 0, share: 0.33 }, seed, 9);
        assert_eq!((hidden, templates), (only(&["c0@1"]), only(&["t3"])), "seed {seed}");
    }
}

#[test]
fn without_a_stale_chunk_only_the_template_is_found() {
    for seed in 21..=25 {
        let (hidden, templates, _) = run(World { stale: false, hard: 6, share: 0.33 }, seed, 9);
        assert_eq!((hidden, templates), (only(&[]), only(&["t3"])), "seed {seed}");
    }
}
