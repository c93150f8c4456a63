//! A small publisher with all keys at hand, and an attacker's toolbox, for the tests of this crate.

use chrono::{DateTime, TimeDelta, Utc};
use flywheel_bundle::manifest::{BaseModelV1, HealthV1, LineageV1, ProbeCheck, ProbeV1};
use flywheel_bundle::publish::{
    CatalogEdit, Changes, Expiries, InitialRepository, Keyring, MemoryRepository, OnlineSigners, Profile, PublishError,
    PublishPlan, RepositoryState, RoleKeySet, RoleSigner, SecretKey, SignedMetadata, add_signatures, assemble,
    catalog_next, init_repository,
};
use flywheel_bundle::tuf::Role;
use flywheel_bundle::verify::{MemoryTrustStore, Options, Refresh, refresh};
use flywheel_bundle::{ArtefactV1, BuildV1, ManifestV1, UpdateClient, VerifyError};
use flywheel_types::assign::{AssignmentV1, PpmRange, RolloutAssignmentV1};
use flywheel_types::{AppId, BundleKind, CandidateId, Digest, RolloutId};
use serde_json::Value;
use std::collections::BTreeMap;

pub fn t(days: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(1_800_000_000, 0).unwrap() + TimeDelta::days(days)
}

pub fn app() -> AppId {
    AppId::new("support").unwrap()
}

/// Keys of one generation: `0` at the start, `1` after a rotation, and so on.
pub struct Keys {
    pub root: Vec<SecretKey>,
    pub targets: SecretKey,
    pub catalog: SecretKey,
    pub rollout: SecretKey,
    pub snapshot: SecretKey,
    pub timestamp: SecretKey,
}

impl Keys {
    pub fn new(generation: u8) -> Self {
        let key = |role, n: u8| SecretKey::from_seed(role, &[n * 16 + generation; 32]);
        Self {
            root: (0..3).map(|i| key(Role::Root, 1 + i)).collect(),
            targets: key(Role::Targets, 5),
            catalog: key(Role::Catalog, 6),
            rollout: key(Role::Rollout, 7),
            snapshot: key(Role::Snapshot, 8),
            timestamp: key(Role::Timestamp, 9),
        }
    }
    /// Root 2 of 3, the others single.
    pub fn ring(&self) -> Keyring {
        let one = |k: &SecretKey| RoleKeySet::single(k.public().clone());
        Keyring {
            root: RoleKeySet { keys: self.root.iter().map(|k| k.public().clone()).collect(), threshold: 2 },
            targets: one(&self.targets),
            catalog: one(&self.catalog),
            rollout: one(&self.rollout),
            snapshot: one(&self.snapshot),
            timestamp: one(&self.timestamp),
        }
    }
    pub fn of(&self, role: Role) -> Vec<&dyn RoleSigner> {
        match role {
            Role::Root => vec![&self.root[0], &self.root[1]],
            Role::Targets => vec![&self.targets],
            Role::Catalog => vec![&self.catalog],
            Role::Rollout => vec![&self.rollout],
            Role::Snapshot => vec![&self.snapshot],
            Role::Timestamp => vec![&self.timestamp],
        }
    }
}

/// Publisher and repository.
pub struct Shop {
    pub keys: Keys,
    pub expiries: Expiries,
    pub made: InitialRepository,
    pub state: RepositoryState,
    pub repo: MemoryRepository,
    pub serial: u64,
}

impl Shop {
    /// A repository with bundle 1 released and assigned to everybody, at day 0.
    pub fn open() -> Self {
        Self::with(Expiries::of(Profile::Full))
    }

    /// The same with other lives.
    pub fn with(expiries: Expiries) -> Self {
        let keys = Keys::new(0);
        let made =
            init_repository(&keys.ring(), &expiries, t(0), &keys.of(Role::Root), &keys.of(Role::Targets)).unwrap();
        let state = RepositoryState::initial(&made).unwrap();
        let mut shop = Self { keys, expiries, made, state, repo: MemoryRepository::default(), serial: 0 };
        let m = shop.manifest(1, 1);
        shop.release(&m, t(0)).unwrap();
        shop
    }

    pub fn root(&self) -> &[u8] {
        &self.made.root.bytes
    }

    /// A manifest with one small file, whose bytes go into the server's store.
    pub fn manifest(&mut self, seq: u64, security_epoch: u64) -> ManifestV1 {
        let weights = format!("weights {seq}").into_bytes();
        let m = manifest(seq, security_epoch, &weights);
        self.repo.add_blob(weights);
        m
    }

    pub fn assignment(&mut self, bundle: Option<Digest>, now: DateTime<Utc>) -> AssignmentV1 {
        self.serial += 1;
        AssignmentV1 {
            v: 1,
            app: app(),
            serial: self.serial,
            issued_at: now,
            poll_s: 3600,
            jitter_pct: 10,
            default_bundle: bundle,
            rollouts: vec![],
            pins: BTreeMap::new(),
        }
    }

    /// Adds a bundle and assigns it to everybody.
    pub fn release(&mut self, m: &ManifestV1, now: DateTime<Utc>) -> Result<PublishPlan, PublishError> {
        let edit = CatalogEdit { add: vec![m.clone()], ..CatalogEdit::default() };
        let assignment = self.assignment(Some(m.id()?), now);
        self.edit(&edit, Some(assignment), now)
    }

    pub fn edit(
        &mut self,
        edit: &CatalogEdit,
        assignment: Option<AssignmentV1>,
        now: DateTime<Utc>,
    ) -> Result<PublishPlan, PublishError> {
        let catalog = catalog_next(&self.state, edit, &self.expiries, now)?.sign(&self.keys.of(Role::Catalog))?;
        let manifests = edit.add.iter().map(|m| m.to_bytes().unwrap()).collect();
        self.publish(Changes { catalog: Some(catalog), manifests, assignment, ..Changes::default() }, now)
    }

    pub fn assign(&mut self, bundle: Option<Digest>, now: DateTime<Utc>) -> Result<PublishPlan, PublishError> {
        let assignment = Some(self.assignment(bundle, now));
        self.publish(Changes { assignment, ..Changes::default() }, now)
    }

    pub fn plan(&self, changes: Changes, now: DateTime<Utc>) -> Result<PublishPlan, PublishError> {
        let (rollout, snapshot, timestamp) =
            (self.keys.of(Role::Rollout), self.keys.of(Role::Snapshot), self.keys.of(Role::Timestamp));
        let signers = OnlineSigners { rollout: &rollout, snapshot: &snapshot, timestamp: &timestamp };
        assemble(&self.state, changes, &signers, &self.expiries, now)
    }

    pub fn publish(&mut self, changes: Changes, now: DateTime<Utc>) -> Result<PublishPlan, PublishError> {
        let plan = self.plan(changes, now)?;
        self.repo.apply(&plan).unwrap();
        self.state = plan.after.clone();
        Ok(plan)
    }

    pub fn resign(&mut self, now: DateTime<Utc>) {
        self.publish(Changes::default(), now).unwrap();
    }

    /// New keys for everything, as after a break-in: root and targets by hand, catalog signed again.
    pub fn rotate(&mut self, generation: u8, now: DateTime<Utc>) {
        use flywheel_bundle::publish::{root_next, targets_next};
        let new = Keys::new(generation);
        let root = root_next(&self.state, &new.ring(), &self.expiries, now).unwrap();
        let mut signers = self.keys.of(Role::Root);
        signers.extend(new.of(Role::Root));
        let root = root.sign(&signers).unwrap();
        let targets =
            targets_next(&self.state, &new.ring(), &self.expiries, now).unwrap().sign(&new.of(Role::Targets)).unwrap();
        let catalog = catalog_next(&self.state, &CatalogEdit::default(), &self.expiries, now)
            .unwrap()
            .sign(&new.of(Role::Catalog))
            .unwrap();
        self.keys = new;
        let changes =
            Changes { root: Some(root), targets: Some(targets), catalog: Some(catalog), ..Changes::default() };
        self.publish(changes, now).unwrap();
    }

    /// Replaces a metadata file by an altered copy signed with the role's real keys: what a thief of those keys
    /// can do. Returns the new bytes.
    pub fn forge(&self, repo: &mut MemoryRepository, path: &str, role: Role, change: impl Fn(&mut Value)) -> Vec<u8> {
        forge_with(repo, path, role, &self.keys.of(role), change)
    }

    pub fn client(&self) -> Phone {
        Phone::new(self.root())
    }
}

pub fn forge_with(
    repo: &mut MemoryRepository,
    path: &str,
    role: Role,
    signers: &[&dyn RoleSigner],
    change: impl Fn(&mut Value),
) -> Vec<u8> {
    let mut file: Value = serde_json::from_slice(&repo.files[path]).unwrap();
    file["signatures"] = Value::Array(vec![]);
    change(&mut file["signed"]);
    let bytes = serde_json::to_vec(&file).unwrap();
    let SignedMetadata { bytes, .. } = add_signatures(role, &bytes, signers).unwrap();
    repo.files.insert(path.to_owned(), bytes.clone());
    bytes
}

/// A device with its store.
pub struct Phone {
    pub root: Vec<u8>,
    pub store: MemoryTrustStore,
    pub client: UpdateClient,
}

impl Phone {
    pub fn new(root: &[u8]) -> Self {
        let store = MemoryTrustStore::default();
        let client = open(root, &store);
        Self { root: root.to_vec(), store, client }
    }
    pub fn refresh(&mut self, repo: &MemoryRepository, day: i64) -> Result<Refresh, VerifyError> {
        refresh(&mut self.client, repo, t(day))
    }
    pub fn restart(&mut self) {
        self.client = open(&self.root, &self.store);
    }
    pub fn bundle(&self) -> Option<Digest> {
        self.client.state().and_then(|s| s.assignment.default_bundle)
    }
}

pub fn open(root: &[u8], store: &MemoryTrustStore) -> UpdateClient {
    UpdateClient::open(root, app(), t(-30), Box::new(store.clone()), Options::default()).unwrap()
}

pub fn manifest(seq: u64, security_epoch: u64, weights: &[u8]) -> ManifestV1 {
    ManifestV1 {
        format: 1,
        app: app(),
        kind: BundleKind::Weights,
        line: "support-answers".into(),
        seq,
        security_epoch,
        base: Some(BaseModelV1 { id: "smollm2-135m-instruct".into(), digest: Digest::of(b"base") }),
        builds: vec![BuildV1 {
            device_classes: vec![],
            runtime: "llama.cpp".into(),
            min_runtime: Some("4000".into()),
            precision: "q4_0".into(),
            accelerator: None,
            min_ram_bytes: 512 << 20,
            artefacts: vec![ArtefactV1::of_bytes("gguf", weights)],
        }],
        tokenizer: Some(Digest::of(b"tokenizer")),
        chat_template: Some(Digest::of(b"template")),
        adapters: vec![],
        deltas: vec![],
        licence: "Apache-2.0".into(),
        evaluation: Some(Digest::of(b"report")),
        lineage: LineageV1 {
            candidate: CandidateId::new("cand-1").unwrap(),
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
        extra: BTreeMap::new(),
    }
}

pub fn rollout(treatment: Digest, control: Digest, to: u32) -> RolloutAssignmentV1 {
    RolloutAssignmentV1 {
        rollout_id: RolloutId::new("r1").unwrap(),
        phase: 1,
        salt: "r1".into(),
        eligible: vec![],
        treatment: PpmRange { from: 0, to },
        control: PpmRange { from: 500_000, to: 500_000 + to },
        treatment_bundle: treatment,
        control_bundle: control,
        ring: vec![],
        retry_failed: false,
        intake_closed: false,
    }
}
