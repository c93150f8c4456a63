//! The update client of a device, fed with files that thieves of one role's keys may make, or with any bytes at all.

use super::repository::{GENUINE, Genuine, app, day};
use crate::{choice, pieces};
use chrono::{DateTime, Utc};
use flywheel_bundle::tuf::{Floors, Role};
use flywheel_bundle::verify::{MemoryTrustStore, Options};
use flywheel_bundle::{Reply, UpdateClient};
use flywheel_types::Digest;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Where the link breaks.
const BREAKS: [&str; 5] = ["snapshot.json", "targets.json", "catalog.json", "rollout.json", "assignment.json"];

/// First byte, low three bits: whose file is forged (6: the assignment, 7: the rest are raw answers in order). Bit 3:
/// the device has refreshed before. Bit 4: the link breaks before each file in turn, and the refresh is repeated.
pub fn run(data: &[u8]) {
    let (first, rest) = choice(data);
    let store = MemoryTrustStore::default();
    let mut client = open(&store);
    if first & 8 != 0 {
        refresh(&mut client, day(1), |path, _| genuine(path));
        assert!(client.may_install(day(1)).is_ok(), "the genuine repository is accepted");
    }
    let before = (client.floors().clone(), client.root_version(), client.state().cloned());
    if first & 7 == 7 {
        let mut answers = pieces(rest);
        refresh(&mut client, day(2), |_, _| answers.next().map(<[u8]>::to_vec));
    } else {
        let Some(forged) = forge(first & 7, rest) else { return };
        // the link breaks one file later every time
        for stop in BREAKS.iter().filter(|_| first & 16 != 0) {
            refresh(&mut client, day(2), |path, _| (!path.ends_with(stop)).then(|| answer(&forged, path)).flatten());
            restarted_is_the_same(&client, &store, before.1);
        }
        refresh(&mut client, day(2), |path, _| answer(&forged, path));
    }
    floors_never_fall(&before.0, before.1, &client);
    if let (Some(old), Some(new)) = (&before.2, client.state())
        && client.root_version() == before.1
    {
        assert!(new.assignment.serial >= old.assignment.serial, "the assignment never goes back");
    }
    if let Some(state) = client.state() {
        assert_eq!((&state.app, &state.assignment.app), (&app(), &app()));
    }
    if let Ok(state) = client.may_install(day(2)) {
        assert!(state.valid_until.1 > client.now(day(2)), "nothing is installed under expired metadata");
        for bundle in state.catalog.keys() {
            if let Ok(entry) = client.installable(bundle, day(2)) {
                assert!(entry.security_epoch >= client.epoch_floor() && !state.revoked.contains(bundle));
            }
        }
    }
    restarted_is_the_same(&client, &store, before.1);
}

fn open(store: &MemoryTrustStore) -> UpdateClient {
    UpdateClient::open(&GENUINE.root, app(), day(-30), Box::new(store.clone()), Options::default())
        .expect("the genuine root opens a client")
}

/// One refresh to its end. However the answers look, it ends, and asks only for names of the repository.
fn refresh(client: &mut UpdateClient, clock: DateTime<Utc>, mut fetch: impl FnMut(&str, u64) -> Option<Vec<u8>>) {
    let was = client.state().cloned();
    client.begin(clock);
    let mut asked = 0;
    while let Some(request) = client.next_request() {
        asked += 1;
        assert!(asked <= 80, "a refresh asks for a bounded number of files");
        let path = &request.path;
        assert!(path.starts_with("metadata/") || path.starts_with("targets/rollout/"), "{path}");
        let reply = fetch(path, request.max_len).map_or(Reply::NotFound, |bytes| Reply::Found(bytes.into()));
        if client.supply(reply).is_err() {
            assert!(client.next_request().is_none(), "an error ends the refresh");
            assert_eq!(client.state(), was.as_ref(), "an error leaves the state as it was");
            return;
        }
    }
}

/// The file at a path of the genuine repository.
fn genuine(path: &str) -> Option<Vec<u8>> {
    GENUINE.repository.files.get(path).cloned()
}

/// Files by the end of their name.
type Forged = BTreeMap<&'static str, Vec<u8>>;

fn answer(forged: &Forged, path: &str) -> Option<Vec<u8>> {
    forged.iter().find(|(name, _)| path.ends_with(*name)).map(|(_, bytes)| bytes.clone())
}

/// A repository in which one document is the fuzzer's, signed with the real key of its role, and the parents announce
/// it one version up, signed as well.
fn forge(which: u8, document: &[u8]) -> Option<Forged> {
    let g: &Genuine = &GENUINE;
    let mut out = Forged::new();
    let (mut rollout, mut snapshot, mut timestamp) =
        (g.signed(Role::Rollout), g.signed(Role::Snapshot), g.signed(Role::Timestamp));
    snapshot["version"] = json!(2);
    timestamp["version"] = json!(2);
    for role in [Role::Targets, Role::Catalog, Role::Rollout] {
        out.insert(suffix(role), g.file(role).to_vec());
    }
    out.insert("assignment.json", g.assignment().to_vec());
    if let Some(role) = Role::ALL.get(usize::from(which)).copied() {
        let signed: Value = serde_json::from_slice(document).ok()?;
        let bytes = g.sign(role, &signed)?;
        match role {
            Role::Root => {}
            Role::Timestamp => timestamp = signed,
            Role::Snapshot => snapshot = signed,
            Role::Targets | Role::Catalog | Role::Rollout => {
                snapshot["meta"][format!("{role}.json")] = described(&signed["version"], &bytes);
            }
        }
        out.insert(suffix(role), bytes);
    } else {
        rollout["version"] = json!(2);
        let file = &mut rollout["targets"]["rollout/assignment.json"];
        file["length"] = json!(document.len());
        file["hashes"]["sha256"] = json!(Digest::of(document).to_hex());
        let bytes = g.sign(Role::Rollout, &rollout)?;
        snapshot["meta"]["rollout.json"] = described(&json!(2), &bytes);
        out.insert("rollout.json", bytes);
        out.insert("assignment.json", document.to_vec());
    }
    let snapshot_bytes = g.sign(Role::Snapshot, &snapshot)?;
    if which != 1 {
        timestamp["meta"]["snapshot.json"] = described(&snapshot["version"], &snapshot_bytes);
    }
    out.insert("timestamp.json", g.sign(Role::Timestamp, &timestamp)?);
    out.insert("snapshot.json", snapshot_bytes);
    // a root is asked for by its number: only the next one may be the forged one
    if let Some(root) = out.remove("root.json") {
        out.insert("2.root.json", root);
    }
    Some(out)
}

fn suffix(role: Role) -> &'static str {
    match role {
        Role::Root => "root.json",
        Role::Timestamp => "timestamp.json",
        Role::Snapshot => "snapshot.json",
        Role::Targets => "targets.json",
        Role::Catalog => "catalog.json",
        Role::Rollout => "rollout.json",
    }
}

fn described(version: &Value, bytes: &[u8]) -> Value {
    json!({ "version": version, "length": bytes.len(), "hashes": { "sha256": Digest::of(bytes).to_hex() } })
}

/// While the keys stay the same, nothing that was accepted is ever forgotten.
fn floors_never_fall(before: &Floors, root: u64, client: &UpdateClient) {
    let after = client.floors();
    assert!(client.root_version() >= root);
    if after.keys != before.keys {
        return;
    }
    assert!(after.timestamp >= before.timestamp && after.snapshot >= before.snapshot && after.issued >= before.issued);
    for (role, floor) in &before.roles {
        assert!(after.role(*role) >= *floor, "the floor of {role} fell");
    }
    for (new, old) in [(after.security_epoch, before.security_epoch), (after.assignment, before.assignment)] {
        assert!(new.keys != old.keys || new.value >= old.value);
    }
}

/// What a device knows survives a restart. `root`: the root version it began with.
fn restarted_is_the_same(client: &UpdateClient, store: &MemoryTrustStore, root: u64) {
    assert!(client.store_failure().is_none());
    let again = open(store);
    assert!(!again.recovered(), "a record that was written can be read");
    assert_eq!(again.root_version(), client.root_version());
    assert_eq!(again.floors(), client.floors(), "the floors survive a restart");
    // files that a new root no longer vouches for are not taken up again
    if client.root_version() == root {
        let assignment = |c: &UpdateClient| c.state().map(|s| s.assignment.clone());
        assert_eq!(assignment(&again), assignment(client), "the assignment survives a restart");
    }
}
