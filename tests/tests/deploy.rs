//! What `deploy/` ships runs: command lines of units and containers, configurations, the health check, and the set-up
//! steps of the README, with the real binary.

use anyhow::{Context, Result, bail, ensure};
use flywheel_tests::binary;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SERVE_UNIT: &str = include_str!("../../deploy/flywheel.service");
const SIGNER_UNIT: &str = include_str!("../../deploy/flywheel-signer.service");
const SERVE_TOML: &str = include_str!("../../deploy/flywheel.toml");
const COMPOSE_TOML: &str = include_str!("../../deploy/compose.toml");
const SIGNER_TOML: &str = include_str!("../../deploy/signer.toml");
const COMPOSE: &str = include_str!("../../deploy/compose.yaml");
const DOCKERFILE: &str = include_str!("../../deploy/Dockerfile");
const README: &str = include_str!("../../deploy/README.md");
const TOOLCHAIN: &str = include_str!("../../rust-toolchain.toml");

/// Longest wait for a process to do what it is there for.
const LONGEST: Duration = Duration::from_secs(60);

/// Arguments of a unit's `ExecStart`, without the program.
fn exec_start(unit: &str) -> Result<Vec<String>> {
    let line = unit.lines().find_map(|l| l.strip_prefix("ExecStart=")).context("the unit has no ExecStart")?;
    let words = line.strip_prefix("/usr/local/bin/flywheel ").context("the unit starts something else")?;
    Ok(words.split_whitespace().map(str::to_owned).collect())
}

/// The lists written as JSON behind `key` in a file, in their order.
fn lists(text: &str, key: &str) -> Result<Vec<Vec<String>>> {
    let found =
        text.lines().filter_map(|l| l.trim_start().strip_prefix(key)).filter(|l| l.trim_start().starts_with('['));
    found.map(|l| Ok(serde_json::from_str(l)?)).collect()
}

/// `text` with every pair replaced; each must occur.
fn replaced(text: &str, pairs: &[(&str, String)]) -> Result<String> {
    let mut text = text.to_owned();
    for (from, to) in pairs {
        ensure!(text.contains(from), "`{from}` is not in the shipped file any more");
        text = text.replace(from, to);
    }
    Ok(text)
}

/// Writes a shipped configuration of `serve` with its data in `dir` and a free port of the loopback; path and port.
fn serve_config(dir: &Path, shipped: &str) -> Result<(PathBuf, u16)> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let listen = shipped.lines().find(|l| l.starts_with("listen = ")).context("the file has no `listen`")?;
    let data = format!("\"{}\"", dir.join("data").display());
    let pairs = [("\"/var/lib/flywheel\"", data), (listen, format!("listen = \"127.0.0.1:{port}\""))];
    let path = dir.join("flywheel.toml");
    fs::write(&path, replaced(shipped, &pairs)?)?;
    Ok((path, port))
}

/// A started command line; killed when dropped.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts the arguments with `config` in the place of the shipped configuration.
    fn start(arguments: &[String], config: &Path) -> Result<Self> {
        let log = config.with_extension("log");
        let arguments =
            arguments.iter().map(|a| if a.ends_with(".toml") { config.to_path_buf() } else { PathBuf::from(a) });
        let child = Command::new(binary()?)
            .args(arguments)
            .env("NO_PROXY", "127.0.0.1")
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()?;
        Ok(Self { child, log })
    }

    /// Asks until the answer is yes; an error when the process ends before or the time is over.
    fn until(&mut self, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + LONGEST;
        while !done()? {
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                bail!("it did not come so far ({ended:?}):\n{}", fs::read_to_string(&self.log)?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// SIGTERM, as systemd and Docker stop a service; the exit code.
    fn terminate(mut self) -> Result<Option<i32>> {
        let sent = Command::new("sh").args(["-c", &format!("kill -TERM {}", self.child.id())]).status()?;
        ensure!(sent.success(), "the signal was not sent");
        let deadline = Instant::now() + LONGEST;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            ensure!(Instant::now() < deadline, "SIGTERM does not end it:\n{}", fs::read_to_string(&self.log)?);
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the health check of the container against a port.
fn healthy(port: u16) -> Result<bool> {
    let check = lists(COMPOSE, "test:")?.into_iter().next().context("there is no health check")?;
    ensure!(check[..2] == ["CMD", "flywheel"], "{check:?}");
    let mut command = Command::new(binary()?);
    command.args(&check[2..]).env("FLYWHEEL_SERVER", format!("http://127.0.0.1:{port}")).env("NO_PROXY", "127.0.0.1");
    Ok(command.output()?.status.success())
}

#[test]
fn the_server_becomes_ready_and_ends_well_on_sigterm() -> Result<()> {
    for shipped in [SERVE_TOML, COMPOSE_TOML] {
        let dir = tempfile::tempdir()?;
        let (config, port) = serve_config(dir.path(), shipped)?;
        assert!(!healthy(port)?, "nothing listens yet");
        let mut serve = Process::start(&exec_start(SERVE_UNIT)?, &config)?;
        serve.until(|| healthy(port))?;
        assert_eq!(serve.terminate()?, Some(0));
        assert!(!healthy(port)?, "it is gone");
    }
    Ok(())
}

#[test]
fn containers_and_units_run_the_same() -> Result<()> {
    let (serve, signer) = (exec_start(SERVE_UNIT)?, exec_start(SIGNER_UNIT)?);
    assert_eq!(lists(COMPOSE, "command:")?, [serve.clone(), signer]);
    assert_eq!(lists(DOCKERFILE, "CMD ")?, [serve]);
    assert_eq!(COMPOSE.matches("ports:").count(), 1, "only `serve` publishes a port");
    let channel = TOOLCHAIN.lines().find_map(|l| l.strip_prefix("channel = ")).context("no channel")?;
    assert!(
        DOCKERFILE.contains(&format!("FROM rust:{}-", channel.trim_matches('"'))),
        "the image builds with {channel}"
    );
    Ok(())
}

/// Runs the lines of the README that go through `serve`'s container, in their order, in `dir`.
fn set_up(dir: &Path, config: &Path) -> Result<()> {
    for line in README.lines().filter(|l| l.starts_with("docker compose run ")) {
        let (_, command) = line.split_once(" serve ").with_context(|| format!("`{line}` runs another service"))?;
        let (command, file) = command.split_once(" > ").unwrap_or((command, ""));
        let offline = dir.join("offline").display().to_string();
        let words = command.split_whitespace().map(|w| w.replace("/offline", &offline));
        let out = Command::new(binary()?).args(words).env("FLYWHEEL_CONFIG", config).output()?;
        ensure!(out.status.success(), "`{line}`: {}", String::from_utf8_lossy(&out.stderr));
        if !file.is_empty() {
            fs::write(dir.join(file), out.stdout)?;
        }
    }
    Ok(())
}

#[test]
fn the_readmes_steps_make_what_the_signer_needs() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (config, _) = serve_config(dir.path(), COMPOSE_TOML)?;
    fs::create_dir(dir.path().join("signer"))?;
    set_up(dir.path(), &config)?;
    for file in ["release.json", "trusted-root.json"] {
        fs::copy(dir.path().join("offline").join(file), dir.path().join("signer").join(file))?;
    }
    let server = TcpListener::bind("127.0.0.1:0")?;
    let pairs = [
        ("http://serve:8080", format!("http://{}", server.local_addr()?)),
        ("/etc/flywheel/signer/", format!("{}/", dir.path().join("signer").display())),
        ("/var/lib/flywheel-signer", dir.path().join("state").display().to_string()),
    ];
    let signer_config = dir.path().join("signer.toml");
    fs::write(&signer_config, replaced(SIGNER_TOML, &pairs)?)?;
    let mut signer = Process::start(&exec_start(SIGNER_UNIT)?, &signer_config)?;
    server.set_nonblocking(true)?;
    let mut asked = None;
    signer.until(|| match server.accept() {
        Ok((stream, _)) => {
            asked = Some(stream);
            Ok(true)
        }
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
        Err(e) => Err(e.into()),
    })?;
    let stream = asked.context("nobody asked")?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(LONGEST))?;
    let head: Vec<String> = BufReader::new(stream)
        .lines()
        .take_while(|l| l.as_ref().is_ok_and(|l| !l.is_empty()))
        .collect::<Result<_, _>>()?;
    assert_eq!(head.first().map(String::as_str), Some("GET /v1/signer/work HTTP/1.1"));
    let token = fs::read_to_string(dir.path().join("signer/token"))?;
    assert!(head.iter().any(|l| l.ends_with(&format!("Bearer {}", token.trim()))), "{head:?}");
    Ok(())
}
