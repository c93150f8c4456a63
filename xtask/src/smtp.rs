//! A real mail server for the demo: `aiosmtpd` from PyPI, which keeps what it takes in a Maildir.

use crate::process::{Guard, run_quiet};
use anyhow::{Context, Result, bail};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What pip installs, checked by hash.
const REQUIREMENTS: &str = "\
aiosmtpd==1.4.6 --hash=sha256:72c99179ba5aa9ae0abbda6994668239b64a5ce054471955fe75f581d2592475
atpublic==6.0.2 --hash=sha256:156cfd3854e580ebfa596094a018fe15e4f3fa5bade74b39c3dabb54f12d6565
attrs==26.1.0 --hash=sha256:c647aa4a12dfbad9333ca4e71fe62ddc36f4e63b2d260a37a8b83d2f043ac309
";

/// A running server.
pub struct Smtp {
    pub port: u16,
    guard: Guard,
}

impl Smtp {
    /// Installs the server below `cache` if it is not there, and starts it on a free port; mail lands in `maildir`.
    pub fn start(cache: &Path, maildir: &Path) -> Result<Self> {
        let modules = installed(cache)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let address = format!("127.0.0.1:{port}");
        let guard = Guard::start(
            "the mail server",
            Command::new("python3")
                .args(["-m", "aiosmtpd", "--nosetuid", "--listen", &address, "--class", "aiosmtpd.handlers.Mailbox"])
                .arg(maildir)
                .env("PYTHONPATH", modules)
                .stdout(Stdio::null())
                .stderr(Stdio::null()),
        )?;
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(&address).is_err() {
            if Instant::now() > deadline {
                bail!("the mail server did not start on {address}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Self { port, guard })
    }

    /// Leaves it running.
    pub fn keep(self) {
        self.guard.keep();
    }
}

fn installed(cache: &Path) -> Result<PathBuf> {
    let modules = cache.join("aiosmtpd-1.4.6");
    if modules.is_dir() {
        return Ok(modules);
    }
    let fresh = cache.join(format!(".aiosmtpd-{}", std::process::id()));
    fs::create_dir_all(&fresh)?;
    let list = fresh.with_extension("txt");
    fs::write(&list, REQUIREMENTS)?;
    run_quiet(
        "downloading a mail server",
        Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps"])
            .args(["--root-user-action", "ignore", "--require-hashes", "--target"])
            .arg(&fresh)
            .arg("--requirement")
            .arg(&list),
    )
    .context("cannot get aiosmtpd (needs python3 with pip and a package index)")?;
    let _ = fs::remove_file(list);
    fs::rename(&fresh, &modules)?;
    Ok(modules)
}
