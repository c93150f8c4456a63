//! The fate of every received item. Counts of one request and of one log record are kept apart by kind and reason,
//! so that the sums in the `dispositions` table always equal what was received (invariant 1).

use crate::column::Micros;
use crate::rows::DispositionRow;
use flywheel_types::{AppId, TrustClass};
use std::collections::BTreeMap;

/// How an item ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Disposition {
    Stored,
    Duplicate,
    /// The item itself is bad; the rest of its batch was kept.
    Quarantined,
    /// Nothing of the request was looked at further.
    RefusedIntake,
}

impl Disposition {
    /// The word in the `dispositions` table.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Duplicate => "duplicate",
            Self::Quarantined => "quarantined",
            Self::RefusedIntake => "refused_intake",
        }
    }
}

/// What kind of item it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Interaction,
    Feedback,
    Device,
    /// A data point of a metric.
    Metric,
    /// Could not be told.
    Unknown,
    /// A whole request that was refused before its items could be counted.
    Request,
}

impl Kind {
    /// The word in the `dispositions` table.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Interaction => "interaction",
            Self::Feedback => "feedback",
            Self::Device => "device",
            Self::Metric => "metric",
            Self::Unknown => "unknown",
            Self::Request => "request",
        }
    }
}

/// What is counted together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub app: AppId,
    pub source: &'static str,
    pub kind: Kind,
    pub trust: TrustClass,
    pub disposition: Disposition,
    pub reason: Option<&'static str>,
}

/// Counts of one log record, with the latest receipt per key.
#[derive(Debug, Default, Clone)]
pub(crate) struct Tally(BTreeMap<Key, (u64, Micros)>);

impl Tally {
    pub fn add(&mut self, key: Key, items: u64, at: Micros) {
        if items == 0 {
            return;
        }
        let slot = self.0.entry(key).or_insert((0, at));
        slot.0 += items;
        slot.1 = slot.1.max(at);
    }
    pub fn merge(&mut self, other: Self) {
        for (key, (items, at)) in other.0 {
            self.add(key, items, at);
        }
    }
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub fn rows(&self) -> Vec<DispositionRow> {
        self.0
            .iter()
            .map(|(k, (items, at))| DispositionRow {
                app: k.app.as_str().to_owned(),
                received_date: at.day(),
                received_at: *at,
                source: k.source.to_owned(),
                kind: k.kind.as_str().to_owned(),
                trust: k.trust.as_str().to_owned(),
                disposition: k.disposition.as_str().to_owned(),
                reason: k.reason.map(str::to_owned),
                items: i64::try_from(*items).unwrap_or(i64::MAX),
            })
            .collect()
    }
}
