//! The window engine: everything a device did becomes one immutable record when its fixed window closes.
//!
//! Rules (fixed before the start, so that looking often cannot bias anything):
//! - **Intention to treat**: a device stays in the arm of its first exposure, also after a fall-back.
//! - The window ends `window.hours` after the exposure or with the receipt of response number
//!   `window.max_responses`, whichever is first; `grace_hours` later the device **closes**. Everything received
//!   before the close counts, up to the response limit; nothing received later does.
//! - Closed records come in order of close time (ties by install id): the order in which evidence arrived.
//! - `now` is the ingest watermark: a device closes only when every row up to its close time is known.
//! - Rows that do not count are counted by reason.

use crate::error::ExperimentError;
use crate::gate::GateSpecV1;
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_types::TrustClass;
use flywheel_types::assign::{Arm, BUCKETS};
use flywheel_types::rows::DeviceHistory;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// A period with constant ranges, targeting and metric version. Phases are stratified, never pooled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseV1 {
    /// Rises by at least one from phase to phase.
    pub number: u32,
    /// Width of the treatment's range, ppm.
    pub treatment_ppm: u32,
    /// Width of the control's range outside the treatment's, ppm; 0 ends the comparison.
    pub control_ppm: u32,
    pub started_at: DateTime<Utc>,
}

impl PhaseV1 {
    /// Width of an arm, ppm.
    #[must_use]
    pub fn width(&self, arm: Arm) -> u32 {
        match arm {
            Arm::Control => self.control_ppm,
            Arm::Treatment => self.treatment_ppm,
        }
    }
    /// Whether both arms get devices.
    #[must_use]
    pub fn compares(&self) -> bool {
        self.treatment_ppm > 0 && self.control_ppm > 0
    }
    /// The treatment's share of the devices in arms, by design.
    #[must_use]
    pub fn treatment_share(&self) -> f64 {
        f64::from(self.treatment_ppm) / f64::from(self.treatment_ppm + self.control_ppm).max(1.0)
    }
}

/// Checks that phases are numbered upwards, start in order, and fit the fleet.
///
/// # Errors
/// [`ExperimentError::Phases`] saying which phase is wrong.
pub fn check_phases(phases: &[PhaseV1]) -> Result<(), ExperimentError> {
    if phases.is_empty() {
        return Err(ExperimentError::Phases("the list is empty".into()));
    }
    for p in phases {
        if u64::from(p.treatment_ppm) + u64::from(p.control_ppm) > BUCKETS {
            return Err(ExperimentError::Phases(format!("phase {} is wider than 1,000,000 ppm", p.number)));
        }
    }
    for w in phases.windows(2) {
        if w[1].number <= w[0].number || w[1].started_at < w[0].started_at {
            return Err(ExperimentError::Phases(format!(
                "phase {} does not follow phase {}",
                w[1].number, w[0].number
            )));
        }
    }
    Ok(())
}

/// What one device contributes. Immutable once `closed_at` has passed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRecord {
    pub install: String,
    pub arm: Arm,
    pub phase: u32,
    pub device_class: String,
    pub locale: String,
    pub exposed_at: DateTime<Utc>,
    /// When the device closes or closed.
    pub closed_at: DateTime<Utc>,
    /// Responses that count, at most the window's limit.
    pub responses: u32,
    /// Of these: rejected, edited, corrected or reported by a person.
    pub rejections: u32,
    /// Of these: refused by the model (shown, not gated).
    pub refusals: u32,
    /// Per latency gate of the spec, in its order.
    pub latency: Vec<LatencyCount>,
    /// First load failure, crash or memory kill inside the window.
    pub first_failure_at: Option<DateTime<Utc>>,
    /// Any sign of life after the exposure: response, confirmation or failure.
    pub reporting: bool,
    /// The device reported both arms.
    pub crossed_over: bool,
}

/// Timed responses of one device for one latency gate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyCount {
    /// Responses with a usable time and a threshold for their device class.
    pub timed: u32,
    /// Of these: slower than the arm's threshold.
    pub slow: u32,
}

/// Why a device or row does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exclusion {
    /// No install key signed the rows.
    Anonymous,
    /// The identity was first seen after the rollout was signed.
    NewIdentity,
    /// A phase that the plan does not have, or an arm without traffic in its phase. Counted by the leak gate.
    Leaked,
    /// The comparison was over (the control was given the treatment) before the device closed.
    AfterComparison,
    /// Exposed after the watermark.
    NotYet,
    /// A second history of the same device.
    Duplicate,
    /// Row: time to first token is not a finite, non-negative number.
    BadLatency,
    /// Row: no frozen latency threshold for the device class.
    NoThreshold,
}

impl Exclusion {
    /// The word used in reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Anonymous => "anonymous",
            Self::NewIdentity => "new_identity",
            Self::Leaked => "leaked",
            Self::AfterComparison => "after_comparison",
            Self::NotYet => "not_yet",
            Self::Duplicate => "duplicate",
            Self::BadLatency => "bad_latency",
            Self::NoThreshold => "no_threshold",
        }
    }
}

/// Records of a rollout at a watermark.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Windows {
    /// Closed devices in order of `(closed_at, install)`.
    pub closed: Vec<DeviceRecord>,
    /// Devices whose window is still open, provisional, in order of `(exposed_at, install)`. Used for first
    /// failures and the sample ratio only.
    pub open: Vec<DeviceRecord>,
    /// Devices and rows that do not count, by [`Exclusion::as_str`].
    pub exclusions: BTreeMap<String, u64>,
}

impl Windows {
    /// Every counted device, open and closed.
    pub fn exposed(&self) -> impl Iterator<Item = &DeviceRecord> {
        self.closed.iter().chain(&self.open)
    }
    /// How often a reason was met.
    #[must_use]
    pub fn excluded(&self, why: Exclusion) -> u64 {
        self.exclusions.get(why.as_str()).copied().unwrap_or(0)
    }
}

/// Builds the records at watermark `now`.
///
/// `signed_at` is the time the rollout was signed: identities first seen later do not count. `closed_before` are
/// records from an earlier watermark; they win over the history, so a closed record never changes even if rows
/// arrive late, and histories of closed devices need not be loaded again (pass an empty slice to rebuild all).
///
/// # Errors
/// [`ExperimentError`] if spec or phases are not valid.
pub fn close_windows(
    histories: &[DeviceHistory],
    spec: &GateSpecV1,
    phases: &[PhaseV1],
    signed_at: DateTime<Utc>,
    closed_before: &[DeviceRecord],
    now: DateTime<Utc>,
) -> Result<Windows, ExperimentError> {
    spec.check()?;
    check_phases(phases)?;
    let mut engine = Engine { spec, phases, signed_at, now, counts: BTreeMap::new() };
    let mut records: HashMap<&str, DeviceRecord> =
        closed_before.iter().map(|r| (r.install.as_str(), r.clone())).collect();
    // The same device twice: the first exposure decides, whatever the order of the input.
    let mut first: HashMap<&str, &DeviceHistory> = HashMap::with_capacity(histories.len());
    for h in histories {
        if !engine.counts_device(h) {
            continue;
        }
        let key = |h: &DeviceHistory| (h.exposed_at, h.phase, h.arm);
        match first.get(h.install.as_str()) {
            Some(other) => {
                engine.count(Exclusion::Duplicate, 1);
                if key(h) < key(other) {
                    first.insert(&h.install, h);
                }
            }
            None => {
                first.insert(&h.install, h);
            }
        }
    }
    for (install, h) in first {
        if !records.contains_key(install) {
            records.insert(install, engine.record(h));
        }
    }
    Ok(engine.sort(records.into_values().collect()))
}

struct Engine<'a> {
    spec: &'a GateSpecV1,
    phases: &'a [PhaseV1],
    signed_at: DateTime<Utc>,
    now: DateTime<Utc>,
    counts: BTreeMap<String, u64>,
}

impl Engine<'_> {
    fn count(&mut self, why: Exclusion, n: u64) {
        if n > 0 {
            *self.counts.entry(why.as_str().to_owned()).or_insert(0) += n;
        }
    }

    /// Trust first: a forged fleet must not be able to move a gate, nor to raise a leak or ratio alarm.
    fn counts_device(&mut self, h: &DeviceHistory) -> bool {
        let why = if h.trust == TrustClass::Anonymous && !self.spec.trust.count_anonymous {
            Exclusion::Anonymous
        } else if h.first_seen > self.signed_at {
            Exclusion::NewIdentity
        } else if h.exposed_at > self.now {
            Exclusion::NotYet
        } else if !self.phases.iter().any(|p| p.number == h.phase && p.width(h.arm) > 0) {
            Exclusion::Leaked
        } else {
            return true;
        };
        self.count(why, 1);
        false
    }

    fn closes_at(&self, h: &DeviceHistory) -> DateTime<Utc> {
        let w = self.spec.window;
        let by_time = h.exposed_at + TimeDelta::hours(i64::from(w.hours));
        let mut times: Vec<DateTime<Utc>> = h.responses.iter().map(|r| r.at).filter(|at| *at >= h.exposed_at).collect();
        times.sort_unstable();
        let by_count = times.get(w.max_responses as usize - 1);
        let end = by_count.map_or(by_time, |t| by_time.min(*t));
        end + TimeDelta::hours(i64::from(w.grace_hours))
    }

    fn record(&mut self, h: &DeviceHistory) -> DeviceRecord {
        let closed_at = self.closes_at(h);
        let until = closed_at.min(self.now);
        let mut out = DeviceRecord {
            install: h.install.clone(),
            arm: h.arm,
            phase: h.phase,
            device_class: h.device_class.clone(),
            locale: h.locale.clone(),
            exposed_at: h.exposed_at,
            closed_at,
            responses: 0,
            rejections: 0,
            refusals: 0,
            latency: vec![LatencyCount::default(); self.spec.latency.len()],
            first_failure_at: None,
            reporting: false,
            crossed_over: h.crossed_over,
        };
        let inside = |at: &DateTime<Utc>| *at >= h.exposed_at && *at <= until;
        out.first_failure_at = h.failures.iter().copied().filter(inside).min();
        self.count_responses(h, until, &mut out);
        out.reporting =
            out.responses > 0 || out.first_failure_at.is_some() || h.confirmed_at.is_some_and(|at| inside(&at));
        out
    }

    fn count_responses(&mut self, h: &DeviceHistory, until: DateTime<Utc>, out: &mut DeviceRecord) {
        let mut rows: Vec<_> = h.responses.iter().filter(|r| r.at >= h.exposed_at && r.at <= until).collect();
        rows.sort_by_key(|r| r.at);
        rows.truncate(self.spec.window.max_responses as usize);
        out.responses = rows.len() as u32;
        let (mut bad, mut homeless) = (0, 0);
        for r in rows {
            let label = r.label.filter(|_| r.label_at.is_none_or(|at| at <= until));
            out.rejections += u32::from(label.is_some_and(|l| l.is_rejection()));
            out.refusals += u32::from(r.refused);
            let Some(ms) = r.ttft_ms else { continue };
            if !ms.is_finite() || ms < 0.0 {
                bad += 1;
                continue;
            }
            for (gate, count) in self.spec.latency.iter().zip(&mut out.latency) {
                match gate.threshold_ms(&h.device_class, h.arm) {
                    Some(limit) => {
                        count.timed += 1;
                        count.slow += u32::from(ms > limit);
                    }
                    None => homeless += 1,
                }
            }
        }
        self.count(Exclusion::BadLatency, bad);
        self.count(Exclusion::NoThreshold, homeless);
    }

    fn sort(mut self, records: Vec<DeviceRecord>) -> Windows {
        // Once the control has been given the treatment, a window that is still open compares nothing.
        let over = self.phases.iter().find(|p| !p.compares()).map(|p| p.started_at);
        let mut out = Windows::default();
        for r in records {
            if over.is_some_and(|end| r.closed_at > end) {
                self.count(Exclusion::AfterComparison, 1);
            } else if r.closed_at <= self.now {
                out.closed.push(r);
            } else {
                out.open.push(r);
            }
        }
        out.closed.sort_unstable_by(|a, b| (a.closed_at, &a.install).cmp(&(b.closed_at, &b.install)));
        out.open.sort_unstable_by(|a, b| (a.exposed_at, &a.install).cmp(&(b.exposed_at, &b.install)));
        out.exclusions = self.counts;
        out
    }
}
