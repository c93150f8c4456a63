//! Drives a fleet of phones through ticks of business time.

use crate::behaviour::Behaviour;
use crate::brain::{Brain, BrainAnswer, BrainAsk};
use crate::latency::LatencyModel;
use crate::link::{Link, LinkFault};
use crate::phone::Phone;
use crate::profile::{ProfileMix, stream};
use crate::workload::{RankingMemo, Retriever, Workload};
use chrono::{DateTime, Duration, Utc};
use flywheel_sdk::{
    BlobSource, DeviceConfig, Durability, HostCache, HttpBlobs, HttpTransport, IndexStorage, SdkError, SharedCaches,
    SharedGets, UploadPolicy,
};
use flywheel_types::{AppId, Digest, VirtualClock};
use futures::StreamExt as _;
use rand::Rng as _;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

/// Largest shared answer, bytes.
const MAX_SHARED_BYTES: u64 = 128 << 20;

/// A tick or the construction failed.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    #[error("phone {index} could not be opened: {source}")]
    Open { index: usize, source: SdkError },
    #[error("the brain failed: {0:#}")]
    Brain(anyhow::Error),
    #[error("the brain gave {got} answers to {want} questions")]
    Answers { want: usize, got: usize },
    #[error("a worker task ended early: {0}")]
    Worker(String),
}

/// What a fleet is made of.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    pub app: AppId,
    /// Server address without a trailing slash.
    pub base_url: String,
    pub ingest_key: String,
    pub trusted_root: Arc<[u8]>,
    /// State of all phones and the host's blob cache; a memory file system makes it fast.
    pub dir: PathBuf,
    pub phones: usize,
    pub seed: u64,
    pub mix: ProfileMix,
    /// The first phones download every byte over HTTP into own slots; the others share one verified cache.
    pub own_slot_phones: usize,
    /// So many of those meet a cut connection on each of their first three blob requests.
    pub cut_phones: usize,
    /// So many after those get blobs with a flipped bit: they must refuse every bundle. They have own slots as well.
    pub tampered_phones: usize,
    /// Requests on their way at once.
    pub in_flight: usize,
    /// Tasks that drive phones in parallel.
    pub workers: usize,
    /// A phone uploads every so many ticks.
    pub upload_every: u64,
    /// Phones' clocks lie up to this much behind the tick's time, so that events of a tick do not coincide.
    pub spread: Duration,
    /// Whether users agreed to send question and answer.
    pub send_content: bool,
    /// Whether phones keep the knowledge index.
    pub use_index: bool,
    pub start: DateTime<Utc>,
}

impl FleetConfig {
    /// A fleet with the default mix: 16 own-slot phones, four of them with cut links.
    #[must_use]
    pub fn new(
        app: AppId,
        base_url: impl Into<String>,
        ingest_key: impl Into<String>,
        trusted_root: Arc<[u8]>,
        dir: impl Into<PathBuf>,
        start: DateTime<Utc>,
    ) -> Self {
        Self {
            app,
            base_url: base_url.into(),
            ingest_key: ingest_key.into(),
            trusted_root,
            dir: dir.into(),
            phones: 2000,
            seed: 1,
            mix: ProfileMix::default(),
            own_slot_phones: 16,
            cut_phones: 4,
            tampered_phones: 0,
            in_flight: 64,
            workers: 2,
            upload_every: 1,
            spread: Duration::zero(),
            send_content: true,
            use_index: true,
            start,
        }
    }
}

/// The parts of the world that the caller supplies.
pub struct Parts {
    pub transport: Arc<dyn HttpTransport>,
    pub brain: Arc<dyn Brain>,
    pub workload: Arc<dyn Workload>,
    pub retriever: Arc<dyn Retriever>,
    pub latency: LatencyModel,
    /// Behaviour of the user of each phone.
    pub behaviour: Box<dyn Fn(usize) -> Arc<dyn Behaviour>>,
}

/// What all phones share.
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) mix: ProfileMix,
    pub(crate) clock: VirtualClock,
    pub(crate) spread: Duration,
    pub(crate) transport: Arc<dyn HttpTransport>,
    pub(crate) shared: Arc<SharedCaches>,
    pub(crate) brain: Arc<dyn Brain>,
    pub(crate) workload: Arc<dyn Workload>,
    pub(crate) retriever: Arc<dyn Retriever>,
    pub(crate) rankings: RankingMemo,
    pub(crate) latency: LatencyModel,
    pub(crate) upload_every: u64,
    pub(crate) send_content: bool,
    pub(crate) use_index: bool,
}

/// Sums over the fleet for one tick.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TickReport {
    pub tick: u64,
    pub phones: u64,
    pub offline: u64,
    pub installed: u64,
    pub switched: u64,
    pub blocked: u64,
    pub waiting: u64,
    pub fell_back: u64,
    pub answers: u64,
    /// Distinct questions that went to the brain.
    pub distinct_asks: u64,
    pub rejections: u64,
    pub feedback: u64,
    pub crashes: u64,
    pub uploaded_events: u64,
    pub duplicate_events: u64,
    pub quarantined_events: u64,
    pub errors: BTreeMap<String, u64>,
    /// Phones by the bundle that is loaded and confirmed; phones without one are missing.
    pub running: BTreeMap<Digest, u64>,
}

/// Own-slot blob source of one phone, kept to count its bytes.
struct OwnSlot {
    index: usize,
    blobs: Arc<HttpBlobs>,
}

/// A fleet.
pub struct Fleet {
    world: Arc<World>,
    gets: Arc<SharedGets<Arc<dyn HttpTransport>>>,
    cache: Arc<HostCache>,
    own: Vec<OwnSlot>,
    phones: Vec<Phone>,
    in_flight: usize,
    workers: usize,
    tick: u64,
}

impl Fleet {
    /// Opens every phone's folder below `config.dir`; phones that exist there go on where they were.
    ///
    /// # Errors
    /// [`FleetError::Open`] names the phone.
    pub fn new(config: &FleetConfig, parts: Parts) -> Result<Self, FleetError> {
        let tuf = format!("{}/tuf/{}", config.base_url, config.app);
        let prefixes = vec![
            format!("{tuf}/metadata/"),
            format!("{tuf}/targets/bundles/"),
            format!("{tuf}/targets/rollout/"),
            format!("{}/v1/index/", config.base_url),
        ];
        let gets = Arc::new(SharedGets::new(Arc::clone(&parts.transport), prefixes, MAX_SHARED_BYTES));
        let world = Arc::new(World {
            seed: config.seed,
            mix: config.mix.clone(),
            clock: VirtualClock::new(config.start),
            spread: config.spread,
            transport: Arc::clone(&gets) as Arc<dyn HttpTransport>,
            shared: SharedCaches::new(),
            brain: parts.brain,
            workload: parts.workload,
            retriever: parts.retriever,
            rankings: RankingMemo::default(),
            latency: parts.latency,
            upload_every: config.upload_every,
            send_content: config.send_content,
            use_index: config.use_index,
        });
        let targets = format!("{tuf}/targets");
        let inner = HttpBlobs::new(Arc::clone(&parts.transport), targets.clone(), Durability::Relaxed, 4);
        let cache = Arc::new(HostCache::new(inner, config.dir.join("host-blobs")));
        let mut fleet = Self {
            world,
            gets,
            cache,
            own: Vec::new(),
            phones: Vec::with_capacity(config.phones),
            in_flight: config.in_flight.max(1),
            workers: config.workers.max(1),
            tick: 0,
        };
        for index in 0..config.phones {
            let blobs = fleet.blob_source(config, index, &parts.transport, &targets);
            let behaviour = (parts.behaviour)(index);
            let phone = Phone::open(index, device_config(config, index), blobs, behaviour, &fleet.world)
                .map_err(|source| FleetError::Open { index, source })?;
            fleet.phones.push(phone);
        }
        Ok(fleet)
    }

    fn blob_source(
        &mut self,
        config: &FleetConfig,
        index: usize,
        transport: &Arc<dyn HttpTransport>,
        targets: &str,
    ) -> Arc<dyn BlobSource> {
        let tampered = (config.own_slot_phones..config.own_slot_phones + config.tampered_phones).contains(&index);
        if index >= config.own_slot_phones && !tampered {
            return Arc::clone(&self.cache) as Arc<dyn BlobSource>;
        }
        let mut rng = stream(config.seed, index, "link");
        let faults = if tampered {
            vec![LinkFault::FlipByte(rng.random_range(0..1000)); 10_000]
        } else if index < config.cut_phones {
            (0..3).map(|_| LinkFault::CutAfter(rng.random_range(0..60 << 20))).collect()
        } else {
            Vec::new()
        };
        let link: Arc<dyn HttpTransport> = Arc::new(Link::new(Arc::clone(transport), "/targets/blobs/", faults));
        let blobs = Arc::new(HttpBlobs::new(link, targets, Durability::Relaxed, 4));
        self.own.push(OwnSlot { index, blobs: Arc::clone(&blobs) });
        blobs
    }

    /// One tick: business time moves to `now` (never backwards), every phone does what it does in that time.
    ///
    /// # Errors
    /// The brain failed. Whatever goes wrong on a phone is counted in the report.
    pub async fn tick(&mut self, now: DateTime<Utc>) -> Result<TickReport, FleetError> {
        self.world.clock.advance_to(now);
        self.gets.begin_round();
        self.tick += 1;
        let tick = self.tick;
        self.each(move |phone, world| Box::pin(phone.prepare(world, tick))).await?;
        let answers = Arc::new(self.think().await?);
        let distinct = answers.len() as u64;
        self.each(move |phone, world| {
            let answers = Arc::clone(&answers);
            Box::pin(async move { phone.finish(world, tick, &answers).await })
        })
        .await?;
        Ok(self.report(distinct))
    }

    /// Runs a step on every phone, in parallel, and keeps their order.
    async fn each<F>(&mut self, step: F) -> Result<(), FleetError>
    where
        F: for<'a> Fn(&'a mut Phone, &'a World) -> futures::future::BoxFuture<'a, ()> + Send + Sync + 'static,
    {
        let step = Arc::new(step);
        let share = self.phones.len().div_ceil(self.workers).max(1);
        let width = self.in_flight.div_ceil(self.workers);
        let mut tasks = Vec::new();
        let mut rest = std::mem::take(&mut self.phones);
        while !rest.is_empty() {
            let later = rest.split_off(share.min(rest.len()));
            let (shard, world, step) =
                (std::mem::replace(&mut rest, later), Arc::clone(&self.world), Arc::clone(&step));
            tasks.push(tokio::spawn(async move {
                futures::stream::iter(shard)
                    .map(|mut phone| {
                        let (world, step) = (Arc::clone(&world), Arc::clone(&step));
                        async move {
                            step(&mut phone, &world).await;
                            phone
                        }
                    })
                    .buffered(width)
                    .collect::<Vec<_>>()
                    .await
            }));
        }
        for task in tasks {
            self.phones.extend(task.await.map_err(|e| FleetError::Worker(e.to_string()))?);
        }
        Ok(())
    }

    /// Asks the brain every distinct question once, in the order of phones.
    async fn think(&mut self) -> Result<HashMap<BrainAsk, BrainAnswer>, FleetError> {
        let asks = distinct(self.phones.iter().flat_map(|p| p.asks()));
        if asks.is_empty() {
            return Ok(HashMap::new());
        }
        let answers = self.world.brain.answer(&asks).await.map_err(FleetError::Brain)?;
        if answers.len() != asks.len() {
            return Err(FleetError::Answers { want: asks.len(), got: answers.len() });
        }
        Ok(asks.into_iter().zip(answers).collect())
    }

    fn report(&self, distinct_asks: u64) -> TickReport {
        let mut sum =
            TickReport { tick: self.tick, phones: self.phones.len() as u64, distinct_asks, ..TickReport::default() };
        for phone in &self.phones {
            let r = phone.report();
            for (total, one) in [
                (&mut sum.offline, r.offline),
                (&mut sum.installed, r.installed),
                (&mut sum.switched, r.switched),
                (&mut sum.blocked, r.blocked),
                (&mut sum.waiting, r.waiting.is_some()),
                (&mut sum.fell_back, r.fell_back),
            ] {
                *total += u64::from(one);
            }
            sum.answers += u64::from(r.answers);
            sum.rejections += u64::from(r.rejections);
            sum.feedback += u64::from(r.feedback);
            sum.crashes += u64::from(r.crashes);
            sum.uploaded_events += r.uploaded_events;
            sum.duplicate_events += r.duplicate_events;
            sum.quarantined_events += r.quarantined_events;
            for (word, n) in &r.errors {
                *sum.errors.entry(word.clone()).or_default() += u64::from(*n);
            }
            if let Some(bundle) = phone.loaded() {
                *sum.running.entry(bundle).or_default() += 1;
            }
        }
        sum
    }

    /// The phones, in order.
    #[must_use]
    pub fn phones(&self) -> &[Phone] {
        &self.phones
    }

    /// Body bytes that each own-slot phone fetched for artefacts: (phone, bytes).
    #[must_use]
    pub fn own_slot_bytes(&self) -> Vec<(usize, u64)> {
        self.own.iter().map(|o| (o.index, o.blobs.fetched_bytes())).collect()
    }

    /// Body bytes the host's cache fetched.
    #[must_use]
    pub fn cache_bytes(&self) -> u64 {
        self.cache.fetched_bytes()
    }
}

/// Each ask once, in order of first appearance.
fn distinct<'a>(asks: impl Iterator<Item = &'a BrainAsk>) -> Vec<BrainAsk> {
    let mut seen = HashSet::new();
    asks.filter(|a| seen.insert(*a)).cloned().collect()
}

/// SDK settings of a simulated phone: as shipped, but without syncs to the medium, and with the index in memory.
fn device_config(config: &FleetConfig, index: usize) -> DeviceConfig {
    let mut device = DeviceConfig::new(
        config.app.clone(),
        config.base_url.clone(),
        config.ingest_key.clone(),
        Arc::clone(&config.trusted_root),
        config.dir.join("phones").join(format!("{index:05}")),
    );
    device.durability = Durability::Relaxed;
    // One process owns all folders; 2,000 lock files would only use up its open files.
    device.exclusive = false;
    device.index = IndexStorage::Memory;
    // Loopback: compression costs more than it saves.
    device.upload = UploadPolicy { gzip: false, ..UploadPolicy::default() };
    device
}
