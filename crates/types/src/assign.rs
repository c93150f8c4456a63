//! Who runs what: bucketing, eligibility and the assignment document. The same code decides on the device and
//! on the server. The document is one signed file, the same bytes for every device.

use crate::id::{AppId, Digest, InstallId, RolloutId};
use crate::wire::DeviceFactsV1;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;

/// Number of buckets; ranges are in parts per million of the fleet.
pub const BUCKETS: u64 = 1_000_000;

/// Position of a device for a salt: the first 8 bytes of SHA-256(salt ‖ 0x00 ‖ install_id), big-endian, modulo
/// 1,000,000 (DESIGN.md 8). `install_id` enters as its 32 raw bytes.
#[must_use]
pub fn bucket(salt: &str, install: &InstallId) -> u32 {
    let mut h = Sha256::new();
    h.update(salt.as_bytes());
    h.update([0u8]);
    h.update(install.0.0);
    let out = h.finalize();
    let mut first = [0u8; 8];
    first.copy_from_slice(&out[..8]);
    (u64::from_be_bytes(first) % BUCKETS) as u32
}

/// Position of a device for hiding one chunk version in one canary epoch, by the same rule as [`bucket`]. `key` is the
/// app's canary key; `chunk_version` is `chunk_id@version`. A new epoch draws new devices.
#[must_use]
pub fn hide_bucket(key: &str, install: &InstallId, chunk_version: &str, epoch: u32) -> u32 {
    // Ids never hold a line feed, so the parts cannot run into each other.
    bucket(&format!("hide\n{key}\n{chunk_version}\n{epoch}"), install)
}

/// Whether this device is among the `share_ppm` of devices on which the canary differs: for a chunk being frozen they
/// hide it, for a new version being tried they show it.
#[must_use]
pub fn in_canary(key: &str, install: &InstallId, chunk_version: &str, epoch: u32, share_ppm: u32) -> bool {
    hide_bucket(key, install, chunk_version, epoch) < share_ppm
}

/// Arm of an A/B comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    Control,
    Treatment,
}

impl Arm {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Treatment => "treatment",
        }
    }
}

/// Half-open range of buckets, ppm. Within a rollout a range only ever widens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PpmRange {
    pub from: u32,
    pub to: u32,
}

impl PpmRange {
    #[must_use]
    pub fn contains(self, bucket: u32) -> bool {
        self.from <= bucket && bucket < self.to
    }
    /// Size in ppm.
    #[must_use]
    pub fn width(self) -> u32 {
        self.to.saturating_sub(self.from)
    }
    /// Whether `next` holds every bucket of `self`.
    #[must_use]
    pub fn widens_to(self, next: Self) -> bool {
        self.width() == 0 || (next.from <= self.from && self.to <= next.to)
    }
}

/// One condition on device facts; all conditions of a rollout must hold. A missing fact never matches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Predicate {
    ClassIn { values: Vec<String> },
    SocIn { values: Vec<String> },
    LocaleIn { values: Vec<String> },
    OsIn { values: Vec<String> },
    MinRamBytes { value: u64 },
}

impl Predicate {
    #[must_use]
    pub fn matches(&self, facts: &DeviceFactsV1) -> bool {
        let among =
            |fact: &Option<String>, values: &[String]| fact.as_ref().is_some_and(|f| values.iter().any(|v| v == f));
        match self {
            Self::ClassIn { values } => among(&facts.class, values),
            Self::SocIn { values } => among(&facts.soc, values),
            Self::LocaleIn { values } => among(&facts.locale, values),
            Self::OsIn { values } => among(&facts.os, values),
            Self::MinRamBytes { value } => facts.ram_bytes.is_some_and(|r| r >= *value),
        }
    }
}

/// One running rollout as devices see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutAssignmentV1 {
    pub rollout_id: RolloutId,
    /// Grows whenever ranges, targeting or metric version change; devices report it.
    pub phase: u32,
    pub salt: String,
    #[serde(default)]
    pub eligible: Vec<Predicate>,
    pub treatment: PpmRange,
    pub control: PpmRange,
    /// Manifest digest of the new bundle.
    pub treatment_bundle: Digest,
    /// Manifest digest of the bundle to compare with and to fall back to.
    pub control_bundle: Digest,
    /// Named devices that run the treatment before any statistics.
    #[serde(default)]
    pub ring: Vec<InstallId>,
    /// A bundle that failed locally is tried again only when this is set.
    #[serde(default)]
    pub retry_failed: bool,
    /// Halted: devices that joined an arm before keep it, nobody new joins (see [`AssignmentV1::decide_joined`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub intake_closed: bool,
}

/// The assignment document `assignment.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AssignmentV1 {
    /// Format version, 1.
    pub v: u8,
    pub app: AppId,
    /// Rises with every publication; a device ignores a lower one.
    pub serial: u64,
    pub issued_at: DateTime<Utc>,
    /// Seconds between polls, with jitter in percent.
    pub poll_s: u32,
    pub jitter_pct: u8,
    /// Bundle for everybody without an arm; `None` is the "model off" arm.
    pub default_bundle: Option<Digest>,
    #[serde(default)]
    pub rollouts: Vec<RolloutAssignmentV1>,
    /// Named devices pinned to a bundle (support, testers).
    #[serde(default)]
    pub pins: BTreeMap<InstallId, Digest>,
}

/// What a device must run, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// `None`: run no model.
    pub bundle: Option<Digest>,
    /// Set when the device is in a rollout's statistics.
    pub arm: Option<(RolloutId, u32, Arm)>,
    pub retry_failed: bool,
}

impl AssignmentV1 {
    /// Decides for one device that has joined every rollout it falls into; see [`Self::decide_joined`].
    #[must_use]
    pub fn decide(&self, install: &InstallId, facts: &DeviceFactsV1) -> Decision {
        self.decide_joined(install, facts, |_| true)
    }

    /// Decides for one device. Order: pin, ring, arm of the first rollout that takes the device, default.
    /// Ring devices and pinned devices are in no arm. `joined` tells whether the device was in an arm or the ring
    /// of a rollout before; a rollout with `intake_closed` takes only such devices.
    #[must_use]
    pub fn decide_joined(
        &self,
        install: &InstallId,
        facts: &DeviceFactsV1,
        joined: impl Fn(&RolloutId) -> bool,
    ) -> Decision {
        let plain = |bundle| Decision { bundle, arm: None, retry_failed: false };
        if let Some(pin) = self.pins.get(install) {
            return plain(Some(*pin));
        }
        for r in &self.rollouts {
            if r.intake_closed && !joined(&r.rollout_id) {
                continue;
            }
            if r.ring.contains(install) {
                return Decision { retry_failed: r.retry_failed, ..plain(Some(r.treatment_bundle)) };
            }
            if !r.eligible.iter().all(|p| p.matches(facts)) {
                continue;
            }
            let b = bucket(&r.salt, install);
            let (arm, bundle) = if r.treatment.contains(b) {
                (Arm::Treatment, r.treatment_bundle)
            } else if r.control.contains(b) {
                (Arm::Control, r.control_bundle)
            } else {
                continue;
            };
            return Decision {
                bundle: Some(bundle),
                arm: Some((r.rollout_id.clone(), r.phase, arm)),
                retry_failed: r.retry_failed,
            };
        }
        plain(self.default_bundle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn install(n: u8) -> InstallId {
        InstallId::of_public_key(&[n; 32])
    }

    #[test]
    fn bucket_matches_an_independent_computation() {
        // python: int.from_bytes(sha256(b"salt\0"+sha256(bytes([1]*32)).digest()).digest()[:8],"big")%1000000
        assert_eq!(bucket("salt", &install(1)), 43_575);
        assert_eq!(bucket("", &install(2)), 719_203);
    }

    #[test]
    fn canary_devices_change_with_chunk_and_epoch() {
        // python, as above, over "hide\nkey\nc@1\n3"
        assert_eq!(hide_bucket("key", &install(1), "c@1", 3), 115_270);
        let devices = |chunk: &str, epoch| -> Vec<u8> {
            (0..=255).filter(|n| in_canary("key", &install(*n), chunk, epoch, 100_000)).collect()
        };
        let first = devices("c@1", 1);
        assert!((10..45).contains(&first.len()), "about a tenth: {}", first.len());
        assert_ne!(first, devices("c@1", 2));
        assert_ne!(first, devices("c@2", 1));
    }

    fn doc(t: PpmRange, c: PpmRange) -> AssignmentV1 {
        AssignmentV1 {
            v: 1,
            app: AppId::new("a").unwrap(),
            serial: 1,
            issued_at: DateTime::UNIX_EPOCH,
            poll_s: 3600,
            jitter_pct: 10,
            default_bundle: Some(Digest::of(b"old")),
            rollouts: vec![RolloutAssignmentV1 {
                rollout_id: RolloutId::new("r").unwrap(),
                phase: 1,
                salt: "r".into(),
                eligible: vec![],
                treatment: t,
                control: c,
                treatment_bundle: Digest::of(b"new"),
                control_bundle: Digest::of(b"old"),
                ring: vec![install(9)],
                retry_failed: false,
                intake_closed: false,
            }],
            pins: BTreeMap::new(),
        }
    }

    #[test]
    fn ramp_only_adds_devices_to_the_treatment() {
        let small = doc(PpmRange { from: 0, to: 100_000 }, PpmRange { from: 500_000, to: 600_000 });
        let big = doc(PpmRange { from: 0, to: 500_000 }, PpmRange { from: 500_000, to: 1_000_000 });
        let facts = DeviceFactsV1::default();
        let mut seen = (0, 0);
        for n in 0..=255u8 {
            let (a, b) = (small.decide(&install(n), &facts), big.decide(&install(n), &facts));
            if let Some((_, _, arm)) = a.arm {
                assert_eq!(b.arm.as_ref().map(|x| x.2), Some(arm), "no device changes its arm");
                if arm == Arm::Treatment { seen.0 += 1 } else { seen.1 += 1 }
            }
        }
        assert!(seen.0 > 5 && seen.1 > 5, "{seen:?}");
    }

    #[test]
    fn ring_and_pin_are_in_no_arm() {
        let mut d = doc(PpmRange { from: 0, to: 1_000_000 }, PpmRange { from: 0, to: 0 });
        let facts = DeviceFactsV1::default();
        assert_eq!(d.decide(&install(9), &facts).arm, None);
        assert_eq!(d.decide(&install(9), &facts).bundle, Some(Digest::of(b"new")));
        d.pins.insert(install(3), Digest::of(b"pin"));
        assert_eq!(d.decide(&install(3), &facts).bundle, Some(Digest::of(b"pin")));
    }

    #[test]
    fn a_halted_rollout_takes_nobody_new() {
        let mut d = doc(PpmRange { from: 0, to: 1_000_000 }, PpmRange { from: 0, to: 0 });
        d.rollouts[0].intake_closed = true;
        let facts = DeviceFactsV1::default();
        assert_eq!(d.decide_joined(&install(1), &facts, |_| false).bundle, d.default_bundle);
        assert_eq!(d.decide_joined(&install(9), &facts, |_| false).bundle, d.default_bundle);
        let joined = d.decide_joined(&install(1), &facts, |id| id.as_str() == "r");
        assert_eq!(joined.bundle, Some(Digest::of(b"new")));
    }

    #[test]
    fn a_missing_fact_never_matches() {
        let p = Predicate::MinRamBytes { value: 1 };
        assert!(!p.matches(&DeviceFactsV1::default()));
    }
}
