//! Harness: a whole server in memory (signed repository, event intake that counts like the real one, knowledge index)
//! and a device with a clock and conditions that the test moves.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failed expectation is a failed test"
)]
#![allow(dead_code, reason = "each test binary uses a part")]

use chrono::{DateTime, Duration, Utc};
use flywheel_bundle::manifest::{ArtefactV1, BuildV1, HealthV1, LineageV1, ManifestV1};
use flywheel_bundle::publish::*;
use flywheel_bundle::tuf::Role;
use flywheel_sdk::*;
use flywheel_types::assign::{AssignmentV1, PpmRange, RolloutAssignmentV1};
use flywheel_types::wire::*;
use flywheel_types::*;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub const BASE: &str = "http://server";

pub fn start() -> DateTime<Utc> {
    "2026-03-01T00:00:00Z".parse().unwrap()
}

pub fn app() -> AppId {
    AppId::new("demo").unwrap()
}

/// Conditions that a test changes while the device works.
pub struct TestHost {
    pub conditions: Mutex<Conditions>,
    pub facts: Mutex<DeviceFactsV1>,
    /// Bytes the volume still takes.
    pub room: AtomicU64,
    /// Conditions after this many questions about them.
    pub later: Mutex<Option<(u32, Conditions)>>,
}

impl Host for TestHost {
    fn facts(&self) -> DeviceFactsV1 {
        self.facts.lock().unwrap().clone()
    }
    fn conditions(&self) -> Conditions {
        if let Some((left, then)) = self.later.lock().unwrap().as_mut() {
            if *left == 0 {
                *self.conditions.lock().unwrap() = *then;
            } else {
                *left -= 1;
            }
        }
        *self.conditions.lock().unwrap()
    }
    fn before_write(&self, bytes: u64) -> io::Result<()> {
        let room = self.room.load(Ordering::SeqCst);
        if room < bytes {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.room.store(room - bytes, Ordering::SeqCst);
        Ok(())
    }
}

/// Publisher keys.
struct Keys(BTreeMap<Role, SecretKey>);

impl Keys {
    fn new(seed: u8) -> Self {
        let key = |(i, r): (usize, &Role)| (*r, SecretKey::from_seed(*r, &[seed + i as u8; 32]));
        Self(Role::ALL.iter().enumerate().map(key).collect())
    }
    fn of(&self, role: Role) -> &SecretKey {
        &self.0[&role]
    }
    fn ring(&self) -> Keyring {
        let set = |r| RoleKeySet::single(self.of(r).public().clone());
        Keyring {
            root: set(Role::Root),
            targets: set(Role::Targets),
            catalog: set(Role::Catalog),
            rollout: set(Role::Rollout),
            snapshot: set(Role::Snapshot),
            timestamp: set(Role::Timestamp),
        }
    }
}

/// The server.
pub struct Server {
    pub http: MemoryHttp,
    pub clock: VirtualClock,
    keys: Keys,
    state: RepositoryState,
    repository: MemoryRepository,
    pub intake: Arc<Mutex<Intake>>,
    serial: u64,
    pub root: Arc<[u8]>,
}

/// What the event intake has seen, with the real one's rule: one (install, seq) is stored once.
#[derive(Default)]
pub struct Intake {
    pub batches: BTreeMap<(InstallId, u64), Vec<u8>>,
    pub events: Vec<EventV1>,
    pub duplicates: u64,
    /// Statuses to answer with, first in, first out; with `retry-after`.
    pub answers: Vec<(u16, Option<&'static str>)>,
    /// Largest body taken.
    pub max_body: usize,
}

impl Intake {
    pub fn device_events(&self, kind: DeviceEventKind) -> Vec<DeviceEventV1> {
        self.events
            .iter()
            .filter_map(|e| match e {
                EventV1::Device(d) if d.event == kind => Some(d.clone()),
                _ => None,
            })
            .collect()
    }

    fn take(&mut self, request: &HttpRequest) -> HttpResponse {
        use base64::Engine as _;
        let b64 = base64::engine::general_purpose::STANDARD;
        let answer = |status: u16, retry: Option<&str>, body: Vec<u8>| HttpResponse {
            head: ResponseHead {
                status,
                headers: retry.iter().map(|v| ("retry-after".to_owned(), (*v).to_owned())).collect(),
            },
            body: body.into(),
        };
        if !self.answers.is_empty() {
            let (status, retry) = self.answers.remove(0);
            return answer(status, retry, b"{}".to_vec());
        }
        if request.body.len() > self.max_body {
            return answer(413, None, vec![]);
        }
        let body = match request.get_header("content-encoding") {
            Some("gzip") => {
                let mut out = vec![];
                io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&request.body[..]), &mut out).unwrap();
                out
            }
            _ => request.body.to_vec(),
        };
        assert_eq!(request.get_header(INGEST_KEY_HEADER), Some("key"));
        let public: [u8; 32] = b64.decode(request.get_header(PUBLIC_KEY_HEADER).unwrap()).unwrap().try_into().unwrap();
        let sig = b64.decode(request.get_header(SIGNATURE_HEADER).unwrap()).unwrap();
        let key = ed25519_dalek::VerifyingKey::from_bytes(&public).unwrap();
        let sig = ed25519_dalek::Signature::from_slice(&sig).unwrap();
        key.verify_strict(&signing_bytes(&app(), &body), &sig).expect("the batch is signed");
        let batch: EventBatchV1 = serde_json::from_slice(&body).unwrap();
        assert_eq!(batch.install_id, InstallId::of_public_key(&public));
        let mut ack = IngestAckV1::default();
        match self.batches.get(&(batch.install_id, batch.seq)) {
            Some(known) => {
                assert_eq!(*known, body, "a resend of seq {} is byte-identical", batch.seq);
                self.duplicates += 1;
                ack.duplicate = batch.events.len() as u64;
            }
            None => {
                self.batches.insert((batch.install_id, batch.seq), body);
                ack.stored = batch.events.len() as u64;
                self.events.extend(batch.events);
            }
        }
        answer(200, None, serde_json::to_vec(&ack).unwrap())
    }
}

impl Server {
    pub fn new() -> Self {
        let keys = Keys::new(10);
        let expiries = Expiries::of(Profile::Starter);
        let made = init_repository(&keys.ring(), &expiries, start(), &[keys.of(Role::Root)], &[keys.of(Role::Targets)])
            .unwrap();
        let state = RepositoryState::initial(&made).unwrap();
        let http = MemoryHttp::new();
        let intake = Arc::new(Mutex::new(Intake { max_body: 1 << 20, ..Intake::default() }));
        let for_handler = Arc::clone(&intake);
        http.on_request(move |request| {
            if request.url.ends_with("/v1/events") {
                return for_handler.lock().unwrap().take(request);
            }
            HttpResponse { head: ResponseHead { status: 404, headers: vec![] }, body: Default::default() }
        });
        Self {
            http,
            clock: VirtualClock::new(start()),
            root: made.root.bytes.clone().into(),
            keys,
            state,
            repository: MemoryRepository::default(),
            intake,
            serial: 0,
        }
    }

    /// Publishes bundles and an assignment.
    pub fn publish(&mut self, bundles: &[&TestBundle], assignment: impl FnOnce(&mut AssignmentV1)) {
        self.publish_with_floor(bundles, None, assignment);
    }

    pub fn publish_with_floor(
        &mut self,
        bundles: &[&TestBundle],
        raise_floor: Option<u64>,
        assignment: impl FnOnce(&mut AssignmentV1),
    ) {
        let expiries = Expiries::of(Profile::Starter);
        let now = self.clock.now();
        for b in bundles {
            for a in &b.artefacts {
                self.repository.add_blob(a.clone());
            }
        }
        let edit = CatalogEdit {
            add: bundles.iter().map(|b| b.manifest.clone()).collect(),
            raise_floor,
            ..CatalogEdit::default()
        };
        let catalog = catalog_next(&self.state, &edit, &expiries, now).unwrap();
        let catalog = catalog.sign(&[self.keys.of(Role::Catalog)]).unwrap();
        self.serial += 1;
        let mut next = AssignmentV1 {
            v: 1,
            app: app(),
            serial: self.serial,
            issued_at: now,
            poll_s: 3600,
            jitter_pct: 10,
            default_bundle: None,
            rollouts: vec![],
            pins: BTreeMap::new(),
        };
        assignment(&mut next);
        let changes = Changes {
            catalog: Some(catalog),
            manifests: bundles.iter().map(|b| b.manifest.to_bytes().unwrap()).collect(),
            assignment: Some(next),
            ..Changes::default()
        };
        let signers = OnlineSigners {
            rollout: &[self.keys.of(Role::Rollout)],
            snapshot: &[self.keys.of(Role::Snapshot)],
            timestamp: &[self.keys.of(Role::Timestamp)],
        };
        let plan = assemble(&self.state, changes, &signers, &expiries, now).unwrap();
        self.repository.apply(&plan).unwrap();
        self.state = plan.after;
        for (path, bytes) in &self.repository.files {
            self.http.put(format!("{BASE}/tuf/demo/{path}"), bytes.clone());
        }
    }

    pub fn advance(&self, seconds: i64) {
        self.clock.advance_to(self.clock.now() + Duration::seconds(seconds));
    }
}

/// A bundle with its files.
pub struct TestBundle {
    pub manifest: ManifestV1,
    pub artefacts: Vec<Vec<u8>>,
    pub id: Digest,
}

/// A bundle of one file per length in `sizes`, filled from `seed`.
pub fn bundle(seq: u64, sizes: &[usize]) -> TestBundle {
    bundle_with(seq, sizes, 1, HealthV1 { confirm_generations: 2, ..HealthV1::default() })
}

pub fn bundle_with(seq: u64, sizes: &[usize], security_epoch: u64, health: HealthV1) -> TestBundle {
    let artefacts: Vec<Vec<u8>> = sizes
        .iter()
        .enumerate()
        .map(|(i, size)| {
            let mut rng = ChaCha8Rng::seed_from_u64(seq * 100 + i as u64);
            let mut bytes = vec![0; *size];
            rand::RngCore::fill_bytes(&mut rng, &mut bytes);
            bytes
        })
        .collect();
    let manifest = ManifestV1 {
        format: 1,
        app: app(),
        kind: BundleKind::Weights,
        line: "qa".into(),
        seq,
        security_epoch,
        base: None,
        builds: vec![BuildV1 {
            device_classes: vec![],
            runtime: "any".into(),
            min_runtime: None,
            precision: "q4_0".into(),
            accelerator: None,
            min_ram_bytes: 0,
            artefacts: artefacts.iter().map(|a| ArtefactV1::of_bytes("gguf", a)).collect(),
        }],
        tokenizer: None,
        chat_template: None,
        adapters: vec![],
        deltas: vec![],
        licence: "Apache-2.0".into(),
        evaluation: None,
        lineage: LineageV1 { candidate: CandidateId::new("c").unwrap(), dataset: None, base: None, job: None },
        health,
        extra: BTreeMap::new(),
    };
    TestBundle { id: manifest.id().unwrap(), manifest, artefacts }
}

/// A rollout of `new` over `old` that takes the whole fleet as treatment.
pub fn rollout(id: &str, new: &TestBundle, old: &TestBundle) -> RolloutAssignmentV1 {
    RolloutAssignmentV1 {
        rollout_id: RolloutId::new(id).unwrap(),
        phase: 1,
        salt: id.into(),
        eligible: vec![],
        treatment: PpmRange { from: 0, to: 1_000_000 },
        control: PpmRange { from: 0, to: 0 },
        treatment_bundle: new.id,
        control_bundle: old.id,
        ring: vec![],
        retry_failed: false,
        intake_closed: false,
    }
}

/// Where a device lives; it can be opened again and again.
pub struct Home {
    pub dir: tempfile::TempDir,
    pub host: Arc<TestHost>,
    pub seed: u64,
    pub durability: Durability,
    pub queue: QueueLimits,
}

impl Home {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            host: Arc::new(TestHost {
                conditions: Mutex::new(Conditions::default()),
                facts: Mutex::new(DeviceFactsV1 { class: Some("mid".into()), ..Default::default() }),
                room: AtomicU64::new(u64::MAX),
                later: Mutex::new(None),
            }),
            seed: 1,
            durability: Durability::Relaxed,
            queue: QueueLimits::default(),
        }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("sdk")
    }

    pub fn try_open(&self, server: &Server) -> Result<Device, SdkError> {
        let transport: Arc<dyn HttpTransport> = Arc::new(server.http.clone());
        let mut config = DeviceConfig::new(app(), BASE, "key", Arc::clone(&server.root), self.path());
        config.durability = self.durability;
        config.queue = self.queue;
        config.upload.gzip = self.seed.is_multiple_of(2);
        let env = Env {
            clock: Arc::new(server.clock.clone()),
            rng: Box::new(ChaCha8Rng::seed_from_u64(self.seed)),
            blobs: Arc::new(HttpBlobs::new(
                Arc::clone(&transport),
                format!("{BASE}/tuf/demo/targets"),
                self.durability,
                4,
            )),
            transport,
            host: Arc::clone(&self.host) as Arc<dyn Host>,
            shared: SharedCaches::new(),
        };
        Device::open(config, env)
    }

    pub fn open(&self, server: &Server) -> Device {
        self.try_open(server).unwrap()
    }
}

/// Loads the active bundle like an app: the files must be the bundle's, byte for byte.
pub fn load(device: &mut Device, expected: &TestBundle) {
    let LoadPlan::Run(run) = device.load_begin().unwrap() else { panic!("a bundle is installed") };
    assert_eq!(run.bundle, expected.id);
    check_files(&run.files, expected);
    device.load_succeeded(12.0).unwrap();
}

pub fn check_files(files: &[PathBuf], expected: &TestBundle) {
    assert_eq!(files.len(), expected.artefacts.len());
    for (file, bytes) in files.iter().zip(&expected.artefacts) {
        assert!(std::fs::read(file).unwrap() == *bytes, "{} has the signed bytes", file.display());
    }
}

/// A device that runs and trusts `bundle` since a while.
pub async fn settle(device: &mut Device, bundle: &TestBundle) {
    assert_eq!(device.update(true).await.unwrap(), UpdateOutcome::Installed { bundle: bundle.id });
    load(device, bundle);
    for _ in 0..3 {
        device.record_interaction(Answer::new(TemplateId::new("t").unwrap())).unwrap();
    }
    device.upload().await.unwrap();
}

/// Every file below a folder, with content, but not the queue (which may grow).
pub fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut todo = vec![dir.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                out.insert(path.clone(), std::fs::read(&path).unwrap());
            }
        }
    }
    out
}
