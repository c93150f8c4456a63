//! What a device reads back from its own folder after a crash, and the knowledge index that its server sends.

use crate::bundle::repository::{GENUINE, app, day};
use crate::scratch::Scratch;
use crate::{choice, pieces};
use flywheel_sdk::{
    Conditions, Device, DeviceConfig, Durability, Env, Host, HttpBlobs, HttpResponse, IndexSnapshot, IndexStorage,
    MemoryHttp, QueueLimits, ResponseHead, SdkError, SharedCaches,
};
use flywheel_types::wire::DeviceFactsV1;
use flywheel_types::{ChunkId, InstallId, VirtualClock};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

struct Phone;

impl Host for Phone {
    fn facts(&self) -> DeviceFactsV1 {
        DeviceFactsV1::default()
    }
    fn conditions(&self) -> Conditions {
        Conditions::default()
    }
}

/// Runs a future whose parts are all ready at once (everything is in memory).
fn now<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return out;
        }
    }
}

fn open(dir: &Path, http: &MemoryHttp) -> Result<Device, SdkError> {
    let mut config = DeviceConfig::new(app(), "http://server", "key", GENUINE.root.as_slice().into(), dir);
    config.durability = Durability::Relaxed;
    config.exclusive = false;
    config.index = IndexStorage::File;
    config.queue = QueueLimits { max_events: 50, max_bytes: 16 << 10 };
    config.upload.gzip = false;
    let transport = Arc::new(http.clone());
    let env = Env {
        clock: Arc::new(VirtualClock::new(day(1))),
        rng: Box::new(ChaCha8Rng::seed_from_u64(1)),
        transport: transport.clone(),
        blobs: Arc::new(HttpBlobs::new(transport, "http://server/tuf/support/targets", Durability::Relaxed, 1)),
        host: Arc::new(Phone),
        shared: SharedCaches::new(),
    };
    Device::open(config, env)
}

/// First byte, bit 0: the rest are records ([`pieces`]), framed here with good checksums; else the rest is the log as it
/// is. Bit 1: a damaged reservation of sequence numbers lies beside it. Bit 2: the bytes are the device's state. Bits 3
/// and 4: how the server answers.
pub fn queue(data: &[u8]) {
    let (flags, rest) = choice(data);
    let scratch = Scratch::empty();
    let dir = scratch.path();
    let log = if flags & 1 != 0 { framed(rest) } else { rest.to_vec() };
    let name = if flags & 4 != 0 { "state.json" } else { "queue.log" };
    std::fs::write(dir.join(name), if flags & 4 != 0 { rest } else { &log }).expect("the scratch folder takes files");
    if flags & 2 != 0 {
        std::fs::write(dir.join("queue.seq"), b"damaged").expect("the same");
    }
    let http = MemoryHttp::new();
    let sent = answers(&http, [200, 413, 400, 503][usize::from(flags >> 3 & 3)]);
    let Ok(device) = open(dir, &http) else { return };
    let queued = device.queued_events();
    drop(device);
    let mut device = open(dir, &http).expect("what opened once opens again");
    assert_eq!(device.queued_events(), queued, "a second start finds the same events");
    for _ in 0..4 {
        if now(device.upload()).is_err() {
            break;
        }
    }
    drop(device);
    assert!(open(dir, &http).is_ok(), "what an upload left can be opened");
    let mut last = 0;
    // a batch that lay in the log is sent again as it is, whatever it holds; the others were formed here
    let logged = |body: &[u8]| body.is_empty() || log.windows(body.len()).any(|part| part == body);
    for body in sent.lock().expect("no sender failed").iter().filter(|body| !logged(body)) {
        let batch: Value = serde_json::from_slice(body).expect("a batch is JSON");
        let seq = batch["seq"].as_u64().expect("a batch has a number");
        assert!(batch["events"].is_array() && seq >= last, "batch {seq} after {last}");
        last = seq;
    }
}

/// A server that answers every upload with `status`; returns the bodies it got.
fn answers(http: &MemoryHttp, status: u16) -> Arc<Mutex<Vec<Vec<u8>>>> {
    let sent = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&sent);
    http.on_request(move |request| {
        keep.lock().expect("no sender failed").push(request.body.to_vec());
        HttpResponse { head: ResponseHead { status, headers: vec![] }, body: b"{}".to_vec().into() }
    });
    sent
}

/// A log of whole records (form: `crates/sdk/src/queue/log.rs`).
#[must_use]
pub fn framed(records: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for payload in pieces(records).take(32) {
        out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        out.extend_from_slice(&crc32fast::hash(payload).to_le_bytes());
        out.extend_from_slice(payload);
    }
    out
}

/// Answers of the knowledge index ([`pieces`]), applied in order.
pub fn index(data: &[u8]) {
    let mut snapshot = IndexSnapshot::default();
    let install = InstallId::of_public_key(&[1; 32]);
    for answer in pieces(data).take(8) {
        let before = snapshot.clone();
        let Ok(next) = snapshot.apply(answer) else { continue };
        assert_eq!(before.apply(answer).expect("the same answer applies again"), next, "applying is a function");
        assert_ne!(next.fingerprint(), before.fingerprint());
        for chunk in next.chunks() {
            assert!(chunk.embedding.iter().flatten().all(|v| v.is_finite()));
            assert_eq!(next.get(&chunk.id).map(|c| c.version), Some(chunk.version));
        }
        let width = next.chunks().filter_map(|c| c.embedding.as_ref()).map(Vec::len).next().unwrap_or(1);
        let ranked = next.nearest(&vec![1.0; width], 4);
        assert!(ranked.len() <= 4 && ranked.windows(2).all(|w| w[0].1 >= w[1].1), "best first");
        let all: Vec<(ChunkId, f32)> = next.chunks().map(|c| (c.id.clone(), 0.5)).collect();
        let shown = next.candidates(&all, 2, &install);
        assert!(shown.iter().filter(|c| !c.hidden).count() <= 2);
        snapshot = next;
    }
}
