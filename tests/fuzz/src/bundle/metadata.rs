//! TUF metadata files one by one. Nobody but the genuine keys can make an acceptable one: whatever the fuzzer sends,
//! what is accepted says exactly what a genuine file says.

use super::repository::GENUINE;
use crate::choice;
use flywheel_bundle::tuf::{
    Document, Envelope, FileMeta, Floors, Role, Root, Snapshot, Targets, Timestamp, TrustedRoot, path_matches,
    target_location,
};
use flywheel_types::Digest;
use serde_json::Value;
use std::collections::BTreeMap;

/// First byte: the role. Rest: the file.
pub fn run(data: &[u8]) {
    let (first, file) = choice(data);
    let role = Role::ALL[usize::from(first) % Role::ALL.len()];
    if let Ok(text) = std::str::from_utf8(file) {
        paths(text);
    }
    let Ok(envelope) = Envelope::parse(role, file) else { return };
    assert!(file.len() as u64 <= role.max_bytes());
    if let Ok(signed) = envelope.signed_bytes(role) {
        let again = serde_json::to_vec(&envelope).expect("what was parsed can be written");
        let again = Envelope::parse(role, &again).expect("what was written can be parsed");
        assert_eq!(again.signed_bytes(role).expect("still canonical"), signed, "one document, one signed form");
    }
    documents(role, &envelope.signed);
    if accepted(role, file) {
        let signed = envelope.signed_bytes(role).expect("an accepted file was verified");
        let genuine = Envelope::parse(role, GENUINE.file(role)).and_then(|e| e.signed_bytes(role));
        assert_eq!(signed, genuine.expect("the genuine file is good"), "only a genuine {role} is accepted");
    }
}

/// The device's own checks of one file, with parents that allow any content.
fn accepted(role: Role, file: &[u8]) -> bool {
    let trusted = TrustedRoot::from_root(GENUINE.root.as_slice().into()).expect("the genuine root is good");
    let floors = Floors::new(trusted.root());
    let anything = || FileMeta { version: 1, length: None, hashes: None };
    let expires = trusted.root().expires;
    let meta = |names: &[&str]| -> BTreeMap<String, FileMeta> {
        names.iter().map(|n| ((*n).to_owned(), anything())).collect()
    };
    let timestamp = Timestamp { version: 1, expires, meta: meta(&["snapshot.json"]), issued: None };
    let snapshot = Snapshot { version: 1, expires, meta: meta(&["targets.json", "catalog.json", "rollout.json"]) };
    match role {
        Role::Root => {
            let next = trusted.clone().update(file.into());
            assert!(next.is_err(), "nobody signed a second root");
            TrustedRoot::from_root(file.into()).is_ok()
        }
        Role::Timestamp => trusted.timestamp(file.into(), &floors).is_ok(),
        Role::Snapshot => trusted.snapshot(file.into(), &timestamp, &floors).is_ok(),
        Role::Targets => {
            let alone = trusted.targets_alone(file.into()).is_ok();
            assert!(alone || trusted.targets(file.into(), &snapshot).is_err());
            alone
        }
        Role::Catalog | Role::Rollout => {
            let targets = trusted.targets_alone(GENUINE.file(Role::Targets).into()).expect("genuine targets are good");
            trusted.delegated(role, file.into(), &snapshot, &targets.document).is_ok()
        }
    }
}

/// The document inside, whoever signed it: written and read again it is the same.
fn documents(role: Role, signed: &Value) {
    match role {
        Role::Root => round_trip::<Root>(signed),
        Role::Timestamp => round_trip::<Timestamp>(signed),
        Role::Snapshot => round_trip::<Snapshot>(signed),
        Role::Targets | Role::Catalog | Role::Rollout => round_trip::<Targets>(signed),
    }
}

fn round_trip<T: Document + serde::Serialize + PartialEq + std::fmt::Debug>(signed: &Value) {
    let Ok(document) = serde_json::from_value::<T>(signed.clone()) else { return };
    let checked = document.check().is_ok();
    let text = serde_json::to_vec(&document).expect("a document can be written");
    let again: T = serde_json::from_slice(&text).expect("a written document can be read");
    assert_eq!(again, document);
    assert_eq!(again.check().is_ok(), checked);
}

/// Path rules over any text.
fn paths(text: &str) {
    let mut lines = text.splitn(2, '\n');
    let (pattern, path) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    if path_matches(pattern, path) {
        assert_eq!(pattern.split('/').count(), path.split('/').count(), "`*` never crosses a slash");
    }
    assert!(!path.contains('*') || path_matches(path, path), "a pattern matches itself");
    assert!(target_location(path, &Digest::of(b"")).starts_with("targets/"));
}
