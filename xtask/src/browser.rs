//! `cargo xtask browser`: the dashboard in a real Chromium (`tests/browser`), against a server that is running already.

use crate::process;
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The only package of the tests that npm installs.
const PACKAGE: &str = "node_modules/playwright-core";

/// Which server to look at, and as whom.
#[derive(clap::Args)]
pub struct Args {
    /// Address of the server, for example the one that `cargo xtask demo --keep` prints.
    #[arg(long)]
    pub server: String,
    /// File with a token of the role `operator` (`token-operator` in the demo's folder).
    #[arg(long)]
    pub token_file: PathBuf,
    /// Name of that token: looked for in the audit log.
    #[arg(long)]
    pub token_name: Option<String>,
    /// Keep a screenshot of every page in this folder.
    #[arg(long)]
    pub screenshots: Option<PathBuf>,
}

/// Runs the tests; without Node.js, npm or Chromium a line says what is missing and nothing fails.
pub fn run(args: &Args) -> Result<()> {
    let Some(node) = on_path(&["node"]) else { return skipped("node") };
    let Some(npm) = on_path(&["npm"]) else { return skipped("npm") };
    let Some(chromium) = on_path(&["chromium", "chromium-browser", "google-chrome"]) else {
        return skipped("chromium");
    };
    let dir = process::root().join("tests/browser");
    if !is_installed(&dir)? {
        process::run_quiet("installing playwright-core", Command::new(npm).arg("ci").current_dir(&dir))?;
    }
    let mut tests = Command::new(node);
    tests
        .current_dir(&dir)
        .args(["--test", "--test-reporter=spec", "dashboard.test.mjs"])
        .env("FLYWHEEL_SERVER", &args.server)
        .env("FLYWHEEL_TOKEN_FILE", std::path::absolute(&args.token_file)?)
        .env("FLYWHEEL_CHROMIUM", chromium);
    if let Some(name) = &args.token_name {
        tests.env("FLYWHEEL_TOKEN_NAME", name);
    }
    if let Some(folder) = &args.screenshots {
        tests.env("FLYWHEEL_SCREENSHOTS", std::path::absolute(folder)?);
    }
    process::run("the dashboard in Chromium", &mut tests)
}

/// Whether what is installed is what the lock file names.
fn is_installed(dir: &Path) -> Result<bool> {
    let digest = |file: &Path| -> Result<Value> {
        let lock: Value = serde_json::from_slice(&fs::read(file)?)?;
        Ok(lock["packages"][PACKAGE]["integrity"].clone())
    };
    let wanted = digest(&dir.join("package-lock.json")).context("the lock file of tests/browser cannot be read")?;
    Ok(digest(&dir.join("node_modules/.package-lock.json")).is_ok_and(|found| found == wanted))
}

/// The first of these programs on the PATH.
fn on_path(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    names.iter().flat_map(|n| folders.iter().map(move |f| f.join(n))).find(|p| p.is_file())
}

#[expect(clippy::print_stderr, reason = "a skipped suite must be seen")]
fn skipped(missing: &str) -> Result<()> {
    eprintln!("skipped: the dashboard in a browser ({missing} is not on the PATH)");
    Ok(())
}
