//! A real server for a benchmark: on a disk, with its shipped settings, killed and started again where that is measured.

use super::Bench;
use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Survives a reboot by convention, so it is no tmpfs.
pub const DISK: &str = "/var/tmp";

/// `flywheel serve` in a folder of its own.
pub struct Server {
    pub child: Child,
    pub dir: PathBuf,
    pub address: String,
    pub key: String,
    pub token: String,
}

impl Server {
    /// Starts one with further lines of configuration.
    pub fn start(lines: &str) -> Result<Self> {
        let dir = Path::new(DISK).join(format!("flywheel-bench-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let address = format!("127.0.0.1:{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?.port());
        let config = dir.join("flywheel.toml");
        write_config(&dir, &address, lines)?;
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
        let child = spawn(&dir)?;
        let server = Self { child, dir, address, key, token };
        server.wait()?;
        Ok(server)
    }

    /// Kills it as the kernel would, and starts it again with other lines of configuration.
    pub fn kill_and_restart(&mut self, lines: &str) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        write_config(&self.dir, &self.address, lines)?;
        self.child = spawn(&self.dir)?;
        self.wait()
    }

    /// Stops it as a person would, and waits for its end.
    pub fn stop(&mut self) -> Result<()> {
        let pid = self.child.id().to_string();
        process::run("stopping the server", Command::new("kill").args(["-TERM", &pid]))?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts it again after [`Self::stop`].
    pub fn restart(&mut self) -> Result<()> {
        self.child = spawn(&self.dir)?;
        self.wait()
    }

    /// Until the port answers.
    fn wait(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(&self.address).is_err() {
            if Instant::now() > deadline {
                bail!("the server does not listen: {}", fs::read_to_string(self.dir.join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Until every row is in the tables, where other engines look.
    pub fn wait_until_committed(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(120);
        while gauge(&self.address, "flywheel_ingest_backlog_bytes") != Some(0.0) {
            if Instant::now() > deadline {
                bail!("rows are still in the log after two minutes");
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// What one SELECT answers.
    pub fn sql(&self, query: &str) -> Result<Value> {
        let body = json!({ "query": query }).to_string();
        request(&self.address, "POST", "/v1/sql", Some(&self.token), &body)
    }

    /// Rows and distinct ids, through the server's own SQL. The ids are counted by their first digit: all at once would need
    /// more memory than queries may use.
    pub fn count(&self) -> Result<(u64, u64)> {
        let (mut rows, mut distinct) = (0, 0);
        for digit in "0123456789abcdef".chars() {
            let query = format!(
                "SELECT count(*), count(DISTINCT interaction_id) FROM interactions WHERE substr(interaction_id, 9, 1) = '{digit}'"
            );
            let answer = self.sql(&query)?;
            let row = &answer["rows"][0];
            rows += row[0].as_u64().with_context(|| answer.to_string())?;
            distinct += row[1].as_u64().with_context(|| answer.to_string())?;
        }
        Ok((rows, distinct))
    }
}

fn write_config(dir: &Path, address: &str, lines: &str) -> Result<()> {
    let text = format!("data_dir = {:?}\nlisten = \"{address}\"\n{lines}", dir.join("data"));
    fs::write(dir.join("flywheel.toml"), text).context("cannot write the configuration")
}

fn spawn(dir: &Path) -> Result<Child> {
    let log = File::create(dir.join("log"))?;
    let child = Command::new(process::bin_dir()?.join("flywheel"))
        .args(["serve", "--config"])
        .arg(dir.join("flywheel.toml"))
        // as deploy/flywheel.service sets it
        .env("MALLOC_ARENA_MAX", "2")
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()?;
    Ok(child)
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

pub fn rss_kb(pid: u32) -> u64 {
    memory_kb(pid, "VmRSS:")
}

/// Most that it had at once.
pub fn peak_rss_kb(pid: u32) -> u64 {
    memory_kb(pid, "VmHWM:")
}

fn memory_kb(pid: u32, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix(field));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

/// CPU seconds of a process, user and system.
pub fn cpu_seconds(pid: u32) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    after.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / 100.0
}

pub fn gauge(address: &str, name: &str) -> Option<f64> {
    let text = raw(address, "GET", "/metrics", None, "").ok()?;
    text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

pub fn request(address: &str, method: &str, path: &str, token: Option<&str>, body: &str) -> Result<Value> {
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

/// The load generator (`tests/examples/otlp_load`).
pub mod load {
    use super::{Bench, Command, Context as _, Path, Result, Server, Value, fs, process};

    /// Connections of the generator: enough that two cores never wait. JSON takes twice the time a body, and what more
    /// connections add is time in the queue.
    fn connections(format: &str) -> &'static str {
        if format == "json" { "5" } else { "8" }
    }

    /// Compiles it before any clock runs.
    pub fn build(bench: &Bench) -> Result<()> {
        let mut build = process::cargo();
        // the whole workspace, so that no dependency is compiled again with other features
        build.args(["build", "--quiet", "--workspace", "--example", bench.example]);
        process::run("building the load generator", &mut build)
    }

    /// Sends for `seconds`; answers its report. Runs on one server need different `first` numbers.
    pub fn run(bench: &Bench, server: &Server, format: &str, seconds: u64, first: u64) -> Result<Value> {
        let mut load = command(bench, &server.address, &server.key, format, seconds)?;
        load.args(["--first", &first.to_string()]);
        report(&mut load, &server.dir, &format!("{seconds} s of OTLP/{format}"))
    }

    /// The generator; options may follow.
    pub fn command(bench: &Bench, address: &str, key: &str, format: &str, seconds: u64) -> Result<Command> {
        let mut load = Command::new(process::bin_dir()?.join("examples").join(bench.example));
        load.args(["--address", address, "--key", key, "--format", format]).args([
            "--seconds",
            &seconds.to_string(),
            "--connections",
            connections(format),
        ]);
        Ok(load)
    }

    /// Runs it; its report, which lies in `dir` for so long.
    pub fn report(load: &mut Command, dir: &Path, what: &str) -> Result<Value> {
        let report = dir.join("load.json");
        process::run_quiet(what, load.arg("--json").arg(&report))?;
        serde_json::from_slice(&fs::read(&report)?).context("the report of the load generator")
    }
}
