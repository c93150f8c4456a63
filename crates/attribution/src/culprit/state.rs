//! What attribution remembers between steps: counts, fitted parameters and open evidence. Serialisable, bounded,
//! and keyed by its own names, because every batch brings its own ids.

use super::canary::Canary;
use super::model::Lens;
use super::patterns::PatternTable;
use super::policy::AttributionError;
use super::scope::Split;
use super::suspect::Suspect;
use crate::hash::IdMap;
use flywheel_types::Digest;
use flywheel_types::rows::Interner;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Strength of the prior in a person's rejection rate, in answers.
const USER_PRIOR: f64 = 15.0;
/// Bucket borders of (a person's rate / mean rate).
const BUCKET_CUTS: [f64; 6] = [0.6, 0.8, 1.05, 1.4, 2.0, 3.0];

/// Strings to own ids.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct OwnNames {
    pub template: Interner,
    pub bundle: Interner,
    pub device_class: Interner,
    pub locale: Interner,
    pub chunk: Interner,
}

/// Sums of one person.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UserSums {
    /// First 8 bytes of SHA-256 of the install id.
    pub key: u64,
    pub rows: u32,
    pub failures: u32,
    /// Last day seen, and rows on it.
    pub day: u32,
    pub today: u32,
}

/// All people.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Users {
    pub sums: Vec<UserSums>,
    #[serde(skip)]
    index: IdMap<u64, u32>,
}

impl PartialEq for Users {
    fn eq(&self, other: &Self) -> bool {
        self.sums == other.sums
    }
}

impl Users {
    pub(crate) fn slot(&mut self, install: &str) -> u32 {
        let d = Digest::of(install.as_bytes()).0;
        let mut first = [0u8; 8];
        first.copy_from_slice(&d[..8]);
        self.slot_of_key(u64::from_be_bytes(first))
    }

    pub(crate) fn slot_of_key(&mut self, key: u64) -> u32 {
        if self.index.len() != self.sums.len() {
            self.index = self.sums.iter().enumerate().map(|(i, u)| (u.key, i as u32)).collect();
        }
        let next = self.sums.len() as u32;
        let slot = *self.index.entry(key).or_insert(next);
        if slot == next {
            self.sums.push(UserSums { key, ..UserSums::default() });
        }
        slot
    }
}

/// Bucket of a person's earlier rejections relative to everybody's, 0..=6. Strictly earlier rows only: the same
/// figure taken from the rows being judged would explain the very failures it should predict.
pub(crate) fn user_bucket(u: &UserSums, mean: f64) -> u8 {
    let mean = mean.max(1e-4);
    let rate = (f64::from(u.failures) + USER_PRIOR * mean) / (f64::from(u.rows) + USER_PRIOR) / mean;
    BUCKET_CUTS.iter().filter(|c| rate >= **c).count() as u8
}

/// What the last refit found out about a suspect's surroundings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Surroundings {
    /// Chunks retrieved with it and their share of its rows, most frequent first.
    pub buddies: Vec<(u32, f64)>,
    /// Chunks (almost) never apart from it.
    pub twins: Vec<u32>,
    /// Too few rows of its topic without it.
    pub confounded: bool,
    /// What it did under each template.
    #[serde(default)]
    pub by_template: Vec<Split>,
}

/// Suspects and model of one kind of subject.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Bench {
    pub lens: Lens,
    pub suspects: BTreeMap<u32, Suspect>,
    /// The first few people seen with each subject (for the screen's minimum).
    pub first_users: Vec<Vec<u32>>,
}

impl Bench {
    pub(crate) fn note_user(&mut self, subject: u32, user: u32, cap: usize) {
        let at = subject as usize;
        if self.first_users.len() <= at {
            self.first_users.resize(at + 1, Vec::new());
        }
        let list = &mut self.first_users[at];
        if list.len() < cap && !list.contains(&user) {
            list.push(user);
        }
    }
}

/// State of attribution for one app and one kind of failure. Start with `default()`; store it with serde.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AttributionState {
    /// Rows and failures counted since the beginning.
    pub(crate) rows: u64,
    pub(crate) failures: u64,
    /// Period of the last refit.
    pub(crate) period: Option<u32>,
    pub(crate) names: OwnNames,
    pub(crate) users: Users,
    pub(crate) patterns: PatternTable,
    /// Community of every chunk and their number.
    pub(crate) labels: Vec<u32>,
    pub(crate) communities: u32,
    pub(crate) chunks: Bench,
    pub(crate) templates: Bench,
    pub(crate) surroundings: BTreeMap<u32, Surroundings>,
    pub(crate) canaries: BTreeMap<u32, Canary>,
}

impl AttributionState {
    /// Share of failures so far; 0.1 before there is enough to tell.
    pub(crate) fn mean(&self) -> f64 {
        if self.rows < 50 { 0.1 } else { self.failures as f64 / self.rows as f64 }
    }

    /// Rows counted since the beginning.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Adds the counts and the open evidence of another shard that saw **other people** under the same policy:
    /// counts add exactly, log e-values add because the shards' people are independent. Fitted parameters stay
    /// those of `self` until the next refit. Canary evidence of a chunk is kept from `self` when both hold some.
    ///
    /// # Errors
    /// [`AttributionError::NotMergeable`] when a suspect was judged on different effect sizes or by the same
    /// person in both; nothing is changed then.
    pub fn merge(&mut self, other: &Self) -> Result<(), AttributionError> {
        let mut sum = self.clone();
        let own = |mine: &mut Interner, theirs: &Interner| -> Vec<u32> {
            theirs.names().iter().map(|n| mine.intern(n)).collect()
        };
        let template = own(&mut sum.names.template, &other.names.template);
        let bundle = own(&mut sum.names.bundle, &other.names.bundle);
        let class = own(&mut sum.names.device_class, &other.names.device_class);
        let locale = own(&mut sum.names.locale, &other.names.locale);
        let chunk = own(&mut sum.names.chunk, &other.names.chunk);
        let at = |map: &[u32], id: u32| map.get(id as usize).copied().unwrap_or(id);
        let user: Vec<u32> = other.users.sums.iter().map(|u| sum.users.slot_of_key(u.key)).collect();
        for (u, &slot) in other.users.sums.iter().zip(&user) {
            let s = &mut sum.users.sums[slot as usize];
            s.rows = s.rows.saturating_add(u.rows);
            s.failures = s.failures.saturating_add(u.failures);
            if u.day > s.day {
                (s.day, s.today) = (u.day, u.today);
            }
        }
        for p in other.patterns.iter() {
            let mut cell = p.cell;
            cell.template = at(&template, cell.template);
            cell.bundle = at(&bundle, cell.bundle);
            cell.device_class = at(&class, cell.device_class);
            cell.locale = at(&locale, cell.locale);
            let list: Vec<u32> = p.chunks.iter().map(|c| at(&chunk, *c)).collect();
            sum.patterns.add(cell, &list, p.n, p.failures, usize::MAX);
        }
        sum.rows += other.rows;
        sum.failures += other.failures;
        let pairs = [(&mut sum.chunks, &other.chunks, &chunk), (&mut sum.templates, &other.templates, &template)];
        for (mine, theirs, map) in pairs {
            for (id, evidence) in &theirs.suspects {
                let target = mine
                    .suspects
                    .entry(at(map, *id))
                    .or_insert_with(|| Suspect::new(evidence.since_hour, evidence.grid_len()));
                if !target.merge(evidence, |u| at(&user, u)) {
                    return Err(AttributionError::NotMergeable(
                        "a suspect was judged on other effect sizes or by the same person in both",
                    ));
                }
                target.merge_places(evidence, |c| at(&class, c), |l| at(&locale, l));
            }
            for (id, list) in theirs.first_users.iter().enumerate() {
                list.iter().for_each(|u| mine.note_user(at(map, id as u32), at(&user, *u), 16));
            }
        }
        for (id, canary) in &other.canaries {
            sum.canaries.entry(at(&chunk, *id)).or_insert_with(|| canary.with_users(|u| at(&user, u)));
        }
        *self = sum;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_earlier_behaviour() {
        let u = |rows, failures| UserSums { rows, failures, ..UserSums::default() };
        assert_eq!(user_bucket(&u(0, 0), 0.1), 2, "an unknown person is average");
        assert_eq!(user_bucket(&u(40, 0), 0.1), 0);
        assert_eq!(user_bucket(&u(40, 40), 0.1), 6);
    }

    #[test]
    fn user_slots_survive_serialisation() {
        let mut users = Users::default();
        let (a, b) = (users.slot("a"), users.slot("b"));
        let mut again: Users = serde_json::from_str(&serde_json::to_string(&users).unwrap()).unwrap();
        assert_eq!((again.slot("b"), again.slot("a"), again.slot("c")), (b, a, 2));
    }
}
