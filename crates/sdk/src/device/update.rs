//! Polls, decides and follows the assignment.

use super::Device;
use crate::env::Network;
use crate::error::SdkError;
use crate::policy::Wait;
use crate::slots::Step;
use chrono::{DateTime, Duration, Utc};
use flywheel_bundle::VerifiedState;
use flywheel_types::assign::{AssignmentV1, Decision, RolloutAssignmentV1};
use flywheel_types::{Digest, InstallId};
use rand::Rng as _;

/// Bounds on the poll interval a server may ask for, seconds.
const POLL_MIN_S: u32 = 60;
const POLL_MAX_S: u32 = 7 * 86_400;

/// What one call of [`Device::update`] did. The installed bundle keeps running in every case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpdateOutcome {
    /// The device runs what it should.
    Current,
    /// It should run something else, and waits for better conditions; what was downloaded is kept.
    Waiting(Wait),
    /// The assigned bundle failed here before.
    Blocked { bundle: Digest, retry_at: Option<DateTime<Utc>> },
    /// The other slot became active: a rollback, or forward again. No download. Load it now.
    Switched { bundle: Digest },
    /// A new bundle is active. Load it now.
    Installed { bundle: Digest },
    /// "No model" was assigned.
    Off,
}

impl Device {
    /// Polls when due (`force`: now), then follows the assignment: switch, download, install. Safe to drop at any
    /// point and to call again: a download goes on where it stopped.
    ///
    /// # Errors
    /// Network errors (back-off is kept inside), [`SdkError::Expired`], [`SdkError::Refused`] (reported to the server
    /// once per cause), storage errors.
    pub async fn update(&mut self, force: bool) -> Result<UpdateOutcome, SdkError> {
        let now = self.now();
        if force || now >= self.state.next_poll_at {
            if self.env.host.conditions().network == Network::Offline {
                return Ok(UpdateOutcome::Waiting(Wait::Network));
            }
            if let Some(until) = self.polls.wait_until(now).filter(|_| !force) {
                return Ok(UpdateOutcome::Waiting(Wait::Until(until)));
            }
            self.poll(now).await?;
        }
        let Some(verified) = self.metadata.state() else {
            return Ok(UpdateOutcome::Current);
        };
        self.follow(&verified, now, force).await
    }

    async fn poll(&mut self, now: DateTime<Utc>) -> Result<(), SdkError> {
        match self.metadata.refresh(self.env.transport.as_ref(), now).await {
            Ok(_) => {
                self.polls.succeeded();
                let due = self.next_poll(now);
                // In memory only: after a restart one poll too many is cheaper than a write at every poll.
                self.state.next_poll_at = due;
                Ok(())
            }
            Err(e) => {
                let asked = match &e {
                    SdkError::Status { retry_after_s, .. } => *retry_after_s,
                    _ => None,
                };
                self.polls.failed(now, asked, &mut *self.env.rng);
                if let SdkError::Refused { code, .. } = &e
                    && *code != "missing"
                {
                    self.transition(|s| s.refused(code, None, now))?;
                }
                Err(e)
            }
        }
    }

    fn next_poll(&mut self, now: DateTime<Utc>) -> DateTime<Utc> {
        let (poll_s, jitter_pct) =
            self.metadata.state().map_or((3600, 10), |s| (s.assignment.poll_s, s.assignment.jitter_pct));
        let base_ms = i64::from(poll_s.clamp(POLL_MIN_S, POLL_MAX_S)) * 1000;
        let spread_ms = base_ms * i64::from(jitter_pct.min(100)) / 100;
        now + Duration::milliseconds(base_ms + self.env.rng.random_range(-spread_ms..=spread_ms))
    }

    async fn follow(
        &mut self,
        verified: &VerifiedState,
        now: DateTime<Utc>,
        force: bool,
    ) -> Result<UpdateOutcome, SdkError> {
        let facts = self.env.host.facts();
        let (install, assignment) = (self.identity.install_id(), &verified.assignment);
        let decision = assignment.decide_joined(&install, &facts, |id| self.state.joined.contains(id));
        let rollout = rollout_of(assignment, &decision, &install);
        let floor = self.metadata.epoch_floor();
        self.transition(|s| {
            s.floor_raised(floor);
            s.assigned(&decision, rollout.map(|r| &r.rollout_id), now);
        })?;
        let Some(bundle) = decision.bundle else {
            return Ok(UpdateOutcome::Off);
        };
        let pause = self.installs.wait_until(now).filter(|_| !force);
        let outcome = match self.state.step(&decision, now, &self.config.failure) {
            Step::Nothing if self.is_complete() => return Ok(UpdateOutcome::Current),
            Step::Nothing | Step::Install(_) if pause.is_some() => {
                return Ok(pause.map_or(UpdateOutcome::Current, |until| UpdateOutcome::Waiting(Wait::Until(until))));
            }
            Step::Nothing => self.repair(bundle, verified).await,
            Step::Blocked { retry_at } => return Ok(UpdateOutcome::Blocked { bundle, retry_at }),
            Step::SwitchBack => self.switch(bundle, &decision, now),
            Step::Install(bundle) => {
                let keep = rollout.map(|r| r.control_bundle);
                self.install(bundle, &decision, keep, verified).await
            }
        };
        match &outcome {
            Ok(_) => self.installs.succeeded(),
            Err(e) => {
                let asked = match e {
                    SdkError::Status { retry_after_s, .. } => *retry_after_s,
                    _ => None,
                };
                self.installs.failed(now, asked, &mut *self.env.rng);
            }
        }
        if let Err(SdkError::Refused { code, .. }) = &outcome {
            let code = *code;
            self.transition(|s| s.refused(code, Some(bundle), now))?;
        }
        outcome
    }

    fn switch(&mut self, bundle: Digest, decision: &Decision, now: DateTime<Utc>) -> Result<UpdateOutcome, SdkError> {
        self.metadata.installable(&bundle, now)?;
        self.transition(|s| s.switch_back(decision, now))?;
        Ok(UpdateOutcome::Switched { bundle })
    }
}

/// The rollout behind a decision. Ring devices are in no arm, so theirs is found by name; a pin is nobody's rollout.
fn rollout_of<'a>(
    assignment: &'a AssignmentV1,
    decision: &Decision,
    install: &InstallId,
) -> Option<&'a RolloutAssignmentV1> {
    if let Some((id, _, _)) = &decision.arm {
        return assignment.rollouts.iter().find(|r| r.rollout_id == *id);
    }
    let ring = |r: &&RolloutAssignmentV1| r.ring.contains(install) && Some(r.treatment_bundle) == decision.bundle;
    if assignment.pins.contains_key(install) { None } else { assignment.rollouts.iter().find(ring) }
}
