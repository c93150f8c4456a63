//! `cargo xtask fuzz`: libFuzzer over the decoders of bytes from outside (`tests/fuzz`), on the stable compiler. What
//! cargo-fuzz would do with a nightly is set here: coverage instrumentation, overflow checks, limits of time and memory.

use crate::process;
use anyhow::{Context, Result, bail};
use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Coverage at edges with comparison tracing: all of libFuzzer's feedback that needs no sanitizer runtime.
const RUSTFLAGS: &[&str] = &[
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "--cfg fuzzing",
];
/// In the workspace's `Cargo.toml`.
const PROFILE: &str = "fuzz";
/// Largest input, bytes: a log record of one interaction fits.
const MAX_LEN: u32 = 20 << 10;
/// Memory of the fuzzed process, MiB.
const RSS_LIMIT_MB: u32 = 1024;
/// One input may take this long, seconds.
const INPUT_TIMEOUT_S: u32 = 10;
/// Lines of a crash that are shown.
const SHOWN_LINES: usize = 30;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    /// A target, `all`, `list`, or `replay` (the committed corpus through the targets, without libFuzzer).
    #[arg(default_value = "all")]
    target: String,
    /// How long each target runs.
    #[arg(long, default_value_t = 300)]
    seconds: u64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let known = targets()?;
    let chosen: Vec<&String> = match args.target.as_str() {
        "list" => {
            println!("{}", known.join("\n"));
            return Ok(());
        }
        "replay" => return replay(),
        "all" => known.iter().collect(),
        one => known.iter().filter(|name| *name == one).collect(),
    };
    if chosen.is_empty() {
        bail!("there is no fuzz target `{}`; known are: {}", args.target, known.join(", "));
    }
    let folder = target_dir()?;
    let programs = build(&folder, &chosen)?;
    let mut failed = Vec::new();
    println!("| target | seconds | executions | exec/s | edges | corpus | crashes |");
    println!("|---|---:|---:|---:|---:|---:|---:|");
    for name in chosen {
        let outcome = fuzz(&folder, &programs, name, args.seconds)?;
        println!("{}", outcome.row(name));
        if let Some(crash) = outcome.crash {
            println!("{crash}");
            failed.push(name.as_str());
        }
    }
    if !failed.is_empty() {
        bail!("these targets crashed: {}; add the input to tests/fuzz/corpus once it is fixed", failed.join(", "));
    }
    Ok(())
}

fn package() -> PathBuf {
    process::root().join("tests/fuzz")
}

/// Names of the drivers in `tests/fuzz/fuzz_targets`.
fn targets() -> Result<Vec<String>> {
    let folder = package().join("fuzz_targets");
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "rs") {
            names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

/// Beside the ordinary build, so that neither invalidates the other.
fn target_dir() -> Result<PathBuf> {
    let debug = process::bin_dir()?;
    Ok(debug.parent().context("the target folder has no parent")?.join("fuzz"))
}

/// One of the ordinary tests, in the ordinary folder.
fn replay() -> Result<()> {
    process::run(
        "the replay of the corpus",
        process::cargo().args(["test", "--workspace", "--locked", "--test", "replay"]),
    )
}

/// The compiler's own platform. Named on the command line, it keeps build scripts and macros uninstrumented.
fn host() -> Result<String> {
    let out = Command::new("rustc").arg("-vV").output().context("cannot run rustc")?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let host = text.lines().find_map(|l| l.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.to_owned())
}

/// Builds the drivers; answers their folder.
fn build(target_dir: &Path, names: &[&String]) -> Result<PathBuf> {
    let host = host()?;
    let mut cargo = process::cargo();
    cargo.args(["build", "--package", "flywheel-fuzz", "--locked", "--profile", PROFILE, "--features", "libfuzzer"]);
    cargo.args(["--target", &host, "--target-dir"]).arg(target_dir);
    for name in names {
        cargo.args(["--bin", name]);
    }
    cargo.env_remove("CARGO_ENCODED_RUSTFLAGS").env("RUSTFLAGS", RUSTFLAGS.join(" "));
    process::run("building the fuzz targets", &mut cargo)?;
    Ok(target_dir.join(host).join(PROFILE))
}

/// What a run of one target gave.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    seconds: u64,
    executions: u64,
    edges: u64,
    /// Inputs kept because they reach something new.
    corpus: u64,
    /// Where the failing input lies and the end of the log.
    crash: Option<String>,
}

impl Outcome {
    fn row(&self, name: &str) -> String {
        let per_second = self.executions / self.seconds.max(1);
        let Self { seconds, executions, edges, corpus, crash } = self;
        let crashes = u8::from(crash.is_some());
        format!("| {name} | {seconds} | {executions} | {per_second} | {edges} | {corpus} | {crashes} |")
    }

    /// Takes in a line of libFuzzer: `#1024 NEW cov: 85 ft: 120 corp: 12/300b …` or `stat::number_of_executed_units: 7`.
    fn read(&mut self, line: &str) {
        if let Some(n) = line.strip_prefix("stat::number_of_executed_units:") {
            self.executions = n.trim().parse().unwrap_or(self.executions);
            return;
        }
        let Some(rest) = line.strip_prefix('#') else { return };
        let number = |text: &str| text.split(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok());
        let after = |key: &str| rest.split_once(key).and_then(|(_, tail)| number(tail.trim_start()));
        self.executions = number(rest).unwrap_or(self.executions);
        self.edges = after(" cov: ").unwrap_or(self.edges);
        self.corpus = after(" corp: ").unwrap_or(self.corpus);
    }
}

/// Runs one target. New inputs go to the build folder, never into the committed corpus.
fn fuzz(target_dir: &Path, programs: &Path, name: &str, seconds: u64) -> Result<Outcome> {
    let (found, crashes) = (target_dir.join("corpus").join(name), target_dir.join("artifacts").join(name));
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&crashes)?;
    let mut child = Command::new(programs.join(name))
        .arg(&found)
        .arg(package().join("corpus").join(name))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={MAX_LEN}"))
        .arg(format!("-rss_limit_mb={RSS_LIMIT_MB}"))
        .arg(format!("-timeout={INPUT_TIMEOUT_S}"))
        .arg(format!("-artifact_prefix={}/", crashes.display()))
        .arg("-print_final_stats=1")
        // one thread: what an input does must not depend on the others
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start the driver of {name}"))?;
    let log = child.stderr.take().context("the driver has no log")?;
    let started = Instant::now();
    let (mut outcome, tail) = follow(name, started, seconds, BufReader::new(log))?;
    outcome.seconds = started.elapsed().as_secs();
    if !child.wait()?.success() {
        outcome.crash = Some(format!("{name} failed; inputs are in {}\n{}", crashes.display(), tail.join("\n")));
    }
    Ok(outcome)
}

/// Reads the log to its end behind a progress line; answers the last lines as well.
fn follow(name: &str, started: Instant, seconds: u64, log: impl BufRead) -> Result<(Outcome, Vec<String>)> {
    let (mut outcome, mut tail) = (Outcome::default(), VecDeque::new());
    let spinner = process::spinner(name);
    for line in log.split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        outcome.read(&line);
        let left = Duration::from_secs(seconds).saturating_sub(started.elapsed()).as_secs();
        let Outcome { executions, edges, corpus, .. } = &outcome;
        spinner.set_message(format!("{name}: {executions} inputs, {edges} edges, corpus {corpus}, {left} s left"));
        tail.push_back(line);
        if tail.len() > SHOWN_LINES {
            tail.pop_front();
        }
    }
    spinner.finish_and_clear();
    Ok((outcome, tail.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_of_libfuzzer_is_understood() {
        let log = "INFO: seed corpus: files: 3\n\
                   #3\tINITED cov: 85 ft: 120 corp: 2/30b exec/s: 0 rss: 40Mb\n\
                   #4096\tNEW    cov: 91 ft: 140 corp: 5/210b lim: 8 exec/s: 2048 rss: 41Mb L: 8/8 MS: 1 CMP-\n\
                   Done 5000 runs in 3 second(s)\n\
                   stat::number_of_executed_units: 5000\n";
        let (got, tail) = follow("x", Instant::now(), 3, log.as_bytes()).unwrap();
        assert_eq!(got, Outcome { executions: 5000, edges: 91, corpus: 5, ..Outcome::default() });
        assert_eq!(tail.len(), 5);
        assert_eq!(Outcome { seconds: 10, ..got }.row("x"), "| x | 10 | 5000 | 500 | 91 | 5 | 0 |");
    }

    #[test]
    fn every_driver_has_seeds() {
        let names = targets().unwrap();
        assert!(names.len() >= 10, "{names:?}");
        for name in names {
            let seeds = package().join("corpus").join(&name);
            assert!(fs::read_dir(&seeds).is_ok_and(|mut d| d.next().is_some()), "no seeds in {}", seeds.display());
        }
    }
}
