//! The publisher: order of writes, crashes at every point, concurrent publishers, lost keys, guards.

use crate::support::{Keys, Shop, app, rollout, t};
use chrono::TimeDelta;
use flywheel_bundle::publish::{
    CatalogEdit, Changes, Content, MemoryRepository, RepositoryState, WriteMode, add_signatures, catalog_next,
    check_assignment, init_repository,
};
use flywheel_bundle::tuf::Role;

fn load(repo: &MemoryRepository, root: &[u8]) -> RepositoryState {
    RepositoryState::load(root, &app(), &mut |p| repo.read(p)).unwrap().unwrap()
}

#[test]
fn writes_come_in_crash_safe_order() {
    let mut shop = Shop::open();
    let m = shop.manifest(2, 1);
    let plan = shop.release(&m, t(0)).unwrap();
    let rank = |path: &str| {
        [
            "targets/blobs/",
            "targets/bundles/",
            "targets/rollout/",
            "catalog.json",
            "rollout.json",
            "snapshot.json",
            "timestamp.json",
        ]
        .iter()
        .position(|part| path.contains(part))
        .unwrap()
    };
    let ranks: Vec<usize> = plan.ops.iter().map(|op| rank(&op.path)).collect();
    assert_eq!(ranks, [0, 1, 2, 3, 4, 5, 6], "{:?}", plan.ops.iter().map(|o| &o.path).collect::<Vec<_>>());
    assert!(matches!(plan.ops[0].content, Content::Blob { length: 9, .. }));
    let (last, others) = plan.ops.split_last().unwrap();
    assert!(others.iter().all(|op| op.mode == WriteMode::CreateOnly));
    assert!(matches!(last.mode, WriteMode::CompareAndSwap { expected: Some(_) }));
}

#[test]
fn a_publication_cut_off_anywhere_leaves_a_working_repository() {
    let mut probe = Shop::open();
    let m = probe.manifest(2, 1);
    let steps = probe.release(&m, t(0)).unwrap().ops.len();
    for cut in 0..steps {
        let mut shop = Shop::open();
        let mut phone = shop.client();
        let m = shop.manifest(2, 1);
        let edit = CatalogEdit { add: vec![m.clone()], ..CatalogEdit::default() };
        let signed = catalog_next(&shop.state, &edit, &shop.expiries, t(0)).unwrap();
        let catalog = signed.sign(&shop.keys.of(Role::Catalog)).unwrap();
        let assignment = Some(shop.assignment(Some(m.id().unwrap()), t(0)));
        let manifests = vec![m.to_bytes().unwrap()];
        let changes = Changes { catalog: Some(catalog), manifests, assignment, ..Changes::default() };
        let plan = shop.plan(changes, t(0)).unwrap();
        shop.repo.apply_first(&plan, cut).unwrap();
        phone.refresh(&shop.repo, 0).unwrap();
        assert_ne!(phone.bundle(), Some(m.id().unwrap()), "not visible before the last write");
        // The server restarts an hour later, reads what is there and does it again with other bytes.
        shop.state = load(&shop.repo, shop.root());
        shop.serial = shop.state.assignment().unwrap().serial;
        shop.release(&m, t(0) + TimeDelta::hours(1)).unwrap();
        phone.refresh(&shop.repo, 1).unwrap();
        assert_eq!(phone.bundle(), Some(m.id().unwrap()), "cut after {cut}");
        shop.client().refresh(&shop.repo, 1).unwrap();
    }
}

#[test]
fn a_key_rotation_cut_off_before_the_timestamp_can_be_finished() {
    let mut shop = Shop::open();
    let before = shop.repo.clone();
    shop.rotate(1, t(1));
    let mut repo = shop.repo.clone();
    repo.files.insert("metadata/timestamp.json".into(), before.files["metadata/timestamp.json"].clone());
    shop.repo = repo;
    shop.state = load(&shop.repo, shop.root());
    assert_eq!(shop.state.root().version, 2);
    assert!(shop.plan(Changes::default(), t(1)).is_err(), "the old targets are not signed by the new keys");
    use flywheel_bundle::publish::targets_next;
    let targets = targets_next(&shop.state, &shop.keys.ring(), &shop.expiries, t(1)).unwrap();
    let targets = Some(targets.sign(&shop.keys.of(Role::Targets)).unwrap());
    let catalog = catalog_next(&shop.state, &CatalogEdit::default(), &shop.expiries, t(1)).unwrap();
    let catalog = Some(catalog.sign(&shop.keys.of(Role::Catalog)).unwrap());
    shop.publish(Changes { targets, catalog, ..Changes::default() }, t(1)).unwrap();
    shop.client().refresh(&shop.repo, 1).unwrap();
}

#[test]
fn of_two_publishers_one_wins() {
    let mut shop = Shop::open();
    let (one, two) = (shop.plan(Changes::default(), t(1)).unwrap(), shop.plan(Changes::default(), t(2)).unwrap());
    shop.repo.apply(&one).unwrap();
    assert!(shop.repo.apply(&two).unwrap_err().contains("timestamp.json"));
}

#[test]
fn state_is_read_back_as_it_was() {
    let mut shop = Shop::open();
    shop.rotate(1, t(0));
    let m = shop.manifest(2, 1);
    shop.release(&m, t(1)).unwrap();
    let back = load(&shop.repo, shop.root());
    assert_eq!(back.assignment(), shop.state.assignment());
    assert_eq!(back.catalog(), shop.state.catalog());
    assert_eq!(back.timestamp_digest(), shop.state.timestamp_digest());
    for role in Role::ALL {
        assert_eq!(back.next_version(role), shop.state.next_version(role), "{role}");
    }
    assert!(RepositoryState::load(shop.root(), &app(), &mut |_| Ok(None)).unwrap().is_none());
    let mut broken = shop.repo.clone();
    broken.files.get_mut("metadata/3.catalog.json").unwrap()[50] ^= 1;
    assert!(RepositoryState::load(shop.root(), &app(), &mut |p| broken.read(p)).is_err());
}

#[test]
fn online_roles_are_signed_again_at_half_life_and_offline_ones_raise_an_alarm() {
    let mut shop = Shop::open();
    let roles = |shop: &Shop, day| {
        shop.state.due(&shop.expiries, t(day)).iter().map(|d| (d.role, d.expired)).collect::<Vec<_>>()
    };
    assert_eq!(roles(&shop, 3), []);
    assert_eq!(roles(&shop, 4), [(Role::Timestamp, false), (Role::Snapshot, false), (Role::Rollout, false)]);
    shop.resign(t(3));
    assert_eq!(shop.state.next_version(Role::Snapshot), 2, "too early for the snapshot");
    shop.resign(t(4));
    assert_eq!((shop.state.next_version(Role::Snapshot), shop.state.next_version(Role::Rollout)), (3, 3));
    assert_eq!(roles(&shop, 4), []);
    let late = roles(&shop, 61);
    assert!(late.contains(&(Role::Catalog, true)) && late.contains(&(Role::Targets, false)));
}

#[test]
fn a_catalog_by_the_wrong_key_or_for_an_old_state_is_not_published() {
    let mut shop = Shop::open();
    let m = shop.manifest(2, 1);
    let edit = CatalogEdit { add: vec![m.clone()], ..CatalogEdit::default() };
    let unsigned = catalog_next(&shop.state, &edit, &shop.expiries, t(0)).unwrap();
    let manifests = vec![m.to_bytes().unwrap()];
    let with = |catalog, manifests| Changes { catalog: Some(catalog), manifests, ..Changes::default() };
    let wrong = unsigned.clone().sign(&shop.keys.of(Role::Rollout)).unwrap();
    assert!(shop.plan(with(wrong, manifests.clone()), t(0)).is_err());
    let right = unsigned.sign(&shop.keys.of(Role::Catalog)).unwrap();
    let error = shop.plan(with(right.clone(), vec![]), t(0)).unwrap_err().to_string();
    assert!(error.contains("pass its manifest"), "{error}");
    shop.publish(with(right.clone(), manifests.clone()), t(0)).unwrap();
    let other = shop.manifest(3, 1);
    shop.release(&other, t(0)).unwrap();
    let error = shop.plan(with(right, manifests), t(0)).unwrap_err().to_string();
    assert!(error.contains("is taken"), "{error}");
}

#[test]
fn bundles_in_use_cannot_be_retired_and_shared_files_stay() {
    let mut shop = Shop::open();
    let (m2, m3) = (shop.manifest(2, 1), shop.manifest(3, 1));
    shop.release(&m2, t(0)).unwrap();
    shop.release(&m3, t(0)).unwrap();
    let m1 = shop.manifest(1, 1);
    let mut a = shop.assignment(Some(m2.id().unwrap()), t(0));
    a.rollouts.push(rollout(m3.id().unwrap(), m2.id().unwrap(), 10_000));
    shop.publish(Changes { assignment: Some(a), ..Changes::default() }, t(0)).unwrap();
    let retire = |id, kept| CatalogEdit { retire: vec![id], kept, ..CatalogEdit::default() };
    for id in [m2.id().unwrap(), m3.id().unwrap()] {
        let error = shop.edit(&retire(id, vec![m1.clone()]), None, t(0)).unwrap_err().to_string();
        assert!(error.contains("named by the assignment"), "{error}");
    }
    let id1 = m1.id().unwrap();
    assert!(shop.edit(&retire(id1, vec![m2.clone()]), None, t(0)).is_err(), "manifest 3 is missing");
    shop.edit(&retire(id1, vec![m2.clone(), m3.clone()]), None, t(0)).unwrap();
    let catalog = shop.state.catalog().unwrap();
    assert_eq!(catalog.targets.len(), 4, "two manifests and their files");
    assert!(catalog.targets.contains_key(&m2.files()[0].path));
}

#[test]
fn assignments_are_checked_against_the_catalog() {
    let mut shop = Shop::open();
    let m2 = shop.manifest(2, 1);
    shop.release(&m2, t(0)).unwrap();
    let id = m2.id().unwrap();
    let good = {
        let mut a = shop.assignment(Some(id), t(0));
        a.rollouts.push(rollout(id, id, 10_000));
        a
    };
    let catalog = shop.state.catalog().unwrap();
    check_assignment(catalog, &good).unwrap();
    let broken = |change: fn(&mut flywheel_types::assign::RolloutAssignmentV1)| {
        let mut a = good.clone();
        change(&mut a.rollouts[0]);
        check_assignment(catalog, &a).unwrap_err().to_string()
    };
    assert!(broken(|r| r.control.from = 5_000).contains("overlap"));
    assert!(broken(|r| r.control.to = 1_000_001).contains("beyond"));
    assert!(broken(|r| r.treatment.from = 20_000).contains("upside down"));
    assert!(broken(|r| r.control_bundle = flywheel_types::Digest::of(b"gone")).contains("not in the catalog"));
    let mut stale = good.clone();
    stale.serial = 1;
    assert!(shop.publish(Changes { assignment: Some(stale), ..Changes::default() }, t(0)).is_err());
}

#[test]
fn one_place_in_a_line_is_one_bundle() {
    let mut shop = Shop::open();
    let mut m = shop.manifest(1, 1);
    m.licence = "MIT".into();
    let error = shop.release(&m, t(0)).unwrap_err().to_string();
    assert!(error.contains("take the next seq"), "{error}");
}

#[test]
fn ceremonies_refuse_bad_keyrings_and_too_few_signatures() {
    let keys = Keys::new(0);
    let shop = Shop::open();
    let make = |ring: &flywheel_bundle::publish::Keyring| {
        init_repository(ring, &shop.expiries, t(0), &keys.of(Role::Root), &keys.of(Role::Targets))
    };
    let mut ring = keys.ring();
    ring.catalog = ring.rollout.clone();
    assert!(make(&ring).unwrap_err().to_string().contains("online"));
    let mut ring = keys.ring();
    ring.root.threshold = 4;
    assert!(make(&ring).is_err());
    let mut ring = keys.ring();
    ring.root.keys[1] = ring.root.keys[0].clone();
    assert!(make(&ring).unwrap_err().to_string().contains("twice"));
    let one = [&keys.root[0] as &dyn flywheel_bundle::publish::RoleSigner];
    let few = init_repository(&keys.ring(), &shop.expiries, t(0), &one, &keys.of(Role::Targets));
    assert!(few.unwrap_err().to_string().contains("1 valid"));
}

#[test]
fn signatures_can_be_added_one_after_another() {
    let shop = Shop::open();
    let next = flywheel_bundle::publish::root_next(&shop.state, &shop.keys.ring(), &shop.expiries, t(1)).unwrap();
    let first = next.sign(&[&shop.keys.root[2]]).unwrap();
    let both = add_signatures(Role::Root, &first.bytes, &[&shop.keys.root[0]]).unwrap();
    let again = add_signatures(Role::Root, &both.bytes, &[&shop.keys.root[0]]).unwrap();
    assert_eq!(again.bytes, both.bytes, "one signature per key");
    assert!(shop.plan(Changes { root: Some(first), ..Changes::default() }, t(1)).is_err());
    assert!(shop.plan(Changes { root: Some(both), ..Changes::default() }, t(1)).is_ok());
}
