//! Golden samples: what version 1 wrote must load for ever, byte for byte, with the same digests.
//! `FLYWHEEL_WRITE_GOLDEN=1 cargo test -p flywheel-bundle golden` writes missing samples (never replaces one).

use crate::support::{Phone, Shop, app, manifest, t};
use flywheel_bundle::ManifestV1;
use flywheel_bundle::publish::{MemoryRepository, RepositoryState};
use flywheel_bundle::verify::{MemoryTrustStore, TrustStore as _};
use std::collections::BTreeMap;
use std::path::PathBuf;

fn sample(name: &str, make: impl Fn() -> Vec<u8>) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
    if std::env::var_os("FLYWHEEL_WRITE_GOLDEN").is_some() && !path.exists() {
        std::fs::write(&path, make()).unwrap();
    }
    std::fs::read(&path).map_err(|e| format!("golden/{name}: {e}")).unwrap()
}

/// One file with a whole repository: path → content.
fn pack(repo: &MemoryRepository) -> Vec<u8> {
    let text: BTreeMap<&String, String> =
        repo.files.iter().map(|(p, b)| (p, String::from_utf8(b.clone()).unwrap())).collect();
    serde_json::to_vec_pretty(&text).unwrap()
}

fn unpack(bytes: &[u8]) -> MemoryRepository {
    let text: BTreeMap<String, String> = serde_json::from_slice(bytes).unwrap();
    MemoryRepository {
        files: text.into_iter().map(|(p, t)| (p, t.into_bytes())).collect(),
        ..MemoryRepository::default()
    }
}

#[test]
fn manifest_v1() {
    let bytes = sample("manifest_v1.json", || manifest(7, 1, b"weights 7").to_bytes().unwrap());
    let m = ManifestV1::from_bytes(&bytes).unwrap();
    assert_eq!(m, manifest(7, 1, b"weights 7"));
    assert_eq!(m.to_bytes().unwrap(), bytes);
    assert_eq!(m.id().unwrap().to_hex(), "b58e6e60a3a5be50d6a553cb3260f64556b38501b7390bbeb241c480f35b56b1");
}

#[test]
fn repository_v1() {
    let make = || {
        let mut shop = Shop::open();
        let m = shop.manifest(2, 2);
        shop.release(&m, t(1)).unwrap();
        pack(&shop.repo)
    };
    let repo = unpack(&sample("repository_v1.json", make));
    let root = repo.files["metadata/1.root.json"].clone();
    let mut phone = Phone::new(&root);
    phone.refresh(&repo, 1).unwrap();
    let state = phone.client.may_install(t(1)).unwrap();
    assert_eq!(state.catalog.values().map(|e| e.seq).max(), Some(2));
    assert_eq!(state.assignment.serial, 2);
    let back = RepositoryState::load(&root, &app(), &mut |p| repo.read(p)).unwrap().unwrap();
    assert_eq!(back.assignment(), Some(&state.assignment));
    // The publisher still writes the same bytes from the same keys.
    assert_eq!(pack(&repo), make());
}

#[test]
fn device_records_v1() {
    let make = |record: &'static str| {
        move || {
            let mut phone = Shop::open().client();
            phone.refresh(&Shop::open().repo, 0).unwrap();
            phone.store.load(record).unwrap().unwrap()
        }
    };
    let mut store = MemoryTrustStore::default();
    for (record, file) in [("trust.json", "device_trust_v1.txt"), ("metadata.json", "device_metadata_v1.txt")] {
        store.save(record, &sample(file, make(record))).unwrap();
    }
    let root = Shop::open().root().to_vec();
    let client = crate::support::open(&root, &store);
    assert!(!client.recovered());
    assert!(client.may_install(t(0)).is_ok());
    assert_eq!(client.floors().timestamp, 1);
}
