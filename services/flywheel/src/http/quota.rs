//! Quotas of ingest keys, in events per minute. A key earns its quota evenly and can save one minute of it; a batch may
//! overdraw what is left, because its events are counted only when it was read. Kept in memory: a restart forgives.

use chrono::{DateTime, Utc};
use flywheel_types::{Error, ErrorKind};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// What a key has left.
#[derive(Debug, Clone, Copy)]
struct Account {
    events: f64,
    at: DateTime<Utc>,
}

/// Accounts of the keys that have a quota.
#[derive(Debug, Default)]
pub struct Quotas {
    accounts: Mutex<HashMap<String, Account>>,
}

impl Quotas {
    /// Whether a key with `per_minute` events may send at `now` (real time).
    ///
    /// # Errors
    /// `Quota` when the last minute's events are used up.
    pub fn check(&self, key: &str, per_minute: Option<u32>, now: DateTime<Utc>) -> Result<(), Error> {
        let Some(per_minute) = per_minute else { return Ok(()) };
        let most = f64::from(per_minute);
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let account = accounts.entry(key.to_owned()).or_insert(Account { events: most, at: now });
        let minutes = (now - account.at).num_milliseconds().max(0) as f64 / 60_000.0;
        *account = Account { events: (account.events + minutes * most).min(most), at: now };
        if account.events > 0.0 {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Quota,
            "quota_used_up",
            format!("the ingest key has sent its {per_minute} events of this minute"),
            "send the batch again after the time in Retry-After, or ask for a key with a larger quota",
        ))
    }

    /// Takes the events of a batch that was read.
    pub fn spend(&self, key: &str, events: u64) {
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = accounts.get_mut(key) {
            account.events -= events as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_earned_evenly_and_may_be_overdrawn_once() {
        let quotas = Quotas::default();
        let at = |s: i64| DateTime::from_timestamp(1000 + s, 0).unwrap();
        let check = |s| quotas.check("k", Some(60), at(s));
        check(0).unwrap();
        quotas.spend("k", 90);
        let e = check(0).unwrap_err();
        assert_eq!((e.kind, e.code), (ErrorKind::Quota, "quota_used_up"));
        assert!(check(30).is_err(), "30 earned, 30 owed");
        check(31).unwrap();
        check(600).unwrap();
        quotas.spend("k", 60);
        assert!(check(600).is_err(), "no more than a minute is saved");
        quotas.check("other", None, at(0)).unwrap();
        quotas.spend("other", 1_000_000);
        quotas.check("other", None, at(0)).unwrap();
    }
}
