//! Manifests: round trip, refusals, and which build a device takes.

use crate::support::manifest;
use flywheel_bundle::manifest::{AdapterV1, ManifestError};
use flywheel_bundle::{ArtefactV1, ManifestV1};
use flywheel_types::wire::DeviceFactsV1;
use flywheel_types::{BundleKind, Digest};
use proptest::prelude::*;

fn refused(change: impl Fn(&mut ManifestV1)) -> String {
    let mut m = manifest(1, 1, b"w");
    change(&mut m);
    m.to_bytes().unwrap_err().to_string()
}

#[test]
fn every_rule_names_its_field() {
    assert!(refused(|m| m.format = 2).contains("format 2"));
    assert!(refused(|m| m.line = "a/b".into()).contains("`line`"));
    assert!(refused(|m| m.line = "..".into()).contains("`line`"));
    assert!(refused(|m| m.licence = " ".into()).contains("licence"));
    assert!(refused(|m| m.builds.clear()).contains("builds"));
    assert!(refused(|m| m.builds[0].artefacts.clear()).contains("builds[0].artefacts"));
    assert!(refused(|m| m.builds[0].min_runtime = Some("b4000".into())).contains("min_runtime"));
    assert!(refused(|m| m.builds[0].artefacts[0].path = "blobs/../x.gguf".into()).contains("path"));
    assert!(refused(|m| m.builds[0].artefacts[0].length = 200_000_000).contains("split it"));
    assert!(refused(|m| m.builds[0].artefacts[0].length = 0).contains("length"));
    assert!(refused(|m| m.builds[0].artefacts[0].chunk_size = 4096).contains("chunk_size"));
    assert!(refused(|m| m.builds[0].artefacts[0].chunks.clear()).contains("chunks"));
    assert!(refused(|m| m.builds[0].artefacts[0].chunks[0] = Digest::of(b"?")).contains("only chunk"));
    assert!(refused(|m| m.builds[0].artefacts = vec![ArtefactV1::of_bytes("gguf", b"w"); 2]).contains("twice"));
    assert!(refused(|m| m.health.max_load_deaths = 0).contains("max_load_deaths"));
    let stray = AdapterV1 { sha256: Digest::of(b"?"), rank: 8, alpha_milli: 16_000 };
    assert!(refused(|m| m.adapters = vec![stray.clone()]).contains("in no build"));
    assert!(refused(|m| drop(m.extra.insert("y".into(), 1.into()))).contains("`y`"));
    assert!(refused(|m| drop(m.extra.insert("x-f".into(), 1.5.into()))).contains("integer"));
}

#[test]
fn unknown_keys_are_refused_unless_marked() {
    let mut m = manifest(1, 1, b"w");
    m.extra.insert("x-note".into(), serde_json::json!({"any": ["thing", 1]}));
    let text = String::from_utf8(m.to_bytes().unwrap()).unwrap();
    assert_eq!(ManifestV1::from_bytes(text.as_bytes()).unwrap(), m);
    let top = text.replace("\"x-note\"", "\"y-note\"");
    assert_eq!(ManifestV1::from_bytes(top.as_bytes()), Err(ManifestError::UnknownKey("y-note".into())));
    let nested = text.replace("\"rank\"", "\"rang\"").replace("\"candidate\"", "\"candidat\"");
    assert!(matches!(ManifestV1::from_bytes(nested.as_bytes()), Err(ManifestError::Malformed(_))));
    let future = text.replace("\"format\":1", "\"format\":2");
    assert_eq!(ManifestV1::from_bytes(future.as_bytes()), Err(ManifestError::UnknownFormat(2)));
    let spaced = text.replace("\"format\":1", "\"format\": 1");
    assert_eq!(ManifestV1::from_bytes(spaced.as_bytes()), Err(ManifestError::NotCanonical));
    let null = text.replace("\"licence\"", "\"evaluation\":null,\"licence\"");
    assert!(ManifestV1::from_bytes(null.as_bytes()).is_err(), "one bundle, one spelling");
    assert!(ManifestV1::from_bytes(b"{}").is_err() && ManifestV1::from_bytes(b"").is_err());
}

#[test]
fn a_device_takes_the_first_build_it_fits() {
    let mut m = manifest(1, 1, b"w");
    let mut small = m.builds[0].clone();
    m.builds[0].device_classes = vec!["high-8gb".into()];
    m.builds[0].min_ram_bytes = 6 << 30;
    small.min_ram_bytes = 0;
    small.precision = "q2_k".into();
    m.builds.push(small);
    m.validate().unwrap();
    let facts = |class: Option<&str>, ram: Option<u64>, runtime: Option<&str>| DeviceFactsV1 {
        class: class.map(Into::into),
        ram_bytes: ram,
        runtime: runtime.map(Into::into),
        ..DeviceFactsV1::default()
    };
    let pick = |f: &DeviceFactsV1| m.build_for(f).map(|b| b.precision.clone());
    let llama = Some("llama.cpp");
    assert_eq!(pick(&facts(Some("high-8gb"), Some(8 << 30), llama)), Some("q4_0".into()));
    assert_eq!(pick(&facts(Some("high-8gb"), Some(4 << 30), llama)), Some("q2_k".into()));
    assert_eq!(pick(&facts(Some("high-8gb"), None, llama)), Some("q2_k".into()), "unknown memory");
    assert_eq!(pick(&facts(None, Some(8 << 30), llama)), Some("q2_k".into()));
    assert_eq!(pick(&facts(Some("high-8gb"), Some(8 << 30), Some("mlc"))), None);
}

fn any_manifest() -> impl Strategy<Value = ManifestV1> {
    let text = "[ -~\\n\\t\u{e9}\u{4fdd}\u{1f600}]{1,40}";
    (
        any::<u64>(),
        any::<u64>(),
        proptest::collection::vec(any::<u8>(), 1..300),
        text,
        proptest::sample::select(BundleKind::ALL),
        proptest::collection::btree_map("x-[a-z]{1,8}", text, 0..4),
        any::<u32>(),
    )
        .prop_map(|(seq, epoch, weights, text, kind, extra, ram)| {
            let mut m = manifest(seq, epoch, &weights);
            m.kind = kind;
            m.builds[0].min_ram_bytes = ram.into();
            m.builds[0].artefacts.push(ArtefactV1::of_bytes("json", text.as_bytes()));
            if let Some(probe) = &mut m.health.probe {
                probe.prompt = text;
            }
            m.extra = extra.into_iter().map(|(k, v)| (k, v.into())).collect();
            m
        })
        .prop_filter("two equal files", |m| m.validate().is_ok())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn manifests_round_trip(m in any_manifest()) {
        let bytes = m.to_bytes().unwrap();
        let back = ManifestV1::from_bytes(&bytes).unwrap();
        prop_assert_eq!(&back, &m);
        prop_assert_eq!(back.id().unwrap(), Digest::of(&bytes));
    }

    #[test]
    fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = ManifestV1::from_bytes(&bytes);
        for role in flywheel_bundle::tuf::Role::ALL {
            let _ = flywheel_bundle::tuf::Envelope::parse(role, &bytes);
        }
        let _ = flywheel_bundle::tuf::TrustedRoot::from_root(bytes.into());
    }
}
