//! The device state machine: two slots (active, previous), the load window, local failure verdicts and the outbox of
//! reports. Pure: every transition is a function of the state, the facts and the time; `device` stores the result in
//! one step before anything else happens.

use crate::config::FailurePolicy;
use chrono::{DateTime, Duration, Utc};
use flywheel_bundle::manifest::HealthV1;
use flywheel_bundle::verify::{EpochCheck, RunPath, check_epoch_floor};
use flywheel_types::assign::{Arm, Decision};
use flywheel_types::wire::{AssignedArmV1, DeviceEventKind, DeviceEventV1};
use flywheel_types::{Digest, RolloutId};
use serde::{Deserialize, Serialize};

/// Exposures and joined rollouts remembered.
const MAX_REMEMBERED: usize = 64;

/// A bundle on the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Slot {
    pub(crate) bundle: Digest,
    /// Order of first installation on this device: tells "back" from "forward".
    pub(crate) install_no: u64,
    pub(crate) security_epoch: u64,
    pub(crate) max_load_deaths: u32,
    pub(crate) confirm_generations: u32,
    pub(crate) confirm_after_s: u64,
    /// Confirmed since it last became active.
    pub(crate) confirmed_at: Option<DateTime<Utc>>,
    pub(crate) generations: u32,
    /// The bake period ended well once; the slot is a good place to fall back to.
    pub(crate) baked: bool,
    /// It was the active bundle when the security floor rose above it.
    #[serde(default)]
    pub(crate) active_when_floor_raised: bool,
}

impl Slot {
    pub(crate) fn new(bundle: Digest, install_no: u64, security_epoch: u64, health: &HealthV1) -> Self {
        Self {
            bundle,
            install_no,
            security_epoch,
            max_load_deaths: health.max_load_deaths.max(1),
            confirm_generations: health.confirm_generations,
            confirm_after_s: health.confirm_after_s,
            confirmed_at: None,
            generations: 0,
            baked: false,
            active_when_floor_raised: false,
        }
    }
}

/// Local knowledge that a bundle does not work here, within one rollout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailureVerdict {
    pub(crate) bundle: Digest,
    pub(crate) rollout: Option<RolloutId>,
    pub(crate) at: DateTime<Utc>,
    /// Installs made after the verdict.
    pub(crate) retries: u32,
}

/// A report that must arrive exactly once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) no: u64,
    pub(crate) event: DeviceEventV1,
}

/// What has to happen after a decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// The device runs what it should.
    Nothing,
    /// The bundle failed here before; a retry is possible from this time on, if ever.
    Blocked {
        retry_at: Option<DateTime<Utc>>,
    },
    /// The bundle lies in the other slot: no download.
    SwitchBack,
    Install(Digest),
}

/// Stored state, version 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) v: u8,
    pub(crate) active: Option<Slot>,
    pub(crate) previous: Option<Slot>,
    /// The assignment says: no model.
    pub(crate) off: bool,
    /// Set while a model is being loaded: the bundle, and since when.
    pub(crate) loading: Option<(Digest, DateTime<Utc>)>,
    pub(crate) failures_in_a_row: u32,
    pub(crate) verdicts: Vec<FailureVerdict>,
    pub(crate) arm: Option<AssignedArmV1>,
    /// Reported once each.
    pub(crate) exposures: Vec<(RolloutId, Arm)>,
    /// Rollouts this device was in, in an arm or in the ring: a halted one keeps it.
    #[serde(default)]
    pub(crate) joined: Vec<RolloutId>,
    pub(crate) next_install_no: u64,
    pub(crate) next_report: u64,
    pub(crate) reports: Vec<Report>,
    pub(crate) next_poll_at: DateTime<Utc>,
    /// Highest signed security floor seen; bundles below it are not run (one exception: `fall_back`).
    pub(crate) epoch_floor: u64,
    /// Last refusal reported, so that each cause is reported once, not at every poll.
    pub(crate) last_refusal: Option<String>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            v: 1,
            active: None,
            previous: None,
            off: false,
            loading: None,
            failures_in_a_row: 0,
            verdicts: Vec::new(),
            arm: None,
            exposures: Vec::new(),
            joined: Vec::new(),
            next_install_no: 1,
            next_report: 1,
            reports: Vec::new(),
            next_poll_at: DateTime::UNIX_EPOCH,
            epoch_floor: 0,
            last_refusal: None,
        }
    }
}

impl State {
    /// Puts a report into the outbox.
    pub(crate) fn report(
        &mut self,
        now: DateTime<Utc>,
        event: DeviceEventKind,
        bundle: Option<Digest>,
        reason: Option<String>,
    ) {
        self.report_timed(now, event, bundle, reason, None);
    }

    fn report_timed(
        &mut self,
        now: DateTime<Utc>,
        event: DeviceEventKind,
        bundle: Option<Digest>,
        reason: Option<String>,
        load_ms: Option<f64>,
    ) {
        let assignment = self.arm.clone();
        let event = DeviceEventV1 { at: now, event, bundle, assignment, load_ms, reason };
        self.reports.push(Report { no: self.next_report, event });
        // the state comes from a file: nothing in it may overflow
        self.next_report = self.next_report.saturating_add(1);
    }

    /// Takes in an assignment decision made by `rollout` (if any): remembers the arm, reports its first sight.
    pub(crate) fn assigned(&mut self, decision: &Decision, rollout: Option<&RolloutId>, now: DateTime<Utc>) {
        if let Some(rollout) = rollout {
            remember(&mut self.joined, rollout.clone());
        }
        self.off = decision.bundle.is_none();
        self.arm = decision.arm.as_ref().map(|(rollout_id, phase, arm)| AssignedArmV1 {
            rollout_id: rollout_id.clone(),
            phase: *phase,
            arm: *arm,
        });
        let Some((rollout, _, arm)) = &decision.arm else {
            return;
        };
        if remember(&mut self.exposures, (rollout.clone(), *arm)) {
            self.report(now, DeviceEventKind::Exposed, decision.bundle, None);
        }
    }

    fn rollout(decision: &Decision) -> Option<&RolloutId> {
        decision.arm.as_ref().map(|(r, _, _)| r)
    }

    /// What has to happen so that the device runs what `decision` says.
    pub(crate) fn step(&self, decision: &Decision, now: DateTime<Utc>, policy: &FailurePolicy) -> Step {
        let Some(bundle) = decision.bundle else {
            return Step::Nothing;
        };
        if self.active.as_ref().is_some_and(|s| s.bundle == bundle) {
            return Step::Nothing;
        }
        let verdict = self
            .verdicts
            .iter()
            .find(|v| v.bundle == bundle && v.rollout.as_ref() == Self::rollout(decision))
            .filter(|v| now < later(v.at, policy.expire_s));
        if let Some(v) = verdict {
            let may_ever = decision.retry_failed && v.retries < policy.retry_budget;
            let retry_at = later(v.at, policy.retry_after_s);
            if !may_ever || now < retry_at {
                return Step::Blocked { retry_at: may_ever.then_some(retry_at) };
            }
        }
        match &self.previous {
            Some(p) if p.bundle == bundle => Step::SwitchBack,
            _ => Step::Install(bundle),
        }
    }

    fn count_retry(&mut self, bundle: &Digest, decision: &Decision) {
        let rollout = Self::rollout(decision).cloned();
        for v in self.verdicts.iter_mut().filter(|v| v.bundle == *bundle && v.rollout == rollout) {
            v.retries = v.retries.saturating_add(1);
        }
    }

    /// Makes the previous slot active again. Following the server back to an older installation is a rollback.
    pub(crate) fn switch_back(&mut self, decision: &Decision, now: DateTime<Utc>) {
        let Some(target) = self.previous.take() else {
            return;
        };
        let left = self.active.take();
        self.count_retry(&target.bundle, decision);
        let older = left.as_ref().is_some_and(|l| target.install_no < l.install_no);
        let event = if older { DeviceEventKind::RolledBack } else { DeviceEventKind::Installed };
        let reason = left.as_ref().map(|l| format!("from={}", l.bundle));
        self.report(now, event, Some(target.bundle), reason);
        self.previous = left;
        self.activate(target);
    }

    /// A verified bundle is complete on the device: it becomes active. The best place to fall back to is kept: the
    /// left bundle when it proved itself or when it is the rollout's control, else what was kept before.
    pub(crate) fn installed(&mut self, slot: Slot, decision: &Decision, keep: Option<Digest>, now: DateTime<Utc>) {
        self.count_retry(&slot.bundle, decision);
        self.report(now, DeviceEventKind::Downloaded, Some(slot.bundle), None);
        self.report(now, DeviceEventKind::Installed, Some(slot.bundle), None);
        self.next_install_no = self.next_install_no.max(slot.install_no.saturating_add(1));
        if let Some(left) = self.active.take() {
            let previous_is_target = self.previous.as_ref().is_some_and(|p| Some(p.bundle) == keep);
            let good = left.baked || Some(left.bundle) == keep || left.confirmed_at.is_some() && !previous_is_target;
            if good || self.previous.is_none() {
                self.previous = Some(left);
            }
        }
        self.activate(slot);
    }

    fn activate(&mut self, slot: Slot) {
        self.active = Some(Slot { confirmed_at: None, generations: 0, ..slot });
        self.loading = None;
        self.failures_in_a_row = 0;
    }

    /// The app is about to load the active bundle.
    pub(crate) fn load_begin(&mut self, now: DateTime<Utc>) {
        self.loading = self.active.as_ref().map(|s| (s.bundle, now));
    }

    /// At start: a load mark means that the process died inside the load window. Deaths outside leave no mark and
    /// never count.
    pub(crate) fn note_death_in_load(&mut self, now: DateTime<Utc>) -> bool {
        if self.loading.is_none() {
            return false;
        }
        self.load_failed("died_in_load_window".into(), DeviceEventKind::LoadFailed, now);
        true
    }

    /// The load or the probe failed, or the process died in it. Falls back after the allowed number in a row.
    pub(crate) fn load_failed(&mut self, reason: String, event: DeviceEventKind, now: DateTime<Utc>) {
        self.loading = None;
        let Some(active) = &self.active else { return };
        let (bundle, limit) = (active.bundle, active.max_load_deaths);
        self.report(now, event, Some(bundle), Some(reason));
        self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
        if self.failures_in_a_row >= limit {
            self.fall_back(now);
        }
    }

    /// Leaves the active bundle for the previous one, or for "no model", and remembers not to take it again.
    fn fall_back(&mut self, now: DateTime<Utc>) {
        let Some(failed) = self.active.take() else {
            return;
        };
        let rollout = self.arm.as_ref().map(|a| a.rollout_id.clone());
        match self.verdicts.iter_mut().find(|v| v.bundle == failed.bundle && v.rollout == rollout) {
            Some(v) => v.at = now,
            None => self.verdicts.push(FailureVerdict { bundle: failed.bundle, rollout, at: now, retries: 0 }),
        }
        let (target, to) = self.fall_back_target();
        self.report(now, DeviceEventKind::FellBack, Some(failed.bundle), Some(to));
        self.failures_in_a_row = 0;
        if let Some(slot) = target {
            self.activate(slot);
        }
    }

    /// The previous slot, unless a raised security floor forbids it; and how the report names it.
    fn fall_back_target(&mut self) -> (Option<Slot>, String) {
        let Some(previous) = self.previous.take() else {
            return (None, "to=none".into());
        };
        let path = RunPath::LocalFallback { active_when_floor_raised: previous.active_when_floor_raised };
        match check_epoch_floor(previous.security_epoch, self.epoch_floor, path) {
            Ok(EpochCheck::AtOrAboveFloor) => {
                let to = format!("to={}", previous.bundle);
                (Some(previous), to)
            }
            Ok(EpochCheck::BelowFloorReport) => {
                let to = format!("to={};below_floor", previous.bundle);
                (Some(previous), to)
            }
            Err(_) => (None, "to=none;below_floor".into()),
        }
    }

    /// Loaded and probed. Confirms once per activation.
    pub(crate) fn load_succeeded(&mut self, load_ms: f64, now: DateTime<Utc>) {
        self.loading = None;
        self.failures_in_a_row = 0;
        let Some(active) = &mut self.active else {
            return;
        };
        let bundle = active.bundle;
        if active.confirmed_at.is_some() {
            return;
        }
        active.confirmed_at = Some(now);
        self.report_timed(now, DeviceEventKind::Confirmed, Some(bundle), None, Some(load_ms));
    }

    /// One answer was generated. True when that ended the bake period (and the state must be stored). A bundle that
    /// baked has disproved its local failure verdicts.
    pub(crate) fn generated(&mut self, now: DateTime<Utc>) -> bool {
        let Some(active) = &mut self.active else {
            return false;
        };
        let (Some(confirmed), false) = (active.confirmed_at, active.baked) else {
            return false;
        };
        active.generations = active.generations.saturating_add(1);
        let long_enough = now >= later(confirmed, active.confirm_after_s);
        if active.generations < active.confirm_generations && !long_enough {
            return false;
        }
        active.baked = true;
        let bundle = active.bundle;
        self.verdicts.retain(|v| v.bundle != bundle);
        true
    }

    /// The signed security floor rose: the bundle in use may stay, and may be fallen back to, although it lies below.
    pub(crate) fn floor_raised(&mut self, floor: u64) {
        if floor <= self.epoch_floor {
            return;
        }
        self.epoch_floor = floor;
        if let Some(active) = &mut self.active
            && active.security_epoch < floor
        {
            active.active_when_floor_raised = true;
        }
    }

    /// Reports a refusal, once per cause.
    pub(crate) fn refused(&mut self, code: &str, bundle: Option<Digest>, now: DateTime<Utc>) {
        let cause = format!("{code} {}", bundle.map_or(String::new(), Digest::to_hex));
        if self.last_refusal.as_ref() == Some(&cause) {
            return;
        }
        self.last_refusal = Some(cause);
        self.report(now, DeviceEventKind::Refused, bundle, Some(code.to_owned()));
    }
}

/// Adds to a short list without repetition; true when it is new. The oldest entry makes room.
fn remember<T: PartialEq>(list: &mut Vec<T>, item: T) -> bool {
    if list.contains(&item) {
        return false;
    }
    if list.len() >= MAX_REMEMBERED {
        list.remove(0);
    }
    list.push(item);
    true
}

/// `s` seconds after `t`, or the end of time.
fn later(t: DateTime<Utc>, s: u64) -> DateTime<Utc> {
    let delta = i64::try_from(s).ok().and_then(Duration::try_seconds);
    delta.and_then(|d| t.checked_add_signed(d)).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

#[cfg(test)]
mod tests;
