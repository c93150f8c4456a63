//! The metadata documents (TUF spec 4.3 to 4.6), read strictly where a mistake would weaken a check and
//! leniently where the specification asks for it (unknown fields are ignored, but covered by signatures).

use super::{MetadataError, PublicKey, Role};
use chrono::{DateTime, NaiveDateTime, SecondsFormat, Utc};
use flywheel_types::{BundleKind, Digest};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::collections::BTreeMap;

/// TUF time: `YYYY-MM-DDTHH:MM:SSZ`.
#[must_use]
pub fn format_time(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Serde form of [`format_time`].
pub(crate) mod tuf_time {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(t: &DateTime<Utc>, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format_time(*t))
    }
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<DateTime<Utc>, D::Error> {
        let text = String::deserialize(d)?;
        NaiveDateTime::parse_from_str(&text, "%Y-%m-%dT%H:%M:%SZ")
            .map(|t| t.and_utc())
            .map_err(|_| D::Error::custom(format!("`{text}` is not a time like 2030-01-31T00:00:00Z")))
    }
}

/// Optional [`tuf_time`].
mod tuf_time_opt {
    use super::*;

    pub(super) fn serialize<S: Serializer>(t: &Option<DateTime<Utc>>, s: S) -> Result<S::Ok, S::Error> {
        match t {
            Some(t) => tuf_time::serialize(t, s),
            None => s.serialize_none(),
        }
    }
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<DateTime<Utc>>, D::Error> {
        tuf_time::deserialize(d).map(Some)
    }
}

/// Keys and threshold of a role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleKeys {
    pub keyids: Vec<String>,
    pub threshold: u32,
}

/// Who may sign what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    pub version: u64,
    #[serde(with = "tuf_time")]
    pub expires: DateTime<Utc>,
    pub consistent_snapshot: bool,
    pub keys: BTreeMap<String, PublicKey>,
    pub roles: BTreeMap<String, RoleKeys>,
}

/// What a parent says about a metadata file. We always write length and digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMeta {
    pub version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hashes: Option<Hashes>,
}

/// Digests of a file; SHA-256 is required, others are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashes {
    pub sha256: Digest,
}

impl FileMeta {
    /// Describes `bytes`.
    #[must_use]
    pub fn of(version: u64, bytes: &[u8]) -> Self {
        Self { version, length: Some(bytes.len() as u64), hashes: Some(Hashes { sha256: Digest::of(bytes) }) }
    }

    /// Whether `bytes` have the announced length and digest.
    #[must_use]
    pub fn describes(&self, bytes: &[u8]) -> bool {
        self.length.is_none_or(|l| l == bytes.len() as u64)
            && self.hashes.as_ref().is_none_or(|h| h.sha256 == Digest::of(bytes))
    }
}

/// Freshness: names the current snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timestamp {
    pub version: u64,
    #[serde(with = "tuf_time")]
    pub expires: DateTime<Utc>,
    pub meta: BTreeMap<String, FileMeta>,
    /// When it was signed (an extra field of ours): lifts a device clock that is behind.
    #[serde(default, with = "tuf_time_opt", skip_serializing_if = "Option::is_none")]
    pub issued: Option<DateTime<Utc>>,
}

/// Which versions of the targets documents belong together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub version: u64,
    #[serde(with = "tuf_time")]
    pub expires: DateTime<Utc>,
    pub meta: BTreeMap<String, FileMeta>,
}

/// A targets document: `targets`, `catalog` or `rollout`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Targets {
    pub version: u64,
    #[serde(with = "tuf_time")]
    pub expires: DateTime<Utc>,
    pub targets: BTreeMap<String, TargetFile>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delegations: Option<Delegations>,
    /// Only in `catalog` (an extra field of ours).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release_policy: Option<ReleasePolicy>,
}

/// One target file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TargetFile {
    pub length: u64,
    pub hashes: Hashes,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custom: Option<Value>,
}

impl TargetFile {
    /// Describes a file.
    #[must_use]
    pub fn new(length: u64, sha256: Digest) -> Self {
        Self { length, hashes: Hashes { sha256 }, custom: None }
    }
}

/// `custom` of a manifest target: what a device needs to know before it fetches the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetCustom {
    /// Equal to the target's SHA-256.
    pub bundle_id: Digest,
    pub line: String,
    pub seq: u64,
    pub kind: BundleKind,
    pub security_epoch: u64,
}

/// What the release key says about all bundles together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleasePolicy {
    /// Devices install nothing below.
    pub security_epoch_floor: u64,
    /// Bundles that must not be installed again, sorted.
    pub revoked: Vec<Digest>,
}

/// Hand-over of part of the target space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delegations {
    pub keys: BTreeMap<String, PublicKey>,
    pub roles: Vec<DelegatedRole>,
}

/// One delegated role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelegatedRole {
    pub name: String,
    pub keyids: Vec<String>,
    pub threshold: u32,
    #[serde(default)]
    pub paths: Vec<String>,
    pub terminating: bool,
}

impl Delegations {
    /// The delegation to `role`, if it is there once.
    #[must_use]
    pub fn role(&self, role: Role) -> Option<&DelegatedRole> {
        let mut hits = self.roles.iter().filter(|r| r.name == role.as_str());
        match (hits.next(), hits.next()) {
            (Some(one), None) => Some(one),
            _ => None,
        }
    }
}

impl DelegatedRole {
    /// Keys and threshold.
    #[must_use]
    pub fn role_keys(&self) -> RoleKeys {
        RoleKeys { keyids: self.keyids.clone(), threshold: self.threshold }
    }
}

/// What every document has.
pub trait Document: DeserializeOwned {
    fn version(&self) -> u64;
    fn expires(&self) -> DateTime<Utc>;
    /// Checks that serde cannot express.
    ///
    /// # Errors
    /// A sentence for [`MetadataError::Malformed`].
    fn check(&self) -> Result<(), String>;
}

macro_rules! document {
    ($($name:ident => $check:expr),+ $(,)?) => {$(
        impl Document for $name {
            fn version(&self) -> u64 { self.version }
            fn expires(&self) -> DateTime<Utc> { self.expires }
            fn check(&self) -> Result<(), String> {
                let check: fn(&$name) -> Result<(), String> = $check;
                if self.version == 0 { return Err("version is 0, the first is 1".to_owned()) }
                check(self)
            }
        }
    )+};
}

document! {
    Root => check_root,
    Timestamp => |t| t.meta.get("snapshot.json").map(|_| ()).ok_or_else(|| "does not name snapshot.json".to_owned()),
    Snapshot => |_| Ok(()),
    Targets => check_targets,
}

fn check_role_keys(name: &str, keyids: &[String], threshold: u32) -> Result<(), String> {
    let unique: std::collections::BTreeSet<&String> = keyids.iter().collect();
    if unique.len() != keyids.len() {
        return Err(format!("role {name} lists a key twice"));
    }
    if threshold == 0 {
        return Err(format!("role {name} has threshold 0"));
    }
    Ok(())
}

fn check_root(root: &Root) -> Result<(), String> {
    for role in [Role::Root, Role::Timestamp, Role::Snapshot, Role::Targets] {
        let keys = root.roles.get(role.as_str()).ok_or_else(|| format!("role {role} is missing"))?;
        check_role_keys(role.as_str(), &keys.keyids, keys.threshold)?;
    }
    if !root.consistent_snapshot {
        return Err("consistent_snapshot must be true".to_owned());
    }
    Ok(())
}

fn check_targets(targets: &Targets) -> Result<(), String> {
    for role in targets.delegations.iter().flat_map(|d| &d.roles) {
        check_role_keys(&role.name, &role.keyids, role.threshold)?;
    }
    Ok(())
}

/// Reads the document inside a signed value.
pub(crate) fn read<T: Document>(role: Role, signed: Value) -> Result<T, MetadataError> {
    let malformed = |why: String| MetadataError::Malformed { role, why };
    let document: T = serde_json::from_value(signed).map_err(|e| malformed(e.to_string()))?;
    document.check().map_err(malformed)?;
    Ok(document)
}
