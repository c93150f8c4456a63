//! The manifest of a bundle, from the model file, the candidate and the app's settings.

use super::describe::Described;
use flywheel_bundle::manifest::{BaseModelV1, BuildV1, HealthV1, LineageV1, ManifestV1};
use flywheel_inference::eval::working_memory;
use flywheel_store::candidates::CandidateRow;
use flywheel_types::{AppId, Digest};
use serde::Deserialize;
use serde_json::Value;

/// Engine of the GGUF format.
const RUNTIME: &str = "llama.cpp";
/// Context that a phone is expected to run with, tokens, if the model has as much.
const CONTEXT_TOKENS: usize = 2048;
/// Prompt tokens that the engine processes together (default of stock llama.cpp).
const PASS_TOKENS: usize = 512;
/// Device memory over working set: system and app need about half of a phone's memory for themselves.
const RAM_FACTOR: u64 = 2;
/// Licence of a file that names none: no statement is made (SPDX 2.3, 7.13).
const NO_LICENCE: &str = "NOASSERTION";
/// SPDX identifiers of the usual model licences. Model files write them in any case; SPDX compares without it.
const SPDX: &[&str] = &[
    "Apache-2.0",
    "MIT",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "MPL-2.0",
    "GPL-3.0-only",
    "GPL-3.0-or-later",
    "AGPL-3.0-only",
    "AGPL-3.0-or-later",
    "LGPL-3.0-only",
    "CC0-1.0",
    "CC-BY-4.0",
    "CC-BY-SA-4.0",
    "CC-BY-NC-4.0",
    "CC-BY-NC-SA-4.0",
];

/// `bundle` in the app's settings. What is left out follows from the model file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct BundleSettings {
    /// Line of development; by default the app's id.
    pub line: Option<String>,
    /// SPDX expression; by default `general.license` of the file or its base, and `NOASSERTION` when neither has one.
    pub licence: Option<String>,
    /// Engine that devices report; by default `llama.cpp`.
    pub runtime: Option<String>,
    /// Oldest engine version; by default any.
    pub min_runtime: Option<String>,
    /// Device memory needed; by default twice the estimated working set at 2,048 tokens of context.
    pub min_ram_bytes: Option<u64>,
}

/// Where a bundle comes from.
pub(super) struct Origin<'a> {
    pub app: &'a AppId,
    pub row: &'a CandidateRow,
    pub seq: u64,
    /// Digest of the newest evaluation's report.
    pub evaluation: Option<Digest>,
}

/// Puts the manifest together; it is validated when it is written.
pub(super) fn manifest(origin: &Origin<'_>, file: Described, settings: &BundleSettings) -> ManifestV1 {
    let row = origin.row;
    let context = CONTEXT_TOKENS.min(file.config.context);
    let memory = working_memory(&file.config, file.artefact.length, context, PASS_TOKENS);
    let precision = row.report.get("precision").and_then(Value::as_str).map_or(file.precision, str::to_owned);
    let build = BuildV1 {
        device_classes: Vec::new(),
        runtime: settings.runtime.clone().unwrap_or_else(|| RUNTIME.to_owned()),
        min_runtime: settings.min_runtime.clone(),
        precision,
        accelerator: None,
        min_ram_bytes: settings.min_ram_bytes.unwrap_or(RAM_FACTOR * memory.total_bytes()),
        artefacts: vec![file.artefact],
    };
    ManifestV1 {
        format: 1,
        app: origin.app.clone(),
        kind: row.kind,
        line: settings.line.clone().unwrap_or_else(|| word(origin.app.as_str())),
        seq: origin.seq,
        security_epoch: 0,
        base: row.base.map(|digest| BaseModelV1 { id: word(&file.base_name.to_lowercase()), digest }),
        builds: vec![build],
        tokenizer: Some(file.identity.tokenizer_sha256),
        chat_template: file.identity.chat_template_sha256,
        adapters: Vec::new(),
        deltas: Vec::new(),
        licence: settings.licence.clone().unwrap_or_else(|| licence(file.licence.as_deref())),
        evaluation: origin.evaluation,
        lineage: LineageV1 {
            candidate: row.candidate_id.clone(),
            dataset: row.dataset,
            base: row.base,
            job: row.job.as_ref().map(|(job, _)| job.clone()),
        },
        health: HealthV1::default(),
        extra: Default::default(),
    }
}

/// `text` as a word of a manifest: 1 to 64 of letters, digits, `.`, `_`, `-`, not beginning with `.`; each run of other
/// characters becomes one `-`.
fn word(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            c if c.is_ascii_alphanumeric() || "._-".contains(c) => out.push(c),
            _ if out.ends_with('-') => {}
            _ => out.push('-'),
        }
    }
    out.truncate(64); // only ASCII is in it
    let out = out.trim_start_matches(['.', '-']);
    if out.is_empty() { "unnamed".to_owned() } else { out.to_owned() }
}

/// A licence name of a model file as an SPDX expression; names that SPDX does not list become references.
fn licence(stated: Option<&str>) -> String {
    let Some(stated) = stated else { return NO_LICENCE.to_owned() };
    match SPDX.iter().find(|known| known.eq_ignore_ascii_case(stated)) {
        Some(known) => (*known).to_owned(),
        None => format!("LicenseRef-{}", word(stated).replace('_', "-")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_are_spdx_expressions() {
        for (stated, want) in [
            (Some("apache-2.0"), "Apache-2.0"),
            (Some("MIT"), "MIT"),
            (Some("llama3.2"), "LicenseRef-llama3.2"),
            (Some("My own licence"), "LicenseRef-My-own-licence"),
            (None, "NOASSERTION"),
        ] {
            assert_eq!(licence(stated), want, "{stated:?}");
        }
    }

    #[test]
    fn names_become_words() {
        for (text, want) in [
            ("shop", "shop"),
            ("shop:eu/de@1", "shop-eu-de-1"),
            ("Smollm2 135M 8k", "Smollm2-135M-8k"),
            ("..hidden", "hidden"),
            ("模型", "unnamed"),
        ] {
            assert_eq!(word(text), want, "{text}");
        }
        assert_eq!(word(&"a".repeat(80)).len(), 64);
    }
}
