//! Manifests: what is accepted has exactly one form, and every accessor works on it.

use flywheel_bundle::ManifestV1;
use flywheel_bundle::canonical::json_bytes;
use flywheel_bundle::manifest::MAX_ARTEFACT_BYTES;
use flywheel_types::Digest;
use flywheel_types::wire::DeviceFactsV1;
use serde_json::Value;
use std::collections::BTreeSet;

/// The bytes as they are, and, where they are any JSON, in canonical form: so that the fuzzer need not guess the order
/// of keys to get past the first check.
pub fn run(data: &[u8]) {
    check(data);
    if let Ok(value) = serde_json::from_slice::<Value>(data)
        && let Ok(bytes) = json_bytes(&value)
    {
        check(&bytes);
    }
}

fn check(bytes: &[u8]) {
    let Ok(manifest) = ManifestV1::from_bytes(bytes) else { return };
    assert_eq!(manifest.to_bytes().expect("an accepted manifest can be written"), bytes, "one manifest, one form");
    assert_eq!(manifest.id().expect("an accepted manifest has an id"), Digest::of(bytes));
    assert!(manifest.target_path().starts_with("bundles/"));
    let mut seen = BTreeSet::new();
    for file in manifest.files() {
        assert!(seen.insert(file.sha256), "every file once");
        assert!(file.length > 0 && file.length < MAX_ARTEFACT_BYTES);
        let last = file.chunks.len() - 1;
        assert_eq!(file.chunk_range(last).map(|r| r.1), Some(file.length), "the chunks end with the file");
        assert_eq!(file.chunk_range(last + 1), None);
    }
    let facts = DeviceFactsV1 {
        class: manifest.builds[0].device_classes.first().cloned(),
        runtime: Some(manifest.builds[0].runtime.clone()),
        ram_bytes: Some(u64::MAX),
        ..DeviceFactsV1::default()
    };
    let fits = manifest.build_for(&facts).expect("a device that meets every demand of a build gets one");
    assert!(fits.total_bytes() > 0);
}
