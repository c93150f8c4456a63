//! `cargo xtask demo`: builds, fetches the models, starts `serve` and `signer`, runs the scenario of the simulated
//! fleet against them, and checks what it says.

mod ladder;

use crate::process::{self, Guard, bin_dir, run_quiet, spinner};
use crate::smtp::Smtp;
use crate::{browser, memory, model};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const APP: &str = "support";
/// The last part.
const LAST_PART: &str = "damage";

#[derive(clap::Args)]
pub struct Args {
    /// Seed of the simulated fleet; the same seed gives the same decisions.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Simulated phones.
    #[arg(long, default_value_t = 2600)]
    phones: u32,
    /// Write the summary as JSON.
    #[arg(long)]
    summary: Option<PathBuf>,
    /// Stop after this part: `boot`, `chunk`, `improve` or `damage`.
    #[arg(long, default_value = LAST_PART)]
    until: String,
    /// Leave the servers running at the end and print the dashboard's address.
    #[arg(long)]
    keep: bool,
    /// Look at the dashboard in a real Chromium at the end; skipped with a line where there is none.
    #[arg(long)]
    browser: bool,
}

impl Args {
    /// The default story with the shipped fleet and seed, and a look at the dashboard.
    pub fn shipped() -> Self {
        Self { seed: 7, phones: 2600, summary: None, until: LAST_PART.into(), keep: false, browser: true }
    }
}

pub fn run(args: &Args) -> Result<()> {
    build()?;
    let models = model::ensure()?;
    let started = Instant::now();
    let peak = memory::PeakPss::start();
    let place = Place::new(&models)?;
    let smtp = Smtp::start(&models, &place.dir.join("mail"))?;
    place.prepare(smtp.port)?;
    let (serve, signer) = place.start()?;
    let scenario = place.scenario(args)?;
    let mut summary = read_summary(&place.dir.join("summary.json"));
    let ladder = ladder::measure(&place, &summary)?;
    if !args.keep {
        save_candidate(&mut summary, &models)?;
    }
    if let Value::Object(map) = &mut summary {
        map.remove("merged_gguf"); // goes with the folder
        map.insert("wall_s".into(), json!(started.elapsed().as_secs_f64().round()));
        map.insert("peak_pss_mb".into(), json!(peak.peak_mb()));
    }
    if let Some(path) = &args.summary {
        fs::write(path, serde_json::to_vec_pretty(&summary)?)?;
    }
    print_end(&summary, &place, args.keep);
    if let Some(ladder) = ladder {
        ladder.print();
    }
    let looked = if args.browser && scenario { place.look() } else { Ok(()) };
    if args.keep {
        serve.keep();
        signer.keep();
        smtp.keep();
    } else {
        drop((serve, signer, smtp));
        let _ = fs::remove_dir_all(&place.dir);
        let _ = fs::remove_dir_all(&place.phones);
    }
    if !scenario || summary["ok"] != json!(true) {
        bail!("the demo did not hold what it promises: see above");
    }
    looked
}

#[expect(clippy::print_stdout, reason = "the demo's last lines")]
fn print_end(summary: &Value, place: &Place, keep: bool) {
    println!("\nsummary: {}", serde_json::to_string_pretty(summary).unwrap_or_default());
    println!("dashboard: http://127.0.0.1:{}/", place.port);
    if keep {
        println!("still running; data in {}; stop it with: pkill flywheel", place.dir.display());
    }
}

/// The run's folder is removed: the tuned model goes where the models are.
fn save_candidate(summary: &mut Value, models: &Path) -> Result<()> {
    let Some(from) = summary["candidate_gguf"].as_str().map(PathBuf::from) else { return Ok(()) };
    let to = models.join("demo-candidate.gguf");
    fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
    summary["candidate_gguf"] = json!(to);
    Ok(())
}

fn build() -> Result<()> {
    // cargo shows its own progress
    process::run("building flywheel and fleet-sim", process::cargo().args(["build", "--workspace", "--bins"]))
}

fn read_summary(path: &Path) -> Value {
    fs::read(path)
        .ok()
        .and_then(|b| serde_json::from_slice(&b).ok())
        .unwrap_or_else(|| json!({ "ok": false, "error": "the scenario wrote no summary" }))
}

/// Folders, port and binaries of one run.
struct Place {
    dir: PathBuf,
    phones: PathBuf,
    models: PathBuf,
    bins: PathBuf,
    port: u16,
}

impl Place {
    fn new(models: &Path) -> Result<Self> {
        let name = format!("flywheel-demo-{}", std::process::id());
        let dir = std::env::temp_dir().join(&name);
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        // thousands of simulated phones keep their own small files: a memory file system spares the disk
        let shm = Path::new("/dev/shm");
        let phones = if shm.is_dir() { shm.join(&name) } else { dir.join("phones") };
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        Ok(Self { dir, phones, models: models.to_owned(), bins: bin_dir()?, port })
    }

    /// One of our programs, started as `deploy/flywheel.service` does: one arena per core keeps glibc from holding what
    /// a training or an evaluation has freed.
    fn program(&self, name: &str) -> Command {
        let mut c = Command::new(self.bins.join(name));
        c.env("MALLOC_ARENA_MAX", "2");
        c
    }

    fn flywheel(&self) -> Command {
        let mut c = self.program("flywheel");
        c.env("FLYWHEEL_CONFIG", self.dir.join("flywheel.toml"));
        c
    }

    fn operator(&self, what: &str, args: &[&str]) -> Result<String> {
        let out = run_quiet(what, self.flywheel().args(args))?;
        Ok(String::from_utf8(out)?.trim().to_owned())
    }

    fn prepare(&self, smtp: u16) -> Result<()> {
        let config = format!(
            "data_dir = {data:?}\nlisten = \"127.0.0.1:{port}\"\n\
             [clock]\nkind = \"virtual\"\nstart = \"2026-03-02T00:00:00Z\"\n\
             [models]\nencoder_dir = {encoder:?}\n\
             [mail]\nsmtp_url = \"smtp://127.0.0.1:{smtp}\"\nfrom = \"flywheel@example.com\"\nto = [\"ml-ops@example.com\"]\n",
            data = self.dir.join("server"),
            port = self.port,
            encoder = self.models.join("all-minilm-l6-v2"),
        );
        fs::write(self.dir.join("flywheel.toml"), config)?;
        self.operator("migrating", &["migrate"])?;
        self.operator("creating the app", &["app", "create", APP])?;
        let offline = self.dir.join("offline-keys");
        self.operator("making the keys", &["keys", "init", "--app", APP, "--offline-dir", &offline.to_string_lossy()])?;
        for role in ["operator", "approver", "admin", "viewer", "signer"] {
            self.token(role, role)?;
        }
        self.token("annotator", "ann")?;
        self.token("annotator", "ben")?;
        let key = self.operator("ingest key", &["ingest-key", "create", "--app", APP])?;
        fs::write(self.dir.join("ingest-key"), key)?;
        let signer = format!(
            "server = \"http://127.0.0.1:{port}\"\napp = \"{APP}\"\ntoken_file = {token:?}\n\
             release_key = {key:?}\ntrusted_root = {root:?}\nstate_dir = {state:?}\npoll_s = 1\nuse_server_clock = true\n",
            port = self.port,
            token = self.dir.join("token-signer"),
            key = offline.join("release.json"),
            root = offline.join("trusted-root.json"),
            state = self.dir.join("signer"),
        );
        fs::write(self.dir.join("signer.toml"), signer)?;
        Ok(())
    }

    fn token(&self, role: &str, name: &str) -> Result<()> {
        let token = self.operator("token", &["token", "create", "--app", APP, "--role", role, "--name", name])?;
        fs::write(self.dir.join(format!("token-{name}")), token)?;
        Ok(())
    }

    /// The dashboard in a browser, while the servers still run. The name of the token, which the audit log shows, is
    /// Chinese: the pages must show every script.
    fn look(&self) -> Result<()> {
        const NAME: &str = "审核员 林";
        let args = ["token", "create", "--app", APP, "--role", "operator", "--name", NAME];
        let token_file = self.dir.join("token-browser");
        fs::write(&token_file, self.operator("token", &args)?)?;
        browser::run(&browser::Args {
            server: format!("http://127.0.0.1:{}", self.port),
            token_file,
            token_name: Some(NAME.into()),
            screenshots: None,
        })
    }

    fn start(&self) -> Result<(Guard, Guard)> {
        let log = |name: &str| fs::File::create(self.dir.join(name)).map(Stdio::from);
        let serve = Guard::start(
            "flywheel serve",
            self.flywheel().arg("serve").stderr(log("serve.log")?).stdout(Stdio::null()),
        )?;
        let bar = spinner("starting the server");
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if Instant::now() > deadline {
                bail!(
                    "the server did not start:\n{}",
                    fs::read_to_string(self.dir.join("serve.log")).unwrap_or_default()
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        bar.finish_and_clear();
        let mut signer = self.program("flywheel");
        signer.arg("signer").arg("run").arg("--config").arg(self.dir.join("signer.toml"));
        let signer = Guard::start("flywheel signer", signer.stderr(log("signer.log")?).stdout(Stdio::null()))?;
        Ok((serve, signer))
    }

    /// Runs the scenario; whether it succeeded.
    fn scenario(&self, args: &Args) -> Result<bool> {
        let status = self
            .program("fleet-sim")
            .args(["scenario", "support", "--server"])
            .arg(format!("http://127.0.0.1:{}", self.port))
            .arg("--dir")
            .arg(&self.dir)
            .arg("--phones-dir")
            .arg(&self.phones)
            .arg("--models")
            .arg(&self.models)
            .arg("--flywheel")
            .arg(self.bins.join("flywheel"))
            .arg("--seed")
            .arg(args.seed.to_string())
            .arg("--phones")
            .arg(args.phones.to_string())
            .arg("--until")
            .arg(&args.until)
            .arg("--summary")
            .arg(self.dir.join("summary.json"))
            .status()
            .context("cannot start fleet-sim")?;
        if !status.success() {
            process_log(&self.dir.join("serve.log"));
            process_log(&self.dir.join("signer.log"));
        }
        Ok(status.success())
    }
}

#[expect(clippy::print_stdout, reason = "the log of a failed run must be seen")]
fn process_log(path: &Path) {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    println!("--- last lines of {}", path.display());
    for line in lines.iter().skip(lines.len().saturating_sub(40)) {
        println!("{line}");
    }
}
