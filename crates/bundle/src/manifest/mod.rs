//! The bundle manifest: what a bundle is made of, where it comes from and how a device proves that it works.
//! Its canonical bytes are immutable; their SHA-256 is the bundle's id.

mod artefact;
mod chunk;
mod validate;

pub use artefact::{ArtefactHasher, ArtefactV1, CHUNK_SIZE, MAX_ARTEFACT_BYTES, MAX_ARTEFACTS};
pub use chunk::{ChunkError, ChunkVerifier};

use crate::canonical::{CanonicalError, json_bytes};
use flywheel_types::wire::DeviceFactsV1;
use flywheel_types::{AppId, BundleKind, CandidateId, Digest, JobId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The manifest format this build reads and writes.
pub const FORMAT: u8 = 1;
/// Largest manifest a device accepts, bytes (an 8 GB model needs about 75 kB of chunk hashes).
pub const MAX_MANIFEST_BYTES: u64 = 4 << 20;

/// Why bytes are not an acceptable manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    #[error("manifest cannot be read: {0}")]
    Malformed(String),
    #[error("manifest has format {0}, this build reads format 1: update the app")]
    UnknownFormat(u64),
    #[error("manifest holds the unknown key `{0}`: only keys that begin with `x-` may be added to format 1")]
    UnknownKey(String),
    #[error("manifest is not in canonical form: write it with `ManifestV1::to_bytes`")]
    NotCanonical,
    #[error("manifest field `{field}`: {why}")]
    Invalid { field: String, why: String },
    #[error("manifest is {0} bytes, the limit is {MAX_MANIFEST_BYTES}")]
    TooLarge(u64),
}

/// A bundle manifest, format 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ManifestV1 {
    /// Always 1.
    pub format: u8,
    pub app: AppId,
    pub kind: BundleKind,
    /// Line of development, for example `support-answers`: letters, digits, `.`, `_`, `-`.
    pub line: String,
    /// Label within the line. It orders nothing: rollbacks go to lower numbers.
    pub seq: u64,
    /// Devices refuse a bundle below the signed floor of the catalog.
    pub security_epoch: u64,
    /// The model that this bundle is or extends; absent for bundles that work with any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseModelV1>,
    /// One entry per device class, runtime and precision, in order of preference.
    pub builds: Vec<BuildV1>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<Digest>,
    /// LoRA adapters among the artefacts, in the order they are applied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterV1>,
    /// Smaller downloads from an older artefact to a new one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deltas: Vec<DeltaV1>,
    /// SPDX expression.
    pub licence: String,
    /// Digest of the offline evaluation report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<Digest>,
    pub lineage: LineageV1,
    pub health: HealthV1,
    /// Extensions; every key begins with `x-` and holds no fractions.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

/// The base model by name and content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseModelV1 {
    /// Human name, for example `smollm2-135m-instruct`.
    pub id: String,
    pub digest: Digest,
}

/// One way to run the bundle. A device takes the first build it fits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuildV1 {
    /// Device classes this build is meant for; empty = every class.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_classes: Vec<String>,
    /// Engine, for example `llama.cpp`; `any` when no engine is involved.
    pub runtime: String,
    /// Oldest engine version that loads it, dotted numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_runtime: Option<String>,
    /// Quantisation or number format, for example `q4_0`; `none` for text and indexes.
    pub precision: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
    /// Device memory needed, bytes; 0 = no demand.
    #[serde(default)]
    pub min_ram_bytes: u64,
    /// Ordered: shards stay in the order the engine expects.
    pub artefacts: Vec<ArtefactV1>,
}

/// A LoRA adapter artefact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterV1 {
    /// Digest of the artefact that holds it.
    pub sha256: Digest,
    pub rank: u32,
    /// LoRA alpha in thousandths (16.0 is 16000).
    pub alpha_milli: u32,
}

/// How to make artefact `to` from artefact `from`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaV1 {
    pub from: Digest,
    pub to: Digest,
    /// `xor-zstd`: XOR with `from`, compressed with zstd.
    pub algorithm: String,
    /// The delta file.
    pub artefact: ArtefactV1,
    /// Working memory needed to apply it, bytes.
    pub ram_bytes: u64,
}

/// Where the bundle comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LineageV1 {
    pub candidate: CandidateId,
    /// Digest of the dataset snapshot it was trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dataset: Option<Digest>,
    /// Digest of the artefact it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Digest>,
    /// Job that made it; absent when registered from outside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobId>,
}

/// How a device proves the bundle healthy before it gives up the previous one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthV1 {
    /// Asked once after the load; absent for bundles that generate nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<ProbeV1>,
    /// Time allowed for the load itself, milliseconds.
    pub load_time_limit_ms: u64,
    /// Deaths in a row inside the load window before the device falls back.
    pub max_load_deaths: u32,
    /// The bake period ends after this many real generations without a crash …
    pub confirm_generations: u32,
    /// … or after this many seconds in use, whichever is first.
    pub confirm_after_s: u64,
}

/// Probe prompt with the expected answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeV1 {
    pub prompt: String,
    pub expect: ProbeCheck,
    pub max_tokens: u32,
    /// From the start of the prompt to the last token, milliseconds.
    pub time_limit_ms: u64,
}

/// What the probe's answer must look like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "check", rename_all = "snake_case", deny_unknown_fields)]
pub enum ProbeCheck {
    /// Anything but white space.
    NotEmpty,
    /// At least one of the texts occurs, ignoring ASCII case.
    ContainsAny { values: Vec<String> },
}

impl ProbeCheck {
    /// Whether `answer` passes.
    #[must_use]
    pub fn passes(&self, answer: &str) -> bool {
        match self {
            Self::NotEmpty => !answer.trim().is_empty(),
            Self::ContainsAny { values } => {
                let answer = answer.to_ascii_lowercase();
                values.iter().any(|v| answer.contains(&v.to_ascii_lowercase()))
            }
        }
    }
}

impl Default for HealthV1 {
    /// No probe, 60 s to load, two deaths, confirmed after 20 generations or a day.
    fn default() -> Self {
        Self {
            probe: None,
            load_time_limit_ms: 60_000,
            max_load_deaths: 2,
            confirm_generations: 20,
            confirm_after_s: 86_400,
        }
    }
}

impl ManifestV1 {
    /// Canonical bytes. Validates first, so that nothing unreadable is ever written.
    ///
    /// # Errors
    /// [`ManifestError`] names the offending field.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ManifestError> {
        self.validate()?;
        let bytes = json_bytes(self).map_err(from_canonical)?;
        if bytes.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLarge(bytes.len() as u64));
        }
        Ok(bytes)
    }

    /// The bundle id: SHA-256 of [`Self::to_bytes`].
    ///
    /// # Errors
    /// As [`Self::to_bytes`].
    pub fn id(&self) -> Result<Digest, ManifestError> {
        Ok(Digest::of(&self.to_bytes()?))
    }

    /// Reads and validates a manifest. The bytes must be the canonical ones, so that one bundle has one id.
    ///
    /// # Errors
    /// [`ManifestError`]; an unknown `format` is told apart from damage.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLarge(bytes.len() as u64));
        }
        let value: Value = serde_json::from_slice(bytes).map_err(|e| ManifestError::Malformed(e.to_string()))?;
        match value.get("format").and_then(Value::as_u64) {
            Some(1) => {}
            Some(other) => return Err(ManifestError::UnknownFormat(other)),
            None => return Err(ManifestError::Malformed("no `format` number".to_owned())),
        }
        let manifest: Self = serde_json::from_value(value).map_err(|e| ManifestError::Malformed(e.to_string()))?;
        if manifest.to_bytes()? != bytes {
            return Err(ManifestError::NotCanonical);
        }
        Ok(manifest)
    }

    /// TUF target path of this manifest.
    #[must_use]
    pub fn target_path(&self) -> String {
        format!("bundles/{}/{}/manifest.json", self.line, self.seq)
    }

    /// Every file the bundle can need, each once, in manifest order.
    #[must_use]
    pub fn files(&self) -> Vec<&ArtefactV1> {
        let mut seen = std::collections::BTreeSet::new();
        self.builds
            .iter()
            .flat_map(|b| &b.artefacts)
            .chain(self.deltas.iter().map(|d| &d.artefact))
            .filter(|a| seen.insert(a.sha256))
            .collect()
    }

    /// The first build that `facts` allow. A demand of the build that the device says nothing about is not met;
    /// runtime `any` and an empty class list demand nothing.
    #[must_use]
    pub fn build_for(&self, facts: &DeviceFactsV1) -> Option<&BuildV1> {
        self.builds.iter().find(|b| {
            let class =
                b.device_classes.is_empty() || facts.class.as_ref().is_some_and(|c| b.device_classes.contains(c));
            let runtime = b.runtime == "any" || facts.runtime.as_ref() == Some(&b.runtime);
            let ram = b.min_ram_bytes == 0 || facts.ram_bytes.is_some_and(|r| r >= b.min_ram_bytes);
            class && runtime && ram
        })
    }
}

impl BuildV1 {
    /// Bytes to download when nothing is there yet.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.artefacts.iter().map(|a| a.length).sum()
    }
}

fn from_canonical(e: CanonicalError) -> ManifestError {
    ManifestError::Invalid { field: "x-*".to_owned(), why: e.to_string() }
}
