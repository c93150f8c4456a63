//! Normal life of a device: first contact, idle polls, new releases, roll-back, sleeping for weeks, restarts.

use crate::support::{Phone, Shop, app, t};
use flywheel_bundle::tuf::Role;
use flywheel_bundle::verify::{MemoryTrustStore, Options, Refresh, StoreError, TrustStore};
use flywheel_bundle::{InstallBlocked, Reply, UpdateClient, verify_manifest};

#[test]
fn first_contact_asks_in_the_order_of_the_specification() {
    let shop = Shop::open();
    let mut phone = shop.client();
    let mut asked = Vec::new();
    phone.client.begin(t(0));
    while let Some(r) = phone.client.next_request() {
        let reply = match shop.repo.files.get(&r.path) {
            Some(b) => Reply::Found(b.as_slice().into()),
            None => Reply::NotFound,
        };
        asked.push(r.path);
        phone.client.supply(reply).unwrap();
    }
    let fixed = [
        "metadata/2.root.json",
        "metadata/timestamp.json",
        "metadata/1.snapshot.json",
        "metadata/1.targets.json",
        "metadata/1.catalog.json",
        "metadata/1.rollout.json",
    ];
    assert_eq!(&asked[..6], &fixed);
    assert!(asked[6].starts_with("targets/rollout/") && asked[6].ends_with(".assignment.json"));
    assert_eq!(asked.len(), 7);
}

#[test]
fn an_idle_poll_is_one_request() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let before = phone.store.load("metadata.json").unwrap();
    phone.client.begin(t(1));
    assert_eq!(phone.client.next_request().unwrap().path, "metadata/timestamp.json");
    phone.client.supply(Reply::NotModified).unwrap();
    assert_eq!(phone.client.next_request(), None);
    assert_eq!(phone.refresh(&shop.repo, 1), Ok(Refresh::Unchanged));
    assert_eq!(phone.store.load("metadata.json").unwrap(), before, "nothing is written either");
    // A daily re-signing costs root probe and timestamp, nothing else.
    shop.resign(t(1));
    phone.client.begin(t(1));
    let mut asked = 0;
    while let Some(r) = phone.client.next_request() {
        asked += 1;
        let found = shop.repo.files.get(&r.path).map(|b| Reply::Found(b.as_slice().into()));
        phone.client.supply(found.unwrap_or(Reply::NotFound)).unwrap();
    }
    assert_eq!(asked, 2);
}

#[test]
fn a_rollback_is_a_newer_assignment_of_an_older_bundle() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let old = phone.bundle().unwrap();
    let m = shop.manifest(2, 1);
    shop.release(&m, t(1)).unwrap();
    assert_eq!(phone.refresh(&shop.repo, 1), Ok(Refresh::Updated));
    assert_eq!(phone.bundle(), Some(m.id().unwrap()));
    shop.assign(Some(old), t(2)).unwrap();
    phone.refresh(&shop.repo, 2).unwrap();
    assert_eq!(phone.bundle(), Some(old));
    assert!(phone.client.installable(&old, t(2)).is_ok());
    // And forward again.
    shop.assign(Some(m.id().unwrap()), t(3)).unwrap();
    phone.refresh(&shop.repo, 3).unwrap();
    assert_eq!(phone.bundle(), Some(m.id().unwrap()));
}

#[test]
fn manifests_are_accepted_only_as_listed() {
    let shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let id = phone.bundle().unwrap();
    let state = phone.client.may_install(t(0)).unwrap();
    let entry = phone.client.installable(&id, t(0)).unwrap();
    let bytes = &shop.repo.files[&entry.location];
    let manifest = verify_manifest(bytes, entry, state).unwrap();
    assert_eq!((manifest.seq, manifest.id().unwrap()), (1, id));
    let mut tampered = bytes.clone();
    let at = tampered.windows(6).position(|w| w == b"Apache").unwrap();
    tampered[at] = b'B';
    assert!(matches!(verify_manifest(&tampered, entry, state), Err(InstallBlocked::ManifestMismatch(_))));
    let mut other = entry.clone();
    other.security_epoch = 9;
    assert!(matches!(verify_manifest(bytes, &other, state), Err(InstallBlocked::ManifestMismatch(_))));
    let mut without_blob = (**state).clone();
    without_blob.blobs.clear();
    assert!(matches!(verify_manifest(bytes, entry, &without_blob), Err(InstallBlocked::ManifestMismatch(_))));
}

/// delivery.md 6, case 2: metadata expired everywhere.
#[test]
fn expired_metadata_keeps_the_model_running_and_installs_nothing() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let error = phone.refresh(&shop.repo, 10).unwrap_err();
    assert_eq!(error.code(), "stale");
    assert!(phone.bundle().is_some(), "what is installed keeps running");
    let id = phone.bundle().unwrap();
    let blocked = phone.client.installable(&id, t(10)).unwrap_err();
    assert_eq!(blocked.code(), "stale");
    phone.restart();
    assert!(phone.bundle().is_some(), "also after a restart");
    assert!(phone.client.may_install(t(10)).is_err());
    shop.resign(t(10));
    phone.refresh(&shop.repo, 10).unwrap();
    assert!(phone.client.installable(&id, t(10)).is_ok(), "healed without anybody's help");
}

/// delivery.md 6, case 1: clocks that step back, jump ahead, or are years behind.
#[test]
fn clocks_do_not_lock_a_device_out() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 3).unwrap();
    phone.refresh(&shop.repo, 1).unwrap();
    shop.resign(t(3));
    phone.refresh(&shop.repo, 1).unwrap();
    assert_eq!(phone.refresh(&shop.repo, 3000).unwrap_err().code(), "stale");
    phone.restart();
    shop.resign(t(4));
    phone.refresh(&shop.repo, 4).unwrap();
    assert!(phone.client.may_install(t(4)).is_ok());
    // A clock years behind is lifted to the newest timestamp's signing time, so expiry still works.
    assert_eq!(phone.client.now(t(-2000)), t(4));
    assert_eq!(Phone::new(shop.root()).client.now(t(-2000)), t(-30), "before any contact: build time");
}

#[test]
fn a_restart_needs_no_network() {
    let shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let before = phone.client.state().unwrap().clone();
    phone.restart();
    assert!(!phone.client.recovered());
    assert_eq!(**phone.client.may_install(t(1)).unwrap(), *before);
    assert_eq!(phone.refresh(&shop.repo, 1), Ok(Refresh::Unchanged));
}

#[derive(Clone, Default)]
struct FullDisk(MemoryTrustStore, std::sync::Arc<std::sync::atomic::AtomicBool>);

impl TrustStore for FullDisk {
    fn load(&self, record: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.0.load(record)
    }
    fn save(&mut self, record: &str, bytes: &[u8]) -> Result<(), StoreError> {
        if self.1.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(StoreError { record: record.to_owned(), why: "no space left".to_owned() });
        }
        self.0.save(record, bytes)
    }
}

#[test]
fn trust_that_cannot_be_stored_blocks_installs_until_it_can() {
    let mut shop = Shop::open();
    let disk = FullDisk::default();
    let store = Box::new(disk.clone());
    let mut client = UpdateClient::open(shop.root(), app(), t(-30), store, Options::default()).unwrap();
    let refresh = |c: &mut UpdateClient, shop: &Shop| flywheel_bundle::verify::refresh(c, &shop.repo, t(0));
    refresh(&mut client, &shop).unwrap();
    disk.1.store(true, std::sync::atomic::Ordering::SeqCst);
    let m = shop.manifest(2, 1);
    shop.release(&m, t(0)).unwrap();
    refresh(&mut client, &shop).unwrap();
    let id = m.id().unwrap();
    assert_eq!(client.installable(&id, t(0)).unwrap_err().code(), "trust_not_stored");
    assert_eq!(client.state().unwrap().versions[&Role::Timestamp], 2, "the view itself is new");
    refresh(&mut client, &shop).unwrap();
    assert!(client.installable(&id, t(0)).is_err(), "still full");
    disk.1.store(false, std::sync::atomic::Ordering::SeqCst);
    refresh(&mut client, &shop).unwrap();
    assert!(client.installable(&id, t(0)).is_ok());
}
