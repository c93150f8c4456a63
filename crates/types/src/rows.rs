//! Row batches for the pure crates: struct of arrays with interned u32 ids, so that decisions never see Arrow
//! and never compare strings in an inner loop.

use crate::assign::Arm;
use crate::state::{LabelKind, TrustClass};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Strings to dense u32 ids in order of first appearance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<String>", into = "Vec<String>")]
pub struct Interner {
    names: Vec<String>,
    index: HashMap<String, u32>,
}

impl From<Vec<String>> for Interner {
    fn from(names: Vec<String>) -> Self {
        let mut it = Self::default();
        for n in names {
            it.intern(&n);
        }
        it
    }
}
impl From<Interner> for Vec<String> {
    fn from(it: Interner) -> Self {
        it.names
    }
}

impl Interner {
    /// Id of `name`, new if unseen.
    pub fn intern(&mut self, name: &str) -> u32 {
        if let Some(id) = self.index.get(name) {
            return *id;
        }
        let id = self.names.len() as u32;
        self.names.push(name.to_owned());
        self.index.insert(name.to_owned(), id);
        id
    }
    #[must_use]
    pub fn get(&self, name: &str) -> Option<u32> {
        self.index.get(name).copied()
    }
    /// Name of `id`; the empty string for an unknown id.
    #[must_use]
    pub fn name(&self, id: u32) -> &str {
        self.names.get(id as usize).map_or("", String::as_str)
    }
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

/// Names behind the ids of [`InteractionRows`]. Chunks are interned as `chunk_id@version`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    pub template: Interner,
    pub bundle: Interner,
    pub device_class: Interner,
    pub locale: Interner,
    pub install: Interner,
    pub chunk: Interner,
}

/// Labelled interactions for attribution, ordered by `(time, install, interaction)`. All vectors have the
/// same length `n`, except the chunk lists, which are indexed by `chunk_start[i]..chunk_start[i + 1]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct InteractionRows {
    pub interaction: Vec<String>,
    /// Hours since the Unix epoch of the receipt (business clock).
    pub hour: Vec<u32>,
    pub template: Vec<u32>,
    pub bundle: Vec<u32>,
    pub device_class: Vec<u32>,
    pub locale: Vec<u32>,
    pub install: Vec<u32>,
    pub trust: Vec<TrustClass>,
    /// 1 = a person rejected the answer.
    pub rejected: Vec<bool>,
    /// The answer was a refusal (detected).
    pub refused: Vec<bool>,
    /// `n + 1` offsets into the chunk vectors.
    pub chunk_start: Vec<u32>,
    /// Interned `chunk_id@version`, in rank order (rank 1 first).
    pub chunk: Vec<u32>,
    /// The chunk was hidden on this device (frozen) and did not reach the prompt.
    pub chunk_hidden: Vec<bool>,
}

impl InteractionRows {
    #[must_use]
    pub fn len(&self) -> usize {
        self.interaction.len()
    }
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.interaction.is_empty()
    }
    /// Chunks of row `i` in rank order, with their hidden flags.
    pub fn chunks(&self, i: usize) -> impl Iterator<Item = (u32, bool)> + '_ {
        let range = self.chunk_start[i] as usize..self.chunk_start[i + 1] as usize;
        range.map(|k| (self.chunk[k], self.chunk_hidden[k]))
    }
}

/// One response of a device inside a rollout, as the experiment crate needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    /// Receipt, business clock.
    pub at: DateTime<Utc>,
    pub label: Option<LabelKind>,
    /// Receipt of the label, business clock; `None`: it came with the response. A label that arrives after the
    /// device's window has closed does not change the closed record.
    pub label_at: Option<DateTime<Utc>>,
    pub refused: bool,
    pub ttft_ms: Option<f64>,
}

/// Everything one device did inside one rollout, in order of receipt. Input of the window engine.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceHistory {
    /// Install id, hex.
    pub install: String,
    pub trust: TrustClass,
    /// First receipt of anything from this identity, in any context.
    pub first_seen: DateTime<Utc>,
    pub device_class: String,
    pub locale: String,
    /// Arm of the first exposure (intention to treat).
    pub arm: Arm,
    pub phase: u32,
    pub exposed_at: DateTime<Utc>,
    /// The device reported more than one arm.
    pub crossed_over: bool,
    pub responses: Vec<Response>,
    /// Receipts of load failures, crashes and memory kills.
    pub failures: Vec<DateTime<Utc>>,
    /// The device confirmed the arm's bundle (loaded and probed).
    pub confirmed_at: Option<DateTime<Utc>>,
}
