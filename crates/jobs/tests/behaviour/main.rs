//! Workers and schedules on SQLite and on PostgreSQL. Time is moved by hand; handlers wait for signals, never for time.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests: a failure must fail the test, a skip must be seen"
)]

use chrono::{DateTime, TimeDelta, TimeZone as _, Utc};
use flywheel_jobs::{Enqueued, JobRow, NewJob, WorkerOptions};
use flywheel_store::Store;
use flywheel_store::jobs::JobFilter;
use flywheel_store::scratch::{POSTGRES_URL, Scratch};
use flywheel_types::{AppId, JobId, JobState, VirtualClock};
use std::sync::Arc;
use std::time::Duration;

mod schedules;
mod stops;
mod workers;

/// A migrated store whose lease clock and business clock are moved by hand.
pub struct World {
    pub scratch: Scratch,
    pub lease: VirtualClock,
    pub clock: VirtualClock,
    pub app: AppId,
}

pub fn start() -> DateTime<Utc> {
    Utc.with_ymd_and_hms(2026, 6, 1, 9, 30, 0).unwrap()
}

impl World {
    pub fn store(&self) -> Store {
        self.scratch.store.clone()
    }
    pub fn pass(&self, seconds: i64) {
        self.lease.advance_to(self.scratch.store.lease_now() + TimeDelta::seconds(seconds));
    }
    pub async fn begin(&self) -> flywheel_store::Tx {
        use flywheel_types::BusinessClock as _;
        self.scratch.store.begin(self.clock.now()).await.unwrap()
    }
    pub async fn enqueue(&self, new: &NewJob) -> JobId {
        let mut tx = self.begin().await;
        let done: Enqueued = tx.job_enqueue(&self.app, new).await.unwrap();
        tx.commit().await.unwrap();
        done.id().clone()
    }
    pub async fn job(&self, id: &JobId) -> JobRow {
        self.scratch.store.job_get(&self.app, id).await.unwrap().unwrap()
    }
    pub async fn in_state(&self, state: JobState) -> Vec<JobRow> {
        let filter = JobFilter { state: Some(state), ..JobFilter::default() };
        let mut rows = self.scratch.store.job_list(&self.app, &filter, 1000).await.unwrap();
        rows.reverse();
        rows
    }
    /// How often the side effect with this name happened.
    pub async fn effects(&self, name: &str) -> usize {
        self.scratch.store.audit_list_subject(&self.app, name).await.unwrap().len()
    }
}

/// Short real times, so that heartbeats and polls happen while a test waits for a signal.
pub fn quick() -> WorkerOptions {
    WorkerOptions {
        heartbeat: Duration::from_millis(5),
        poll: Duration::from_millis(5),
        grace: Duration::from_millis(50),
        reap_every: Duration::ZERO,
        ..WorkerOptions::default()
    }
}

pub async fn world(postgres: bool) -> Option<World> {
    let lease = VirtualClock::new(start());
    let given: Option<Arc<dyn flywheel_types::LeaseClock>> = Some(Arc::new(lease.clone()));
    let scratch = if postgres {
        let Some(scratch) = Scratch::postgres(given).await.unwrap() else {
            println!("skipped: {POSTGRES_URL} is not set");
            return None;
        };
        scratch
    } else {
        Scratch::sqlite(given).await.unwrap()
    };
    let app: AppId = "shop".parse().unwrap();
    Some(World { scratch, lease, clock: VirtualClock::new(start()), app })
}

/// Makes two tests of each named function: `sqlite::name` and `postgres::name`.
#[macro_export]
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test]
            async fn $name() {
                let world = $crate::world(false).await.unwrap();
                super::$name(&world).await;
                world.scratch.remove().await.unwrap();
            })+
        }
        mod postgres {
            $(#[tokio::test]
            async fn $name() {
                let Some(world) = $crate::world(true).await else { return };
                super::$name(&world).await;
                world.scratch.remove().await.unwrap();
            })+
        }
    };
}
