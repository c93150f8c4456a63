//! Hardware and circumstances of a simulated phone, drawn from a mix by seed.

use flywheel_sdk::{Conditions, Network, Thermal};
use flywheel_types::wire::DeviceFactsV1;
use rand::Rng as _;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

/// One kind of phone.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Device class, for example `mid-6gb`.
    pub class: &'static str,
    pub model: &'static str,
    pub soc: &'static str,
    pub ram_bytes: u64,
    pub os: &'static str,
    /// Share of the fleet, relative.
    pub weight: u32,
}

/// A fleet's composition.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileMix {
    pub profiles: Vec<Profile>,
    /// Locale and relative share.
    pub locales: Vec<(&'static str, u32)>,
    /// Chance that a phone has no network during a tick.
    pub offline: f64,
    /// Chance that its network is metered.
    pub metered: f64,
    /// Chance that it is hot (no downloads then).
    pub hot: f64,
}

impl Default for ProfileMix {
    /// Four classes, three quarters English, one quarter Chinese, 4 % offline, 12 % metered, 2 % hot.
    fn default() -> Self {
        const GIB: u64 = 1 << 30;
        let p = |class, model, soc, ram_bytes, os, weight| Profile { class, model, soc, ram_bytes, os, weight };
        Self {
            profiles: vec![
                p("low-4gb", "moto-g", "sd680", 4 * GIB, "android-13", 25),
                p("mid-6gb", "pixel-6a", "tensor-g1", 6 * GIB, "android-15", 40),
                p("high-8gb", "iphone-15-pro", "a17-pro", 8 * GIB, "ios-18", 25),
                p("flagship-12gb", "galaxy-s25", "sd8-elite", 12 * GIB, "android-15", 10),
            ],
            locales: vec![("en-US", 75), ("zh-CN", 25)],
            offline: 0.04,
            metered: 0.12,
            hot: 0.02,
        }
    }
}

/// Picks by relative weight; `roll` is any number.
fn weighted<T>(items: &[(T, u32)], roll: u64) -> Option<&T> {
    let total: u64 = items.iter().map(|(_, w)| u64::from(*w)).sum();
    let mut left = roll.checked_rem(total)?;
    items.iter().find_map(|(item, w)| {
        let w = u64::from(*w);
        if left < w {
            return Some(item);
        }
        left -= w;
        None
    })
}

/// What the SDK is told about one phone.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    pub class: &'static str,
    pub locale: &'static str,
    pub facts: DeviceFactsV1,
}

impl ProfileMix {
    /// The phone number `index` of a fleet with `seed`.
    #[must_use]
    pub fn draw(&self, seed: u64, index: usize) -> Drawn {
        let mut rng = stream(seed, index, "profile");
        let kinds: Vec<(&Profile, u32)> = self.profiles.iter().map(|p| (p, p.weight)).collect();
        let profile = weighted(&kinds, rng.random());
        let locale = weighted(&self.locales, rng.random()).copied().unwrap_or("en-US");
        let Some(profile) = profile.copied() else {
            return Drawn { class: "unknown", locale, facts: DeviceFactsV1::default() };
        };
        let facts = DeviceFactsV1 {
            class: Some(profile.class.into()),
            model: Some(profile.model.into()),
            soc: Some(profile.soc.into()),
            ram_bytes: Some(profile.ram_bytes),
            os: Some(profile.os.into()),
            locale: Some(locale.into()),
            app_version: Some("1.0.0".into()),
            runtime: Some("llama.cpp".into()),
        };
        Drawn { class: profile.class, locale, facts }
    }

    /// Network, battery and heat of a phone during one tick. A function of (seed, phone, tick) only, so that it does
    /// not depend on who asks when.
    #[must_use]
    pub fn conditions(&self, seed: u64, index: usize, tick: u64) -> Conditions {
        let mut rng = stream(seed ^ tick.wrapping_mul(0x9E37_79B9_7F4A_7C15), index, "conditions");
        let roll: f64 = rng.random();
        let network = if roll < self.offline {
            Network::Offline
        } else if roll < self.offline + self.metered {
            Network::Metered
        } else {
            Network::Unmetered
        };
        Conditions {
            network,
            plugged_in: rng.random_bool(0.3),
            battery_pct: Some(rng.random_range(35..=100)),
            thermal: if rng.random_bool(self.hot.clamp(0.0, 1.0)) { Thermal::Severe } else { Thermal::Nominal },
            free_bytes: None,
        }
    }
}

/// Independent random stream of a phone for one purpose.
#[must_use]
pub fn stream(seed: u64, index: usize, purpose: &str) -> ChaCha8Rng {
    use sha2::{Digest as _, Sha256};
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update((index as u64).to_le_bytes());
    hash.update(purpose.as_bytes());
    ChaCha8Rng::from_seed(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_mix_is_met_and_repeats() {
        let mix = ProfileMix::default();
        let mut classes: BTreeMap<&str, u32> = BTreeMap::new();
        for i in 0..4000 {
            let d = mix.draw(7, i);
            assert_eq!(d, mix.draw(7, i));
            *classes.entry(d.class).or_default() += 1;
        }
        assert!((850..1150).contains(&classes["low-4gb"]), "{classes:?}");
        assert!((300..500).contains(&classes["flagship-12gb"]), "{classes:?}");
        assert_ne!(
            (0..50).map(|i| mix.draw(7, i).class).collect::<Vec<_>>(),
            (0..50).map(|i| mix.draw(8, i).class).collect::<Vec<_>>()
        );
    }

    #[test]
    fn conditions_follow_their_shares() {
        let mix = ProfileMix::default();
        let offline = (0..5000).filter(|i| mix.conditions(1, *i, 3).network == Network::Offline).count();
        assert!((130..280).contains(&offline), "{offline}");
    }
}
