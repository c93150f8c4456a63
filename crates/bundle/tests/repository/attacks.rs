//! The attacks of the TUF specification (section 1.5.2) and delivery.md 6, each against a device that has already
//! seen the repository, and most of them with real stolen keys.

use crate::support::{Keys, Phone, Shop, forge_with, t};
use chrono::TimeDelta;
use flywheel_bundle::publish::{CatalogEdit, Changes, Expiries, RoleSigner, SecretKey};
use flywheel_bundle::tuf::{MetadataError as M, Role};
use flywheel_bundle::verify::TrustStore as _;
use flywheel_bundle::{InstallBlocked, Reply, VerifyError};
use flywheel_types::Digest;
use serde_json::{Value, json};

/// Describes `bytes` in the file at `path` under `meta[name]`, with the real keys of `role`.
fn announce(shop: &mut Shop, path: &str, role: Role, name: &str, version: u64, bytes: &[u8]) -> Vec<u8> {
    let mut repo = std::mem::take(&mut shop.repo);
    let out = shop.forge(&mut repo, path, role, |s| {
        s["meta"][name] = json!({
            "version": version, "length": bytes.len(), "hashes": {"sha256": Digest::of(bytes).to_hex()}
        });
        if role == Role::Timestamp {
            s["version"] = json!(s["version"].as_u64().unwrap() + 1);
        }
    });
    shop.repo = repo;
    out
}

/// Puts `change` into the file of a listed role and lets stolen snapshot and timestamp keys vouch for it.
fn replace_listed(shop: &mut Shop, role: Role, version: u64, signers: &[&dyn RoleSigner], change: impl Fn(&mut Value)) {
    let mut repo = std::mem::take(&mut shop.repo);
    let file = forge_with(&mut repo, &role.path(version), role, signers, change);
    shop.repo = repo;
    let snapshot_version = shop.state.next_version(Role::Snapshot) - 1;
    let path = Role::Snapshot.path(snapshot_version);
    let snapshot = announce(shop, &path, Role::Snapshot, &role.meta_name(), version, &file);
    announce(shop, "metadata/timestamp.json", Role::Timestamp, "snapshot.json", snapshot_version, &snapshot);
}

#[test]
fn arbitrary_software_files_without_the_right_signature_are_refused() {
    let mut shop = Shop::open();
    let phone = || shop.client();
    let stranger = SecretKey::from_seed(Role::Timestamp, &[99; 32]);
    let mut repo = shop.repo.clone();
    forge_with(&mut repo, "metadata/timestamp.json", Role::Timestamp, &[&stranger], |_| {});
    let error = phone().refresh(&repo, 0).unwrap_err();
    assert!(matches!(error, VerifyError::Metadata(M::BelowThreshold { role: Role::Timestamp, valid: 0, .. })));
    // The same with one byte of a correctly signed file changed.
    let mut repo = shop.repo.clone();
    let file = String::from_utf8(repo.files["metadata/timestamp.json"].clone()).unwrap();
    repo.files.insert("metadata/timestamp.json".into(), file.replace("\"version\":1}", "\"version\":2}").into());
    assert_eq!(phone().refresh(&repo, 0).unwrap_err().code(), "bad_signature");
    // Another file in place of each target and metadata file.
    for path in shop.repo.files.keys().filter(|p| !p.ends_with("timestamp.json") && !p.contains("root")) {
        if path.starts_with("targets/blobs") || path.starts_with("targets/bundles") {
            continue;
        }
        let mut repo = shop.repo.clone();
        repo.files.get_mut(path).unwrap()[10] ^= 1;
        assert_eq!(phone().refresh(&repo, 0).unwrap_err().code(), "mismatch", "{path}");
    }
    // Online keys cannot add a bundle: catalog signed by them.
    let evil = Digest::of(b"evil");
    let rollout = Keys::new(0).rollout;
    replace_listed(&mut shop, Role::Catalog, 1, &[&rollout], |s| {
        s["targets"]["bundles/x/9/manifest.json"] = json!({"length": 4, "hashes": {"sha256": evil.to_hex()}});
    });
    let error = shop.client().refresh(&shop.repo, 0).unwrap_err();
    assert!(matches!(error, VerifyError::Metadata(M::BelowThreshold { role: Role::Catalog, .. })), "{error}");
}

#[test]
fn online_keys_cannot_list_bundles_in_their_own_role() {
    let mut shop = Shop::open();
    let rollout = Keys::new(0).rollout;
    replace_listed(&mut shop, Role::Rollout, 1, &[&rollout], |s| {
        s["targets"]["bundles/x/9/manifest.json"] =
            json!({"length": 4, "hashes": {"sha256": Digest::of(b"evil").to_hex()}});
    });
    let error = shop.client().refresh(&shop.repo, 0).unwrap_err();
    assert!(error.to_string().contains("outside the delegated paths"), "{error}");
}

#[test]
fn a_bundle_that_is_only_assigned_is_not_installable() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    // The publisher refuses; a thief of the online keys does not ask it.
    let evil = Digest::of(b"evil");
    assert!(shop.assign(Some(evil), t(0)).is_err());
    let mut a = shop.assignment(Some(evil), t(0));
    a.serial += 1;
    let bytes = serde_json::to_vec(&a).unwrap();
    let digest = Digest::of(&bytes);
    shop.repo.files.insert(format!("targets/rollout/{digest}.assignment.json"), bytes.clone());
    let rollout = Keys::new(0).rollout;
    replace_listed(&mut shop, Role::Rollout, 1, &[&rollout], |s| {
        s["targets"]["rollout/assignment.json"] = json!({"length": bytes.len(), "hashes": {"sha256": digest.to_hex()}});
    });
    phone.refresh(&shop.repo, 0).unwrap();
    assert_eq!(phone.bundle(), Some(evil));
    assert_eq!(phone.client.installable(&evil, t(0)).unwrap_err().code(), "not_listed");
}

#[test]
fn endless_data_is_cut_at_the_announced_length() {
    let shop = Shop::open();
    for path in ["metadata/timestamp.json", "metadata/2.root.json"] {
        let mut repo = shop.repo.clone();
        repo.files.insert(path.into(), vec![b' '; 9 << 20]);
        let error = shop.client().refresh(&repo, 0).unwrap_err();
        assert!(matches!(error, VerifyError::TooLarge { .. }), "{path}: {error}");
    }
    for (path, bytes) in &shop.repo.files {
        if path.starts_with("metadata/1.") && !path.contains("root") {
            let mut repo = shop.repo.clone();
            repo.files.get_mut(path).unwrap().push(b' ');
            let error = shop.client().refresh(&repo, 0).unwrap_err();
            assert_eq!(error, VerifyError::TooLarge { path: path.clone(), limit: bytes.len() as u64 });
        }
    }
}

#[test]
fn freeze_old_files_served_for_ever_stop_authorising_installs() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    let frozen = shop.repo.clone();
    phone.refresh(&frozen, 0).unwrap();
    let m = shop.manifest(2, 1);
    shop.release(&m, t(1)).unwrap();
    assert!(phone.refresh(&frozen, 6).is_ok());
    assert_eq!(phone.refresh(&frozen, 7).unwrap_err().code(), "stale");
    assert_eq!(phone.client.may_install(t(7)).unwrap_err().code(), "stale");
}

#[test]
fn each_expired_role_is_noticed() {
    for role in Role::ALL {
        let days = |r: Role| TimeDelta::days(if r == role { 5 } else { 1000 });
        let mut shop = Shop::with(Expiries {
            root: days(Role::Root),
            targets: days(Role::Targets),
            catalog: days(Role::Catalog),
            rollout: days(Role::Rollout),
            snapshot: days(Role::Snapshot),
            timestamp: days(Role::Timestamp),
        });
        let mut phone = shop.client();
        phone.refresh(&shop.repo, 4).unwrap();
        assert!(phone.client.may_install(t(4)).is_ok());
        let expired = VerifyError::Metadata(M::Expired { role, expires: t(5) });
        assert_eq!(phone.refresh(&shop.repo, 5).unwrap_err(), expired);
        assert_eq!(shop.client().refresh(&shop.repo, 5).unwrap_err(), expired, "also at first contact");
        let blocked = InstallBlocked::Stale { role, expires: t(5) };
        assert_eq!(phone.client.may_install(t(5)).unwrap_err(), blocked);
        // What the server can sign by itself it signs again; over expired offline roles it refuses to publish.
        let offline = matches!(role, Role::Root | Role::Targets | Role::Catalog);
        assert_eq!(shop.plan(Changes::default(), t(5)).is_err(), offline, "{role}");
        if !offline {
            shop.resign(t(5));
            phone.refresh(&shop.repo, 5).unwrap();
            assert!(phone.client.may_install(t(5)).is_ok());
        }
    }
}

#[test]
fn rollback_of_every_role_is_refused() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    let old = shop.repo.clone();
    let m = shop.manifest(2, 1);
    shop.release(&m, t(0)).unwrap();
    phone.refresh(&shop.repo, 0).unwrap();
    phone.restart();
    let error = phone.refresh(&old, 0).unwrap_err();
    assert_eq!(error, M::Rollback { role: Role::Timestamp, trusted: 2, offered: 1 }.into());
    // A newer timestamp that names the older snapshot.
    let mut attack = Shop { repo: old.clone(), ..Shop::open() };
    let snapshot = old.files["metadata/1.snapshot.json"].clone();
    announce(&mut attack, "metadata/timestamp.json", Role::Timestamp, "snapshot.json", 1, &snapshot);
    announce(&mut attack, "metadata/timestamp.json", Role::Timestamp, "snapshot.json", 1, &snapshot);
    let error = phone.refresh(&attack.repo, 0).unwrap_err();
    assert_eq!(error, M::Rollback { role: Role::Snapshot, trusted: 2, offered: 1 }.into());
    // delivery.md 6, case 4: a newer snapshot that names an older delegated role, or leaves it out.
    for role in [Role::Catalog, Role::Rollout] {
        let mut attack = Shop::open();
        attack.repo = shop.repo.clone();
        let old_file = old.files[&role.path(1)].clone();
        let snap = announce(&mut attack, "metadata/2.snapshot.json", Role::Snapshot, &role.meta_name(), 1, &old_file);
        announce(&mut attack, "metadata/timestamp.json", Role::Timestamp, "snapshot.json", 2, &snap);
        let mut victim = Phone { store: phone.store.clone(), ..Phone::new(shop.root()) };
        victim.restart();
        let error = victim.refresh(&attack.repo, 0).unwrap_err();
        assert_eq!(error, M::Rollback { role, trusted: 2, offered: 1 }.into());
    }
}

#[test]
fn a_snapshot_without_a_role_is_refused() {
    for role in [Role::Targets, Role::Catalog, Role::Rollout] {
        let mut shop = Shop::open();
        let mut phone = shop.client();
        phone.refresh(&shop.repo, 0).unwrap();
        let mut repo = std::mem::take(&mut shop.repo);
        let snap = shop.forge(&mut repo, "metadata/1.snapshot.json", Role::Snapshot, |s| {
            s["meta"].as_object_mut().unwrap().remove(&role.meta_name());
        });
        shop.repo = repo;
        announce(&mut shop, "metadata/timestamp.json", Role::Timestamp, "snapshot.json", 1, &snap);
        let error = phone.refresh(&shop.repo, 0).unwrap_err();
        assert_eq!(error, M::NotListed { role }.into());
        assert_eq!(error.code(), "rollback");
    }
}

#[test]
fn mix_and_match_of_two_publications_is_refused() {
    let mut shop = Shop::open();
    let old = shop.repo.clone();
    let m = shop.manifest(2, 1);
    shop.release(&m, t(0)).unwrap();
    for role in [Role::Snapshot, Role::Catalog, Role::Rollout] {
        let mut repo = shop.repo.clone();
        repo.files.insert(role.path(2), old.files[&role.path(1)].clone());
        let code = shop.client().refresh(&repo, 0).unwrap_err().code();
        assert!(code == "mismatch" || code == "malformed", "{role}: {code}");
    }
}

#[test]
fn keys_below_the_threshold_are_worth_nothing() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let new = Keys::new(1);
    let root = flywheel_bundle::publish::root_next(&shop.state, &new.ring(), &shop.expiries, t(0)).unwrap();
    // One of three old root keys (two are needed), signing twice under two ids does not help either.
    let one: Vec<&dyn RoleSigner> = vec![&shop.keys.root[0], &new.root[0], &new.root[1]];
    let signed = root.sign(&one).unwrap();
    let mut repo = shop.repo.clone();
    repo.files.insert("metadata/2.root.json".into(), signed.bytes.clone());
    // Something changed, so that the phone looks for a root at all.
    shop.resign(t(0));
    repo.files.insert("metadata/timestamp.json".into(), shop.repo.files["metadata/timestamp.json"].clone());
    let error = phone.refresh(&repo, 0).unwrap_err();
    assert_eq!(error, M::BelowThreshold { role: Role::Root, valid: 1, threshold: 2 }.into());
    let mut file: Value = serde_json::from_slice(&signed.bytes).unwrap();
    let twin = file["signatures"].as_array().unwrap().iter().find(|s| s["keyid"] == shop.keys.root[0].public().id());
    let twin = twin.unwrap().clone();
    file["signatures"].as_array_mut().unwrap().extend([twin.clone(), twin]);
    repo.files.insert("metadata/2.root.json".into(), serde_json::to_vec(&file).unwrap());
    assert_eq!(phone.refresh(&repo, 0).unwrap_err().code(), "bad_signature");
    assert_eq!(phone.client.root_version(), 1);
}

#[test]
fn fast_forward_is_healed_by_rotating_the_keys() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    // Stolen online keys push every counter to the end.
    let far = u64::MAX - 1;
    let clean = shop.repo.clone();
    let mut repo = std::mem::take(&mut shop.repo);
    let snapshot = shop.forge(&mut repo, "metadata/1.snapshot.json", Role::Snapshot, |s| s["version"] = json!(far));
    repo.files.insert(Role::Snapshot.path(far), snapshot.clone());
    shop.forge(&mut repo, "metadata/timestamp.json", Role::Timestamp, |s| {
        s["version"] = json!(far);
        s["issued"] = json!("2027-01-20T00:00:00Z");
        s["meta"]["snapshot.json"] = json!({
            "version": far, "length": snapshot.len(), "hashes": {"sha256": Digest::of(&snapshot).to_hex()}
        });
    });
    phone.refresh(&repo, 0).unwrap();
    assert_eq!(phone.client.floors().timestamp, far);
    // The owner comes back with new keys and small numbers.
    shop.repo = clean;
    shop.resign(t(1));
    assert_eq!(phone.refresh(&shop.repo, 1).unwrap_err().code(), "rollback");
    shop.rotate(1, t(1));
    phone.refresh(&shop.repo, 1).unwrap();
    phone.restart();
    phone.refresh(&shop.repo, 1).unwrap();
    assert!(phone.client.may_install(t(1)).is_ok());
    assert_eq!(phone.client.root_version(), 2);
    assert!(phone.client.floors().timestamp < 10);
}

#[test]
fn several_rotations_in_one_refresh_also_there_and_back() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    for generation in [1, 2, 0] {
        shop.rotate(generation, t(1));
    }
    phone.refresh(&shop.repo, 1).unwrap();
    assert_eq!(phone.client.root_version(), 4);
    // A phone that was never online takes the same way from the root in its app.
    shop.client().refresh(&shop.repo, 1).unwrap();
}

/// delivery.md 6, case 5: a refused timestamp must leave no trace.
#[test]
fn a_refused_timestamp_does_not_block_the_good_one() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    let m = shop.manifest(2, 1);
    shop.release(&m, t(0)).unwrap();
    phone.refresh(&shop.repo, 0).unwrap();
    let mut bad = shop.repo.clone();
    shop.forge(&mut bad, "metadata/timestamp.json", Role::Timestamp, |s| {
        s["version"] = json!(3);
        s["meta"]["snapshot.json"]["version"] = json!(1);
    });
    assert_eq!(phone.refresh(&bad, 0).unwrap_err().code(), "rollback");
    phone.restart();
    shop.resign(t(0));
    phone.refresh(&shop.repo, 0).unwrap();
    assert_eq!(phone.client.floors().timestamp, 3);
    assert!(phone.client.may_install(t(0)).is_ok());
}

/// delivery.md 6, case 8: other publishers choose their key ids freely.
#[test]
fn declared_key_ids_count() {
    let mut shop = Shop::open();
    let own = shop.keys.timestamp.public().id();
    let swap = |v: &Value| serde_json::from_str::<Value>(&v.to_string().replace(&own, "my-own-id")).unwrap();
    let mut file: Value = serde_json::from_slice(shop.root()).unwrap();
    file = swap(&file);
    file["signatures"] = json!([]);
    let root = flywheel_bundle::publish::add_signatures(
        Role::Root,
        &serde_json::to_vec(&file).unwrap(),
        &shop.keys.of(Role::Root),
    )
    .unwrap();
    let stamp: Value = serde_json::from_slice(&shop.repo.files["metadata/timestamp.json"]).unwrap();
    shop.repo.files.insert("metadata/timestamp.json".into(), serde_json::to_vec(&swap(&stamp)).unwrap());
    Phone::new(&root.bytes).refresh(&shop.repo, 0).unwrap();
    // Our own publisher always writes the hash of the key.
    let written: Value = serde_json::from_slice(shop.root()).unwrap();
    assert!(written["signed"]["keys"].get(&own).is_some());
}

/// delivery.md 6, case 13: each stored file cut off in turn.
#[test]
fn damaged_records_are_survived_without_losing_the_floors() {
    let mut shop = Shop::open();
    shop.rotate(1, t(0));
    let old = shop.repo.clone();
    let m = shop.manifest(2, 1);
    shop.release(&m, t(0)).unwrap();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let floors = phone.client.floors().clone();
    for record in ["trust.json", "metadata.json"] {
        let good = phone.store.load(record).unwrap().unwrap();
        for cut in [0, 1, 64, 65, good.len() / 2, good.len() - 1] {
            phone.store.save(record, &good[..cut]).unwrap();
            phone.restart();
            assert!(phone.client.recovered());
            assert_eq!(phone.client.floors(), &floors, "{record} cut at {cut}");
            assert_eq!(phone.refresh(&old, 0).unwrap_err().code(), "rollback");
            phone.restart();
            phone.refresh(&shop.repo, 0).unwrap();
            assert!(phone.client.may_install(t(0)).is_ok());
            phone.store.save(record, &good).unwrap();
        }
    }
    // Both gone: back to the root in the app, and it says so.
    phone.store.save("trust.json", b"").unwrap();
    phone.store.save("metadata.json", b"").unwrap();
    phone.restart();
    assert!(phone.client.recovered() && phone.bundle().is_none());
    phone.refresh(&shop.repo, 0).unwrap();
}

#[test]
fn floors_raised_by_a_repeated_and_unfinished_refresh_survive_a_restart() {
    let mut shop = Shop::open();
    shop.assign(None, t(1)).unwrap();
    let mut phone = shop.client();
    let without = |name: &str| {
        let mut repo = shop.repo.clone();
        repo.files.retain(|path, _| !path.ends_with(name));
        repo
    };
    // the first try ends after the timestamp, the second one file later
    phone.refresh(&without(".snapshot.json"), 1).unwrap_err();
    phone.refresh(&without(".targets.json"), 1).unwrap_err();
    let floors = phone.client.floors().clone();
    assert_eq!(floors.role(Role::Rollout), 2);
    phone.restart();
    assert_eq!(phone.client.floors(), &floors);
}

#[test]
fn newer_metadata_that_cannot_be_completed_blocks_installs() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let id = phone.bundle().unwrap();
    let m = shop.manifest(2, 1);
    shop.release(&m, t(0)).unwrap();
    let mut hiding = shop.repo.clone();
    hiding.files.remove("metadata/2.rollout.json");
    assert_eq!(phone.refresh(&hiding, 0).unwrap_err().code(), "missing");
    assert_eq!(phone.client.installable(&id, t(0)).unwrap_err().code(), "refresh_unfinished");
    phone.restart();
    assert_eq!(phone.client.installable(&id, t(0)).unwrap_err().code(), "refresh_unfinished");
    assert!(phone.bundle().is_some());
    phone.refresh(&shop.repo, 0).unwrap();
    assert!(phone.client.installable(&id, t(0)).is_ok());
}

/// delivery.md 6, case 25: below the floor through every path.
#[test]
fn the_epoch_floor_holds_and_survives_old_catalogs_and_restarts() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    phone.refresh(&shop.repo, 0).unwrap();
    let old = phone.bundle().unwrap();
    let m = shop.manifest(2, 2);
    let new = m.id().unwrap();
    let edit = CatalogEdit { add: vec![m], raise_floor: Some(2), ..CatalogEdit::default() };
    let a = shop.assignment(Some(new), t(0));
    shop.edit(&edit, Some(a), t(0)).unwrap();
    phone.refresh(&shop.repo, 0).unwrap();
    phone.restart();
    assert_eq!(phone.client.epoch_floor(), 2);
    assert_eq!(phone.client.installable(&old, t(0)).unwrap_err().code(), "below_floor");
    assert!(phone.client.installable(&new, t(0)).is_ok());
    // Neither the publisher nor a lower floor brings it back.
    assert!(shop.assign(Some(old), t(0)).is_err());
    let lower = CatalogEdit { raise_floor: Some(1), ..CatalogEdit::default() };
    assert!(shop.edit(&lower, None, t(0)).is_err());
    shop.rotate(1, t(1));
    phone.refresh(&shop.repo, 1).unwrap();
    assert_eq!(phone.client.epoch_floor(), 2, "new release keys carry the floor on");
}

#[test]
fn revoked_bundles_are_not_installed() {
    let mut shop = Shop::open();
    let mut phone = shop.client();
    let m = shop.manifest(2, 1);
    shop.release(&m, t(0)).unwrap();
    phone.refresh(&shop.repo, 0).unwrap();
    let bad = m.id().unwrap();
    let good = *phone.client.state().unwrap().catalog.keys().find(|k| **k != bad).unwrap();
    let edit = CatalogEdit { revoke: vec![bad], ..CatalogEdit::default() };
    assert!(shop.edit(&edit, None, t(0)).is_err(), "the assignment still names it");
    let a = shop.assignment(Some(good), t(0));
    shop.edit(&edit, Some(a), t(0)).unwrap();
    phone.refresh(&shop.repo, 0).unwrap();
    assert_eq!(phone.client.installable(&bad, t(0)).unwrap_err().code(), "revoked");
    assert!(phone.client.installable(&good, t(0)).is_ok());
    assert!(shop.release(&m, t(0)).is_err(), "it cannot be released again");
}

#[test]
fn answers_nobody_asked_for_are_refused() {
    let shop = Shop::open();
    let mut phone = shop.client();
    assert_eq!(phone.client.supply(Reply::NotFound).unwrap_err(), VerifyError::NoOpenRequest);
    phone.client.begin(t(0));
    phone.client.abandon();
    assert_eq!(phone.client.supply(Reply::NotFound).unwrap_err(), VerifyError::NoOpenRequest);
}
