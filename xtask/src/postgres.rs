//! A private PostgreSQL for tests and benchmarks: a throw-away cluster on a Unix socket and a free port, with the
//! settings that `initdb` writes (every commit is durable).

use crate::process::run_quiet;
use anyhow::{Context, Result};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where distributions put the server's programs when they are not on the PATH.
const VERSIONS: &str = "/usr/lib/postgresql";

/// A running cluster; stopped and removed when dropped.
pub struct Cluster {
    dir: PathBuf,
    port: u16,
    programs: PathBuf,
}

impl Cluster {
    /// Starts one in the temporary folder, or returns `None` when PostgreSQL is not installed.
    pub fn start() -> Result<Option<Self>> {
        Self::start_in(&std::env::temp_dir().join(format!("flywheel-pg-{}", std::process::id())))
    }

    /// Starts one in the folder `dir`, which is replaced, or returns `None` when PostgreSQL is not installed.
    pub fn start_in(dir: &Path) -> Result<Option<Self>> {
        let Some(programs) = programs() else { return Ok(None) };
        let _ = fs::remove_dir_all(dir);
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        // The server may run as another user; it makes its own folder, which nobody else may read, in here.
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777))?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let this = Self { dir: dir.to_owned(), port, programs };
        let mut initdb = this.server_program("initdb");
        initdb.args(["-A", "trust", "-U", "flywheel", "-E", "UTF8", "--no-sync", "-D"]).arg(this.data());
        run_quiet("initdb", &mut initdb)?;
        let options = format!("-p {port} -k {} -c listen_addresses=127.0.0.1 -c max_connections=200", dir.display());
        let mut start = this.server_program("pg_ctl");
        start.args(["start", "-w", "-D"]).arg(this.data()).arg("-l").arg(dir.join("log")).arg("-o").arg(options);
        run_quiet("starting PostgreSQL", &mut start).with_context(|| {
            format!("PostgreSQL did not start\n{}", fs::read_to_string(dir.join("log")).unwrap_or_default())
        })?;
        Ok(Some(this))
    }

    /// Connection URL of the maintenance database.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// Creates an empty database and answers its connection URL.
    pub fn database(&self, name: &str) -> Result<String> {
        let mut create = Command::new(self.programs.join("createdb"));
        create.args(["-h", "127.0.0.1", "-U", "flywheel", "-p", &self.port.to_string(), name]);
        run_quiet("createdb", &mut create)?;
        Ok(self.url_of(name))
    }

    fn url_of(&self, database: &str) -> String {
        format!("postgres://flywheel@127.0.0.1:{}/{database}", self.port)
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// PostgreSQL refuses to run as root: become the `postgres` user then.
    fn server_program(&self, name: &str) -> Command {
        let program = self.programs.join(name);
        let mut command = if fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0) {
            let mut runuser = Command::new("runuser");
            runuser.args(["-u", "postgres", "--"]).arg(program);
            runuser
        } else {
            Command::new(program)
        };
        // Not the caller's folder: that user may not be allowed to enter it.
        command.current_dir("/");
        command
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.server_program("pg_ctl").args(["stop", "-m", "immediate", "-D"]).arg(self.data()).output();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The folder of the server's programs: that of the `initdb` on the PATH (links followed: the others lie beside the
/// real one), else the newest version that is installed.
fn programs() -> Option<PathBuf> {
    let has = |dir: &PathBuf| dir.join("initdb").is_file();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).find(has).and_then(|dir| fs::canonicalize(dir.join("initdb")).ok());
    on_path.and_then(|program| program.parent().map(Path::to_owned)).or_else(|| {
        let versions = fs::read_dir(VERSIONS).ok()?.flatten();
        let number = |dir: &PathBuf| dir.file_name().and_then(|n| n.to_str()?.parse::<u32>().ok());
        let newest = versions.map(|v| v.path()).filter(|v| number(v).is_some()).max_by_key(number)?;
        Some(newest.join("bin")).filter(has)
    })
}
