//! Exponential back-off with full jitter (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015):
//! wait = uniform(0, min(cap, base · 2^(n−1))). The uniform number is derived from job and attempt, so that it needs no
//! generator and a test can predict it; a floor keeps a failing job from spinning.

use flywheel_store::jobs::JobRow;
use flywheel_types::Digest;
use std::time::Duration;

/// How long a failed job waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Largest wait after the first failure.
    pub base: Duration,
    /// Largest wait at all.
    pub cap: Duration,
    /// Smallest wait.
    pub floor: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { base: Duration::from_secs(5), cap: Duration::from_secs(15 * 60), floor: Duration::from_secs(1) }
    }
}

impl Backoff {
    /// Wait after the current attempt of `job` failed.
    #[must_use]
    pub fn wait(&self, job: &JobRow) -> Duration {
        let n = u32::try_from(job.counted_attempts().clamp(1, 32)).unwrap_or(32);
        let top = self.base.saturating_mul(2u32.saturating_pow(n - 1)).min(self.cap);
        let seed = Digest::of(format!("{}/{}", job.job_id, job.attempt).as_bytes());
        let mut first = [0u8; 4];
        first.copy_from_slice(&seed.0[..4]);
        let share = f64::from(u32::from_be_bytes(first)) / f64::from(u32::MAX);
        top.mul_f64(share).max(self.floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;
    use flywheel_types::{AppId, JobId, JobState};

    fn job(id: usize, attempt: i64) -> JobRow {
        let t = DateTime::default();
        JobRow {
            job_id: JobId::new(format!("j{id}")).unwrap(),
            app_id: AppId::new("a").unwrap(),
            kind: "k".into(),
            payload: serde_json::Value::Null,
            state: JobState::Running,
            priority: 0,
            run_at: t,
            concurrency_key: None,
            concurrency_limit: 1,
            dedup_key: None,
            attempt,
            uncounted: 0,
            max_attempts: 3,
            lease_owner: None,
            lease_expires_at: None,
            cancel_requested_at: None,
            progress: None,
            checkpoint_uri: None,
            result: None,
            last_error: None,
            schedule_id: None,
            scheduled_for: None,
            created_at: t,
            started_at: None,
            finished_at: None,
        }
    }

    #[test]
    fn waits_are_spread_below_the_doubling_top() {
        let b = Backoff::default();
        for (attempt, top) in [(1, 5.0), (2, 10.0), (3, 20.0), (40, 900.0)] {
            let waits: Vec<f64> = (0..500).map(|i| b.wait(&job(i, attempt)).as_secs_f64()).collect();
            assert!(waits.iter().all(|w| (1.0..=top).contains(w)), "attempt {attempt}");
            let mean = waits.iter().sum::<f64>() / 500.0;
            assert!((0.4 * top..0.65 * top).contains(&mean), "attempt {attempt}: mean {mean}");
        }
        assert_eq!(b.wait(&job(1, 2)), b.wait(&job(1, 2)));
    }
}
