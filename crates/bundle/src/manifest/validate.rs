//! What a manifest must satisfy beyond its shape. The same checks run before writing and after reading.

use super::artefact::{ArtefactV1, CHUNK_SIZE, MAX_ARTEFACT_BYTES, MAX_ARTEFACTS};
use super::{BuildV1, FORMAT, HealthV1, ManifestError, ManifestV1};
use flywheel_types::Digest;
use std::collections::BTreeSet;

fn invalid(field: impl Into<String>, why: impl Into<String>) -> ManifestError {
    ManifestError::Invalid { field: field.into(), why: why.into() }
}

/// A path segment or short name: safe in a file name and in a URL without escaping.
fn check_word(field: &str, text: &str) -> Result<(), ManifestError> {
    let ok = !text.is_empty()
        && text.len() <= 64
        && !text.starts_with('.')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    if ok {
        return Ok(());
    }
    Err(invalid(field, format!("`{text}` must be 1 to 64 of letters, digits, `.`, `_`, `-`, not begin with `.`")))
}

impl ManifestV1 {
    /// Checks every field.
    ///
    /// # Errors
    /// The first offending field, with its place.
    pub fn validate(&self) -> Result<(), ManifestError> {
        if self.format != FORMAT {
            return Err(ManifestError::UnknownFormat(self.format.into()));
        }
        if let Some(key) = self.extra.keys().find(|k| !k.starts_with("x-")) {
            return Err(ManifestError::UnknownKey(key.clone()));
        }
        check_word("line", &self.line)?;
        if self.licence.trim().is_empty() || self.licence.len() > 256 {
            return Err(invalid("licence", "give an SPDX expression of at most 256 bytes"));
        }
        if let Some(base) = &self.base {
            check_word("base.id", &base.id)?;
        }
        if self.builds.is_empty() || self.builds.len() > 64 {
            return Err(invalid("builds", format!("{} builds; 1 to 64 are allowed", self.builds.len())));
        }
        for (i, build) in self.builds.iter().enumerate() {
            check_build(&format!("builds[{i}]"), build)?;
        }
        self.check_references()?;
        check_health(&self.health)
    }

    fn check_references(&self) -> Result<(), ManifestError> {
        let known: BTreeSet<Digest> = self.builds.iter().flat_map(|b| &b.artefacts).map(|a| a.sha256).collect();
        for (i, a) in self.adapters.iter().enumerate() {
            let field = format!("adapters[{i}]");
            if !known.contains(&a.sha256) {
                return Err(invalid(field, format!("artefact {} is in no build", a.sha256)));
            }
            if a.rank == 0 || a.alpha_milli == 0 {
                return Err(invalid(field, "rank and alpha must be above zero"));
            }
        }
        for (i, d) in self.deltas.iter().enumerate() {
            let field = format!("deltas[{i}]");
            if d.algorithm != "xor-zstd" {
                return Err(invalid(field, format!("unknown algorithm `{}`; use `xor-zstd`", d.algorithm)));
            }
            if !known.contains(&d.to) || d.from == d.to {
                return Err(invalid(field, "`to` must be an artefact of this bundle and differ from `from`"));
            }
            check_artefact(&field, &d.artefact)?;
        }
        Ok(())
    }
}

fn check_build(field: &str, build: &BuildV1) -> Result<(), ManifestError> {
    check_word(&format!("{field}.runtime"), &build.runtime)?;
    check_word(&format!("{field}.precision"), &build.precision)?;
    for class in &build.device_classes {
        check_word(&format!("{field}.device_classes"), class)?;
    }
    if let Some(v) = &build.min_runtime {
        let numbers = v.split('.').all(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
        if !numbers || v.len() > 64 {
            return Err(invalid(format!("{field}.min_runtime"), format!("`{v}` is not dotted numbers")));
        }
    }
    if build.artefacts.is_empty() || build.artefacts.len() > MAX_ARTEFACTS {
        let n = build.artefacts.len();
        return Err(invalid(format!("{field}.artefacts"), format!("{n} files; 1 to {MAX_ARTEFACTS} are allowed")));
    }
    let mut seen = BTreeSet::new();
    for (i, a) in build.artefacts.iter().enumerate() {
        let field = format!("{field}.artefacts[{i}]");
        check_artefact(&field, a)?;
        if !seen.insert(a.sha256) {
            return Err(invalid(field, "the same file twice in one build"));
        }
    }
    Ok(())
}

fn check_artefact(field: &str, a: &ArtefactV1) -> Result<(), ManifestError> {
    let extension = a
        .path
        .strip_prefix("blobs/")
        .and_then(|rest| rest.strip_prefix(&a.sha256.to_hex()))
        .and_then(|rest| rest.strip_prefix('.'));
    let extension_ok = extension.is_some_and(|e| {
        (1..=16).contains(&e.len()) && e.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
    });
    if !extension_ok {
        return Err(invalid(format!("{field}.path"), format!("`{}` is not `blobs/<sha256>.<extension>`", a.path)));
    }
    if a.length == 0 || a.length >= MAX_ARTEFACT_BYTES {
        let why = format!("{} bytes; a file has 1 to {} bytes: split it", a.length, MAX_ARTEFACT_BYTES - 1);
        return Err(invalid(format!("{field}.length"), why));
    }
    if a.chunk_size != CHUNK_SIZE {
        return Err(invalid(format!("{field}.chunk_size"), format!("must be {CHUNK_SIZE} at format 1")));
    }
    let want = a.length.div_ceil(CHUNK_SIZE);
    if a.chunks.len() as u64 != want {
        let why = format!("{} hashes, {want} needed for {} bytes", a.chunks.len(), a.length);
        return Err(invalid(format!("{field}.chunks"), why));
    }
    if want == 1 && a.chunks.first() != Some(&a.sha256) {
        return Err(invalid(format!("{field}.chunks"), "the only chunk must have the digest of the file"));
    }
    Ok(())
}

fn check_health(health: &HealthV1) -> Result<(), ManifestError> {
    let positive = [
        ("health.load_time_limit_ms", health.load_time_limit_ms),
        ("health.max_load_deaths", health.max_load_deaths.into()),
        ("health.confirm_generations", health.confirm_generations.into()),
        ("health.confirm_after_s", health.confirm_after_s),
    ];
    if let Some((field, _)) = positive.iter().find(|(_, v)| *v == 0) {
        return Err(invalid(*field, "must be above zero"));
    }
    let Some(probe) = &health.probe else {
        return Ok(());
    };
    if probe.prompt.is_empty() || probe.prompt.len() > 16_384 {
        return Err(invalid("health.probe.prompt", "must have 1 to 16384 bytes"));
    }
    if probe.max_tokens == 0 || probe.time_limit_ms == 0 {
        return Err(invalid("health.probe", "max_tokens and time_limit_ms must be above zero"));
    }
    if let super::ProbeCheck::ContainsAny { values } = &probe.expect
        && (values.is_empty() || values.iter().any(String::is_empty))
    {
        return Err(invalid("health.probe.expect", "name at least one text, none of them empty"));
    }
    Ok(())
}
