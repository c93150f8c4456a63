//! Harness of the whole-flow tests: the real `flywheel` binary in a temporary folder, spoken to over HTTP only.

pub mod bucket;
pub mod line;
pub mod phone;
pub mod reconnect;

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Largest upload that the test server takes, bytes: small, so that a test can exceed it.
pub const MAX_UPLOAD: usize = 64 << 10;

/// A running server with one app, `shop`; stopped when dropped.
pub struct Server {
    child: Child,
    arguments: Vec<String>,
    /// Words before the program: what starts it.
    launcher: Vec<String>,
    dir: tempfile::TempDir,
    port: u16,
}

/// The binary beside the test programs, or the one that `FLYWHEEL_BINARY` names. `cargo xtask test` builds it first.
///
/// # Errors
/// When it is not there.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("FLYWHEEL_BINARY") {
        return Ok(path.into());
    }
    let here = std::env::current_exe()?;
    let found = here.ancestors().map(|d| d.join("flywheel")).find(|p| p.is_file());
    found.context("the `flywheel` binary is not built: run `cargo build --workspace --bins`")
}

impl Server {
    /// Starts `arguments` (without the program), with `{config}` replaced by the path of a fresh configuration.
    ///
    /// # Errors
    /// When a set-up command fails or the server does not listen; with what it wrote to its log.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        Self::with_config(arguments, &format!("[ingest]\nmax_body_bytes = {MAX_UPLOAD}\n"))
    }

    /// As [`Self::start`], with further lines of configuration instead of the small limit of uploads.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn with_config(arguments: &[&str], lines: &str) -> Result<Self> {
        Self::with_launcher(arguments, lines, Vec::new())
    }

    /// As [`Self::with_config`], started by another program (`env`, a shell) that becomes it.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn with_launcher(arguments: &[&str], lines: &str, launcher: Vec<String>) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let path = write_config(dir.path(), port, lines)?;
        run(dir.path(), &["migrate"])?;
        run(dir.path(), &["app", "create", "shop"])?;
        let offline = dir.path().join("offline");
        run(dir.path(), &["keys", "init", "--app", "shop", "--offline-dir", &offline.to_string_lossy()])?;
        let arguments: Vec<String> = arguments.iter().map(|a| a.replace("{config}", &path.to_string_lossy())).collect();
        let child = spawn(dir.path(), &arguments, &launcher)?;
        let mut server = Self { child, arguments, launcher, dir, port };
        server.wait()?;
        Ok(server)
    }

    /// Until the port answers: the log is replayed by then.
    fn wait(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(self.dir.path().join("log"))?;
                bail!("the server does not listen ({ended:?}):\n{log}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Address of a path.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// One command of the binary with this server's configuration; its output.
    ///
    /// # Errors
    /// When the command fails.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        run(self.dir.path(), arguments)
    }

    /// A token of a role for the app `shop`.
    ///
    /// # Errors
    /// When the command fails.
    pub fn token(&self, role: &str) -> Result<String> {
        run(self.dir.path(), &["token", "create", "--app", "shop", "--role", role, "--name", role])
    }

    /// An ingest key of the app `shop`.
    ///
    /// # Errors
    /// When the command fails.
    pub fn ingest_key(&self) -> Result<String> {
        run(self.dir.path(), &["ingest-key", "create", "--app", "shop"])
    }

    /// An ingest key of the app `shop` that may send so many events in a minute.
    ///
    /// # Errors
    /// When the command fails.
    pub fn ingest_key_with_quota(&self, events_per_minute: u32) -> Result<String> {
        let quota = events_per_minute.to_string();
        let arguments = ["ingest-key", "create", "--app", "shop", "--name", "small", "--events-per-minute", &quota];
        run(self.dir.path(), &arguments)
    }

    /// Kills the process as the kernel would (`SIGKILL`) and starts it again on the same data.
    ///
    /// # Errors
    /// When it does not come back.
    pub fn kill_and_restart(&mut self) -> Result<()> {
        self.kill()?;
        self.restart()
    }

    /// Kills the process as the kernel would (`SIGKILL`).
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts a killed server again on the same data.
    ///
    /// # Errors
    /// When it does not come back.
    pub fn restart(&mut self) -> Result<()> {
        self.child = spawn(self.dir.path(), &self.arguments, &self.launcher)?;
        self.wait()
    }

    /// Other lines of configuration for the next start.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn set_config(&self, lines: &str) -> Result<()> {
        write_config(self.dir.path(), self.port, lines).map(drop)
    }

    /// Folder of everything the server owns.
    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Most memory that the process had at once, kB (`VmHWM`).
    pub fn peak_rss_kb(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
    }

    /// What the server wrote to its log since it was started.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dir.path().join("log"))?)
    }

    /// Segments of the write-ahead log, oldest first.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn wal_segments(&self) -> Result<Vec<PathBuf>> {
        let folder = self.data_dir().join("lake/log");
        let entries = fs::read_dir(folder)?.map(|e| e.map(|e| e.path())).collect::<Result<Vec<_>, _>>()?;
        let mut found: Vec<PathBuf> =
            entries.into_iter().filter(|p| p.extension().is_some_and(|e| e == "log")).collect();
        found.sort();
        Ok(found)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn write_config(dir: &Path, port: u16, lines: &str) -> Result<PathBuf> {
    let config = format!(
        "data_dir = {:?}\nlisten = \"127.0.0.1:{port}\"\n\
         [clock]\nkind = \"virtual\"\nstart = \"2026-03-02T00:00:00Z\"\n{lines}",
        dir.join("data")
    );
    let path = dir.join("flywheel.toml");
    fs::write(&path, config)?;
    Ok(path)
}

fn spawn(dir: &Path, arguments: &[String], launcher: &[String]) -> Result<Child> {
    let log = fs::File::create(dir.join("log"))?;
    let program = binary()?;
    let mut command = match launcher.split_first() {
        None => Command::new(program),
        Some((first, rest)) => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    };
    Ok(command.args(arguments).stdout(Stdio::null()).stderr(log).spawn()?)
}

/// Lets this process have so many files and connections open, if the system allows it.
///
/// # Errors
/// When it does not.
pub fn raise_file_limit(wanted: u64) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < wanted) {
        bail!("{wanted} files cannot be open at once: the hard limit is {:?}", limit.maximum);
    }
    if limit.current.is_some_and(|now| now < wanted) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum })?;
    }
    Ok(())
}

/// Runs one command of the binary with the folder's configuration; answers its output.
fn run(dir: &Path, arguments: &[&str]) -> Result<String> {
    let out = Command::new(binary()?).args(arguments).env("FLYWHEEL_CONFIG", dir.join("flywheel.toml")).output()?;
    if !out.status.success() {
        bail!("flywheel {arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8(out.stdout)?.trim().to_owned())
}

/// The arguments of `ExecStart` in the shipped unit, with `{config}` where its configuration stands.
///
/// # Errors
/// When the unit does not start `flywheel`.
pub fn unit_arguments() -> Result<Vec<&'static str>> {
    let unit = include_str!("../../deploy/flywheel.service");
    let line = unit.lines().find_map(|l| l.strip_prefix("ExecStart=")).context("the unit has no ExecStart")?;
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or_default();
    if !program.ends_with("/flywheel") {
        bail!("the unit starts `{program}`");
    }
    Ok(words.map(|w| if w.ends_with(".toml") { "{config}" } else { w }).collect())
}

/// A client for the server; TLS is not used on loopback, but the library wants a provider.
///
/// # Errors
/// When the library cannot make one.
pub fn client() -> Result<reqwest::Client> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    Ok(reqwest::Client::builder()
        .timeout(Duration::from_secs(30))
        // a kept connection dies with the server that a test kills
        .pool_max_idle_per_host(0)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .build()?)
}
