//! The peer of `bench ingest`: otlp2parquet, the nearest server that takes the same OTLP/HTTP bodies and stores them as Parquet.
//! It is installed from the registry into the target folder, runs with its shipped settings on the same disk, and takes the same
//! load. Its rows are counted by DuckDB.

use super::Bench;
use super::server::{DISK, Server, cpu_seconds, load, peak_rss_kb};
use crate::{process, python};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const NAME: &str = "otlp2parquet";
const VERSION: &str = "0.12.0";
/// It writes what it holds after ten seconds; by then everything it will ever write is there.
const SETTLED: Duration = Duration::from_secs(13);
/// Load before a kill, and the load of which the kill takes the end away.
const KILL_AFTER: Duration = Duration::from_secs(14);
const KILL_LOAD_S: u64 = 20;

/// The running peer.
struct Peer {
    program: PathBuf,
    dir: PathBuf,
    address: String,
    child: Child,
}

impl Peer {
    fn start(program: &Path) -> Result<Self> {
        let dir = Path::new(DISK).join(format!("flywheel-bench-{NAME}-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let address = format!("127.0.0.1:{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?.port());
        let child = spawn(program, &dir, &address)?;
        let peer = Self { program: program.to_owned(), dir, address, child };
        peer.wait()?;
        Ok(peer)
    }

    fn wait(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(&self.address).is_err() {
            if Instant::now() > deadline {
                bail!("{NAME} does not listen: {}", fs::read_to_string(self.dir.join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn kill_and_restart(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.child = spawn(&self.program, &self.dir, &self.address)?;
        self.wait()
    }

    /// Rows and distinct ids in its files, and their bytes.
    fn count(&self) -> Result<(u64, u64, u64)> {
        let script = "import duckdb, json, pathlib, sys\n\
            files = [str(p) for p in pathlib.Path(sys.argv[1]).rglob('*.parquet')]\n\
            query = \"SELECT count(*), count(DISTINCT json_extract_string(log_attributes, '$.\\\"gen_ai.response.id\\\"')) \" \\\n\
            f'FROM read_parquet({files})'\n\
            duckdb.sql('SET enable_progress_bar = false')\n\
            rows = list(duckdb.sql(query).fetchall()[0]) if files else [0, 0]\n\
            print(json.dumps([*rows, sum(pathlib.Path(f).stat().st_size for f in files)]))\n";
        let python = python::ensure().context("the peer's rows cannot be counted")?;
        let mut count = Command::new(python);
        count.args(["-c", script]).arg(self.dir.join("data"));
        let out = process::run_quiet("DuckDB counts the peer's rows", &mut count)?;
        let [rows, ids, bytes]: [u64; 3] = serde_json::from_slice(&out)?;
        Ok((rows, ids, bytes))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn spawn(program: &Path, dir: &Path, address: &str) -> Result<Child> {
    let log = File::create(dir.join("log"))?;
    let mut command = Command::new(program);
    command.env("OTLP2PARQUET_LISTEN_ADDR", address).env("OTLP2PARQUET_STORAGE_PATH", dir.join("data"));
    command.env("OTLP2PARQUET_LOG_LEVEL", "warn").env("MALLOC_ARENA_MAX", "2").current_dir(dir);
    command.stdout(Stdio::null()).stderr(log).spawn().with_context(|| format!("cannot start {NAME}"))
}

/// Its program, optimised as the registry ships it.
fn install() -> Result<PathBuf> {
    let debug = process::bin_dir()?;
    let root = debug.parent().context("the target folder has no parent")?.join("peers");
    let program = root.join("bin").join(NAME);
    if !program.is_file() {
        let mut install = process::cargo();
        install.args(["install", NAME, "--version", VERSION, "--locked", "--root"]).arg(&root);
        install.arg("--target-dir").arg(root.join("build"));
        process::run("installing the peer", &mut install)?;
    }
    Ok(program)
}

/// The same load on the peer: what it takes, what it costs, and what a kill takes away.
pub fn measure(bench: &Bench, seconds: u64) -> Result<Value> {
    let program = install()?;
    let mut out = json!({ "name": NAME, "version": VERSION });
    for format in ["protobuf", "json"] {
        // it may not take every body that the standard allows
        let found = one(bench, &program, format, seconds).and_then(|mut found| {
            found["kill"] = killed(bench, &program, format)?;
            Ok(found)
        });
        let found = found.unwrap_or_else(|e| json!({ "failed": e.to_string() }));
        println!("{NAME}, {format}: {}", serde_json::to_string_pretty(&found)?);
        out[format] = found;
    }
    Ok(out)
}

fn one(bench: &Bench, program: &Path, format: &str, seconds: u64) -> Result<Value> {
    let peer = Peer::start(program)?;
    let mut load = load::command(bench, &peer.address, "none", format, seconds)?;
    let mut out = load::report(&mut load, &peer.dir, &format!("{seconds} s of OTLP/{format} at {NAME}"))?;
    out["server_cpu_s"] = json!(cpu_seconds(peer.child.id()));
    out["rss_mb"] = json!(peak_rss_kb(peer.child.id()) as f64 / 1000.0);
    std::thread::sleep(SETTLED);
    let (rows, ids, bytes) = peer.count()?;
    let acked = out["events"].as_u64().unwrap_or_default();
    out["stored"] = json!(rows);
    out["lost"] = json!(acked as i64 - ids as i64);
    out["doubled"] = json!(rows as i64 - ids as i64);
    out["bytes_per_event"] = json!(bytes as f64 / rows.max(1) as f64);
    Ok(out)
}

/// Load, a kill in the middle of it, a restart: events acknowledged, and those that are there afterwards.
fn killed(bench: &Bench, program: &Path, format: &str) -> Result<Value> {
    let mut peer = Peer::start(program)?;
    let (address, dir) = (peer.address.clone(), peer.dir.clone());
    let acked = under_load(bench, &address, "none", &dir, format, || peer.kill_and_restart())?;
    std::thread::sleep(SETTLED);
    let (_, ids, _) = peer.count()?;
    Ok(json!({ "acknowledged": acked, "found": ids, "lost": acked as i64 - ids as i64 }))
}

/// The same for ours.
pub fn killed_ours(bench: &Bench, format: &str) -> Result<Value> {
    let mut server = Server::start("")?;
    let (address, key, dir) = (server.address.clone(), server.key.clone(), server.dir.clone());
    let acked = under_load(bench, &address, &key, &dir, format, || server.kill_and_restart(""))?;
    let (rows, ids) = server.count()?;
    let (lost, doubled) = (acked as i64 - ids as i64, rows as i64 - ids as i64);
    Ok(json!({ "acknowledged": acked, "found": ids, "lost": lost, "doubled": doubled }))
}

/// Events that were acknowledged before `kill` came.
fn under_load(
    bench: &Bench,
    address: &str,
    key: &str,
    dir: &Path,
    format: &str,
    kill: impl FnOnce() -> Result<()>,
) -> Result<u64> {
    let mut load = load::command(bench, address, key, format, KILL_LOAD_S)?;
    load.args(["--may-end", "true"]);
    let dir = dir.to_owned();
    let running = std::thread::spawn(move || load::report(&mut load, &dir, "load until the server is killed"));
    std::thread::sleep(KILL_AFTER);
    kill()?;
    let report = running.join().map_err(|_| anyhow::anyhow!("the load's thread panicked"))??;
    report["events"].as_u64().context("the report has no events")
}
