//! The controllers: what happens when business time passes. Everything that was received before a tick is in the
//! tables before the controllers look; they only queue jobs, the steps do the work.

use crate::pipeline::{attribute, compact, notify, reconcile_rollout};
use crate::server::Server;
use chrono::{DateTime, Utc};
use flywheel_jobs::{ScheduleSpec, Scheduler};
use flywheel_types::{AppId, Error, JobState};
use std::sync::Arc;
use std::time::Duration;

/// Longest time a virtual tick waits for its jobs, seconds (training on a small machine takes minutes).
const SETTLE_S: u64 = 1800;

/// The schedule that every app has: nightly compaction, vacuum and pruning. An operator can move or pause it.
const HOUSEKEEPING: &str = "housekeeping";

/// One tick at the business time `server.now()`.
///
/// # Errors
/// Of the lake and the database.
pub async fn tick(server: &Server, scheduler: &Scheduler) -> Result<(), Error> {
    server.lake.flush().await?;
    let now = server.now();
    for app in server.store.app_list().await? {
        housekeeping(server, &app.app_id).await?;
        queue(server, &app.app_id, now).await?;
        reconcile_rollout::repair_assignment(server, &app.app_id).await.or_else(|e| {
            // an app without keys has nothing to publish yet
            if e.code == "app_has_no_keys" { Ok(()) } else { Err(e) }
        })?;
    }
    scheduler.tick().await?;
    server.metrics.add("flywheel_ticks_total", &[], 1);
    Ok(())
}

async fn queue(server: &Server, app: &AppId, now: DateTime<Utc>) -> Result<(), Error> {
    let open = server.store.rollout_list(app, true, 100).await?;
    let mut tx = server.begin().await?;
    attribute::enqueue(&mut tx, app, now).await?;
    for rollout in &open {
        reconcile_rollout::enqueue(&mut tx, app, &rollout.rollout_id).await?;
    }
    tx.commit().await?;
    Ok(())
}

async fn housekeeping(server: &Server, app: &AppId) -> Result<(), Error> {
    if server.store.schedule_get(app, HOUSEKEEPING).await?.is_some() {
        return Ok(());
    }
    let mut tx = server.begin().await?;
    flywheel_jobs::schedule_put(&mut tx, app, &ScheduleSpec::new(HOUSEKEEPING, compact::KIND, "0 3 * * *")).await?;
    tx.commit().await?;
    Ok(())
}

/// Ticks by the wall clock until `stop` ends.
pub async fn run(server: Arc<Server>, every: Duration, stop: impl Future<Output = ()>) {
    let scheduler = Scheduler::new(server.store.clone(), server.clock(), Default::default());
    let mut interval = tokio::time::interval(every);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    tokio::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => return,
            _ = interval.tick() => {
                if let Err(e) = tick(&server, &scheduler).await {
                    tracing::error!(error = %e, inside = e.inside.as_deref(), "controller tick failed");
                }
            }
        }
    }
}

/// Moves the virtual clock, ticks, and returns when no job can run any more.
///
/// # Errors
/// `Conflict` when the clock is real, `Invalid` for a time in the past, `Unavailable` when jobs do not end.
pub async fn advance(server: &Server, to: DateTime<Utc>) -> Result<(), Error> {
    let clock = server.virtual_clock.as_ref().ok_or_else(|| {
        Error::conflict(
            "clock_is_real",
            "the business clock is the wall clock",
            "set [clock] kind = \"virtual\" for simulations",
        )
    })?;
    if to < server.now() {
        return Err(Error::invalid(
            "time_goes_forward",
            format!("it is {} already", server.now()),
            "send a later time",
        ));
    }
    // rows of the old time go to the tables before the time changes
    server.lake.flush().await?;
    clock.advance_to(to);
    tick(server, &Scheduler::new(server.store.clone(), server.clock(), Default::default())).await?;
    settle(server).await
}

/// Waits until nothing is queued or running. Mail is left out: it is retried by the wall clock for hours.
///
/// # Errors
/// `Unavailable` after half an hour.
pub async fn settle(server: &Server) -> Result<(), Error> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(SETTLE_S);
    loop {
        let counts = server.store.job_counts(None).await?;
        let waits = |s: JobState| matches!(s, JobState::Queued | JobState::Running);
        let open: i64 = counts.iter().filter(|c| waits(c.state) && c.kind != notify::KIND).map(|c| c.count).sum();
        if open == 0 {
            return Ok(());
        }
        if tokio::time::Instant::now() > deadline {
            return Err(Error::new(
                flywheel_types::ErrorKind::Unavailable,
                "jobs_do_not_end",
                format!("{open} jobs are still open after {SETTLE_S} s"),
                "look at GET /v1/jobs?state=running",
            ));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
