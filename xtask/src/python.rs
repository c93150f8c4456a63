//! A Python with the programs of others that tests and benchmarks compare with (`tests/interop/requirements.txt`): an
//! environment of its own in the cache folder, made once per list.

use crate::{model, process};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Tells tests and benchmarks which Python to run.
pub const VARIABLE: &str = "PYTHON";

/// The Python that `PYTHON` names, else one that has everything; `None`, with a line that says so, where it cannot be made.
pub fn ensure() -> Option<PathBuf> {
    process::or_skip(VARIABLE, "what is compared with programs in Python", || made("requirements.txt"))
}

/// The same for PEFT and PyTorch, which bring gigabytes: `PEFT_PYTHON`.
pub fn ensure_peft() -> Option<PathBuf> {
    process::or_skip("PEFT_PYTHON", "training beside PEFT", || made("requirements-peft.txt"))
}

fn made(list: &str) -> Result<PathBuf> {
    let list = process::root().join("tests/interop").join(list);
    let digest = hex::encode(Sha256::digest(fs::read(&list)?));
    let cache = model::folder()?;
    let base = cache.parent().context("the cache folder has no parent")?.join("python");
    let folder = base.join(digest.get(..16).unwrap_or(&digest));
    let python = folder.join("bin/python");
    // written last: an installation that broke off is made again
    let whole = folder.join("whole");
    if !whole.exists() {
        install(&folder, &python, &list)?;
        fs::write(&whole, "")?;
    }
    Ok(python)
}

fn install(folder: &Path, python: &Path, list: &Path) -> Result<()> {
    let mut venv = Command::new("python3");
    process::run_quiet("making a Python environment", venv.args(["-m", "venv", "--clear"]).arg(folder))?;
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--requirement"]);
    process::run_quiet("installing what the tests compare with", pip.arg(list))?;
    Ok(())
}
