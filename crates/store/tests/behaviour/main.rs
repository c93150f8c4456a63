//! One behaviour suite, run on SQLite and on PostgreSQL. The PostgreSQL half needs FLYWHEEL_TEST_POSTGRES_URL and says so
//! when it is skipped.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests: a failure must fail the test, a skip must be seen"
)]

use chrono::{DateTime, TimeDelta, TimeZone as _, Utc};
use flywheel_store::scratch::{POSTGRES_URL, Scratch};
use flywheel_types::{AppId, Digest, VirtualClock};
use std::sync::Arc;

mod chunks;
mod corrections;
mod erasures;
mod jobs;
mod ledger;
mod models;
mod outbox;
mod rollouts;
mod schema;
mod tenants;
mod views;

/// What a test gets: a migrated store, its lease clock and an app.
pub struct World {
    pub scratch: Scratch,
    pub clock: VirtualClock,
    pub app: AppId,
}

impl World {
    pub fn store(&self) -> &flywheel_store::Store {
        &self.scratch.store
    }
    pub async fn begin(&self) -> flywheel_store::Tx {
        self.store().begin(noon()).await.unwrap()
    }
    /// Moves lease time.
    pub fn pass(&self, seconds: i64) {
        self.clock.advance_to(self.store().lease_now() + TimeDelta::seconds(seconds));
    }
}

pub fn noon() -> DateTime<Utc> {
    Utc.with_ymd_and_hms(2026, 6, 1, 12, 0, 0).unwrap()
}
pub fn id<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().unwrap()
}
pub fn digest(text: &str) -> Digest {
    Digest::of(text.as_bytes())
}

pub async fn world(postgres: bool) -> Option<World> {
    let clock = VirtualClock::new(noon());
    let lease: Option<Arc<dyn flywheel_types::LeaseClock>> = Some(Arc::new(clock.clone()));
    let scratch = if postgres {
        let Some(scratch) = Scratch::postgres(lease).await.unwrap() else {
            println!("skipped: {POSTGRES_URL} is not set");
            return None;
        };
        scratch
    } else {
        Scratch::sqlite(lease).await.unwrap()
    };
    let app = id("shop");
    let mut tx = scratch.store.begin(noon()).await.unwrap();
    tx.app_create(&app, &Default::default()).await.unwrap();
    tx.commit().await.unwrap();
    Some(World { scratch, clock, app })
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

/// The call failed because somebody was faster or the state forbids it.
#[macro_export]
macro_rules! assert_conflict {
    ($call:expr) => {{
        let got = $call;
        assert!(matches!(got, Err(flywheel_store::Error::Conflict { .. })), "{got:?}");
    }};
}
