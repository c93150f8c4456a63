//! What goes into a step beside the rows (the registry's view of the chunks), and what comes out: suspects with
//! evidence and proposed transitions.

use flywheel_types::{Automation, ChunkState};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the registry knows about one chunk version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChunkInfo {
    pub state: ChunkState,
    /// Hours since the Unix epoch at which `state` began.
    pub since_hour: u32,
    #[serde(default)]
    pub tags: Vec<String>,
    #[serde(default)]
    pub collection: Option<String>,
    /// No other chunk answers some query cluster.
    #[serde(default)]
    pub only_source: bool,
    /// Share of affected queries left with no chunk above the score threshold if this one is hidden.
    #[serde(default)]
    pub coverage_loss: Option<f64>,
    /// Epoch of the running canary (`CANARY_FROZEN`, `CANARY_ACTIVE`); a new epoch starts fresh evidence.
    #[serde(default)]
    pub canary_epoch: u32,
}

/// How past automatic freezes turned out (canary or person).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreezePrecision {
    pub confirmed: u32,
    pub refuted: u32,
}

/// The registry's view at the time of the step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChunkContext {
    /// Business time, hours since the Unix epoch.
    pub now_hour: u32,
    pub automation: Automation,
    #[serde(default)]
    pub precision: FreezePrecision,
    /// Every served or hidden chunk version by `chunk_id@version`.
    pub chunks: BTreeMap<String, ChunkInfo>,
}

/// What kind of thing is suspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SubjectKind {
    Chunk,
    Template,
}

/// A chunk retrieved together with the suspect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Buddy {
    pub name: String,
    /// Share of the suspect's exposures in which this chunk was there too.
    pub share: f64,
}

/// How much of one failure the model puts on the suspect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceShare {
    pub interaction: String,
    /// Responsibility, 0..=1.
    pub share: f64,
    /// Rank of the suspect in that retrieval, 1 = first.
    pub rank: u32,
}

/// What a chunk did under one prompt template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TemplateEffect {
    pub template: String,
    /// Rows of the model's window with both, and failures among them.
    pub exposures: u64,
    pub failures: u64,
    /// Causal power of the chunk at rank 1 under this template.
    pub q_hat: f64,
}

/// Randomised comparison of devices that see the chunk with devices that do not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CanaryReport {
    pub shown: u64,
    pub shown_failures: u64,
    pub hidden: u64,
    pub hidden_failures: u64,
    /// Natural log of the e-value for "hiding helps".
    pub log_e_helps: f64,
    /// Natural log of the e-value against "hiding helps by more than delta".
    pub log_e_no_help: f64,
}

/// Evidence about one suspect. `log_e*` are natural logarithms of e-values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SuspectReport {
    pub kind: SubjectKind,
    /// `chunk_id@version` or template id.
    pub name: String,
    /// Rows of the model's window with the suspect, and failures among them.
    pub exposures: u64,
    pub failures: u64,
    /// Share of all retrievals of the window.
    pub retrieval_share: f64,
    /// Score given all other causes, and score given the baseline only.
    pub z: f64,
    pub z_offset: f64,
    /// Causal power at rank 1 with its 90 % interval.
    pub q_hat: f64,
    pub q_low: f64,
    pub q_high: f64,
    /// Fresh evidence since `since_hour`: people counted, days, device classes, locales.
    pub since_hour: u32,
    pub users: u32,
    pub days: u32,
    pub device_classes: u32,
    pub locales: u32,
    pub log_e: f64,
    /// After dropping the most incriminating people.
    pub log_e_trimmed: f64,
    /// Time-uniform value the decision uses (adjuster of the running maximum of the trimmed e-value).
    pub log_e_decision: f64,
    /// Rejected at the canary level.
    pub significant: bool,
    pub community: Option<u32>,
    /// The topic cannot be told from the chunk: too few rows of the topic without it.
    pub confounded_with_topic: bool,
    /// Other suspects that (almost) never appear without it; nobody can say which one is guilty.
    pub not_separable: Vec<String>,
    /// A chunk under each template, most used first.
    #[serde(default)]
    pub by_template: Vec<TemplateEffect>,
    /// The chunk fails under these templates only and does no harm under others: they are to blame, not the chunk.
    #[serde(default)]
    pub only_under: Vec<String>,
    /// Nearly all its rows are from templates that fail as a whole; only a canary can tell.
    #[serde(default)]
    pub confounded_with_template: bool,
    pub buddies: Vec<Buddy>,
    pub top_traces: Vec<TraceShare>,
    pub canary: Option<CanaryReport>,
    /// One paragraph in plain words.
    pub explanation: String,
}

/// A proposed step of a chunk's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Transition {
    /// ACTIVE → SUSPECT.
    MarkSuspect,
    /// SUSPECT → ACTIVE: no evidence within the window.
    ClearSuspect,
    /// SUSPECT → CANARY_FROZEN on `share_ppm` of the devices.
    CanaryFreeze { share_ppm: u32 },
    /// SUSPECT | CANARY_FROZEN → FROZEN on observational evidence alone.
    Freeze,
    /// CANARY_FROZEN → FROZEN: hiding it helped.
    ConfirmByCanary,
    /// CANARY_FROZEN → ACTIVE: hiding it did not help.
    RefuteByCanary,
    /// CANARY_ACTIVE → ACTIVE: the new version does no harm.
    Activate,
    /// CANARY_ACTIVE → FROZEN: the new version fails too.
    Refreeze,
    /// FROZEN → CANARY_ACTIVE: the freeze outlived its TTL; fresh evidence decides.
    ExpireFreeze,
    /// A person decides.
    NeedsPerson { why: String },
}

impl Transition {
    /// The state it leads to; `None` where a person decides.
    #[must_use]
    pub fn target(&self) -> Option<ChunkState> {
        match self {
            Self::MarkSuspect => Some(ChunkState::Suspect),
            Self::CanaryFreeze { .. } => Some(ChunkState::CanaryFrozen),
            Self::Freeze | Self::ConfirmByCanary | Self::Refreeze => Some(ChunkState::Frozen),
            Self::ClearSuspect | Self::RefuteByCanary | Self::Activate => Some(ChunkState::Active),
            Self::ExpireFreeze => Some(ChunkState::CanaryActive),
            Self::NeedsPerson { .. } => None,
        }
    }
}

/// One proposed transition.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    pub kind: SubjectKind,
    pub name: String,
    pub transition: Transition,
    /// May be done without a person under this policy, automation setting and budget.
    pub automatic: bool,
    /// Numbers behind it, in plain words.
    pub reason: String,
}

/// Result of one step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Rows that counted, and rows of anonymous senders that did not.
    pub rows_used: u64,
    pub rows_anonymous: u64,
    /// Times the model was refitted.
    pub refits: u32,
    /// Failures over rows since the beginning.
    pub base_rate: Option<f64>,
    /// Suspects the false-discovery control counts (`m`).
    pub hypotheses: u32,
    pub communities: u32,
    /// Patterns forgotten because of the memory bound.
    pub patterns_forgotten: u64,
    /// Most likely cause first.
    pub suspects: Vec<SuspectReport>,
    pub proposals: Vec<Proposal>,
}
