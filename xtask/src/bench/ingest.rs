//! `bench ingest`: the real server on a disk, its shipped settings, and a load generator on the same machine. Reports what
//! the intake takes for as long as asked, whether the log's backlog grows, and whether every acknowledged row is there once.

use super::Bench;
use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Survives a reboot by convention, so it is no tmpfs.
const DISK: &str = "/var/tmp";
/// The run the targets are about, seconds; `FLYWHEEL_BENCH_SECONDS` shortens it.
const SECONDS: u64 = 300;
const CONNECTIONS: &str = "8";

/// Runs the load as protobuf, then as JSON.
pub fn drive(bench: &Bench, peer: bool) -> Result<Value> {
    if peer {
        bail!("the peers of `ingest` are run by hand, see docs/benchmarks.md");
    }
    let mut build = process::cargo();
    // the whole workspace, so that no dependency is compiled again with other features
    build.args(["build", "--quiet", "--workspace", "--example", bench.example]);
    process::run("building the load generator", &mut build)?;
    let seconds = std::env::var("FLYWHEEL_BENCH_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(SECONDS);
    let mut out = json!({ "bench": "ingest", "load_average_before": fs::read_to_string("/proc/loadavg")?.trim() });
    for format in ["protobuf", "json"] {
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
    Ok(out)
}

/// One run on an empty server.
fn one(bench: &Bench, format: &str, seconds: u64) -> Result<Value> {
    let server = Server::start()?;
    let watch = Watch::start(&server)?;
    let report = server.dir.join("load.json");
    let example = process::bin_dir()?.join("examples").join(bench.example);
    let mut load = Command::new(example);
    load.args(["--address", &server.address, "--key", &server.key, "--format", format])
        .args(["--seconds", &seconds.to_string(), "--connections", CONNECTIONS])
        .arg("--json")
        .arg(&report);
    process::run_quiet(&format!("{seconds} s of OTLP/{format}"), &mut load)?;
    let mut out: Value = serde_json::from_slice(&fs::read(&report)?)?;
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
    let bytes = folder_bytes(&server.dir.join("data"), "interactions")?;
    out["bytes_per_event"] = json!(bytes as f64 / stored.max(1) as f64);
    Ok(out)
}

/// `flywheel serve` in a folder of its own.
struct Server {
    child: Child,
    dir: PathBuf,
    address: String,
    key: String,
    token: String,
}

impl Server {
    fn start() -> Result<Self> {
        let dir = Path::new(DISK).join(format!("flywheel-bench-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let address = format!("127.0.0.1:{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?.port());
        let config = dir.join("flywheel.toml");
        fs::write(&config, format!("data_dir = {:?}\nlisten = \"{address}\"\n", dir.join("data")))?;
        let program = process::bin_dir()?.join("flywheel");
        let run = |args: &[&str]| -> Result<String> {
            let out = Command::new(&program).args(args).env("FLYWHEEL_CONFIG", &config).output()?;
            if !out.status.success() {
                bail!("flywheel {args:?}: {}", String::from_utf8_lossy(&out.stderr));
            }
            Ok(String::from_utf8(out.stdout)?.trim().to_owned())
        };
        run(&["migrate"])?;
        run(&["app", "create", "shop"])?;
        run(&["keys", "init", "--app", "shop", "--offline-dir", &dir.join("offline").to_string_lossy()])?;
        let key = run(&["ingest-key", "create", "--app", "shop"])?;
        let token = run(&["token", "create", "--app", "shop", "--role", "operator", "--name", "bench"])?;
        let log = File::create(dir.join("log"))?;
        let child = Command::new(&program)
            .args(["serve", "--config"])
            .arg(&config)
            // as deploy/flywheel.service sets it
            .env("MALLOC_ARENA_MAX", "2")
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        let server = Self { child, dir, address, key, token };
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(&server.address).is_err() {
            if Instant::now() > deadline {
                bail!("the server does not listen: {}", fs::read_to_string(server.dir.join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(server)
    }

    /// Rows and distinct ids, through the server's own SQL. The ids are counted by their first digit: all at once would need
    /// more memory than queries may use.
    fn count(&self) -> Result<(u64, u64)> {
        let (mut rows, mut distinct) = (0, 0);
        for digit in "0123456789abcdef".chars() {
            let query = format!(
                "SELECT count(*), count(DISTINCT interaction_id) FROM interactions WHERE substr(interaction_id, 9, 1) = '{digit}'"
            );
            let body = json!({ "query": query }).to_string();
            let answer = request(&self.address, "POST", "/v1/sql", Some(&self.token), &body)?;
            let row = &answer["rows"][0];
            rows += row[0].as_u64().with_context(|| answer.to_string())?;
            distinct += row[1].as_u64().with_context(|| answer.to_string())?;
        }
        Ok((rows, distinct))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::env::var_os("FLYWHEEL_BENCH_KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
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

fn rss_kb(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

/// CPU seconds of a process, user and system.
fn cpu_seconds(pid: u32) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    after.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn gauge(address: &str, name: &str) -> Option<f64> {
    let text = raw(address, "GET", "/metrics", None, "").ok()?;
    text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

fn request(address: &str, method: &str, path: &str, token: Option<&str>, body: &str) -> Result<Value> {
    let text = raw(address, method, path, token, body)?;
    serde_json::from_str(&text).with_context(|| format!("{path} answered {text}"))
}

/// One HTTP/1.0 request; the body of the answer.
fn raw(address: &str, method: &str, path: &str, token: Option<&str>, body: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    let token = token.map(|t| format!("authorization: Bearer {t}\r\n")).unwrap_or_default();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nhost: {address}\r\n{token}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("the answer has no body")?;
    Ok(body.to_owned())
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
