//! What the planner decides on, from the lake: the frozen baseline, the last report, and the inventory of arms.

use crate::server::Server;
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_experiment::gate::{BaselineV1, GateReportV1, GateSpecV1};
use flywheel_experiment::planner::{ArmInventory, Inventory, PlanV1, RingDevice, RolloutPolicyV1};
use flywheel_lake::read::{HeldBundle, InventoryRow};
use flywheel_store::apps::AppSettings;
use flywheel_store::rollouts::VerdictRow;
use flywheel_types::assign::{Arm, bucket};
use flywheel_types::rows::DeviceHistory;
use flywheel_types::{AppId, Digest, Error, InstallId, RolloutId, RolloutState, TrustClass};
use std::collections::HashMap;

/// Days of the incumbent's telemetry that the latency thresholds are frozen from.
const BASELINE_DAYS: i64 = 7;
/// A share is given in parts per million.
const PPM: u64 = 1_000_000;

/// Freezes the gate spec from what the incumbent did: rejection rate, latency by device class, fleet size.
///
/// # Errors
/// Of the lake; `Invalid` when the baseline cannot make a spec.
pub async fn freeze_spec(
    server: &Server,
    app: &AppId,
    control: Digest,
    settings: &AppSettings,
    policy: &RolloutPolicyV1,
) -> Result<GateSpecV1, Error> {
    let devices =
        server.lake.inventory(app, None).await?.iter().filter(|d| d.trust != TrustClass::Anonymous).count() as u64;
    let since = server.now() - TimeDelta::days(BASELINE_DAYS);
    let first_step = policy.steps.first().map_or(0, |s| u64::from(s.treatment_ppm) + u64::from(s.control_ppm));
    let baseline = BaselineV1 {
        rejection_rate: server.lake.rejection_rate(app, &control, None).await?.unwrap_or(0.0),
        ttft_ms: server.lake.latency_samples(app, &control, since, None).await?,
        planned_devices: devices * first_step / PPM,
    };
    let mut spec = GateSpecV1::freeze(&baseline).map_err(|e| {
        Error::invalid("baseline_refused", e.to_string(), "the incumbent's telemetry cannot make a gate")
    })?;
    spec.trust.count_anonymous |= settings.count_anonymous;
    Ok(spec)
}

/// The newest gate report of a rollout.
///
/// # Errors
/// Of the database.
pub async fn last_report(server: &Server, app: &AppId, rollout: &RolloutId) -> Result<Option<GateReportV1>, Error> {
    let newest = server.store.rollout_verdict_latest(app, rollout, VerdictRow::WHOLE).await?;
    newest.map(|v| serde_json::from_value(v.numbers).map_err(Error::internal)).transpose()
}

/// The fleet as the planner needs it, read once per reconciliation.
pub struct Fleet {
    devices: Vec<InventoryRow>,
    first_seen: HashMap<String, DateTime<Utc>>,
    /// What devices reported about the candidate.
    candidate: HashMap<String, HeldBundle>,
}

/// Reads the fleet.
///
/// # Errors
/// Of the lake.
pub async fn fleet(server: &Server, app: &AppId, candidate: Digest) -> Result<Fleet, Error> {
    let mut devices = server.lake.inventory(app, None).await?;
    devices.retain(|d| d.trust != TrustClass::Anonymous);
    Ok(Fleet {
        devices,
        first_seen: server.lake.first_seen(app, None).await?,
        candidate: server.lake.bundle_devices(app, &candidate, None).await?,
    })
}

/// Counts what the planner asks about the arms, the ring, and the way back. Identities that were first seen after the
/// plan was signed count nowhere.
#[must_use]
pub fn inventory(plan: &PlanV1, histories: &[DeviceHistory], fleet: &Fleet) -> Inventory {
    let signed = plan.signed_at.unwrap_or(plan.changed_at);
    let known = |d: &&InventoryRow| fleet.first_seen.get(&d.install).is_some_and(|at| *at <= signed);
    let failed: HashMap<&str, bool> =
        histories.iter().map(|h| (h.install.as_str(), h.failures.iter().any(|at| *at >= plan.step_since))).collect();
    let (candidate, control) = (plan.candidate_bundle.to_hex(), plan.control_bundle.to_hex());
    let mut out = Inventory::default();
    for d in fleet.devices.iter().filter(known) {
        let has_failed = failed.get(d.install.as_str()).copied().unwrap_or(false);
        match arm_of(plan, &d.install) {
            Some(Arm::Treatment) => count(&mut out.treatment, d, &candidate, plan.step_since, has_failed),
            Some(Arm::Control) => count(&mut out.control, d, &control, plan.step_since, has_failed),
            None => {}
        }
    }
    out.ring = plan.ring.iter().map(|i| ring_device(i, fleet, &candidate)).collect();
    if plan.state == RolloutState::RollingBack {
        for d in fleet.devices.iter().filter(known) {
            if fleet.candidate.get(&d.install).is_some_and(|h| h.held) {
                out.to_restore += 1;
                out.restored += u64::from(d.bundle.as_deref() == Some(&control));
            }
        }
    }
    out
}

fn arm_of(plan: &PlanV1, install: &str) -> Option<Arm> {
    let install: InstallId = install.parse().ok()?;
    if plan.ring.contains(&install) {
        return None;
    }
    let b = bucket(&plan.salt, &install);
    if plan.treatment.contains(b) { Some(Arm::Treatment) } else { plan.control.contains(b).then_some(Arm::Control) }
}

fn count(arm: &mut ArmInventory, d: &InventoryRow, bundle: &str, since: DateTime<Utc>, failed: bool) {
    arm.assigned += 1;
    if d.last_seen < since {
        return;
    }
    arm.reporting += 1;
    arm.confirmed += u64::from(d.bundle.as_deref() == Some(bundle));
    arm.failed += u64::from(failed);
}

fn ring_device(install: &InstallId, fleet: &Fleet, candidate: &str) -> RingDevice {
    let text = install.to_string();
    let found = fleet.devices.iter().find(|d| d.install == text);
    RingDevice {
        install: *install,
        confirmed_at: found.filter(|d| d.bundle.as_deref() == Some(candidate)).and_then(|d| d.confirmed_at),
        failed: fleet.candidate.get(&text).is_some_and(|h| h.failed),
    }
}
