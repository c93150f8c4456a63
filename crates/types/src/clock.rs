//! Time is a parameter. `BusinessClock` drives policies (gates, windows, TTLs) and may be virtual;
//! `LeaseClock` drives leases, heartbeats and network time-outs and is always real.

use chrono::{DateTime, Utc};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// The clock of policies: what the fleet experienced. May be virtual in simulations and tests.
pub trait BusinessClock: Send + Sync {
    fn now(&self) -> DateTime<Utc>;
}

/// The clock of leases and time-outs. Never virtual in production; tests move it by hand.
pub trait LeaseClock: Send + Sync {
    /// Milliseconds since the Unix epoch.
    fn now_ms(&self) -> i64;
}

/// The machine's clock, for both roles.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl BusinessClock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
    fn now(&self) -> DateTime<Utc> {
        Utc::now()
    }
}
impl LeaseClock for SystemClock {
    fn now_ms(&self) -> i64 {
        BusinessClock::now(self).timestamp_millis()
    }
}

/// A clock that moves only when told to, and never backwards.
#[derive(Debug, Clone)]
pub struct VirtualClock(Arc<AtomicI64>);

impl VirtualClock {
    #[must_use]
    pub fn new(start: DateTime<Utc>) -> Self {
        Self(Arc::new(AtomicI64::new(start.timestamp_micros())))
    }
    /// Moves to `to`; a time in the past leaves the clock where it is.
    pub fn advance_to(&self, to: DateTime<Utc>) {
        self.0.fetch_max(to.timestamp_micros(), Ordering::SeqCst);
    }
}
impl BusinessClock for VirtualClock {
    fn now(&self) -> DateTime<Utc> {
        DateTime::from_timestamp_micros(self.0.load(Ordering::SeqCst)).unwrap_or_default()
    }
}
impl LeaseClock for VirtualClock {
    fn now_ms(&self) -> i64 {
        self.0.load(Ordering::SeqCst) / 1000
    }
}
