//! Throughput of the job queue with durability as shipped and one claim per worker.
//!
//! `bench_jobs --url sqlite:DIR/bench.db --sync-dir DIR --workers 4 --jobs 2000 --json FILE`
//!
//! On a disk the commit rate is bounded by fdatasync, so the raw rate of the same file system is measured before and after
//! the run and the result is also given as jobs per fdatasync. On tmpfs fdatasync is free and the figure says what the
//! code costs. The database must be empty: use a fresh file, or a fresh schema through `options=-csearch_path%3D…`.

#![expect(clippy::print_stdout, reason = "a program that prints its result")]

use async_trait::async_trait;
use flywheel_jobs::{Handlers, JobContext, JobError, JobHandler, NewJob, Outcome, Worker, WorkerOptions};
use flywheel_store::Store;
use flywheel_types::clock::SystemClock;
use flywheel_types::{AppId, BusinessClock as _};
use serde_json::json;
use std::error::Error;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

struct Args {
    url: String,
    sync_dir: PathBuf,
    workers: usize,
    jobs: usize,
    json: Option<PathBuf>,
}

fn args() -> Result<Args, Box<dyn Error>> {
    let mut out = Args { url: String::new(), sync_dir: ".".into(), workers: 4, jobs: 2000, json: None };
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

/// Overwrites of one 4 KiB page in a file that does not grow, each made durable, per second: what a recycled log costs.
fn fdatasync_per_s(dir: &Path) -> Result<f64, Box<dyn Error>> {
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

struct Nothing {
    left: Arc<AtomicUsize>,
    done: Arc<Notify>,
}

#[async_trait]
impl JobHandler for Nothing {
    async fn run(&self, _: &JobContext) -> Result<Outcome, JobError> {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.done.notify_one();
        }
        Ok(Outcome::Done(None))
    }
}

/// Runs `jobs` jobs and answers the seconds from the first claim to the last commit.
async fn run(store: &Store, workers: usize, jobs: usize) -> Result<f64, Box<dyn Error>> {
    let app: AppId = "bench".parse()?;
    let mut tx = store.begin(SystemClock.now()).await?;
    for n in 0..jobs {
        tx.job_enqueue(&app, &NewJob::new("nothing", json!({"v": 1, "n": n}))).await?;
    }
    tx.commit().await?;
    let (left, done) = (Arc::new(AtomicUsize::new(jobs)), Arc::new(Notify::new()));
    let handler = Nothing { left, done: done.clone() };
    let options = WorkerOptions { slots: workers, ..WorkerOptions::default() };
    let worker = Worker::new(store.clone(), Handlers::new().with("nothing", handler), options);
    let began = Instant::now();
    // The shut-down waits for the last settle.
    worker.run(async move { done.notified().await }).await;
    let seconds = began.elapsed().as_secs_f64();
    let open: i64 = store
        .job_counts(Some(&app))
        .await?
        .iter()
        .filter(|c| c.state != flywheel_types::JobState::Succeeded)
        .map(|c| c.count)
        .sum();
    if open > 0 {
        return Err(format!("{open} jobs did not succeed").into());
    }
    Ok(seconds)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args = args()?;
    let store = Store::connect(&args.url).await?;
    store.migrate().await?;
    let before = fdatasync_per_s(&args.sync_dir)?;
    let seconds = run(&store, args.workers, args.jobs).await?;
    let after = fdatasync_per_s(&args.sync_dir)?;
    let (rate, sync) = (args.jobs as f64 / seconds, (before + after) / 2.0);
    let backend = format!("{:?}", store.backend()).to_lowercase();
    let report = json!({
        "backend": backend,
        "jobs": args.jobs,
        "workers": args.workers,
        "claims_per_worker": 1,
        "durability": "as shipped: synchronous=FULL, WAL (SQLite); synchronous_commit of the server (PostgreSQL)",
        "seconds": seconds,
        "jobs_per_s": rate,
        "fdatasync_per_s": sync,
        "fdatasync_per_s_before_after": [before, after],
        "jobs_per_fdatasync": rate / sync,
    });
    let text = serde_json::to_string_pretty(&report)?;
    println!("{text}");
    if let Some(path) = args.json {
        std::fs::write(path, text)?;
    }
    Ok(())
}
