//! `cargo xtask check`: formatting, lints, the tidy rules and the dependency policy.

use crate::{process, tidy};
use anyhow::{Result, bail};
use std::process::Command;

pub fn run() -> Result<()> {
    process::run("cargo fmt", process::cargo().args(["fmt", "--all", "--check"]))?;
    process::run(
        "cargo clippy",
        process::cargo().args(["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]),
    )?;
    let problems = tidy::check(&process::root())?;
    if !problems.is_empty() {
        bail!("tidy found {} problem(s):\n  {}", problems.len(), problems.join("\n  "));
    }
    if Command::new("cargo-deny").arg("--version").output().is_ok() {
        // advisories need a database from a git host; the rest needs the package index only
        process::run("cargo deny", process::cargo().args(["deny", "check", "bans", "licenses", "sources"]))?;
    } else {
        skipped("cargo-deny is not installed: `cargo install cargo-deny --locked`");
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "a skipped check must be seen")]
fn skipped(why: &str) {
    eprintln!("skipped: {why}");
}
