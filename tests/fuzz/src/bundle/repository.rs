//! A small genuine repository with all keys at hand, made once per process. With the keys of a role the fuzzer plays
//! the thief of those keys: what a device must survive without trusting more than the role may say.

use chrono::{DateTime, TimeDelta, Utc};
use flywheel_bundle::manifest::{BaseModelV1, HealthV1, LineageV1, ProbeCheck, ProbeV1};
use flywheel_bundle::publish::{
    CatalogEdit, Changes, Expiries, Keyring, MemoryRepository, OnlineSigners, Profile, RepositoryState, RoleKeySet,
    RoleSigner as _, SecretKey, add_signatures, assemble, catalog_next, init_repository,
};
use flywheel_bundle::tuf::Role;
use flywheel_bundle::{ArtefactV1, BuildV1, ManifestV1};
use flywheel_types::assign::{AssignmentV1, PpmRange, Predicate, RolloutAssignmentV1};
use flywheel_types::{AppId, BundleKind, CandidateId, Digest, InstallId, RolloutId};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The repository: files by path, and the root that the app ships.
pub struct Genuine {
    keys: BTreeMap<Role, SecretKey>,
    pub repository: MemoryRepository,
    pub root: Vec<u8>,
    pub manifest: ManifestV1,
}

/// See [`Genuine`].
pub static GENUINE: LazyLock<Genuine> = LazyLock::new(make);

#[must_use]
pub fn app() -> AppId {
    AppId::new("support").expect("a valid id")
}

/// Day `day` of the repository's life.
#[must_use]
pub fn day(day: i64) -> DateTime<Utc> {
    let start: DateTime<Utc> = "2026-03-01T00:00:00Z".parse().expect("a valid time");
    start + TimeDelta::days(day)
}

impl Genuine {
    /// The newest file of a role.
    #[must_use]
    pub fn file(&self, role: Role) -> &[u8] {
        let path = if role == Role::Timestamp { role.path(0) } else { role.path(1) };
        &self.repository.files[&path]
    }

    /// The assignment document.
    #[must_use]
    pub fn assignment(&self) -> &[u8] {
        let found = self.repository.files.iter().find(|(path, _)| path.ends_with(".assignment.json"));
        found.expect("the repository has an assignment").1
    }

    /// The signed part of the newest file of a role.
    #[must_use]
    pub fn signed(&self, role: Role) -> Value {
        let mut file: Value = serde_json::from_slice(self.file(role)).expect("genuine metadata is JSON");
        file["signed"].take()
    }

    /// `signed` as a file of `role` with a good signature of the role's key; `None` when it has no such form.
    #[must_use]
    pub fn sign(&self, role: Role, signed: &Value) -> Option<Vec<u8>> {
        let bytes = serde_json::to_vec(&serde_json::json!({ "signatures": [], "signed": signed })).ok()?;
        add_signatures(role, &bytes, &[&self.keys[&role]]).ok().map(|s| s.bytes)
    }
}

fn make() -> Genuine {
    let seeds = Role::ALL.iter().zip(1u8..);
    let keys: BTreeMap<Role, SecretKey> = seeds.map(|(r, n)| (*r, SecretKey::from_seed(*r, &[n; 32]))).collect();
    let one = |role: Role| RoleKeySet::single(keys[&role].public().clone());
    let ring = Keyring {
        root: one(Role::Root),
        targets: one(Role::Targets),
        catalog: one(Role::Catalog),
        rollout: one(Role::Rollout),
        snapshot: one(Role::Snapshot),
        timestamp: one(Role::Timestamp),
    };
    let expiries = Expiries::of(Profile::Full);
    let made = init_repository(&ring, &expiries, day(0), &[&keys[&Role::Root]], &[&keys[&Role::Targets]])
        .expect("a repository can be made");
    let state = RepositoryState::initial(&made).expect("a fresh repository loads");
    let mut repository = MemoryRepository::default();
    repository.add_blob(b"weights".to_vec());
    let manifest = manifest();
    let edit = CatalogEdit { add: vec![manifest.clone()], ..CatalogEdit::default() };
    let catalog = catalog_next(&state, &edit, &expiries, day(0))
        .and_then(|c| c.sign(&[&keys[&Role::Catalog]]))
        .expect("the bundle can be released");
    let bundle = manifest.id().expect("the manifest is valid");
    let changes = Changes {
        catalog: Some(catalog),
        manifests: vec![manifest.to_bytes().expect("the manifest is valid")],
        assignment: Some(assignment(bundle)),
        ..Changes::default()
    };
    let signers = OnlineSigners {
        rollout: &[&keys[&Role::Rollout]],
        snapshot: &[&keys[&Role::Snapshot]],
        timestamp: &[&keys[&Role::Timestamp]],
    };
    let plan = assemble(&state, changes, &signers, &expiries, day(0)).expect("the release can be published");
    repository.apply(&plan).expect("the plan can be applied");
    Genuine { root: made.root.bytes.clone(), keys, repository, manifest }
}

fn manifest() -> ManifestV1 {
    ManifestV1 {
        format: 1,
        app: app(),
        kind: BundleKind::Weights,
        line: "support-answers".into(),
        seq: 7,
        security_epoch: 1,
        base: Some(BaseModelV1 { id: "smollm2-135m-instruct".into(), digest: Digest::of(b"base") }),
        builds: vec![BuildV1 {
            device_classes: vec!["high-8gb".into()],
            runtime: "llama.cpp".into(),
            min_runtime: Some("4000.1".into()),
            precision: "q4_0".into(),
            accelerator: Some("gpu".into()),
            min_ram_bytes: 512 << 20,
            artefacts: vec![ArtefactV1::of_bytes("gguf", b"weights")],
        }],
        tokenizer: Some(Digest::of(b"tokenizer")),
        chat_template: Some(Digest::of(b"template")),
        adapters: vec![],
        deltas: vec![],
        licence: "Apache-2.0".into(),
        evaluation: Some(Digest::of(b"report")),
        lineage: LineageV1 {
            candidate: CandidateId::new("cand-1").expect("a valid id"),
            dataset: Some(Digest::of(b"dataset")),
            base: Some(Digest::of(b"base")),
            job: None,
        },
        health: HealthV1 {
            probe: Some(ProbeV1 {
                prompt: "How long is the warranty?\n保修期多长？".into(),
                expect: ProbeCheck::ContainsAny { values: vec!["24 months".into()] },
                max_tokens: 32,
                time_limit_ms: 20_000,
            }),
            ..HealthV1::default()
        },
        extra: BTreeMap::from([("x-note".to_owned(), Value::from("first"))]),
    }
}

fn assignment(bundle: Digest) -> AssignmentV1 {
    AssignmentV1 {
        v: 1,
        app: app(),
        serial: 1,
        issued_at: day(0),
        poll_s: 3600,
        jitter_pct: 10,
        default_bundle: Some(bundle),
        rollouts: vec![RolloutAssignmentV1 {
            rollout_id: RolloutId::new("r1").expect("a valid id"),
            phase: 1,
            salt: "r1".into(),
            eligible: vec![Predicate::MinRamBytes { value: 1 }],
            treatment: PpmRange { from: 0, to: 1000 },
            control: PpmRange { from: 500_000, to: 501_000 },
            treatment_bundle: bundle,
            control_bundle: bundle,
            ring: vec![InstallId::of_public_key(&[1; 32])],
            retry_failed: false,
            intake_closed: false,
        }],
        pins: BTreeMap::from([(InstallId::of_public_key(&[2; 32]), bundle)]),
    }
}
