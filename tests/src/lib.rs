//! Harness of the whole-flow tests: the real `flywheel` binary in a temporary folder, spoken to over HTTP only.

use anyhow::{Context, Result, bail};
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running server with one app; stopped when dropped.
pub struct Server {
    child: Child,
    dir: tempfile::TempDir,
    port: u16,
}

/// The binary beside the test programs. `cargo xtask test` builds it first.
pub fn binary() -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    let found = here.ancestors().map(|d| d.join("flywheel")).find(|p| p.is_file());
    found.context("the `flywheel` binary is not built: run `cargo build --workspace --bins`")
}

impl Server {
    /// Starts `arguments` (without the program), with `{config}` replaced by the path of a fresh configuration.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let config = format!(
            "data_dir = {:?}\nlisten = \"127.0.0.1:{port}\"\n[clock]\nkind = \"virtual\"\nstart = \"2026-03-02T00:00:00Z\"\n",
            dir.path().join("data")
        );
        fs::write(dir.path().join("flywheel.toml"), config)?;
        run(dir.path(), &["migrate"])?;
        run(dir.path(), &["app", "create", "shop"])?;
        let offline = dir.path().join("offline");
        run(dir.path(), &["keys", "init", "--app", "shop", "--offline-dir", &offline.to_string_lossy()])?;
        let path = dir.path().join("flywheel.toml");
        let arguments = arguments.iter().map(|a| a.replace("{config}", &path.to_string_lossy()));
        let child = Command::new(binary()?)
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.path().join("log"))?)
            .spawn()?;
        let server = Self { child, dir, port };
        server.wait()?;
        Ok(server)
    }

    fn wait(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if Instant::now() > deadline {
                bail!("the server did not start:\n{}", fs::read_to_string(self.dir.path().join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Address of a path.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// A token of a role for the app `shop`.
    pub fn token(&self, role: &str) -> Result<String> {
        run(self.dir.path(), &["token", "create", "--app", "shop", "--role", role, "--name", role])
    }

    /// An ingest key of the app `shop`.
    pub fn ingest_key(&self) -> Result<String> {
        run(self.dir.path(), &["ingest-key", "create", "--app", "shop"])
    }

    /// Kills the process as the kernel would.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs one command of the binary with the folder's configuration; answers its output.
fn run(dir: &Path, arguments: &[&str]) -> Result<String> {
    let out = Command::new(binary()?).args(arguments).env("FLYWHEEL_CONFIG", dir.join("flywheel.toml")).output()?;
    if !out.status.success() {
        bail!("flywheel {arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8(out.stdout)?.trim().to_owned())
}

/// A client for the server; TLS is not used on loopback, but the library wants a provider.
pub fn client() -> Result<reqwest::Client> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    Ok(reqwest::Client::builder().timeout(Duration::from_secs(30)).build()?)
}
