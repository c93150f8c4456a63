//! What the fleet runs, counted for the overview.

use chrono::{DateTime, TimeDelta, Utc};
use flywheel_lake::read::InventoryRow;
use flywheel_types::TrustClass;
use std::collections::BTreeMap;

/// Hours after which a silent device counts as not reporting.
pub const SILENT_HOURS: i64 = 48;

/// Devices of one bundle; `None`: no bundle was confirmed yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BundleCount {
    pub bundle: Option<String>,
    pub devices: u64,
    pub not_reporting: u64,
}

/// The fleet in numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fleet {
    /// Most devices first.
    pub bundles: Vec<BundleCount>,
    pub devices: u64,
    pub not_reporting: u64,
    /// Senders that did not prove who they are; they are in none of the other numbers.
    pub anonymous: u64,
}

/// Counts the inventory at `now`.
pub fn count(rows: &[InventoryRow], now: DateTime<Utc>) -> Fleet {
    let silent_since = now - TimeDelta::hours(SILENT_HOURS);
    let mut by_bundle: BTreeMap<Option<&str>, BundleCount> = BTreeMap::new();
    let mut fleet = Fleet::default();
    for row in rows {
        if row.trust == TrustClass::Anonymous {
            fleet.anonymous += 1;
            continue;
        }
        let silent = u64::from(row.last_seen < silent_since);
        let entry = by_bundle.entry(row.bundle.as_deref()).or_default();
        entry.devices += 1;
        entry.not_reporting += silent;
        fleet.devices += 1;
        fleet.not_reporting += silent;
    }
    fleet.bundles = by_bundle.into_iter().map(|(b, n)| BundleCount { bundle: b.map(str::to_owned), ..n }).collect();
    fleet.bundles.sort_by(|a, b| b.devices.cmp(&a.devices).then_with(|| a.bundle.cmp(&b.bundle)));
    fleet
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(bundle: Option<&str>, trust: TrustClass, hours_ago: i64) -> InventoryRow {
        InventoryRow {
            install: "i".into(),
            trust,
            bundle: bundle.map(str::to_owned),
            confirmed_at: None,
            last_seen: DateTime::UNIX_EPOCH - TimeDelta::hours(hours_ago),
            device_class: String::new(),
        }
    }

    #[test]
    fn devices_are_counted_by_bundle_and_anonymous_senders_apart() {
        let rows = [
            row(Some("a"), TrustClass::Keyed, 1),
            row(Some("b"), TrustClass::Keyed, 49),
            row(Some("b"), TrustClass::Attested, 1),
            row(None, TrustClass::Keyed, 0),
            row(Some("a"), TrustClass::Anonymous, 0),
        ];
        let got = count(&rows, DateTime::UNIX_EPOCH);
        assert_eq!((got.devices, got.not_reporting, got.anonymous), (4, 1, 1));
        assert_eq!(got.bundles[0], BundleCount { bundle: Some("b".into()), devices: 2, not_reporting: 1 });
        assert_eq!(got.bundles.len(), 3);
    }
}
