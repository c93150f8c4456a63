//! Whether a download may go on right now, decided from facts the app supplies. A pure function, asked before the
//! first byte and between chunks.

use crate::config::DownloadPolicy;
use crate::env::{Conditions, Network, Thermal};
use chrono::{DateTime, Utc};

/// Why nothing was done. Shown to the user as it is ("waiting for Wi-Fi").
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Wait {
    #[error("waiting for a network")]
    Network,
    #[error("waiting for Wi-Fi: {bytes} bytes are more than a metered network may carry")]
    Unmetered { bytes: u64 },
    #[error("waiting for power: battery at {battery_pct} %")]
    Power { battery_pct: u8 },
    #[error("waiting for the device to cool down ({0:?})")]
    Cooler(Thermal),
    #[error("waiting for space: {needed_bytes} bytes needed, {free_bytes} free")]
    Space { needed_bytes: u64, free_bytes: u64 },
    #[error("waiting until {0}")]
    Until(DateTime<Utc>),
}

/// Decides for a download with `missing_bytes` to go.
///
/// # Errors
/// The first condition that does not hold.
pub(crate) fn may_download(policy: &DownloadPolicy, now: &Conditions, missing_bytes: u64) -> Result<(), Wait> {
    match now.network {
        Network::Offline => return Err(Wait::Network),
        Network::Metered if missing_bytes > policy.metered_max_bytes => {
            return Err(Wait::Unmetered { bytes: missing_bytes });
        }
        Network::Metered | Network::Unmetered => {}
    }
    if let Some(pct) = now.battery_pct
        && !now.plugged_in
        && pct < policy.min_battery_pct
    {
        return Err(Wait::Power { battery_pct: pct });
    }
    if now.thermal > policy.max_thermal {
        return Err(Wait::Cooler(now.thermal));
    }
    let needed_bytes = missing_bytes.saturating_add(policy.reserve_bytes);
    match now.free_bytes {
        Some(free_bytes) if free_bytes < needed_bytes => Err(Wait::Space { needed_bytes, free_bytes }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_condition_is_named() {
        let p = DownloadPolicy { metered_max_bytes: 10, reserve_bytes: 100, ..Default::default() };
        let ok = Conditions { free_bytes: Some(1000), battery_pct: Some(50), plugged_in: false, ..Default::default() };
        assert_eq!(may_download(&p, &ok, 900), Ok(()));
        assert_eq!(may_download(&p, &ok, 901), Err(Wait::Space { needed_bytes: 1001, free_bytes: 1000 }));
        let c = Conditions { network: Network::Offline, ..ok };
        assert_eq!(may_download(&p, &c, 1), Err(Wait::Network));
        let c = Conditions { network: Network::Metered, ..ok };
        assert_eq!(may_download(&p, &c, 10), Ok(()));
        assert_eq!(may_download(&p, &c, 11), Err(Wait::Unmetered { bytes: 11 }));
        let c = Conditions { battery_pct: Some(29), ..ok };
        assert_eq!(may_download(&p, &c, 1), Err(Wait::Power { battery_pct: 29 }));
        assert_eq!(may_download(&p, &Conditions { plugged_in: true, ..c }, 1), Ok(()));
        let c = Conditions { thermal: Thermal::Severe, ..ok };
        assert_eq!(may_download(&p, &c, 1), Err(Wait::Cooler(Thermal::Severe)));
    }
}
