//! When to try again: full jitter (a uniform delay between zero and a doubling bound), or exactly what the server
//! asked for in `Retry-After`. Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

use chrono::{DateTime, Duration, Utc};
use rand::{Rng as _, RngCore};

/// A server may not silence a device for longer than this, seconds.
const RETRY_AFTER_CAP_S: u64 = 24 * 3600;

/// Retry state of one channel (uploads or polls). Lives in memory: a restart is a fresh start.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    base_s: u64,
    cap_s: u64,
    failures: u32,
    set_at: DateTime<Utc>,
    not_before: DateTime<Utc>,
}

impl Backoff {
    pub(crate) fn new(base_s: u64, cap_s: u64) -> Self {
        Self {
            base_s: base_s.max(1),
            cap_s: cap_s.max(1),
            failures: 0,
            set_at: DateTime::UNIX_EPOCH,
            not_before: DateTime::UNIX_EPOCH,
        }
    }

    /// The time to wait for, or `None` when a try is allowed now. A clock that was set back opens the gate: waiting
    /// for a moment that lies a year ahead would be silence.
    pub(crate) fn wait_until(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        (now < self.not_before && now >= self.set_at).then_some(self.not_before)
    }

    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
        self.not_before = DateTime::UNIX_EPOCH;
    }

    pub(crate) fn failed(
        &mut self,
        now: DateTime<Utc>,
        retry_after_s: Option<u64>,
        rng: &mut dyn RngCore,
    ) -> DateTime<Utc> {
        let bound_s = self.base_s.saturating_mul(1 << self.failures.min(30)).min(self.cap_s);
        let jitter_ms = rng.random_range(0..=bound_s.saturating_mul(1000));
        let asked_ms = retry_after_s.map_or(0, |s| s.min(RETRY_AFTER_CAP_S) * 1000);
        self.failures = self.failures.saturating_add(1);
        self.set_at = now;
        let wait_ms = if asked_ms > 0 { asked_ms } else { jitter_ms };
        self.not_before = now + Duration::milliseconds(i64::try_from(wait_ms).unwrap_or(i64::MAX / 2));
        self.not_before
    }
}

/// Seconds of a `Retry-After` value: a number or an HTTP date (RFC 9110, 10.2.3).
pub(crate) fn retry_after_s(value: &str, now: DateTime<Utc>) -> Option<u64> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<u64>() {
        return Some(seconds);
    }
    let at = DateTime::parse_from_rfc2822(value).ok()?;
    u64::try_from((at.with_timezone(&Utc) - now).num_seconds().max(0)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;
    use rand_chacha::ChaCha8Rng;

    fn at(s: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(s, 0).unwrap()
    }

    #[test]
    fn delays_stay_under_a_doubling_bound_and_the_cap() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut b = Backoff::new(2, 60);
        for n in 0..40u32 {
            let until = b.failed(at(1000), None, &mut rng);
            let bound = (2u64 << n.min(20)).min(60);
            assert!(until <= at(1000) + Duration::seconds(bound as i64), "try {n}: {until}");
        }
        b.succeeded();
        assert_eq!(b.wait_until(at(1000)), None);
    }

    #[test]
    fn retry_after_wins_over_jitter_and_is_capped() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut b = Backoff::new(2, 60);
        assert_eq!(b.failed(at(0), Some(120), &mut rng), at(120));
        assert_eq!(b.wait_until(at(119)), Some(at(120)));
        assert_eq!(b.wait_until(at(120)), None);
        assert_eq!(b.failed(at(0), Some(u64::MAX), &mut rng), at(24 * 3600));
    }

    #[test]
    fn a_clock_set_back_does_not_silence_the_device() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut b = Backoff::new(2, 60);
        b.failed(at(40_000_000), Some(30), &mut rng);
        assert_eq!(b.wait_until(at(8_000_000)), None);
    }

    #[test]
    fn retry_after_reads_both_forms() {
        assert_eq!(retry_after_s(" 17 ", at(0)), Some(17));
        let now = DateTime::parse_from_rfc3339("1994-11-06T08:49:00Z").unwrap().with_timezone(&Utc);
        assert_eq!(retry_after_s("Sun, 06 Nov 1994 08:49:37 GMT", now), Some(37));
        assert_eq!(retry_after_s("soon", now), None);
    }
}
