//! A small fleet against a server in memory: updates reach everybody, tampered bytes reach nobody, a bundle that dies
//! while loading is left, and the same seed gives the same events.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failed expectation is a failed test"
)]

#[path = "../../../crates/sdk/tests/support/mod.rs"]
mod support;

use fleet_sim::fleet::Parts;
use fleet_sim::*;
use flywheel_sdk::{HttpTransport, IndexSnapshot, InstalledBundle};
use flywheel_types::wire::{DeviceEventKind as K, EventV1};
use flywheel_types::{ChunkId, Digest, InstallId, TemplateId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use support::*;

const STALE: &str = "kb/stale";

/// Answers with the text of the first chunk; the bundle `dead` dies while loading.
struct Parrot {
    dead: Mutex<Option<Digest>>,
    asked: Mutex<u64>,
}

#[async_trait::async_trait]
impl Brain for Parrot {
    async fn answer(&self, asks: &[BrainAsk]) -> anyhow::Result<Vec<BrainAnswer>> {
        *self.asked.lock().unwrap() += asks.len() as u64;
        let text = |a: &BrainAsk| a.chunks.first().map_or("I do not know.".to_owned(), |c| c.text.clone());
        Ok(asks.iter().map(|a| BrainAnswer { text: text(a), input_tokens: 60, output_tokens: 8 }).collect())
    }
    fn load(&self, bundle: &InstalledBundle, _class: &str, _roll: f64) -> LoadTrial {
        assert!(bundle.files.iter().all(|f| f.is_file()));
        if *self.dead.lock().unwrap() == Some(bundle.bundle) { LoadTrial::Dies } else { LoadTrial::Works }
    }
}

/// The chunk of the question first, then the others by id.
struct Own;

impl Retriever for Own {
    fn rank(&self, index: &IndexSnapshot, question: &Question) -> Vec<(ChunkId, f32)> {
        let mut ids: Vec<ChunkId> = index.chunks().map(|c| c.id.clone()).collect();
        ids.sort_by_key(|id| (Some(id) != question.chunk.as_ref(), id.clone()));
        ids.into_iter().enumerate().map(|(i, id)| (id, 1.0 / (1.0 + i as f32))).collect()
    }
}

fn questions() -> Vec<Arc<Question>> {
    let q = |n: usize, chunk: &str, expected: &str, lang: &str| {
        Arc::new(Question {
            id: format!("q{n}"),
            text: Arc::from(format!("question {n}?")),
            lang: lang.into(),
            expected: expected.into(),
            chunk: Some(ChunkId::new(chunk).unwrap()),
        })
    };
    vec![q(0, STALE, "30", "en"), q(1, "kb/good", "12", "en"), q(2, "kb/zh", "7", "zh")]
}

fn put_index(server: &Server, since: u64, version: u64, changes: &str) {
    let body = format!(r#"{{"index_version":{version},"changes":[{changes}]}}"#);
    server.http.put(format!("{BASE}/v1/index/changes?since={since}"), body.into_bytes());
}

fn chunk(id: &str, text: &str, hide: &str) -> String {
    format!(r#"{{"chunk_id":"{id}","version":1,"state":"active","text":"{text}","hide":{hide}}}"#)
}

fn fleet(server: &Server, dir: &std::path::Path, phones: usize, brain: &Arc<Parrot>) -> Fleet {
    let mut config = FleetConfig::new(app(), BASE, "key", server.root.clone(), dir, start());
    config.phones = phones;
    config.seed = 2;
    config.own_slot_phones = 6;
    config.cut_phones = 3;
    config.tampered_phones = 1;
    config.mix.offline = 0.1;
    let template = TemplateId::new("faq@1").unwrap();
    let parts = Parts {
        transport: Arc::new(server.http.clone()) as Arc<dyn HttpTransport>,
        brain: Arc::clone(brain) as Arc<dyn Brain>,
        workload: Arc::new(UniformWorkload { questions: questions(), templates: vec![(template, 1)], per_tick: 1.5 }),
        retriever: Arc::new(Own),
        latency: LatencyModel::default(),
        behaviour: Box::new(|_| Arc::new(Honest::default())),
    };
    Fleet::new(&config, parts).unwrap()
}

async fn tick(server: &Server, fleet: &mut Fleet) -> TickReport {
    server.advance(3600);
    fleet.tick(flywheel_types::BusinessClock::now(&server.clock)).await.unwrap()
}

/// Everything that arrived, per install, in the order of sequence numbers.
fn arrived(server: &Server) -> BTreeMap<(InstallId, u64), Vec<u8>> {
    server.intake.lock().unwrap().batches.clone()
}

async fn story(phones: usize) -> (Server, Vec<TickReport>, [TestBundle; 3]) {
    let mut server = Server::new();
    let (one, two, three) = (bundle(1, &[9 << 20]), bundle(2, &[70_000]), bundle(3, &[70_000]));
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    let all = [chunk(STALE, "It is 31.", "null"), chunk("kb/good", "It is 12.", "null"), chunk("kb/zh", "7", "null")];
    put_index(&server, 0, 3, &all.join(","));
    put_index(&server, 3, 3, "");
    let dir = tempfile::tempdir().unwrap();
    let brain = Arc::new(Parrot { dead: Mutex::new(Some(three.id)), asked: Mutex::new(0) });
    let mut fleet = fleet(&server, dir.path(), phones, &brain);
    let mut reports = vec![];
    for _ in 0..5 {
        reports.push(tick(&server, &mut fleet).await);
    }
    // A good rollout to everybody, taken back, then a bundle that dies while loading.
    server.publish(&[&two, &three], |a| {
        a.default_bundle = Some(one.id);
        a.rollouts = vec![rollout("good", &two, &one)];
    });
    put_index(&server, 3, 4, &chunk(STALE, "It is 31.", r#"{"salt":"s","share_ppm":1000000}"#));
    put_index(&server, 4, 4, "");
    for _ in 0..6 {
        reports.push(tick(&server, &mut fleet).await);
    }
    server.publish(&[], |a| a.default_bundle = Some(one.id));
    for _ in 0..6 {
        reports.push(tick(&server, &mut fleet).await);
    }
    server.publish(&[], |a| {
        a.default_bundle = Some(one.id);
        a.rollouts = vec![rollout("dead", &three, &one)];
    });
    for _ in 0..6 {
        reports.push(tick(&server, &mut fleet).await);
    }
    let bytes = fleet.own_slot_bytes();
    assert_eq!(bytes.len(), 7);
    assert!(bytes.iter().filter(|(i, _)| *i < 6).all(|(_, b)| *b >= 9 << 20), "{bytes:?}");
    assert_eq!(fleet.cache_bytes(), (9 << 20) + 70_000 * 2, "each blob once for all other phones");
    assert!(*brain.asked.lock().unwrap() < 400, "distinct questions only");
    (server, reports, [one, two, three])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_follows_its_server_and_refuses_what_is_tampered() {
    const PHONES: usize = 120;
    let (server, reports, [one, two, three]) = story(PHONES).await;
    assert_eq!(reports[4].running.get(&one.id), Some(&(PHONES as u64 - 1)), "{:?}", reports[4]);
    assert_eq!(reports[10].running.get(&two.id), Some(&(PHONES as u64 - 1)), "{:?}", reports[10]);
    assert_eq!(reports[16].running.get(&one.id), Some(&(PHONES as u64 - 1)), "{:?}", reports[16]);
    let last = reports.last().unwrap();
    assert_eq!(last.running.get(&one.id), Some(&(PHONES as u64 - 1)), "{last:?}");
    assert!(last.blocked > 100, "{last:?}");
    // The stale chunk is rejected while it is shown, and nothing of it is left when it is hidden.
    let rejections = |r: &[TickReport]| r.iter().map(|r| r.rejections).sum::<u64>();
    assert!(rejections(&reports[1..5]) > 60, "{}", rejections(&reports[1..5]));
    let intake = server.intake.lock().unwrap();
    let mut hidden = 0;
    let mut interactions = 0;
    for e in &intake.events {
        let EventV1::Interaction(i) = e else { continue };
        interactions += 1;
        assert!(i.ttft_ms.unwrap() > 0.0 && i.content.is_some());
        let stale = i.retrieval.iter().find(|r| r.chunk_id.as_str() == STALE);
        if let (Some(4), Some(stale)) = (i.index_version, stale) {
            assert!(stale.hidden);
            hidden += 1;
        }
    }
    assert!(interactions > 3000 && hidden > 300, "{interactions} {hidden}");
    // One phone refused tampered bytes, twice (two bundles), and told so once each.
    let refused = intake.device_events(K::Refused);
    assert!(!refused.is_empty());
    assert!(refused.iter().all(|d| d.reason.as_deref() == Some("chunk_hash_mismatch")), "{refused:?}");
    assert_eq!(intake.device_events(K::RolledBack).len(), PHONES - 1);
    let fell: BTreeSet<_> = intake.device_events(K::FellBack).iter().map(|d| d.bundle).collect();
    assert_eq!(fell, BTreeSet::from([Some(three.id)]));
    assert_eq!(intake.device_events(K::LoadFailed).len(), 2 * intake.device_events(K::FellBack).len());
    assert_eq!(intake.duplicates, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_seed_gives_the_same_bytes() {
    let (a, reports_a, _) = story(40).await;
    let (b, reports_b, _) = story(40).await;
    assert_eq!(reports_a, reports_b);
    assert!(arrived(&a) == arrived(&b), "every batch of every phone is the same");
}

/// Prints the cost of a phone-tick; run with `--ignored --nocapture`. The budget is 0.3 ms besides signing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, not a check"]
async fn cost_of_a_phone_tick() {
    const PHONES: usize = 2000;
    let mut server = Server::new();
    let one = bundle(1, &[1 << 20]);
    server.publish(&[&one], |a| a.default_bundle = Some(one.id));
    put_index(&server, 0, 3, &chunk("kb/good", "It is 12.", "null"));
    put_index(&server, 3, 3, "");
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let brain = Arc::new(Parrot { dead: Mutex::new(None), asked: Mutex::new(0) });
    let begun = std::time::Instant::now();
    let mut fleet = fleet(&server, dir.path(), PHONES, &brain);
    println!("open: {:.3} ms a phone", begun.elapsed().as_secs_f64() * 1e3 / PHONES as f64);
    let memory = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        status.lines().find(|l| l.starts_with("VmRSS")).unwrap_or("VmRSS unknown").to_owned()
    };
    println!("after opening: {}", memory());
    for n in 0..12 {
        if n == 6 {
            server.publish(&[], |a| a.default_bundle = Some(one.id));
        }
        let begun = std::time::Instant::now();
        let r = tick(&server, &mut fleet).await;
        let ms = begun.elapsed().as_secs_f64() * 1e3 / PHONES as f64;
        println!("tick {n}: {ms:.3} ms a phone (wall, 2 threads, intake included), {} answers", r.answers);
    }
    println!("at the end: {}", memory());
}
