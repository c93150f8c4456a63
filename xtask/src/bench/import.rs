//! `bench import`: history from files into the real server, twice, with and without live telemetry beside it. Reports rows a
//! second, memory, what the second run added (nothing), and what the acknowledgements of live uploads had to wait meanwhile.

use super::server::{DISK, Server, cpu_seconds, load, peak_rss_kb, request};
use super::{Args, Bench};
use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Rows of the acceptance.
const ROWS: u64 = 10_000_000;

/// Files of each form.
const FILES: u64 = 4;
/// Live uploads a second, of 200 events each.
const RATE: u64 = 25;
/// One stretch of live uploads, seconds.
const STRETCH: u64 = 10;
/// Stretches before the import: what the acknowledgements wait for without it.
const BEFORE: u64 = 3;
/// Ids of one stretch lie apart from those of the next.
const APART: u64 = 1 << 24;

/// Makes the files and runs it.
pub fn drive(bench: &Bench, args: &Args) -> Result<Value> {
    if args.peer {
        bail!("`import` has no peer to compare with");
    }
    load::build(bench)?;
    load::build(&Bench { example: "history", ..*bench })?;
    let rows = args.rows.unwrap_or(ROWS);
    let files = Files::make(rows)?;
    let quiet = run(bench, &files, rows, false)?;
    println!("alone: {}", serde_json::to_string_pretty(&quiet)?);
    let live = run(bench, &files, rows, true)?;
    println!("beside live telemetry: {}", serde_json::to_string_pretty(&live)?);
    Ok(json!({ "bench": "import", "rows": rows, "file_bytes": files.bytes, "alone": quiet, "live": live }))
}

/// History in a folder that goes with its guard.
struct Files {
    folder: PathBuf,
    bytes: u64,
}

impl Files {
    fn make(rows: u64) -> Result<Self> {
        let folder = Path::new(DISK).join(format!("flywheel-history-{}", std::process::id()));
        let mut files = Self { folder, bytes: 0 };
        let mut make = Command::new(process::bin_dir()?.join("examples/history"));
        make.arg("--folder").arg(&files.folder);
        make.args(["--rows", &rows.to_string(), "--files", &FILES.to_string()]);
        process::run_quiet(&format!("making {rows} rows of history"), &mut make)?;
        for form in ["parquet", "lines"] {
            for entry in fs::read_dir(files.folder.join(form))? {
                files.bytes += entry?.metadata()?.len();
            }
        }
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Both imports on an empty server.
fn run(bench: &Bench, files: &Files, rows: u64, with_live: bool) -> Result<Value> {
    let source = format!("file://{}/", files.folder.display());
    let server = Server::start(&format!("[import]\nsources = [{source:?}]\n"))?;
    let mut out = json!({});
    if with_live {
        let waits = (0..BEFORE).map(|i| stretch(bench, &server.address, &server.key, &server.dir, i));
        out["ack_p99_ms_before"] = json!(middle(waits.collect::<Result<Vec<_>>>()?));
    }
    let live = with_live.then(|| Live::start(bench, &server));
    let cpu = cpu_seconds(server.child.id());
    let began = Instant::now();
    let first = import(&server, &source)?;
    let seconds = began.elapsed().as_secs_f64();
    out["server_cpu_s"] = json!(cpu_seconds(server.child.id()) - cpu);
    if let Some(live) = live {
        let waits = live.stop()?;
        out["ack_p99_ms_worst"] = json!(waits.iter().copied().fold(0.0, f64::max));
        out["ack_p99_ms_meanwhile"] = json!(middle(waits));
    }
    out["peak_rss_mb"] = json!(peak_rss_kb(server.child.id()) as f64 / 1000.0);
    out["seconds"] = json!(seconds);
    out["rows_per_s"] = json!(rows as f64 / seconds);
    out["result"] = first;
    let began = Instant::now();
    let second = import(&server, &source)?;
    out["second"] =
        json!({ "seconds": began.elapsed().as_secs_f64(), "rows": second["rows"], "already": second["already"] });
    let mut stored = 0;
    for table in ["interactions", "feedback", "device_events"] {
        let answer = server.sql(&format!("SELECT count(*) FROM {table} WHERE source = 'import'"))?;
        stored += answer["rows"][0][0].as_u64().with_context(|| answer.to_string())?;
    }
    let counted = server.sql("SELECT sum(items) FROM dispositions WHERE source = 'import'")?;
    out["in_tables"] = json!(stored);
    out["in_dispositions"] = counted["rows"][0][0].clone();
    if stored != rows || out["in_dispositions"] != json!(rows) {
        bail!("{rows} rows became {stored} in the tables and {} in dispositions", out["in_dispositions"]);
    }
    Ok(out)
}

/// Imports and waits; the result of the job.
fn import(server: &Server, source: &str) -> Result<Value> {
    let body = json!({ "source": source, "table": "interactions" }).to_string();
    let started = request(&server.address, "POST", "/v1/imports", Some(&server.token), &body)?;
    let path = format!("/v1/jobs/{}", started["job_id"].as_str().with_context(|| started.to_string())?);
    let shown = process::spinner("importing");
    loop {
        let job = request(&server.address, "GET", &path, Some(&server.token), "")?;
        match job["state"].as_str() {
            Some("queued" | "running") => {
                shown.set_message(format!("importing: {} rows", job["progress"]["rows"]));
                std::thread::sleep(Duration::from_millis(100));
            }
            Some("succeeded") => {
                shown.finish_and_clear();
                return Ok(job["result"].clone());
            }
            _ => bail!("{job}"),
        }
    }
}

/// The 99th percentile of one stretch of live uploads, ms.
fn stretch(bench: &Bench, address: &str, key: &str, dir: &Path, number: u64) -> Result<f64> {
    let mut load = load::command(bench, address, key, "protobuf", STRETCH)?;
    load.args(["--rate", &RATE.to_string(), "--first", &(number * APART).to_string()]);
    let report = load::report(&mut load, dir, "live telemetry")?;
    report["ack_p99_ms"].as_f64().context("the report has no ack_p99_ms")
}

/// Live uploads, stretch after stretch, until they are stopped.
struct Live {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<Vec<f64>>>,
}

impl Live {
    fn start(bench: &Bench, server: &Server) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let bench = Bench { ..*bench };
        let (ended, address, key, dir) =
            (Arc::clone(&stop), server.address.clone(), server.key.clone(), server.dir.clone());
        let thread = std::thread::spawn(move || {
            let mut waits = Vec::new();
            while !ended.load(Ordering::Relaxed) || waits.is_empty() {
                waits.push(stretch(&bench, &address, &key, &dir, BEFORE + waits.len() as u64)?);
            }
            Ok(waits)
        });
        Self { stop, thread }
    }

    fn stop(self) -> Result<Vec<f64>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow::anyhow!("the thread of the live telemetry panicked"))?
    }
}

/// The median.
fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
