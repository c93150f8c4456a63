//! One simulated phone: a real SDK device and the world around it.

use crate::behaviour::{Behaviour, Judgement};
use crate::brain::{BrainAnswer, BrainAsk, LoadTrial};
use crate::fleet::World;
use crate::profile::{Drawn, stream};
use crate::workload::Ask;
use chrono::{DateTime, Duration, Utc};
use flywheel_sdk::{
    Answer, BlobSource, Candidate, Conditions, Device, DeviceConfig, Env, Host, LoadPlan, Network, SdkError,
    UpdateOutcome, Wait,
};
use flywheel_types::wire::{ContentV1, DeviceFactsV1, RetrievedV1};
use flywheel_types::{BusinessClock, ChunkId, Digest, InteractionId, LabelKind, VirtualClock};
use rand::Rng as _;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

/// Loads tried within one tick: enough for two deaths and the fall-back.
const LOADS_PER_TICK: u32 = 4;

/// The phone's hardware, as the SDK asks about it.
struct SimHost {
    facts: DeviceFactsV1,
    now: Mutex<Conditions>,
}

impl Host for SimHost {
    fn facts(&self) -> DeviceFactsV1 {
        self.facts.clone()
    }
    fn conditions(&self) -> Conditions {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fleet's clock, a fixed time earlier, so that events of a tick are spread over it.
struct PhoneClock {
    fleet: VirtualClock,
    behind: Duration,
}

impl BusinessClock for PhoneClock {
    fn now(&self) -> DateTime<Utc> {
        BusinessClock::now(&self.fleet) - self.behind
    }
}

/// A question of this tick, ready for the brain.
struct Planned {
    ask: Ask,
    candidates: Vec<Candidate>,
    brain: BrainAsk,
}

/// What one phone did in a tick.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PhoneTick {
    pub offline: bool,
    pub installed: bool,
    pub switched: bool,
    pub blocked: bool,
    /// Why an update waits.
    pub waiting: Option<Wait>,
    pub fell_back: bool,
    pub answers: u32,
    pub rejections: u32,
    pub feedback: u32,
    pub crashes: u32,
    pub uploaded_events: u64,
    pub duplicate_events: u64,
    pub quarantined_events: u64,
    /// Errors by a short word.
    pub errors: BTreeMap<String, u32>,
}

/// One phone.
pub struct Phone {
    index: usize,
    drawn: Drawn,
    config: DeviceConfig,
    host: Arc<SimHost>,
    clock: Arc<PhoneClock>,
    blobs: Arc<dyn BlobSource>,
    behaviour: Arc<dyn Behaviour>,
    device: Option<Device>,
    boots: u64,
    loaded: Option<Digest>,
    rng: ChaCha8Rng,
    planned: Vec<Planned>,
    later: Vec<(InteractionId, LabelKind, Option<String>)>,
    report: PhoneTick,
}

fn word(e: &SdkError) -> String {
    match e {
        SdkError::Refused { code, .. } => (*code).to_owned(),
        SdkError::Expired(_) => "expired".into(),
        SdkError::Status { status, .. } => format!("http_{status}"),
        SdkError::Transport { .. } => "network".into(),
        SdkError::NoSpace { .. } => "no_space".into(),
        SdkError::Malformed { .. } => "malformed".into(),
        SdkError::Io { .. } | SdkError::Corrupt { .. } | SdkError::Busy { .. } => "storage".into(),
        SdkError::Usage(_) => "usage".into(),
    }
}

impl Phone {
    /// Opens the phone's device in its own folder.
    pub(crate) fn open(
        index: usize,
        config: DeviceConfig,
        blobs: Arc<dyn BlobSource>,
        behaviour: Arc<dyn Behaviour>,
        world: &World,
    ) -> Result<Self, SdkError> {
        let drawn = world.mix.draw(world.seed, index);
        let mut rng = stream(world.seed, index, "world");
        let spread_ms = world.spread.num_milliseconds().max(0);
        let behind = Duration::milliseconds(rng.random_range(0..=spread_ms));
        let host = Arc::new(SimHost { facts: drawn.facts.clone(), now: Mutex::new(Conditions::default()) });
        let mut phone = Self {
            index,
            drawn,
            config,
            host,
            clock: Arc::new(PhoneClock { fleet: world.clock.clone(), behind }),
            blobs,
            behaviour,
            device: None,
            boots: 0,
            loaded: None,
            rng,
            planned: Vec::new(),
            later: Vec::new(),
            report: PhoneTick::default(),
        };
        phone.boot(world)?;
        Ok(phone)
    }

    /// Starts the app: what was in memory is gone, what was stored is read.
    fn boot(&mut self, world: &World) -> Result<(), SdkError> {
        self.device = None;
        self.loaded = None;
        let env = Env {
            clock: Arc::clone(&self.clock) as Arc<dyn BusinessClock>,
            rng: Box::new(stream(world.seed ^ self.boots, self.index, "sdk")),
            transport: Arc::clone(&world.transport),
            blobs: Arc::clone(&self.blobs),
            host: Arc::clone(&self.host) as Arc<dyn Host>,
            shared: Arc::clone(&world.shared),
        };
        self.boots += 1;
        self.device = Some(Device::open(self.config.clone(), env)?);
        Ok(())
    }

    /// The phone's SDK device; `None` only after its folder could not be opened again.
    #[must_use]
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Class, locale and facts.
    #[must_use]
    pub fn drawn(&self) -> &Drawn {
        &self.drawn
    }

    /// The bundle that is loaded now.
    #[must_use]
    pub fn loaded(&self) -> Option<Digest> {
        self.loaded
    }

    fn fail(&mut self, e: &SdkError) {
        tracing::debug!(phone = self.index, error = %e, "phone error");
        *self.report.errors.entry(word(e)).or_default() += 1;
    }

    /// First half of a tick: network, updates, load, index, and the questions of this tick.
    pub(crate) async fn prepare(&mut self, world: &World, tick: u64) {
        self.report = PhoneTick::default();
        self.planned.clear();
        let conditions = world.mix.conditions(world.seed, self.index, tick);
        *self.host.now.lock().unwrap_or_else(PoisonError::into_inner) = conditions;
        self.report.offline = conditions.network == Network::Offline;
        self.say_later();
        if !self.report.offline {
            self.update().await;
        }
        self.load(world);
        if !self.report.offline && world.use_index {
            self.sync_index().await;
        }
        self.plan_questions(world, tick);
    }

    fn say_later(&mut self) {
        let Some(device) = self.device.as_mut() else {
            return;
        };
        let mut failed = None;
        for (id, label, reason) in self.later.drain(..) {
            self.report.feedback += 1;
            failed = device.record_feedback(id, label, reason).err().or(failed);
        }
        if let Some(e) = failed {
            self.fail(&e);
        }
    }

    async fn update(&mut self) {
        let Some(device) = self.device.as_mut() else {
            return;
        };
        match device.update(false).await {
            Ok(UpdateOutcome::Installed { .. }) => self.report.installed = true,
            Ok(UpdateOutcome::Switched { .. }) => self.report.switched = true,
            Ok(UpdateOutcome::Blocked { .. }) => self.report.blocked = true,
            Ok(UpdateOutcome::Waiting(wait)) => self.report.waiting = Some(wait),
            Ok(UpdateOutcome::Current | UpdateOutcome::Off) => {}
            Err(e) => self.fail(&e),
        }
    }

    async fn sync_index(&mut self) {
        let Some(device) = self.device.as_mut() else {
            return;
        };
        if let Err(e) = device.sync_index().await {
            self.fail(&e);
        }
    }

    /// Loads the active bundle when another or none is in memory.
    fn load(&mut self, world: &World) {
        for _ in 0..LOADS_PER_TICK {
            let Some(device) = self.device.as_mut() else {
                return;
            };
            let active = device.active_bundle();
            if active == self.loaded {
                return;
            }
            self.loaded = None;
            if active.is_none() {
                return;
            }
            match self.try_load(world) {
                Ok(true) => return,
                Ok(false) => {}
                Err(e) => {
                    self.fail(&e);
                    return;
                }
            }
        }
    }

    /// One load; false when it did not work.
    fn try_load(&mut self, world: &World) -> Result<bool, SdkError> {
        let Some(device) = self.device.as_mut() else {
            return Ok(false);
        };
        let LoadPlan::Run(run) = device.load_begin()? else {
            return Ok(true);
        };
        match world.brain.load(&run, self.drawn.class, self.rng.random()) {
            LoadTrial::Works => {
                let load_ms = world.latency.load_ms(self.drawn.class, &run.bundle, &mut self.rng);
                device.load_succeeded(load_ms)?;
                self.loaded = Some(run.bundle);
                Ok(true)
            }
            LoadTrial::Fails { reason, out_of_memory } => {
                self.report.fell_back |= device.load_failed(&reason, out_of_memory)?.fell_back;
                Ok(false)
            }
            LoadTrial::Dies => {
                self.boot(world)?;
                let now = self.device.as_ref().and_then(Device::active_bundle);
                self.report.fell_back |= now != Some(run.bundle);
                Ok(false)
            }
        }
    }

    fn plan_questions(&mut self, world: &World, tick: u64) {
        let (Some(device), Some(bundle)) = (self.device.as_ref(), self.loaded) else {
            return;
        };
        let mut rng = stream(world.seed ^ tick.wrapping_mul(0x517C_C1B7_2722_0A95), self.index, "asks");
        for ask in world.workload.asks(self.index, self.drawn.locale, tick, &mut rng) {
            let index = device.index();
            let ranked = world.rankings.rank(world.retriever.as_ref(), index, &ask.question);
            let candidates = index.candidates(&ranked, ask.k, &device.install_id());
            let chunks = candidates.iter().filter(|c| !c.hidden).map(|c| Arc::clone(&c.chunk)).collect();
            let brain =
                BrainAsk { bundle, template: ask.template.clone(), question: Arc::clone(&ask.question.text), chunks };
            self.planned.push(Planned { ask, candidates, brain });
        }
    }

    /// What the brain is asked for this phone.
    pub(crate) fn asks(&self) -> impl Iterator<Item = &BrainAsk> {
        self.planned.iter().map(|p| &p.brain)
    }

    /// Second half of a tick: answers reach the user, the user reacts, events are uploaded.
    pub(crate) async fn finish(&mut self, world: &World, tick: u64, answers: &HashMap<BrainAsk, BrainAnswer>) {
        let mut rng = stream(world.seed ^ tick.wrapping_mul(0x2545_F491_4F6C_DD1D), self.index, "user");
        for planned in std::mem::take(&mut self.planned) {
            let Some(answer) = answers.get(&planned.brain) else {
                continue;
            };
            if let Err(e) = self.answered(world, &planned, answer, &mut rng) {
                self.fail(&e);
            }
        }
        let turn = (self.index as u64).wrapping_add(tick).is_multiple_of(world.upload_every.max(1));
        if turn && !self.report.offline {
            self.upload().await;
        }
    }

    fn answered(
        &mut self,
        world: &World,
        planned: &Planned,
        answer: &BrainAnswer,
        rng: &mut ChaCha8Rng,
    ) -> Result<(), SdkError> {
        let Some(device) = self.device.as_mut() else {
            return Ok(());
        };
        let bundle = planned.brain.bundle;
        let timing = world.latency.answer(self.drawn.class, &bundle, answer.input_tokens, &mut self.rng);
        let id = device.record_interaction(Answer {
            retrieval: planned.candidates.iter().map(retrieved).collect(),
            index_version: Some(device.index().version()),
            ttft_ms: Some(timing.ttft_ms),
            ttfv_ms: Some(timing.ttft_ms),
            decode_tokens_per_s: Some(timing.decode_tokens_per_s),
            input_tokens: Some(answer.input_tokens),
            output_tokens: Some(answer.output_tokens),
            peak_memory_bytes: Some(timing.peak_memory_bytes),
            memory_metric: Some("pss".into()),
            content: world
                .send_content
                .then(|| ContentV1 { question: planned.ask.question.text.to_string(), answer: answer.text.clone() }),
            ..Answer::new(planned.ask.template.clone())
        })?;
        self.report.answers += 1;
        if self.rng.random_bool(world.brain.crash_chance(&bundle).clamp(0.0, 1.0)) {
            self.report.crashes += 1;
            return device.record_crash(false, Some("signal_11".into()));
        }
        let shown: Vec<ChunkId> = planned.brain.chunks.iter().map(|c| c.id.clone()).collect();
        let seen =
            Judgement { index: self.index, question: &planned.ask.question, answer: &answer.text, shown: &shown };
        let Some(verdict) = self.behaviour.judge(&seen, rng) else {
            return Ok(());
        };
        self.report.rejections += u32::from(verdict.label.is_rejection());
        if verdict.later {
            self.later.push((id, verdict.label, verdict.reason));
            return Ok(());
        }
        self.report.feedback += 1;
        device.record_feedback(id, verdict.label, verdict.reason)
    }

    async fn upload(&mut self) {
        let Some(device) = self.device.as_mut() else {
            return;
        };
        match device.upload().await {
            Ok(out) => {
                self.report.uploaded_events += out.events;
                self.report.duplicate_events += out.ack.duplicate;
                self.report.quarantined_events += out.ack.quarantined;
                if out.refused_events > 0 {
                    *self.report.errors.entry("events_refused".into()).or_default() += 1;
                }
                if out.waiting.is_some() {
                    *self.report.errors.entry("upload_waits".into()).or_default() += 1;
                }
            }
            Err(e) => self.fail(&e),
        }
    }

    /// What this phone did in the last tick.
    #[must_use]
    pub fn report(&self) -> &PhoneTick {
        &self.report
    }
}

fn retrieved(c: &Candidate) -> RetrievedV1 {
    RetrievedV1 { chunk_id: c.chunk.id.clone(), version: c.chunk.version, score: c.score, hidden: c.hidden }
}
