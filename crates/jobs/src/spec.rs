//! Schedules as people write them: checked, stored, paused, started by hand.

use crate::cron::CronExpr;
use crate::{Enqueued, NewJob, ScheduleError};
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_store::schedules::{MissedPolicy, OverlapPolicy, ScheduleRow};
use flywheel_store::{Tx, ids};
use flywheel_types::{AppId, Digest};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A schedule to create or change. Fields not given take the defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleSpec {
    /// Unique in the app.
    pub name: String,
    /// Kind of job, a verb.
    pub kind: String,
    #[serde(default)]
    pub payload: Value,
    /// Cron expression with five fields.
    pub expr: String,
    /// IANA zone.
    #[serde(default = "utc")]
    pub zone: String,
    #[serde(default = "yes")]
    pub enabled: bool,
    #[serde(default = "run_once")]
    pub missed: MissedPolicy,
    /// Bounds of `run_all`: number and age in seconds.
    #[serde(default = "ten")]
    pub missed_max: u32,
    #[serde(default = "day")]
    pub missed_window_s: i64,
    #[serde(default)]
    pub start_deadline_s: Option<i64>,
    #[serde(default = "skip")]
    pub overlap: OverlapPolicy,
    /// Bound of the fixed delay derived from the schedule's id, seconds.
    #[serde(default)]
    pub jitter_s: i64,
    #[serde(default)]
    pub priority: i64,
    #[serde(default = "three")]
    pub max_attempts: u32,
    /// Key and limit shared with other jobs; `None`: the schedule's own, limit 1 (none with `allow`).
    #[serde(default)]
    pub concurrency: Option<(String, u32)>,
}

fn utc() -> String {
    "UTC".into()
}
fn yes() -> bool {
    true
}
fn run_once() -> MissedPolicy {
    MissedPolicy::RunOnce
}
fn skip() -> OverlapPolicy {
    OverlapPolicy::Skip
}
fn ten() -> u32 {
    10
}
fn three() -> u32 {
    3
}
fn day() -> i64 {
    86_400
}

impl ScheduleSpec {
    /// A schedule in UTC with the defaults: `run_once` for missed slots, `skip` on overlap.
    #[must_use]
    pub fn new(name: &str, kind: &str, expr: &str) -> Self {
        Self {
            name: name.into(),
            kind: kind.into(),
            payload: Value::Null,
            expr: expr.into(),
            zone: utc(),
            enabled: true,
            missed: run_once(),
            missed_max: ten(),
            missed_window_s: day(),
            start_deadline_s: None,
            overlap: skip(),
            jitter_s: 0,
            priority: 0,
            max_attempts: three(),
            concurrency: None,
        }
    }

    fn check(&self) -> Result<(), ScheduleError> {
        let bad = |field, detail: &str| Err(ScheduleError::Field { field, detail: detail.into() });
        if self.name.is_empty() || self.kind.is_empty() {
            return bad("name and kind", "they must not be empty");
        }
        if self.jitter_s < 0 || self.jitter_s > 86_400 {
            return bad("jitter_s", "it must be between 0 and 86400");
        }
        if self.missed_max == 0 || self.missed_window_s <= 0 {
            return bad("missed_max and missed_window_s", "they must be above 0; use `skip` for none");
        }
        if self.start_deadline_s.is_some_and(|d| d <= 0) {
            return bad("start_deadline_s", "it must be above 0");
        }
        if self.start_deadline_s.is_some_and(|d| d < self.jitter_s) {
            return bad("start_deadline_s", "it must not be below jitter_s, or no slot would run");
        }
        let limit = self.concurrency.as_ref().map(|(_, limit)| *limit);
        match (limit, self.overlap) {
            (Some(0), _) => bad("concurrency", "a limit of 0 would never let it run"),
            (Some(n), o) if n > 1 && o != OverlapPolicy::Allow => {
                bad("concurrency", "a limit above 1 needs overlap `allow`")
            }
            _ => Ok(()),
        }
    }
}

/// Delay of every slot of a schedule, `0..=bound` seconds, always the same for the same schedule.
pub(crate) fn jitter(schedule_id: &str, bound_s: i64) -> TimeDelta {
    let mut first = [0u8; 8];
    first.copy_from_slice(&Digest::of(schedule_id.as_bytes()).0[..8]);
    let span = u64::try_from(bound_s).unwrap_or(0) + 1;
    TimeDelta::seconds(i64::try_from(u64::from_be_bytes(first) % span).unwrap_or(0))
}

/// Where a schedule goes on after `after`.
pub(crate) fn go_on(
    cron: &CronExpr,
    schedule_id: &str,
    jitter_s: i64,
    after: DateTime<Utc>,
) -> (Option<DateTime<Utc>>, Option<DateTime<Utc>>) {
    let slot = cron.next(after);
    (slot, slot.map(|s| s + jitter(schedule_id, jitter_s)))
}

/// Creates a schedule or changes the one of that name. With an unchanged expression and zone the next slot stays where it
/// was, so that a deployment while the server was down loses no slot; otherwise it is the first after the transaction's
/// time.
///
/// # Errors
/// [`ScheduleError`] for anything that would not work as written.
pub async fn schedule_put(tx: &mut Tx, app: &AppId, spec: &ScheduleSpec) -> Result<ScheduleRow, ScheduleError> {
    spec.check()?;
    let at = tx.at();
    let cron = CronExpr::parse(&spec.expr, &spec.zone, at)?;
    let old = tx.schedule_get(app, &spec.name).await?;
    let id = old.as_ref().map_or_else(|| ids::fresh("schedule"), |o| o.schedule_id.clone());
    let kept = old
        .as_ref()
        .filter(|o| o.expr == spec.expr && o.zone == spec.zone && o.enabled && spec.enabled)
        .and_then(|o| o.next_slot);
    let next_slot = kept.or_else(|| cron.next(at));
    let row = ScheduleRow {
        app_id: app.clone(),
        schedule_id: id.clone(),
        name: spec.name.clone(),
        kind: spec.kind.clone(),
        payload: spec.payload.clone(),
        expr: spec.expr.clone(),
        zone: spec.zone.clone(),
        enabled: spec.enabled,
        missed: spec.missed,
        missed_max: spec.missed_max,
        missed_window_s: spec.missed_window_s,
        start_deadline_s: spec.start_deadline_s,
        overlap: spec.overlap,
        jitter_s: spec.jitter_s,
        priority: spec.priority,
        max_attempts: spec.max_attempts,
        concurrency: spec.concurrency.clone(),
        next_slot,
        due_at: next_slot.map(|s| s + jitter(&id, spec.jitter_s)),
        created_at: old.map_or(at, |o| o.created_at),
        updated_at: at,
    };
    tx.schedule_put(&row).await?;
    Ok(row)
}

async fn get(tx: &mut Tx, app: &AppId, name: &str) -> Result<ScheduleRow, ScheduleError> {
    let row = tx.schedule_get(app, name).await?;
    row.ok_or_else(|| {
        let (what, id) = ("schedule", name.to_owned());
        ScheduleError::Store(flywheel_store::Error::NotFound { what, id })
    })
}

/// Switches a schedule off: slots that pass meanwhile are not missed.
///
/// # Errors
/// [`ScheduleError::Store`] when there is none of that name.
pub async fn schedule_pause(tx: &mut Tx, app: &AppId, name: &str) -> Result<(), ScheduleError> {
    Ok(tx.schedule_enabled_set(app, name, false, None, None).await?)
}

/// Switches a schedule on again from the transaction's time; one that is on stays as it is.
///
/// # Errors
/// [`ScheduleError`] when there is none of that name.
pub async fn schedule_resume(tx: &mut Tx, app: &AppId, name: &str) -> Result<(), ScheduleError> {
    let row = get(tx, app, name).await?;
    if row.enabled {
        return Ok(());
    }
    let cron = CronExpr::parse(&row.expr, &row.zone, tx.at())?;
    let (slot, due) = go_on(&cron, &row.schedule_id, row.jitter_s, tx.at());
    Ok(tx.schedule_enabled_set(app, name, true, slot, due).await?)
}

/// Runs a schedule's job now. It never consumes a slot; `key` names the request, so that a repeated one (a double click)
/// gives the same job. It waits for a running job of the schedule like any other.
///
/// # Errors
/// [`ScheduleError`] when there is none of that name.
pub async fn schedule_run_now(tx: &mut Tx, app: &AppId, name: &str, key: &str) -> Result<Enqueued, ScheduleError> {
    let row = get(tx, app, name).await?;
    let job = job_of(&row, None).dedup(format!("run-now/{}/{key}", row.schedule_id));
    Ok(tx.job_enqueue(app, &job).await?)
}

/// The job of a schedule; with the slot it fills, or without when started by hand.
pub(crate) fn job_of(row: &ScheduleRow, slot: Option<DateTime<Utc>>) -> NewJob {
    let mut job = NewJob::new(&row.kind, row.payload.clone()).priority(row.priority).max_attempts(row.max_attempts);
    job.concurrency = row
        .concurrency
        .clone()
        .or_else(|| (row.overlap != OverlapPolicy::Allow).then(|| (format!("schedule/{}", row.schedule_id), 1)));
    job.schedule = Some((row.schedule_id.clone(), slot));
    job
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_is_fixed_and_bounded() {
        let all: Vec<i64> = (0..1000).map(|i| jitter(&format!("s{i}"), 60).num_seconds()).collect();
        assert!(all.iter().all(|s| (0..=60).contains(s)));
        assert!(all.contains(&0) && all.contains(&60));
        assert_eq!(jitter("s1", 60), jitter("s1", 60));
        assert_eq!(jitter("s1", 0), TimeDelta::zero());
    }

    #[test]
    fn bad_fields_are_named() {
        let field = |change: fn(&mut ScheduleSpec)| {
            let mut s = ScheduleSpec::new("n", "k", "* * * * *");
            change(&mut s);
            s.check().unwrap_err().to_string()
        };
        assert!(field(|s| s.jitter_s = -1).starts_with("jitter_s"));
        assert!(field(|s| s.concurrency = Some(("x".into(), 2))).starts_with("concurrency"));
        assert!(field(|s| s.start_deadline_s = Some(0)).starts_with("start_deadline_s"));
        assert!(field(|s| s.missed_max = 0).starts_with("missed_max"));
        assert!(field(|s| s.kind.clear()).starts_with("name and kind"));
    }

    #[test]
    fn a_short_file_is_enough() {
        let s: ScheduleSpec = serde_json::from_str(r#"{"name":"n","kind":"lora","expr":"0 3 * * *"}"#).unwrap();
        assert_eq!(s, ScheduleSpec::new("n", "lora", "0 3 * * *"));
        assert!(serde_json::from_str::<ScheduleSpec>(r#"{"name":"n","kind":"k","expr":"x","zome":"UTC"}"#).is_err());
    }
}
