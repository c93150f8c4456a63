//! Quotas of single senders, in events per minute: of an install that proves itself by its signature, and of a network (IPv4 /24,
//! IPv6 /56). They stop one broken or hostile sender, not a fleet, so their defaults are off. Accounts live in a table of fixed
//! size; when it is full the sender that was silent longest is forgotten, which forgives it, and so does a restart.

use axum::http::HeaderMap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, Utc};
use flywheel_types::wire::PUBLIC_KEY_HEADER;
use flywheel_types::{Error, ErrorKind, InstallId};
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};

/// Accounts per table: 2 MB.
const ACCOUNTS: usize = 1 << 16;
/// Places in which one sender may be found.
const WAYS: usize = 8;

/// Address of the other end of the connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub IpAddr);

/// The part of an address that one household or office shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Network {
    V4([u8; 3]),
    V6([u8; 7]),
}

impl Network {
    /// Network of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        let v4 = |a: Ipv4Addr| {
            let [a, b, c, _] = a.octets();
            Self::V4([a, b, c])
        };
        let v6 = |a: Ipv6Addr| {
            let [a, b, c, d, e, f, g, ..] = a.octets();
            Self::V6([a, b, c, d, e, f, g])
        };
        match address.to_canonical() {
            IpAddr::V4(a) => v4(a),
            IpAddr::V6(a) => v6(a),
        }
    }
}

/// Who sent a request, as far as it can be told before its body is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Senders {
    /// Only claimed until the signature was checked; a request whose signature does not fit is refused and spends nothing.
    pub install: Option<InstallId>,
    pub network: Option<Network>,
}

impl Senders {
    /// From the headers and the connection; the last `proxies` entries of `X-Forwarded-For` were written by proxies that are
    /// trusted.
    #[must_use]
    pub fn of(headers: &HeaderMap, peer: Option<Peer>, proxies: usize) -> Self {
        let key = headers.get(PUBLIC_KEY_HEADER).and_then(|v| v.to_str().ok());
        let key = key.and_then(|k| STANDARD.decode(k.trim()).ok()).and_then(|k| <[u8; 32]>::try_from(k).ok());
        let address = client(headers, proxies).or(peer.map(|p| p.0));
        Self { install: key.map(|k| InstallId::of_public_key(&k)), network: address.map(Network::of) }
    }
}

/// The address that the first trusted proxy saw. What stands before it was written by the client, or anybody.
fn client(headers: &HeaderMap, proxies: usize) -> Option<IpAddr> {
    let all = headers.get_all("x-forwarded-for").iter().filter_map(|v| v.to_str().ok());
    let chain: Vec<&str> = all.flat_map(|v| v.split(',')).map(str::trim).collect();
    let place = chain.len().checked_sub(proxies).filter(|_| proxies > 0)?;
    let text = chain.get(place)?;
    // some proxies write the port too
    text.parse().ok().or_else(|| text.parse::<std::net::SocketAddr>().ok().map(|a| a.ip()))
}

/// Quotas of installs and networks.
#[derive(Debug)]
pub struct SenderQuotas {
    per_install: Option<u32>,
    per_network: Option<u32>,
    installs: Accounts,
    networks: Accounts,
}

impl SenderQuotas {
    /// Events per minute of one install and of one network; 0 is no quota.
    #[must_use]
    pub fn new(per_install: u32, per_network: u32) -> Self {
        let on = |n: u32| (n > 0).then_some(n);
        Self {
            per_install: on(per_install),
            per_network: on(per_network),
            installs: Accounts::new(if per_install > 0 { ACCOUNTS } else { 0 }),
            networks: Accounts::new(if per_network > 0 { ACCOUNTS } else { 0 }),
        }
    }

    /// Whether the sender may send at `now` (real time).
    ///
    /// # Errors
    /// `Quota` when the last minute's events of its install or its network are used up.
    pub fn check(&self, sender: &Senders, now: DateTime<Utc>) -> Result<(), Error> {
        if let (Some(most), Some(install)) = (self.per_install, &sender.install)
            && self.installs.left(install, most, now) <= 0.0
        {
            return Err(used_up("install_quota_used_up", "install", most));
        }
        if let (Some(most), Some(network)) = (self.per_network, &sender.network)
            && self.networks.left(network, most, now) <= 0.0
        {
            return Err(used_up("network_quota_used_up", "network", most));
        }
        Ok(())
    }

    /// Takes the events of a batch that was read, and whose signature fitted if it had one.
    pub fn spend(&self, sender: &Senders, events: u64, now: DateTime<Utc>) {
        if let (Some(most), Some(install)) = (self.per_install, &sender.install) {
            self.installs.spend(install, most, events, now);
        }
        if let (Some(most), Some(network)) = (self.per_network, &sender.network) {
            self.networks.spend(network, most, events, now);
        }
    }
}

fn used_up(code: &'static str, who: &str, most: u32) -> Error {
    let message = format!("the {who} has sent its {most} events of this minute");
    Error::new(ErrorKind::Quota, code, message, "send the batch again after the time in Retry-After")
}

/// What a sender has left, and when that was.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    /// Keyed hash of the sender; two senders with the same share an account.
    of: u64,
    events: f64,
    at_ms: i64,
}

/// Accounts in sets of [`WAYS`].
#[derive(Debug)]
struct Accounts {
    hasher: RandomState,
    places: Mutex<Vec<Account>>,
}

impl Accounts {
    fn new(size: usize) -> Self {
        Self { hasher: RandomState::new(), places: Mutex::new(vec![Account::default(); size]) }
    }

    fn left(&self, who: &impl Hash, most: u32, now: DateTime<Utc>) -> f64 {
        self.account(who, most, now, |a| a.events).unwrap_or(f64::from(most))
    }

    fn spend(&self, who: &impl Hash, most: u32, events: u64, now: DateTime<Utc>) {
        self.account(who, most, now, |a| a.events -= events as f64);
    }

    /// The account with what was earned until `now`; one that is not there takes the place of the one that was used least lately.
    /// `None` for a table without places.
    fn account<T>(
        &self,
        who: &impl Hash,
        most: u32,
        now: DateTime<Utc>,
        use_it: impl FnOnce(&mut Account) -> T,
    ) -> Option<T> {
        let (of, now, most) = (self.hasher.hash_one(who), now.timestamp_millis(), f64::from(most));
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let sets = (places.len() / WAYS) as u64;
        let first = usize::try_from(of.checked_rem(sets)?).ok()? * WAYS;
        let set = places.get_mut(first..first + WAYS)?;
        let found = set.iter().position(|a| a.of == of && a.at_ms != 0);
        let oldest = || set.iter().enumerate().min_by_key(|(_, a)| a.at_ms).map(|(i, _)| i);
        let place = found.or_else(oldest)?;
        let account = set.get_mut(place)?;
        if found.is_none() {
            *account = Account { of, events: most, at_ms: now };
        }
        let minutes = (now - account.at_ms).max(0) as f64 / 60_000.0;
        *account = Account { of, events: (account.events + minutes * most).min(most), at_ms: now.max(account.at_ms) };
        Some(use_it(account))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1000 + s, 0).unwrap()
    }
    fn from(address: &str) -> Senders {
        Senders { install: None, network: Some(Network::of(address.parse().unwrap())) }
    }

    #[test]
    fn a_network_is_what_a_household_shares() {
        let of = |a: &str| Network::of(a.parse().unwrap());
        assert_eq!(of("192.0.2.7"), of("192.0.2.250"));
        assert_eq!(of("192.0.2.7"), of("::ffff:192.0.2.9"));
        assert_ne!(of("192.0.2.7"), of("192.0.3.7"));
        assert_eq!(of("2001:db8:1:ff00::1"), of("2001:db8:1:ffff:9::2"));
        assert_ne!(of("2001:db8:1:ff00::1"), of("2001:db8:1:fe00::1"));
    }

    #[test]
    fn only_entries_of_trusted_proxies_count() {
        let mut headers = HeaderMap::new();
        headers.append("x-forwarded-for", "10.9.9.9, 198.51.100.7".parse().unwrap());
        headers.append("x-forwarded-for", "203.0.113.5:4711".parse().unwrap());
        let peer = Some(Peer("192.0.2.1".parse().unwrap()));
        let network = |proxies| Senders::of(&headers, peer, proxies).network;
        assert_eq!(network(0), from("192.0.2.1").network);
        assert_eq!(network(1), from("203.0.113.5").network);
        assert_eq!(network(2), from("198.51.100.7").network);
        assert_eq!(network(4), from("192.0.2.1").network, "fewer entries than proxies");
        assert_eq!(Senders::of(&HeaderMap::new(), None, 0), Senders { install: None, network: None });
    }

    #[test]
    fn installs_and_networks_have_their_own_quota() {
        let quotas = SenderQuotas::new(10, 60);
        let key = [7u8; 32];
        let mut headers = HeaderMap::new();
        headers.insert(PUBLIC_KEY_HEADER, STANDARD.encode(key).parse().unwrap());
        let phone = Senders::of(&headers, Some(Peer("192.0.2.1".parse().unwrap())), 0);
        assert_eq!(phone.install, Some(InstallId::of_public_key(&key)));
        quotas.check(&phone, at(0)).unwrap();
        quotas.spend(&phone, 10, at(0));
        let e = quotas.check(&phone, at(0)).unwrap_err();
        assert_eq!((e.kind, e.code), (ErrorKind::Quota, "install_quota_used_up"));
        let neighbour = from("192.0.2.99");
        quotas.check(&neighbour, at(0)).unwrap();
        quotas.spend(&neighbour, 50, at(0));
        assert_eq!(quotas.check(&neighbour, at(0)).unwrap_err().code, "network_quota_used_up");
        quotas.check(&from("192.0.3.1"), at(0)).unwrap();
        quotas.check(&neighbour, at(1)).unwrap();
        quotas.check(&phone, at(6)).unwrap();
        let off = SenderQuotas::new(0, 0);
        off.spend(&phone, 1_000_000, at(0));
        off.check(&phone, at(0)).unwrap();
    }

    #[test]
    fn the_table_stays_as_large_as_it_is_and_keeps_who_is_active() {
        let quotas = SenderQuotas::new(0, 5);
        let loud = from("192.0.2.1");
        quotas.spend(&loud, 1000, at(0));
        for n in 0..200_000u32 {
            let other = Senders { install: None, network: Some(Network::of(Ipv4Addr::from(n << 8).into())) };
            quotas.check(&other, at(0)).unwrap();
            if n % 1000 == 0 {
                assert!(quotas.check(&loud, at(1)).is_err(), "{n} others did not push it out");
            }
        }
        assert_eq!(quotas.networks.places.lock().unwrap().len(), ACCOUNTS);
        assert!(quotas.installs.places.lock().unwrap().is_empty());
    }
}
