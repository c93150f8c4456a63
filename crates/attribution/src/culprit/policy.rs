//! Thresholds of attribution and of what may happen without a person. Everything a decision compares with is
//! a field here, stored with the decision, so that a decision can be explained and replayed.

use serde::{Deserialize, Serialize};

/// Which outcome counts as a failure. Run one state per outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// A person rejected the answer.
    #[default]
    Rejected,
    /// The model refused (detected).
    Refused,
    /// Either.
    RejectedOrRefused,
}

/// Settings of the statistics. `Default` gives the published method.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttributionPolicyV1 {
    /// Format version, 1.
    pub v: u8,
    pub failure: FailureKind,
    /// Count rows of anonymous senders. Off unless the app's signed settings say otherwise.
    pub count_anonymous: bool,
    /// The model is refitted when a new period of this many hours begins; inside a period it is frozen, so
    /// evidence is always judged by a model that has not seen it.
    pub refit_hours: u32,
    /// Rows older than this no longer shape the model, days.
    pub window_days: u32,
    /// Bound on stored count patterns; beyond it the oldest quarter is forgotten.
    pub max_patterns: usize,
    /// Rows of one install per day that enter the model; more are counted but do not shape it.
    pub user_daily_cap: u32,
    /// Screen: conditional z above this …
    pub screen_z: f64,
    /// … with at least this many exposures …
    pub screen_min_exposures: u64,
    /// … by at least this many people.
    pub screen_min_users: u32,
    /// A chunk takes part in the noisy-OR when its offset z is above this.
    pub active_z: f64,
    /// Shrinkage of the causal power: `q = (Σρ − kappa) / (Σw + lambda)`.
    pub kappa: f64,
    pub lambda: f64,
    /// Effect sizes the e-process bets on.
    pub lambda_grid: Vec<f64>,
    /// Safety margin on the predicted failure rate without the suspect, ≥ 1.
    pub gamma: f64,
    /// Most incriminating people dropped per suspect among keyed (and anonymous) installs.
    pub trim_keyed: u32,
    /// The same among attested installs.
    pub trim_attested: u32,
    /// An undecided suspect is let go after this many days.
    pub evidence_days: u32,
    pub freeze: FreezePolicyV1,
}

impl Default for AttributionPolicyV1 {
    fn default() -> Self {
        Self {
            v: 1,
            failure: FailureKind::Rejected,
            count_anonymous: false,
            refit_hours: 12,
            window_days: 28,
            max_patterns: 200_000,
            user_daily_cap: 20,
            screen_z: 1.5,
            screen_min_exposures: 8,
            screen_min_users: 5,
            active_z: 2.0,
            kappa: 1.0,
            lambda: 6.0,
            lambda_grid: vec![0.05, 0.1, 0.2, 0.35],
            gamma: 1.1,
            trim_keyed: 20,
            trim_attested: 3,
            evidence_days: 28,
            freeze: FreezePolicyV1::default(),
        }
    }
}

/// When a chunk version may be hidden, and when a person must say so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FreezePolicyV1 {
    /// One switch that turns every automatic transition into a proposal for a person.
    pub kill_switch: bool,
    /// False-discovery level for opening a canary.
    pub alpha_canary: f64,
    /// False-discovery level for a freeze without a canary …
    pub alpha_freeze: f64,
    /// … after dropping this many most incriminating people, whatever their trust class …
    pub freeze_trim: u32,
    /// … and only for effects whose lower bound is at least this; weaker effects need the canary's proof.
    pub freeze_min_q_lower: f64,
    /// People whose evidence was counted, at least.
    pub min_users: u32,
    /// Days on which evidence was counted, at least.
    pub min_days: u32,
    /// Device classes among them, at least (or all there are, if the fleet has fewer).
    pub min_device_classes: u32,
    /// Lower bound of the causal power, at least.
    pub min_q_lower: f64,
    /// A chunk with at least this share of all retrievals needs a person …
    pub person_share: f64,
    /// … but in a small index the limit is this many times the average share, if that is more.
    pub small_index_factor: f64,
    /// Tags that need a person.
    pub person_tags: Vec<String>,
    /// Share of a collection that may be hidden without a person (at least one chunk).
    pub max_collection_share: f64,
    /// Chunks hidden per day, share of the index (at least one).
    pub budget_chunks_per_day: f64,
    /// Retrieval mass hidden per day, share (small indexes: `small_index_factor` average shares).
    pub budget_mass_per_day: f64,
    /// Chunks hidden in total, share of the index (at least one).
    pub budget_total: f64,
    /// Affected queries left without any chunk above the score threshold; more needs a person.
    pub max_coverage_loss: f64,
    /// A freeze ends after this many days in a canary with fresh evidence, never silently.
    pub ttl_days: u32,
    /// Devices on which a canary differs from the rest, ppm.
    pub canary_share_ppm: u32,
    /// E-value for "hiding helps" that confirms a canary.
    pub canary_confirm_e: f64,
    /// E-value against "hiding helps by more than `canary_delta`" that refutes it.
    pub canary_refute_e: f64,
    /// Smallest difference of failure rates worth hiding a chunk for.
    pub canary_delta: f64,
    /// Freezes judged before the precision meter may switch automation off.
    pub precision_min_judged: u32,
}

impl Default for FreezePolicyV1 {
    fn default() -> Self {
        Self {
            kill_switch: false,
            alpha_canary: 0.10,
            alpha_freeze: 0.01,
            freeze_trim: 20,
            freeze_min_q_lower: 0.30,
            min_users: 20,
            min_days: 3,
            min_device_classes: 2,
            min_q_lower: 0.05,
            person_share: 0.001,
            small_index_factor: 4.0,
            person_tags: ["safety", "legal", "medical", "pinned"].map(str::to_owned).to_vec(),
            max_collection_share: 0.20,
            budget_chunks_per_day: 0.005,
            budget_mass_per_day: 0.02,
            budget_total: 0.05,
            max_coverage_loss: 0.05,
            ttl_days: 14,
            canary_share_ppm: 100_000,
            canary_confirm_e: 100.0,
            canary_refute_e: 20.0,
            canary_delta: 0.10,
            precision_min_judged: 10,
        }
    }
}

/// What is wrong with the input of [`super::step`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum AttributionError {
    #[error("batch column `{column}` holds {found} entries, {expected} are needed")]
    ColumnLength { column: &'static str, found: usize, expected: usize },
    #[error("chunk_start[{row}] = {value} does not ascend inside 0..={chunks}")]
    ChunkOffsets { row: usize, value: u32, chunks: usize },
    #[error("row {row}: {column} id {id} has no name in the batch's names")]
    UnknownId { row: usize, column: &'static str, id: u32 },
    #[error("policy field `{field}` is {value}; {rule}")]
    Policy { field: &'static str, value: f64, rule: &'static str },
    #[error("these states cannot be added: {0}")]
    NotMergeable(&'static str),
}

impl AttributionPolicyV1 {
    /// Checks the ranges a decision relies on.
    ///
    /// # Errors
    /// [`AttributionError::Policy`] names the first field out of range.
    pub fn check(&self) -> Result<(), AttributionError> {
        let f = &self.freeze;
        let unit = |field, value: f64| {
            if value > 0.0 && value < 1.0 {
                Ok(())
            } else {
                Err(AttributionError::Policy { field, value, rule: "it must lie strictly between 0 and 1" })
            }
        };
        unit("alpha_canary", f.alpha_canary)?;
        unit("alpha_freeze", f.alpha_freeze)?;
        unit("canary_delta", f.canary_delta)?;
        for l in &self.lambda_grid {
            unit("lambda_grid", *l)?;
        }
        let at_least = |field, value: f64, low: f64, rule| {
            if value >= low { Ok(()) } else { Err(AttributionError::Policy { field, value, rule }) }
        };
        at_least("lambda_grid", self.lambda_grid.len() as f64, 1.0, "it needs at least one effect size")?;
        at_least("gamma", self.gamma, 1.0, "a margin below 1 would break the error control")?;
        at_least("refit_hours", f64::from(self.refit_hours), 1.0, "it must be at least 1 hour")?;
        at_least("lambda", self.lambda, 0.0, "it must not be negative")?;
        at_least("kappa", self.kappa, 0.0, "it must not be negative")?;
        at_least("canary_confirm_e", f.canary_confirm_e, 1.0, "an e-value below 1 is no evidence")?;
        at_least("canary_refute_e", f.canary_refute_e, 1.0, "an e-value below 1 is no evidence")
    }
}
