//! Child processes: run one to the end, or start one that dies with its guard.

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The workspace root (the folder above this crate).
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or(here.clone(), PathBuf::from)
}

/// `cargo` as it runs us, in the workspace root, with the environment that a person's `cargo` has: build scripts watch
/// what cargo tells us about our own package, and half an hour of dependencies would be built again.
pub fn cargo() -> Command {
    let mut c = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    c.current_dir(root());
    for (name, _) in std::env::vars_os() {
        let ours = |n: &str| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_");
        if name.to_str().is_some_and(ours) {
            c.env_remove(name);
        }
    }
    c
}

/// Runs `command` with its output shown; an error when it fails.
pub fn run(what: &str, command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start: {what}"))?;
    if !status.success() {
        bail!("{what} failed with {status}");
    }
    Ok(())
}

/// Runs `command` with captured output behind a spinner; shows the output only on failure.
pub fn run_quiet(what: &str, command: &mut Command) -> Result<Vec<u8>> {
    let spinner = spinner(what);
    let out = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start: {what}"))?;
    spinner.finish_and_clear();
    if !out.status.success() {
        bail!(
            "{what} failed with {}\n{}{}",
            out.status,
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(out.stdout)
}

/// The path that an environment variable names, else what `made` answers; `None`, with a line that says what is left out,
/// where it cannot be made.
#[expect(clippy::print_stderr, reason = "a skipped suite must be seen")]
pub fn or_skip(variable: &str, what: &str, made: impl FnOnce() -> Result<PathBuf>) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(variable) {
        return Some(named.into());
    }
    made().inspect_err(|e| eprintln!("skipped: {what} ({e:#})")).ok()
}

/// A spinner for anything longer than two seconds.
pub fn spinner(what: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} [{elapsed}]") {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A background process that is killed when the guard goes.
pub struct Guard {
    pub child: Child,
}

impl Guard {
    pub fn start(what: &str, command: &mut Command) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("cannot start: {what}"))?;
        Ok(Self { child })
    }
    /// Leaves the process running.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Folder of the built binaries (`$CARGO_TARGET_DIR/debug`).
pub fn bin_dir() -> Result<PathBuf> {
    let out = cargo()
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .output()
        .context("cannot run cargo metadata")?;
    let meta: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    let target = meta["target_directory"].as_str().context("cargo metadata has no target_directory")?;
    Ok(PathBuf::from(target).join("debug"))
}
