//! The signing policy: what the release key signs by itself. Everything else waits for a person. Pure: the caller
//! says what was signed today and whom it asked.

use crate::http::signer::WaitingRelease;
use flywheel_bundle::manifest::ManifestV1;
use flywheel_types::{AppId, BundleKind, Digest, Verdict};
use serde::Deserialize;

/// What may be signed without a person. The defaults sign only releases whose offline gate passed.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SigningPolicy {
    pub kinds: Vec<BundleKind>,
    /// Sum of a build's artefacts, bytes.
    pub max_build_bytes: u64,
    /// Releases in 24 hours.
    pub max_per_day: usize,
    /// Digests of base models; empty allows any.
    pub bases: Vec<Digest>,
    /// The offline gate must have passed and must not have been overridden.
    pub require_gate_pass: bool,
}

impl Default for SigningPolicy {
    fn default() -> Self {
        Self {
            kinds: vec![BundleKind::Weights, BundleKind::Adapter, BundleKind::Prompt],
            max_build_bytes: 4 << 30,
            max_per_day: 10,
            bases: Vec::new(),
            require_gate_pass: true,
        }
    }
}

/// What to do with a release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ruling {
    Sign,
    /// A person has to say yes; the text says why.
    AskPerson(String),
    /// Never: the request contradicts itself.
    Refuse(String),
}

impl SigningPolicy {
    /// Judges a release. `signed_today` counts what was signed in the last 24 hours.
    #[must_use]
    pub fn rule(&self, app: &AppId, waiting: &WaitingRelease, manifest: &ManifestV1, signed_today: usize) -> Ruling {
        if manifest.app != *app {
            return Ruling::Refuse(format!("the manifest is for app `{}`", manifest.app));
        }
        if manifest.id().ok() != Some(waiting.manifest) {
            return Ruling::Refuse("the manifest does not have the digest it is asked for under".into());
        }
        if waiting.candidate["candidate_id"].as_str() != Some(manifest.lineage.candidate.as_str()) {
            return Ruling::Refuse("the manifest names another candidate than the request".into());
        }
        match self.wants_person(waiting, manifest, signed_today) {
            Some(why) => Ruling::AskPerson(why),
            None => Ruling::Sign,
        }
    }

    fn wants_person(&self, waiting: &WaitingRelease, manifest: &ManifestV1, signed_today: usize) -> Option<String> {
        if !self.kinds.contains(&manifest.kind) {
            return Some(format!("bundles of kind `{}` are not signed automatically", manifest.kind));
        }
        if let Some(big) = manifest.builds.iter().map(|b| b.total_bytes()).find(|n| *n > self.max_build_bytes) {
            return Some(format!("a build has {big} bytes, the policy allows {}", self.max_build_bytes));
        }
        if signed_today >= self.max_per_day {
            return Some(format!("{signed_today} releases were signed in the last 24 hours"));
        }
        let base = manifest.base.as_ref().map(|b| b.digest);
        if !self.bases.is_empty() && !base.is_some_and(|b| self.bases.contains(&b)) {
            return Some("its base model is not among the allowed ones".into());
        }
        let verdict = waiting.evaluation["verdict"].as_str();
        if self.require_gate_pass && verdict != Some(Verdict::Pass.as_str()) {
            return Some(format!("its offline gate says {}", verdict.unwrap_or("nothing")));
        }
        None
    }
}
