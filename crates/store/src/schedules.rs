//! Cron schedules and what became of each of their slots. When a slot is due and what to do about missed ones is
//! decided in the jobs crate. Times here are business time.

use crate::query::{FromRow, Row, json_text, q};
use crate::words::words;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, JobId};
use serde::Serialize;
use serde_json::Value;

words! {
    /// What happens with slots that passed while nobody was there.
    MissedPolicy {
        /// One run for the latest missed slot.
        RunOnce = "run_once",
        /// None.
        Skip = "skip",
        /// The newest `missed_max` within `missed_window_s`, in order.
        RunAll = "run_all",
    }
}
words! {
    /// What happens when a slot comes while a job of the schedule is still open.
    OverlapPolicy {
        /// The slot is skipped, visibly.
        Skip = "skip",
        /// One job may wait; further slots are skipped.
        QueueOne = "queue_one",
        /// The older jobs are cancelled.
        CancelRunning = "cancel_running",
        /// Jobs may run side by side.
        Allow = "allow",
    }
}
words! {
    /// What became of a slot.
    RunOutcome { Enqueued = "enqueued", Skipped = "skipped" }
}

/// One schedule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScheduleRow {
    pub app_id: AppId,
    pub schedule_id: String,
    pub name: String,
    pub kind: String,
    pub payload: Value,
    /// Cron expression, five fields.
    pub expr: String,
    /// IANA zone in which it is read.
    pub zone: String,
    pub enabled: bool,
    pub missed: MissedPolicy,
    pub missed_max: u32,
    pub missed_window_s: i64,
    /// A slot found later than this is not run any more.
    pub start_deadline_s: Option<i64>,
    pub overlap: OverlapPolicy,
    /// Bound of the fixed delay that is derived from the schedule's id.
    pub jitter_s: i64,
    pub priority: i64,
    pub max_attempts: u32,
    pub concurrency: Option<(String, u32)>,
    /// The next slot that is not decided yet; `None`: there is none.
    pub next_slot: Option<DateTime<Utc>>,
    /// When it is looked at: the slot plus the delay.
    pub due_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for ScheduleRow {
    fn from_row(row: &Row) -> Result<Self> {
        let limit = row.num("concurrency_limit")?;
        Ok(Self {
            app_id: row.parsed("app_id")?,
            schedule_id: row.text("schedule_id")?,
            name: row.text("name")?,
            kind: row.text("kind")?,
            payload: row.json("payload")?,
            expr: row.text("expr")?,
            zone: row.text("zone")?,
            enabled: row.flag("enabled")?,
            missed: row.parsed("missed")?,
            missed_max: row.num("missed_max")?,
            missed_window_s: row.int("missed_window_s")?,
            start_deadline_s: row.opt_int("start_deadline_s")?,
            overlap: row.parsed("overlap")?,
            jitter_s: row.int("jitter_s")?,
            priority: row.int("priority")?,
            max_attempts: row.num("max_attempts")?,
            concurrency: row.opt_text("concurrency_key")?.map(|key| (key, limit)),
            next_slot: row.opt_time("next_slot")?,
            due_at: row.opt_time("due_at")?,
            created_at: row.time("created_at")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

/// What became of one slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RunRow {
    pub schedule_id: String,
    pub scheduled_for: DateTime<Utc>,
    pub app_id: AppId,
    pub outcome: RunOutcome,
    /// For people: `on time`, `missed(…)`, `overlap(…)`, `deadline(…)`.
    pub reason: String,
    /// The job, in state `skipped` when it was not run.
    pub job_id: JobId,
    pub decided_at: DateTime<Utc>,
}

impl FromRow for RunRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            schedule_id: row.text("schedule_id")?,
            scheduled_for: row.time("scheduled_for")?,
            app_id: row.parsed("app_id")?,
            outcome: row.parsed("outcome")?,
            reason: row.text("reason")?,
            job_id: row.parsed("job_id")?,
            decided_at: row.time("decided_at")?,
        })
    }
}

const SELECT: &str = "SELECT app_id, schedule_id, name, kind, payload, expr, zone, enabled, missed, missed_max, \
    missed_window_s, start_deadline_s, overlap, jitter_s, priority, max_attempts, concurrency_key, \
    concurrency_limit, next_slot, due_at, created_at, updated_at FROM schedules";
const RUNS: &str = "SELECT schedule_id, scheduled_for, app_id, outcome, reason, job_id, decided_at FROM schedule_runs";

impl Store {
    /// The schedule of this name.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn schedule_get(&self, app: &AppId, name: &str) -> Result<Option<ScheduleRow>> {
        self.fetch_opt(q(format!("{SELECT} WHERE app_id = $1 AND name = $2")).bind(app).bind(name)).await
    }

    /// Every schedule of the app, by name.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn schedule_list(&self, app: &AppId) -> Result<Vec<ScheduleRow>> {
        self.fetch(q(format!("{SELECT} WHERE app_id = $1 ORDER BY name")).bind(app)).await
    }

    /// Enabled schedules of all apps that are due at `now`, most overdue first: for the scheduler loop.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn schedule_list_due(&self, now: DateTime<Utc>) -> Result<Vec<ScheduleRow>> {
        let sql = format!("{SELECT} WHERE enabled = 1 AND due_at <= $1 ORDER BY due_at, schedule_id");
        self.fetch(q(sql).bind(now)).await
    }

    /// Decided slots of a schedule, newest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn schedule_run_list(&self, app: &AppId, schedule_id: &str, limit: u32) -> Result<Vec<RunRow>> {
        let sql = format!("{RUNS} WHERE app_id = $1 AND schedule_id = $2 ORDER BY scheduled_for DESC LIMIT $3");
        self.fetch(q(sql).bind(app).bind(schedule_id).bind(limit)).await
    }
}

impl Tx {
    /// The schedule of this name as this transaction sees it.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn schedule_get(&mut self, app: &AppId, name: &str) -> Result<Option<ScheduleRow>> {
        self.fetch_opt(q(format!("{SELECT} WHERE app_id = $1 AND name = $2")).bind(app).bind(name)).await
    }

    /// Creates the schedule or replaces the one of that name; its id stays. The jobs crate has checked it.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn schedule_put(&mut self, row: &ScheduleRow) -> Result<()> {
        let at = self.at();
        let sql = "INSERT INTO schedules (app_id, schedule_id, name, kind, payload, expr, zone, enabled, missed, \
                   missed_max, missed_window_s, start_deadline_s, overlap, jitter_s, priority, max_attempts, \
                   concurrency_key, concurrency_limit, next_slot, due_at, created_at, updated_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, \
                   $20, $21, $21) ON CONFLICT (app_id, name) DO UPDATE SET kind = excluded.kind, \
                   payload = excluded.payload, expr = excluded.expr, zone = excluded.zone, \
                   enabled = excluded.enabled, missed = excluded.missed, missed_max = excluded.missed_max, \
                   missed_window_s = excluded.missed_window_s, start_deadline_s = excluded.start_deadline_s, \
                   overlap = excluded.overlap, jitter_s = excluded.jitter_s, priority = excluded.priority, \
                   max_attempts = excluded.max_attempts, concurrency_key = excluded.concurrency_key, \
                   concurrency_limit = excluded.concurrency_limit, next_slot = excluded.next_slot, \
                   due_at = excluded.due_at, updated_at = excluded.updated_at";
        let query = q(sql)
            .bind(&row.app_id)
            .bind(&row.schedule_id)
            .bind(&row.name)
            .bind(&row.kind)
            .bind(json_text("payload", &row.payload)?)
            .bind(&row.expr)
            .bind(&row.zone)
            .bind(row.enabled)
            .bind(row.missed)
            .bind(row.missed_max)
            .bind(row.missed_window_s)
            .bind(row.start_deadline_s)
            .bind(row.overlap)
            .bind(row.jitter_s)
            .bind(row.priority)
            .bind(row.max_attempts)
            .bind(row.concurrency.as_ref().map(|(key, _)| key.clone()))
            .bind(row.concurrency.as_ref().map_or(1, |(_, limit)| *limit))
            .bind(row.next_slot)
            .bind(row.due_at)
            .bind(at);
        self.execute(query).await.map(|_| ())
    }

    /// Switches a schedule on or off and sets where it goes on.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn schedule_enabled_set(
        &mut self,
        app: &AppId,
        name: &str,
        enabled: bool,
        next_slot: Option<DateTime<Utc>>,
        due_at: Option<DateTime<Utc>>,
    ) -> Result<()> {
        let at = self.at();
        let sql = "UPDATE schedules SET enabled = $3, next_slot = $4, due_at = $5, updated_at = $6 \
                   WHERE app_id = $1 AND name = $2";
        let query = q(sql).bind(app).bind(name).bind(enabled).bind(next_slot).bind(due_at).bind(at);
        match self.execute(query).await? {
            0 => Err(Error::not_found("schedule", name)),
            _ => Ok(()),
        }
    }

    /// Deletes a schedule; its runs and jobs stay.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn schedule_delete(&mut self, app: &AppId, name: &str) -> Result<()> {
        let sql = "DELETE FROM schedules WHERE app_id = $1 AND name = $2";
        match self.execute(q(sql).bind(app).bind(name)).await? {
            0 => Err(Error::not_found("schedule", name)),
            _ => Ok(()),
        }
    }

    /// Moves the schedule from the slot the caller saw to the next; `false` when another replica was faster, and
    /// then nothing of this transaction may be committed.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn schedule_advance(
        &mut self,
        schedule_id: &str,
        from: DateTime<Utc>,
        next_slot: Option<DateTime<Utc>>,
        due_at: Option<DateTime<Utc>>,
    ) -> Result<bool> {
        let sql = "UPDATE schedules SET next_slot = $3, due_at = $4 \
                   WHERE schedule_id = $1 AND next_slot = $2 AND enabled = 1";
        let query = q(sql).bind(schedule_id).bind(from).bind(next_slot).bind(due_at);
        Ok(self.execute(query).await? == 1)
    }

    /// Writes down what became of a slot; `false` when it was decided before.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn schedule_run_insert(
        &mut self,
        app: &AppId,
        schedule_id: &str,
        scheduled_for: DateTime<Utc>,
        outcome: RunOutcome,
        reason: &str,
        job: &JobId,
    ) -> Result<bool> {
        let at = self.at();
        let sql = "INSERT INTO schedule_runs (schedule_id, scheduled_for, app_id, outcome, reason, job_id, decided_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING";
        let query =
            q(sql).bind(schedule_id).bind(scheduled_for).bind(app).bind(outcome).bind(reason).bind(job).bind(at);
        Ok(self.execute(query).await? == 1)
    }
}
