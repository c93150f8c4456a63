//! A private PostgreSQL for the tests: a throw-away cluster on a Unix socket and a free port.

use crate::process::run_quiet;
use anyhow::{Context, Result};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A running cluster; stopped and removed when dropped.
pub struct Cluster {
    dir: PathBuf,
    port: u16,
}

impl Cluster {
    /// Starts one, or returns `None` when PostgreSQL is not installed.
    pub fn start() -> Result<Option<Self>> {
        if Command::new("initdb").arg("--version").output().is_err() {
            return Ok(None);
        }
        let dir = std::env::temp_dir().join(format!("flywheel-pg-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir)?;
        run_quiet("preparing PostgreSQL", Command::new("chmod").arg("777").arg(&dir))?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let this = Self { dir, port };
        let data = this.dir.join("data");
        run_quiet(
            "initdb",
            as_postgres("initdb").args(["-A", "trust", "-U", "flywheel", "-E", "UTF8", "--no-sync", "-D"]).arg(&data),
        )?;
        let options =
            format!("-p {port} -k {} -c listen_addresses=127.0.0.1 -c max_connections=200", this.dir.display());
        run_quiet(
            "starting PostgreSQL",
            as_postgres("pg_ctl")
                .args(["start", "-w", "-D"])
                .arg(&data)
                .arg("-l")
                .arg(this.dir.join("log"))
                .arg("-o")
                .arg(options),
        )
        .context("PostgreSQL did not start")?;
        Ok(Some(this))
    }
    /// Connection URL of the maintenance database.
    pub fn url(&self) -> String {
        format!("postgres://flywheel@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let data = self.dir.join("data");
        let _ = as_postgres("pg_ctl").args(["stop", "-m", "immediate", "-D"]).arg(&data).output();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// PostgreSQL refuses to run as root: become the `postgres` user then.
fn as_postgres(program: &str) -> Command {
    let root = std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0);
    if root && Path::new("/usr/sbin/runuser").exists() {
        let mut c = Command::new("runuser");
        c.args(["-u", "postgres", "--", program]);
        c.current_dir("/");
        return c;
    }
    Command::new(program)
}
