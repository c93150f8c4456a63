//! What the job benchmark shares with the peers measured beside it (`tests/peers/`): options, the raw speed of the file
//! system, the report.

use serde_json::{Value, json};
use std::error::Error;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Options of a run.
pub struct Args {
    /// An empty database.
    pub url: String,
    /// A folder on the file system that holds it.
    pub sync_dir: PathBuf,
    pub workers: usize,
    pub jobs: usize,
    /// Where to write the report besides standard output.
    pub json: Option<PathBuf>,
}

impl Args {
    /// From the command line.
    ///
    /// # Errors
    /// An unknown option, a missing or malformed value.
    pub fn parse() -> Result<Self, Box<dyn Error>> {
        let mut out = Self { url: String::new(), sync_dir: ".".into(), workers: 4, jobs: 2000, json: None };
        let mut words = std::env::args().skip(1);
        while let Some(name) = words.next() {
            let value = words.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--url" => out.url = value,
                "--sync-dir" => out.sync_dir = value.into(),
                "--workers" => out.workers = value.parse()?,
                "--jobs" => out.jobs = value.parse()?,
                "--json" => out.json = Some(value.into()),
                other => return Err(format!("unknown option {other}").into()),
            }
        }
        if out.url.is_empty() {
            return Err("--url is missing".into());
        }
        Ok(out)
    }

    /// The report of a run that took `seconds`, with the fdatasync rate measured before and after it.
    pub fn report(&self, queue: &str, backend: &str, durability: &str, seconds: f64, sync: [f64; 2]) -> Value {
        let (rate, per_s) = (self.jobs as f64 / seconds, f64::midpoint(sync[0], sync[1]));
        json!({
            "queue": queue,
            "backend": backend,
            "durability": durability,
            "jobs": self.jobs,
            "workers": self.workers,
            "claims_per_worker": 1,
            "seconds": seconds,
            "jobs_per_s": rate,
            "fdatasync_per_s": per_s,
            "fdatasync_per_s_before_after": sync,
            "jobs_per_fdatasync": rate / per_s,
        })
    }

    /// Prints the report and writes it to the file that was asked for.
    ///
    /// # Errors
    /// Those of the file.
    pub fn publish(&self, report: &Value) -> Result<(), Box<dyn Error>> {
        let text = serde_json::to_string_pretty(report)?;
        println!("{text}");
        if let Some(path) = &self.json {
            std::fs::write(path, text)?;
        }
        Ok(())
    }
}

/// Overwrites of one 4 KiB page in a file that does not grow, each made durable, per second: what a recycled log costs.
///
/// # Errors
/// Those of the file system.
pub fn fdatasync_per_s(dir: &Path) -> Result<f64, Box<dyn Error>> {
    const PAGES: u32 = 256;
    let path = dir.join(format!("fdatasync-{}.tmp", std::process::id()));
    let mut file = std::fs::File::create(&path)?;
    let page = [7u8; 4096];
    for _ in 0..PAGES {
        file.write_all(&page)?;
    }
    file.sync_all()?;
    let (mut n, began) = (0u32, Instant::now());
    while began.elapsed() < Duration::from_secs(1) {
        if n.is_multiple_of(PAGES) {
            file.seek(SeekFrom::Start(0))?;
        }
        file.write_all(&page)?;
        file.sync_data()?;
        n += 1;
    }
    let rate = f64::from(n) / began.elapsed().as_secs_f64();
    std::fs::remove_file(&path)?;
    Ok(rate)
}
