//! The contract of `step` beside its statistics: bad input is named, batches may be cut anywhere, ids may differ
//! between batches, the state survives storage, shards add up, spam and anonymous rows do not freeze, and 100,000
//! rows are quick.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "test helpers: a broken assumption fails the test, and figures are printed"
)]

use flywheel_attribution::culprit::{
    AttributionError, AttributionPolicyV1, AttributionState, ChunkContext, ChunkInfo, FreezePrecision, Proposal,
    SubjectKind, Transition, step,
};
use flywheel_types::rows::{InteractionRows, Names};
use flywheel_types::{Automation, ChunkState, TrustClass};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

const CHUNKS: usize = 40;

struct Row {
    hour: u32,
    user: usize,
    template: usize,
    trust: TrustClass,
    rejected: bool,
    chunks: Vec<usize>,
}

/// Rows of `users`; chunk 0 and template 2 are bad when `bad`.
fn rows(seed: u64, n: usize, days: u32, users: std::ops::Range<usize>, bad: bool) -> Vec<Row> {
    let mut r = ChaCha8Rng::seed_from_u64(seed);
    (0..n)
        .map(|i| {
            let topic = r.random_range(0..CHUNKS / 5) * 5;
            let mut chunks: Vec<usize> = (0..3).map(|_| topic + r.random_range(0..5)).collect();
            chunks.dedup();
            let template = r.random_range(0..3);
            let mut survive = 0.88;
            if bad && let Some(rank) = chunks.iter().position(|c| *c == 0) {
                survive *= 1.0 - 0.7 / (2.0 + rank as f64).log2();
            }
            if bad && template == 2 {
                survive *= 0.7;
            }
            Row {
                hour: 1_000 * 24 + (i * days as usize * 24 / n) as u32,
                user: r.random_range(users.clone()),
                template,
                trust: TrustClass::Attested,
                rejected: r.random_bool(1.0 - survive),
                chunks,
            }
        })
        .collect()
}

/// A batch with its own ids, interned in the order the rows come.
fn batch(rows: &[Row]) -> (Names, InteractionRows) {
    let mut names = Names::default();
    let mut b = InteractionRows { chunk_start: vec![0], ..InteractionRows::default() };
    for (i, r) in rows.iter().enumerate() {
        b.interaction.push(format!("{}-{i}-{}", r.hour, r.user));
        b.hour.push(r.hour);
        b.template.push(names.template.intern(&format!("t{}", r.template)));
        b.bundle.push(names.bundle.intern("b"));
        b.device_class.push(names.device_class.intern(["x", "y"][r.user % 2]));
        b.locale.push(names.locale.intern(["en", "zh"][r.user / 2 % 2]));
        b.install.push(names.install.intern(&format!("user-{}", r.user)));
        b.trust.push(r.trust);
        b.rejected.push(r.rejected);
        b.refused.push(false);
        b.chunk.extend(r.chunks.iter().map(|c| names.chunk.intern(&format!("c{c}@1"))));
        b.chunk_hidden.resize(b.chunk.len(), false);
        b.chunk_start.push(b.chunk.len() as u32);
    }
    (names, b)
}

fn context(state: ChunkState) -> ChunkContext {
    let info = ChunkInfo {
        state,
        since_hour: 990 * 24,
        tags: vec![],
        collection: None,
        only_source: false,
        coverage_loss: None,
        canary_epoch: 0,
    };
    ChunkContext {
        now_hour: 1_010 * 24,
        automation: Automation::Act,
        precision: FreezePrecision::default(),
        chunks: (0..CHUNKS).map(|c| (format!("c{c}@1"), info.clone())).collect::<BTreeMap<_, _>>(),
    }
}

fn feed(state: &mut AttributionState, rows: &[Row], ctx: &ChunkContext) -> flywheel_attribution::culprit::StepReport {
    let (names, b) = batch(rows);
    step(&AttributionPolicyV1::default(), state, &names, &b, ctx).unwrap()
}

#[test]
fn batches_may_be_cut_anywhere_and_the_state_survives_storage() {
    let all = rows(1, 12_000, 8, 0..1_500, true);
    let ctx = context(ChunkState::Suspect);
    let mut whole = AttributionState::default();
    let a = feed(&mut whole, &all, &ctx);
    let mut parts = AttributionState::default();
    let mut b = a.clone();
    for part in all.chunks(1_234) {
        b = feed(&mut parts, part, &ctx);
        parts = serde_json::from_str(&serde_json::to_string(&parts).unwrap()).unwrap();
    }
    assert_eq!(whole.rows(), parts.rows());
    let key = |r: &flywheel_attribution::culprit::StepReport| -> Vec<_> {
        r.suspects
            .iter()
            .map(|s| (s.name.clone(), s.users, s.exposures, format!("{:.9} {:.9} {:.9}", s.z, s.q_hat, s.log_e)))
            .collect()
    };
    assert_eq!(key(&a), key(&b));
    let found: std::collections::BTreeSet<_> =
        a.suspects.iter().filter(|s| s.significant).map(|s| (s.kind, s.name.as_str())).collect();
    let planted = [(SubjectKind::Template, "t2"), (SubjectKind::Chunk, "c0@1")];
    assert_eq!(found, planted.into_iter().collect());
    let freeze = a.proposals.iter().find(|p| p.name == "c0@1").unwrap();
    assert_eq!((&freeze.transition, freeze.automatic), (&Transition::Freeze, true), "{freeze:?}");
    let t = a.proposals.iter().find(|p| p.kind == SubjectKind::Template).unwrap();
    assert_eq!((t.name.as_str(), t.automatic), ("t2", false), "{t:?}");
    assert!(a.proposals.iter().all(|p| p.name == "c0@1" || p.name == "t2"), "{:?}", a.proposals);
}

#[test]
fn shards_of_different_people_add_up() {
    let (left, right) = (rows(2, 8_000, 8, 0..900, true), rows(3, 8_000, 8, 1_000..1_900, true));
    let ctx = context(ChunkState::Suspect);
    let (mut a, mut b) = (AttributionState::default(), AttributionState::default());
    let (ra, rb) = (feed(&mut a, &left, &ctx), feed(&mut b, &right, &ctx));
    a.merge(&b).unwrap();
    assert_eq!(a.rows(), 16_000);
    let sum = feed(&mut a, &[], &ctx);
    let of =
        |r: &flywheel_attribution::culprit::StepReport| r.suspects.iter().find(|s| s.name == "c0@1").cloned().unwrap();
    let (x, y, z) = (of(&ra), of(&rb), of(&sum));
    assert_eq!(z.users, x.users + y.users);
    assert!(z.log_e > x.log_e && z.log_e > y.log_e);
    let same_people = a.clone();
    assert!(matches!(a.merge(&b), Err(AttributionError::NotMergeable(_))));
    assert_eq!(a, same_people, "a refused merge changes nothing");
}

#[test]
fn spam_anonymous_rows_automation_and_the_kill_switch() {
    let mut all = rows(4, 12_000, 8, 0..1_500, false);
    // 20 keyed accounts reject an innocent chunk 40 times each; anonymous ones do it 10,000 times.
    let mut r = ChaCha8Rng::seed_from_u64(9);
    for i in 0..10_800usize {
        let keyed = i < 800;
        all.push(Row {
            hour: 1_000 * 24 + r.random_range(24..190),
            user: if keyed { 5_000 + i % 20 } else { 6_000 + i },
            template: 0,
            trust: if keyed { TrustClass::Keyed } else { TrustClass::Anonymous },
            rejected: true,
            chunks: vec![7, 8, 9],
        });
    }
    all.sort_by_key(|r| r.hour);
    let mut state = AttributionState::default();
    let report = feed(&mut state, &all, &context(ChunkState::Suspect));
    assert_eq!((report.rows_used, report.rows_anonymous), (12_800, 10_000));
    // The hostile accounts all use one template: what little suspicion there is of their targets is lifted.
    let harmless = |p: &Proposal| p.kind == SubjectKind::Template || p.transition == Transition::ClearSuspect;
    assert!(report.proposals.iter().all(harmless), "{:?}", report.proposals);
    assert!(report.suspects.iter().filter(|s| s.kind == SubjectKind::Chunk).all(|s| !s.significant));

    let bad = rows(5, 12_000, 8, 0..1_500, true);
    for (automation, kill_switch) in [(Automation::Recommend, false), (Automation::Act, true)] {
        let mut ctx = context(ChunkState::Suspect);
        ctx.automation = automation;
        let mut policy = AttributionPolicyV1::default();
        policy.freeze.kill_switch = kill_switch;
        let (names, b) = batch(&bad);
        let report = step(&policy, &mut AttributionState::default(), &names, &b, &ctx).unwrap();
        let p = report.proposals.iter().find(|p| p.name == "c0@1").unwrap();
        assert_eq!((&p.transition, p.automatic), (&Transition::Freeze, false));
    }
    let mut ctx = context(ChunkState::Suspect);
    ctx.chunks.get_mut("c0@1").unwrap().tags.push("medical".to_owned());
    let report = feed(&mut AttributionState::default(), &bad, &ctx);
    let p = report.proposals.iter().find(|p| p.name == "c0@1").unwrap();
    assert!(matches!(&p.transition, Transition::NeedsPerson { why } if why.contains("medical")), "{p:?}");
}

#[test]
fn registry_states_drive_their_own_proposals() {
    let mut ctx = context(ChunkState::Active);
    ctx.chunks.get_mut("c3@1").unwrap().state = ChunkState::Frozen;
    let c4 = ctx.chunks.get_mut("c4@1").unwrap();
    (c4.state, c4.since_hour) = (ChunkState::Suspect, 980 * 24);
    ctx.chunks.get_mut("c5@1").unwrap().state = ChunkState::Frozen;
    ctx.chunks.get_mut("c5@1").unwrap().since_hour = ctx.now_hour - 13 * 24;
    let report = feed(&mut AttributionState::default(), &[], &ctx);
    let got: Vec<_> = report.proposals.iter().map(|p| (p.name.as_str(), &p.transition, p.automatic)).collect();
    assert_eq!(got, [("c3@1", &Transition::ExpireFreeze, true), ("c4@1", &Transition::ClearSuspect, true)]);
    assert_eq!(report.base_rate, None, "no data is unknown, not 0");
}

#[test]
fn bad_input_is_named_and_changes_nothing() {
    let (names, good) = batch(&rows(6, 50, 1, 0..10, false));
    let policy = AttributionPolicyV1::default();
    let ctx = context(ChunkState::Active);
    let mut state = AttributionState::default();
    let mut refuse = |b: &InteractionRows, policy: &AttributionPolicyV1| {
        let e = step(policy, &mut state, &names, b, &ctx).unwrap_err();
        assert_eq!(state, AttributionState::default());
        e
    };
    let mut b = good.clone();
    b.hour.pop();
    assert_eq!(refuse(&b, &policy), AttributionError::ColumnLength { column: "hour", found: 49, expected: 50 });
    let mut b = good.clone();
    b.chunk_start[3] = 9_999;
    assert!(matches!(refuse(&b, &policy), AttributionError::ChunkOffsets { row: 3, value: 9_999, .. }));
    let mut b = good.clone();
    b.locale[7] = 44;
    assert_eq!(refuse(&b, &policy), AttributionError::UnknownId { row: 7, column: "locale", id: 44 });
    let wrong = AttributionPolicyV1 { gamma: 0.5, ..policy };
    assert!(matches!(refuse(&good, &wrong), AttributionError::Policy { field: "gamma", .. }));
    let (names, empty) = (Names::default(), InteractionRows::default());
    assert!(step(&AttributionPolicyV1::default(), &mut state, &names, &empty, &ctx).is_ok());
}

#[test]
fn a_hundred_thousand_rows_in_one_step() {
    let all = rows(8, 100_000, 1, 0..20_000, true);
    let (names, b) = batch(&all);
    let mut state = AttributionState::default();
    let started = std::time::Instant::now();
    step(&AttributionPolicyV1::default(), &mut state, &names, &b, &context(ChunkState::Suspect)).unwrap();
    let first = started.elapsed();
    let later: Vec<Row> =
        rows(9, 100_000, 1, 0..20_000, true).into_iter().map(|r| Row { hour: r.hour + 24, ..r }).collect();
    let (names, b) = batch(&later);
    let started = std::time::Instant::now();
    step(&AttributionPolicyV1::default(), &mut state, &names, &b, &context(ChunkState::Suspect)).unwrap();
    let bytes = serde_json::to_vec(&state).unwrap().len();
    println!("100,000 rows × 3 chunks: first step {first:?}, next {:?}, state {bytes} bytes", started.elapsed());
}
