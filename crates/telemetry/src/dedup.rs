//! Which batches were already stored. An SDK install counts its batches, so its state is the highest number up to
//! which everything was seen, plus the few runs seen ahead of a gap. Other clients are known by a key (their
//! `Idempotency-Key`, or the digest of the body), kept for 14 days because phones are offline for long.
//!
//! Identities are kept as truncated SHA-256 digests scoped to the app (and the ingest key): 128 bits, so an accidental
//! collision is out of reach, and no file here names a device.

use flywheel_types::{AppId, InstallId};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, HashMap};

/// Days a key of a client without sequence numbers is remembered.
pub const KEY_DAYS: i32 = 14;
/// Runs ahead of the contiguous part that are kept apart per install.
const MAX_RUNS: usize = 32;

/// Identity of one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchKey {
    /// Signed SDK batch: scope of (app, install), sequence number.
    Seq { scope: [u8; 16], seq: u64 },
    /// Any other: scope of (app, sender, key), digest of the body, day of receipt.
    Opaque { scope: [u8; 16], body: [u8; 8], day: i32 },
}

fn scope(parts: &[&[u8]]) -> [u8; 16] {
    let mut h = Sha256::new();
    for p in parts {
        h.update((p.len() as u64).to_le_bytes());
        h.update(p);
    }
    head(&h.finalize())
}

fn head<const N: usize>(digest: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&digest[..N]);
    out
}

impl BatchKey {
    /// Key of a signed SDK batch.
    #[must_use]
    pub fn seq(app: &AppId, install: &InstallId, seq: u64) -> Self {
        Self::Seq { scope: scope(&[b"seq", app.as_str().as_bytes(), &install.0.0]), seq }
    }
    /// Key of any other batch: `sender` is the install or the ingest key, `key` what the client named the batch.
    #[must_use]
    pub fn opaque(app: &AppId, sender: &[u8], key: Option<&str>, body: &[u8], day: i32) -> Self {
        let digest = Sha256::digest(body);
        let app = app.as_str().as_bytes();
        let scope = match key {
            Some(k) => scope(&[b"key", app, sender, k.as_bytes()]),
            None => scope(&[b"body", app, sender, &digest]),
        };
        Self::Opaque { scope, body: head(&digest), day }
    }

    /// Bytes of one entry in the log and in key files.
    pub const ENCODED: usize = 29;

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Seq { scope, seq } => {
                out.push(1);
                out.extend_from_slice(scope);
                out.extend_from_slice(&seq.to_le_bytes());
                out.extend_from_slice(&[0; 4]);
            }
            Self::Opaque { scope, body, day } => {
                out.push(2);
                out.extend_from_slice(scope);
                out.extend_from_slice(body);
                out.extend_from_slice(&day.to_le_bytes());
            }
        }
    }
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let scope: [u8; 16] = bytes.get(1..17)?.try_into().ok()?;
        let word: [u8; 8] = bytes.get(17..25)?.try_into().ok()?;
        let day: [u8; 4] = bytes.get(25..29)?.try_into().ok()?;
        match bytes.first()? {
            1 => Some(Self::Seq { scope, seq: u64::from_le_bytes(word) }),
            2 => Some(Self::Opaque { scope, body: word, day: i32::from_le_bytes(day) }),
            _ => None,
        }
    }
}

/// Batches of one install that were seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runs {
    /// Every number up to here was seen, or its gap was given up.
    upto: u64,
    /// Disjoint ascending runs above `upto + 1`, inclusive.
    ahead: Vec<(u64, u64)>,
}

impl Runs {
    /// Whether `seq` was seen (or lies below a gap that was given up).
    #[must_use]
    pub fn contains(&self, seq: u64) -> bool {
        seq <= self.upto || self.ahead.iter().any(|(a, b)| (*a..=*b).contains(&seq))
    }

    /// Adds `seq`. With more than 32 gaps the lowest is given up: a device that skipped so often dropped those
    /// batches from its own queue.
    pub fn insert(&mut self, seq: u64) {
        if self.contains(seq) {
            return;
        }
        let at = self.ahead.partition_point(|(a, _)| *a < seq);
        self.ahead.insert(at, (seq, seq));
        if let Some([left, right]) = self.ahead.get(at..at + 2)
            && left.1 + 1 == right.0
        {
            self.ahead[at].1 = right.1;
            self.ahead.remove(at + 1);
        }
        if at > 0 && self.ahead[at - 1].1 + 1 == self.ahead[at].0 {
            self.ahead[at - 1].1 = self.ahead[at].1;
            self.ahead.remove(at);
        }
        if self.ahead.len() > MAX_RUNS {
            let (_, end) = self.ahead.remove(0);
            self.upto = end;
        }
        while self.ahead.first().is_some_and(|(a, _)| *a == self.upto + 1) {
            let (_, end) = self.ahead.remove(0);
            self.upto = end;
        }
    }
}

/// What the state says about a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    Fresh,
    Duplicate,
    /// The key is known, but with another body.
    Conflict,
}

/// How to take back one insertion when its log record could not be written.
#[derive(Debug)]
pub(crate) enum Undo {
    Seq { scope: [u8; 16], before: Option<Runs> },
    Opaque { scope: [u8; 16], day: i32 },
}

/// All batches seen.
#[derive(Debug, Default)]
pub struct DedupState {
    installs: HashMap<[u8; 16], Runs>,
    days: BTreeMap<i32, HashMap<[u8; 16], [u8; 8]>>,
    /// Keys not yet in a key file.
    unsaved: Vec<BatchKey>,
}

impl DedupState {
    /// Whether a batch was seen.
    #[must_use]
    pub fn check(&self, key: &BatchKey) -> Seen {
        match key {
            BatchKey::Seq { scope, seq } => match self.installs.get(scope) {
                Some(runs) if runs.contains(*seq) => Seen::Duplicate,
                _ => Seen::Fresh,
            },
            BatchKey::Opaque { scope, body, .. } => match self.days.values().find_map(|d| d.get(scope)) {
                Some(known) if known == body => Seen::Duplicate,
                Some(_) => Seen::Conflict,
                None => Seen::Fresh,
            },
        }
    }

    pub(crate) fn insert(&mut self, key: &BatchKey) -> Undo {
        match *key {
            BatchKey::Seq { scope, seq } => {
                let before = self.installs.get(&scope).cloned();
                self.installs.entry(scope).or_default().insert(seq);
                Undo::Seq { scope, before }
            }
            BatchKey::Opaque { scope, body, day } => {
                self.days.entry(day).or_default().insert(scope, body);
                self.unsaved.push(*key);
                Undo::Opaque { scope, day }
            }
        }
    }

    /// Takes insertions back; `undo` in the order they were made.
    pub(crate) fn revert(&mut self, undo: Vec<Undo>) {
        for step in undo.into_iter().rev() {
            match step {
                Undo::Seq { scope, before: Some(runs) } => {
                    self.installs.insert(scope, runs);
                }
                Undo::Seq { scope, before: None } => {
                    self.installs.remove(&scope);
                }
                Undo::Opaque { scope, day } => {
                    if let Some(keys) = self.days.get_mut(&day) {
                        keys.remove(&scope);
                    }
                    self.unsaved.pop();
                }
            }
        }
    }

    /// Loads a key that is already in a key file.
    pub(crate) fn load(&mut self, key: &BatchKey) {
        self.insert(key);
        if matches!(key, BatchKey::Opaque { .. }) {
            self.unsaved.pop();
        }
    }

    /// Keys since the last call, to be appended to the key files.
    pub(crate) fn unsaved(&self) -> &[BatchKey] {
        &self.unsaved
    }
    pub(crate) fn saved(&mut self) {
        self.unsaved.clear();
    }

    /// Forgets keys older than [`KEY_DAYS`] before `today`; returns the days dropped.
    pub(crate) fn expire(&mut self, today: i32) -> Vec<i32> {
        let keep = self.days.split_off(&today.saturating_sub(KEY_DAYS));
        std::mem::replace(&mut self.days, keep).into_keys().collect()
    }

    /// Number of installs known.
    #[must_use]
    pub fn installs(&self) -> usize {
        self.installs.len()
    }

    /// Install part of the snapshot: count, then per install scope, `upto`, number of runs, runs.
    pub(crate) fn encode_installs(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.installs.len() as u64).to_le_bytes());
        for (scope, runs) in &self.installs {
            out.extend_from_slice(scope);
            out.extend_from_slice(&runs.upto.to_le_bytes());
            out.push(runs.ahead.len() as u8);
            for (a, b) in &runs.ahead {
                out.extend_from_slice(&a.to_le_bytes());
                out.extend_from_slice(&b.to_le_bytes());
            }
        }
    }

    /// Reads what [`Self::encode_installs`] wrote; `None` when the bytes do not fit.
    pub(crate) fn decode_installs(&mut self, mut bytes: &[u8]) -> Option<()> {
        fn word(bytes: &mut &[u8]) -> Option<u64> {
            let (head, rest) = bytes.split_first_chunk::<8>()?;
            *bytes = rest;
            Some(u64::from_le_bytes(*head))
        }
        let n = word(&mut bytes)?;
        for _ in 0..n {
            let (scope, rest) = bytes.split_first_chunk::<16>()?;
            bytes = rest;
            let upto = word(&mut bytes)?;
            let (count, rest) = bytes.split_first()?;
            bytes = rest;
            let mut ahead = Vec::with_capacity(usize::from(*count));
            for _ in 0..*count {
                ahead.push((word(&mut bytes)?, word(&mut bytes)?));
            }
            self.installs.insert(*scope, Runs { upto, ahead });
        }
        bytes.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn gaps_close_and_old_gaps_are_given_up() {
        let mut r = Runs::default();
        for s in [1, 2, 5, 4] {
            r.insert(s);
        }
        assert_eq!(r, Runs { upto: 2, ahead: vec![(4, 5)] });
        r.insert(3);
        assert_eq!(r, Runs { upto: 5, ahead: vec![] });
        for s in (10..100).step_by(2) {
            r.insert(s);
        }
        assert_eq!(r.ahead.len(), MAX_RUNS);
        assert!(r.contains(11), "below a gap that was given up");
        assert!(!r.contains(97));
    }

    proptest! {
        #[test]
        fn runs_equal_a_set_while_gaps_are_few(seqs in proptest::collection::vec(1u64..60, 0..80)) {
            let mut runs = Runs::default();
            let mut set = HashSet::new();
            for s in seqs {
                prop_assert_eq!(runs.contains(s), set.contains(&s));
                runs.insert(s);
                set.insert(s);
            }
            for s in 1..60 {
                prop_assert_eq!(runs.contains(s), set.contains(&s));
            }
        }
    }

    #[test]
    fn keys_are_scoped_and_expire() {
        let (a, b) = (AppId::new("a").unwrap(), AppId::new("b").unwrap());
        let key = |app, sender: &[u8], k, body: &[u8]| BatchKey::opaque(app, sender, k, body, 100);
        let mut s = DedupState::default();
        let first = key(&a, b"k1", Some("id"), b"x");
        s.insert(&first);
        assert_eq!(s.check(&first), Seen::Duplicate);
        assert_eq!(s.check(&key(&a, b"k1", Some("id"), b"y")), Seen::Conflict);
        assert_eq!(s.check(&key(&a, b"k2", Some("id"), b"x")), Seen::Fresh);
        assert_eq!(s.check(&key(&b, b"k1", Some("id"), b"x")), Seen::Fresh);
        assert_eq!(s.check(&key(&a, b"k1", None, b"x")), Seen::Fresh);
        assert!(s.expire(114).is_empty());
        assert_eq!(s.check(&first), Seen::Duplicate);
        assert_eq!(s.expire(115), [100]);
        assert_eq!(s.check(&first), Seen::Fresh);
    }

    #[test]
    fn a_failed_group_leaves_no_trace() {
        let app = AppId::new("a").unwrap();
        let install = InstallId::of_public_key(&[1; 32]);
        let mut s = DedupState::default();
        s.insert(&BatchKey::seq(&app, &install, 1));
        let undo = vec![
            s.insert(&BatchKey::seq(&app, &install, 2)),
            s.insert(&BatchKey::seq(&app, &install, 3)),
            s.insert(&BatchKey::opaque(&app, b"k", None, b"body", 1)),
        ];
        s.revert(undo);
        assert_eq!(s.check(&BatchKey::seq(&app, &install, 1)), Seen::Duplicate);
        assert_eq!(s.check(&BatchKey::seq(&app, &install, 2)), Seen::Fresh);
        assert_eq!(s.check(&BatchKey::opaque(&app, b"k", None, b"body", 1)), Seen::Fresh);
        assert!(s.unsaved().is_empty());
    }

    #[test]
    fn installs_round_trip_and_refuse_cut_bytes() {
        let app = AppId::new("a").unwrap();
        let mut s = DedupState::default();
        for i in 0..20u8 {
            for seq in [1, 2, 9] {
                s.insert(&BatchKey::seq(&app, &InstallId::of_public_key(&[i; 32]), seq));
            }
        }
        let mut bytes = Vec::new();
        s.encode_installs(&mut bytes);
        let mut again = DedupState::default();
        again.decode_installs(&bytes).unwrap();
        assert_eq!(again.installs, s.installs);
        assert!(DedupState::default().decode_installs(&bytes[..bytes.len() - 1]).is_none());
    }

    #[test]
    fn entries_round_trip() {
        let app = AppId::new("a").unwrap();
        for key in [
            BatchKey::seq(&app, &InstallId::of_public_key(&[1; 32]), u64::MAX),
            BatchKey::opaque(&app, b"k", Some("x"), b"b", -3),
        ] {
            let mut bytes = Vec::new();
            key.encode(&mut bytes);
            assert_eq!(bytes.len(), BatchKey::ENCODED);
            assert_eq!(BatchKey::decode(&bytes), Some(key));
        }
    }
}
