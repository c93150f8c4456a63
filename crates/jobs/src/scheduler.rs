//! The scheduler: looks which schedules are due by the business clock and decides their slots. Any number of replicas may
//! run it; the compare-and-swap on the schedule's next slot lets one of them win each decision.

use crate::cron::CronExpr;
use crate::policy::{Decision, Open, Policy, decide};
use crate::spec::{go_on, jitter, job_of};
use crate::{Enqueued, ScheduleError};
use chrono::{DateTime, TimeDelta, Utc};
use flywheel_store::schedules::{RunOutcome, ScheduleRow};
use flywheel_store::{Store, Tx};
use flywheel_types::{BusinessClock, JobState};
use std::sync::Arc;
use std::time::Duration;

/// Slots older than this are passed over without being counted one by one.
const LOOK_BACK: TimeDelta = TimeDelta::days(366);

/// How a scheduler works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Time between looks.
    pub poll: Duration,
    /// Up to this age a slot counts as on time and not as missed.
    pub on_time: TimeDelta,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self { poll: Duration::from_secs(1), on_time: TimeDelta::seconds(60) }
    }
}

/// Turns due slots into jobs.
#[derive(Clone)]
pub struct Scheduler {
    store: Store,
    clock: Arc<dyn BusinessClock>,
    options: SchedulerOptions,
}

impl Scheduler {
    #[must_use]
    pub fn new(store: Store, clock: Arc<dyn BusinessClock>, options: SchedulerOptions) -> Self {
        Self { store, clock, options }
    }

    /// Looks again and again until `shutdown` resolves.
    pub async fn run(&self, shutdown: impl Future<Output = ()> + Send) {
        let mut shutdown = std::pin::pin!(shutdown);
        loop {
            if let Err(error) = self.tick().await {
                tracing::warn!(%error, "schedules could not be read; trying again");
            }
            tokio::select! {
                () = tokio::time::sleep(self.options.poll) => {}
                () = &mut shutdown => return,
            }
        }
    }

    /// Decides every schedule that is due now; answers how many slots became jobs. One schedule that cannot be decided is
    /// logged and does not hold up the others.
    ///
    /// # Errors
    /// Those of reading the list.
    pub async fn tick(&self) -> flywheel_store::Result<usize> {
        let now = self.clock.now();
        let mut started = 0;
        for row in self.store.schedule_list_due(now).await? {
            match self.decide_one(&row, now).await {
                Ok(n) => started += n,
                Err(error) => {
                    tracing::error!(schedule = row.name, app = %row.app_id, %error, "schedule not decided");
                }
            }
        }
        Ok(started)
    }

    async fn decide_one(&self, row: &ScheduleRow, now: DateTime<Utc>) -> Result<usize, ScheduleError> {
        let Some(first) = row.next_slot else {
            return Ok(0);
        };
        let cron = CronExpr::parse(&row.expr, &row.zone, first - TimeDelta::minutes(1))?;
        let delay = jitter(&row.schedule_id, row.jitter_s);
        let due = due_slots(&cron, first, now - delay, now - LOOK_BACK);
        let Some(last) = due.last().copied() else {
            return Ok(0);
        };
        let (next, next_due) = go_on(&cron, &row.schedule_id, row.jitter_s, last);
        let mut tx = self.store.begin(now).await?;
        if !tx.schedule_advance(&row.schedule_id, first, next, next_due).await? {
            // Another replica has decided these slots.
            tx.rollback().await?;
            return Ok(0);
        }
        let started = self.carry_out(&mut tx, row, &due, now - delay).await?;
        tx.commit().await?;
        Ok(started)
    }

    /// `now` is earlier by the schedule's jitter, so that a slot is not late because of it.
    async fn carry_out(
        &self,
        tx: &mut Tx,
        row: &ScheduleRow,
        due: &[DateTime<Utc>],
        now: DateTime<Utc>,
    ) -> Result<usize, ScheduleError> {
        let open = tx.job_list_open(&row.schedule_id).await?;
        let running = open.iter().filter(|j| j.state == JobState::Running).count();
        let open_now = Open { running, queued: open.len() - running };
        let decided = decide(&self.policy(row), due, open_now, now);
        if decided.cancel_open {
            for job in &open {
                tx.job_cancel(&row.app_id, &job.job_id, "its schedule: a newer slot came").await?;
            }
        }
        let base = tx.lease_now_us();
        let mut started = 0;
        for (slot, decision) in &decided.slots {
            started += self.record(tx, row, *slot, decision, base + started as i64).await?;
        }
        Ok(started)
    }

    /// Writes the job or the skip and the run row; answers 1 when a job was enqueued. `run_at_us` rises with the slots, so
    /// that jobs of one catch-up run in order.
    async fn record(
        &self,
        tx: &mut Tx,
        row: &ScheduleRow,
        slot: DateTime<Utc>,
        decision: &Decision,
        run_at_us: i64,
    ) -> Result<usize, ScheduleError> {
        let mut job = job_of(row, Some(slot));
        job.run_at = DateTime::from_timestamp_micros(run_at_us);
        let (outcome, reason, done) = match decision {
            Decision::Run { reason } => (RunOutcome::Enqueued, reason, tx.job_enqueue(&row.app_id, &job).await?),
            Decision::Skip { reason } => (RunOutcome::Skipped, reason, tx.job_skip(&row.app_id, &job, reason).await?),
        };
        tx.schedule_run_insert(&row.app_id, &row.schedule_id, slot, outcome, reason, done.id()).await?;
        tracing::info!(schedule = row.name, %slot, %outcome, reason, job.id = %done.id(), "slot decided");
        Ok(usize::from(outcome == RunOutcome::Enqueued && matches!(done, Enqueued::New(_))))
    }

    fn policy(&self, row: &ScheduleRow) -> Policy {
        Policy {
            missed: row.missed,
            missed_max: row.missed_max as usize,
            missed_window: TimeDelta::seconds(row.missed_window_s),
            start_deadline: row.start_deadline_s.map(TimeDelta::seconds),
            overlap: row.overlap,
            on_time: self.options.on_time,
        }
    }
}

/// Slots from `first` to `now`, without those before `oldest`; at least one of them is kept.
fn due_slots(cron: &CronExpr, first: DateTime<Utc>, now: DateTime<Utc>, oldest: DateTime<Utc>) -> Vec<DateTime<Utc>> {
    let mut slot = Some(first);
    if first < oldest {
        slot = cron.next(oldest).filter(|s| *s <= now).or(Some(first));
    }
    let mut due = Vec::new();
    while let Some(s) = slot.filter(|s| *s <= now) {
        due.push(s);
        slot = cron.next(s);
    }
    due
}
