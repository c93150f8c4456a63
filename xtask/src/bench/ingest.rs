//! `bench ingest`: the real server on a disk, its shipped settings, and a load generator on the same machine. Reports what
//! the intake takes for as long as asked, whether the log's backlog grows, and whether every acknowledged row is there once.

use super::server::{Server, cpu_seconds, gauge, load, rss_kb};
use super::{Args, Bench, peer};
use crate::{process, python};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The run the targets are about, seconds; `FLYWHEEL_BENCH_SECONDS` shortens it.
const SECONDS: u64 = 300;

/// Runs the load as protobuf, then as JSON.
pub fn drive(bench: &Bench, args: &Args) -> Result<Value> {
    load::build(bench)?;
    let seconds = std::env::var("FLYWHEEL_BENCH_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(SECONDS);
    let mut out = json!({ "bench": "ingest", "load_average_before": fs::read_to_string("/proc/loadavg")?.trim() });
    let formats = ["protobuf", "json"];
    if let Some(unknown) = args.format.as_deref().filter(|f| !formats.contains(f)) {
        bail!("no format named `{unknown}`; there is: {}", formats.join(", "));
    }
    for format in formats.into_iter().filter(|f| args.format.as_deref().is_none_or(|wanted| wanted == *f)) {
        let found = one(bench, format, seconds)?;
        println!("{format}: {}", serde_json::to_string_pretty(&found)?);
        // the figures of the release are those of protobuf
        if format == "protobuf"
            && let (Some(all), Some(found)) = (out.as_object_mut(), found.as_object())
        {
            all.extend(found.clone());
        }
        out[format] = found;
    }
    if args.peer {
        out["kill"] = peer::killed_ours(bench, "protobuf")?;
        out["peer"] = peer::measure(bench, seconds)?;
    }
    Ok(out)
}

/// One run on an empty server.
fn one(bench: &Bench, format: &str, seconds: u64) -> Result<Value> {
    let server = Server::start("")?;
    let watch = Watch::start(&server)?;
    let mut out = load::run(bench, &server, format, seconds, 0)?;
    let seen = watch.stop()?;
    out["server_cpu_s"] = json!(cpu_seconds(server.child.id()));
    out["rss_mb"] = json!(seen.rss_kb as f64 / 1000.0);
    out["fdatasync_p99_ms"] = json!(quantile(&seen.fdatasync_ms, 0.99));
    out["fdatasync_p50_ms"] = json!(quantile(&seen.fdatasync_ms, 0.5));
    out["backlog_mb_mid"] = json!(seen.backlog_at(0.5) / 1e6);
    out["backlog_mb_end"] = json!(seen.backlog_at(1.0) / 1e6);
    out["backlog_mb_max"] = json!(seen.backlog.iter().copied().fold(0.0, f64::max) / 1e6);
    let drained = Instant::now();
    let (stored, distinct) = server.count()?;
    let acked = out["events"].as_u64().unwrap_or_default();
    out["drain_and_count_s"] = json!(drained.elapsed().as_secs_f64());
    out["stored"] = json!(stored);
    out["lost"] = json!(acked as i64 - distinct as i64);
    out["doubled"] = json!(stored as i64 - distinct as i64);
    server.wait_until_committed()?;
    out["foreign"] = foreign(&server.dir.join("data/lake/tables/interactions"))?;
    out["foreign"]["sql"] = ours(&server, stored, distinct)?;
    out["foreign"]["equal"] = json!(["duckdb", "polars"].map(|engine| equal(&out["foreign"], engine)));
    let bytes = folder_bytes(&server.dir.join("data"), "interactions")?;
    out["bytes_per_event"] = json!(bytes as f64 / stored.max(1) as f64);
    Ok(out)
}

/// Columns whose sums are compared.
const SUMS: [&str; 5] = ["input_tokens", "output_tokens", "peak_memory_bytes", "ttft_ms", "decode_tokens_per_s"];

/// Rows, ids and sums by our own SQL, one query each: a query has ten seconds.
fn ours(server: &Server, rows: u64, ids: u64) -> Result<Value> {
    let mut out = vec![json!(rows), json!(ids)];
    for column in SUMS {
        out.push(server.sql(&format!("SELECT sum({column}) FROM interactions"))?["rows"][0][0].clone());
    }
    Ok(Value::from(out))
}

/// Whether an engine sees what our SQL says, up to the order in which fractions were added.
fn equal(foreign: &Value, engine: &str) -> bool {
    let numbers = |name: &str| -> Vec<f64> {
        foreign[name].as_array().map(|v| v.iter().filter_map(Value::as_f64).collect()).unwrap_or_default()
    };
    let (ours, theirs) = (numbers("sql"), numbers(engine));
    ours.len() == theirs.len() && ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() <= 1e-9 * a.abs().max(b.abs()))
}

/// Rows, ids and sums as DuckDB and Polars see them.
fn foreign(table: &Path) -> Result<Value> {
    let Some(python) = python::ensure() else { return Ok(Value::Null) };
    let mut read = Command::new(python);
    read.arg(process::root().join("tests/interop/read_table.py")).arg(table);
    for column in SUMS {
        read.args(["--sum", column]);
    }
    let out = read.output()?;
    if !out.status.success() {
        println!("left out: DuckDB and Polars are not there ({})", String::from_utf8_lossy(&out.stderr).trim());
        return Ok(Value::Null);
    }
    Ok(serde_json::from_slice(&out.stdout)?)
}

/// What was sampled while the load ran.
#[derive(Default)]
struct Seen {
    /// Bytes of the log's backlog, once a second.
    backlog: Vec<f64>,
    rss_kb: u64,
    fdatasync_ms: Vec<f64>,
}

impl Seen {
    fn backlog_at(&self, part: f64) -> f64 {
        let last = self.backlog.len().saturating_sub(1);
        // the mean of ten seconds: a commit lets the backlog fall in steps
        let end = ((last as f64 * part) as usize).min(last);
        let window = self.backlog.get(end.saturating_sub(9)..=end).unwrap_or_default();
        window.iter().sum::<f64>() / window.len().max(1) as f64
    }
}

struct Watch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Seen>>>,
}

impl Watch {
    fn start(server: &Server) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (s, address, pid) = (Arc::clone(&stop), server.address.clone(), server.child.id());
        let sample = std::thread::spawn(move || {
            let mut seen = Seen::default();
            while !s.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_secs(1));
                if let Some(bytes) = gauge(&address, "flywheel_ingest_backlog_bytes") {
                    seen.backlog.push(bytes);
                }
                seen.rss_kb = seen.rss_kb.max(rss_kb(pid));
            }
            Ok(seen)
        });
        let (s, probe) = (Arc::clone(&stop), File::create(server.dir.join("probe"))?);
        let sync = std::thread::spawn(move || {
            let mut seen = Seen::default();
            while !s.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(200));
                let began = Instant::now();
                probe.write_all_at(&[1; 4096], 0)?;
                probe.sync_data()?;
                seen.fdatasync_ms.push(began.elapsed().as_secs_f64() * 1000.0);
            }
            Ok(seen)
        });
        Ok(Self { stop, threads: vec![sample, sync] })
    }

    fn stop(self) -> Result<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        let mut out = Seen::default();
        for thread in self.threads {
            let part = thread.join().map_err(|_| anyhow::anyhow!("a sampling thread panicked"))??;
            out.backlog.extend(part.backlog);
            out.fdatasync_ms.extend(part.fdatasync_ms);
            out.rss_kb = out.rss_kb.max(part.rss_kb);
        }
        out.fdatasync_ms.sort_by(f64::total_cmp);
        Ok(out)
    }
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = ((sorted.len() as f64 * q) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or_default()
}

/// Bytes of all Parquet files below the folder called `name`.
fn folder_bytes(root: &Path, name: &str) -> Result<u64> {
    let mut total = 0;
    for entry in fs::read_dir(root)? {
        let path = entry?.path();
        if path.is_dir() {
            total += folder_bytes(&path, name)?;
        } else if path.extension().is_some_and(|e| e == "parquet") && path.to_string_lossy().contains(name) {
            total += fs::metadata(&path)?.len();
        }
    }
    Ok(total)
}
