//! `bench jobs`: the job queue on SQLite and PostgreSQL, on disk and on tmpfs, each on a fresh database, with the raw
//! fdatasync rate of the same run; on request with apalis beside it under equal settings. Ours and the peer take turns
//! within each place, so that both meet the same machine.

use super::{Args, Bench};
use crate::{postgres::Cluster, process};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const WORKERS: usize = 4;
/// Runs of each queue at each place; the median counts.
const ROUNDS: usize = 3;

/// Where and on what a queue is measured.
struct Place {
    backend: &'static str,
    medium: &'static str,
    /// Folder on that medium.
    root: &'static str,
    jobs: usize,
    /// Field of the report and its least value.
    target: (&'static str, f64),
}

/// The targets of the release. On a disk a rate says little without the rate of fdatasync, so the ratio counts. It speaks of
/// the queue only where the disk binds: tmpfs comes first, and says what the processor alone would allow.
const PLACES: &[Place] = &[
    Place { backend: "sqlite", medium: "tmpfs", root: TMPFS, jobs: 6000, target: ("jobs_per_s", 1000.0) },
    Place { backend: "postgres", medium: "tmpfs", root: TMPFS, jobs: 6000, target: ("jobs_per_s", 2000.0) },
    Place { backend: "sqlite", medium: "disk", root: DISK, jobs: 500, target: ("jobs_per_fdatasync", 0.45) },
    Place { backend: "postgres", medium: "disk", root: DISK, jobs: 2000, target: ("jobs_per_fdatasync", 1.5) },
];

/// Survives a reboot by convention, so it is no tmpfs; `/tmp` may be one.
const DISK: &str = "/var/tmp";
const TMPFS: &str = "/dev/shm";

/// A queue program: how it is called and under which name it reports.
type Queue<'a> = (&'static str, Box<dyn Fn() -> Command + 'a>);

/// Runs everything, prints a table and answers the report.
pub fn drive(bench: &Bench, args: &Args) -> Result<Value> {
    let mut queues: Vec<Queue<'_>> = vec![("flywheel", Box::new(|| bench.program()))];
    if args.peer {
        let program = build_peer()?;
        queues.push(("apalis", Box::new(move || Command::new(&program))));
    }
    // compiled before the clock runs
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--package", bench.package, "--example", bench.example]);
    process::run("building the benchmark", &mut build)?;
    let (mut rows, mut left_out) = (Vec::new(), Vec::new());
    println!("| queue | database | on | jobs/s | fdatasync/s, same run | jobs per fdatasync | target |");
    println!("|---|---|---|---|---|---|---|");
    let mut unbound = HashMap::new();
    for place in PLACES {
        match measure(place, &queues, &mut unbound)? {
            Some(found) => rows.extend(found),
            None => left_out.push(format!("{} on {}: initdb is not installed", place.backend, place.medium)),
        }
    }
    for line in &left_out {
        println!("left out: {line}");
    }
    Ok(json!({
        "bench": "jobs", "workers": WORKERS, "claims_per_worker": 1, "rounds": ROUNDS,
        "results": rows, "left_out": left_out, "load_average": load_average(),
    }))
}

fn measure(place: &Place, queues: &[Queue<'_>], unbound: &mut Unbound) -> Result<Option<Vec<Value>>> {
    check_medium(place)?;
    let folder = Folder::new(Path::new(place.root).join(format!("flywheel-bench-{}", std::process::id())))?;
    let cluster = match place.backend {
        "postgres" => match Cluster::start_in(&folder.0.join("pg"))? {
            Some(cluster) => Some(cluster),
            None => return Ok(None),
        },
        _ => None,
    };
    let mut runs = vec![Vec::new(); queues.len()];
    for round in 0..ROUNDS {
        for ((name, program), runs) in queues.iter().zip(&mut runs) {
            let database = format!("{name}_{round}");
            let url = match &cluster {
                Some(cluster) => cluster.database(&database)?,
                None => format!("sqlite:{}", folder.0.join(database + ".db").display()),
            };
            runs.push(once(name, program(), place, &url, &folder.0)?);
        }
    }
    Ok(Some(queues.iter().zip(runs).map(|((name, _), runs)| summary(name, place, &runs, unbound)).collect()))
}

/// One run of one program on an empty database; answers its report.
fn once(name: &str, mut program: Command, place: &Place, url: &str, folder: &Path) -> Result<Value> {
    let report = folder.join("report.json");
    program.args(["--url", url, "--workers", &WORKERS.to_string(), "--jobs", &place.jobs.to_string()]);
    program.arg("--sync-dir").arg(folder).arg("--json").arg(&report);
    process::run_quiet(&format!("{name}, {} on {}", place.backend, place.medium), &mut program)?;
    Ok(serde_json::from_slice(&std::fs::read(&report)?)?)
}

/// Jobs per second of a queue and database where a sync costs nothing.
type Unbound = HashMap<(&'static str, &'static str), f64>;

/// The run with the median of what the target is about, and all runs.
fn summary(name: &'static str, place: &Place, runs: &[Value], unbound: &mut Unbound) -> Value {
    let figure = |run: &Value, field: &str| run[field].as_f64().unwrap_or(0.0);
    let (field, least) = place.target;
    let mut sorted: Vec<&Value> = runs.iter().collect();
    sorted.sort_by(|a, b| figure(a, field).total_cmp(&figure(b, field)));
    let median = sorted.get(sorted.len() / 2).copied().cloned().unwrap_or_default();
    let met = figure(&median, field) >= least;
    let ours = name == "flywheel";
    if place.medium == "tmpfs" {
        unbound.insert((name, place.backend), figure(&median, "jobs_per_s"));
    }
    let free = unbound.get(&(name, place.backend)).copied().unwrap_or(f64::INFINITY);
    // no queue of this speed could reach the ratio on a disk as fast as this
    let cpu_binds = field == "jobs_per_fdatasync" && free < least * figure(&median, "fdatasync_per_s");
    println!(
        "| {name} | {} | {} | {:.0} | {:.0} | {:.2} | {} |",
        place.backend,
        place.medium,
        figure(&median, "jobs_per_s"),
        figure(&median, "fdatasync_per_s"),
        figure(&median, "jobs_per_fdatasync"),
        match (ours, met) {
            (false, _) => "–".into(),
            (true, true) => format!("{field} ≥ {least}"),
            (true, false) if cpu_binds => format!("{field} ≥ {least}: the processor binds, {free:.0} jobs/s on tmpfs"),
            (true, false) => format!("{field} ≥ {least}: not met"),
        },
    );
    let target = ours.then(|| json!({"field": field, "least": least, "met": met, "cpu_binds": cpu_binds}));
    json!({
        "queue": name, "backend": place.backend, "medium": place.medium,
        "target": target, "median": median, "runs": runs,
    })
}

/// Refuses to call a tmpfs a disk, or the other way round.
fn check_medium(place: &Place) -> Result<()> {
    let out = Command::new("stat").args(["-f", "-c", "%T", place.root]).output().context("cannot run stat")?;
    let found = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    if (found == "tmpfs") != (place.medium == "tmpfs") {
        bail!("{} is {found}, so it cannot serve as {}", place.root, place.medium);
    }
    Ok(())
}

/// Load averages of 1, 5 and 15 minutes: says whether the machine was idle.
pub(super) fn load_average() -> Vec<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).filter_map(|word| word.parse().ok()).collect()
}

/// Builds `tests/peers/apalis`, a workspace of its own, and answers its program.
fn build_peer() -> Result<PathBuf> {
    let debug = process::bin_dir()?;
    let target = debug.parent().context("the target folder has no parent")?.join("apalis");
    let manifest = process::root().join("tests/peers/apalis/Cargo.toml");
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--locked", "--manifest-path"]).arg(manifest).arg("--target-dir").arg(&target);
    process::run("building apalis", &mut build)?;
    Ok(target.join("debug/flywheel-peer-apalis"))
}

/// A folder that is removed with its guard.
struct Folder(PathBuf);

impl Folder {
    fn new(path: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
