//! Throughput of the job queue with durability as shipped and one claim per worker.
//!
//! `bench_jobs --url sqlite:DIR/bench.db --sync-dir DIR --workers 4 --jobs 2000 --json FILE`
//!
//! On a disk the commit rate is bounded by fdatasync, so the raw rate of the same file system is measured before and after
//! the run and the result is also given as jobs per fdatasync. On tmpfs fdatasync is free and the figure says what the
//! code costs. The database must be empty. `cargo xtask bench jobs` prepares one for each run.

#![expect(clippy::print_stdout, reason = "a program that prints its result")]

mod common;

use async_trait::async_trait;
use common::{Args, fdatasync_per_s};
use flywheel_jobs::{Handlers, JobContext, JobError, JobHandler, NewJob, Outcome, Worker, WorkerOptions};
use flywheel_store::Store;
use flywheel_types::clock::SystemClock;
use flywheel_types::{AppId, BusinessClock as _};
use serde_json::json;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tokio::sync::Notify;

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
    let args = Args::parse()?;
    let store = Store::connect(&args.url).await?;
    store.migrate().await?;
    let before = fdatasync_per_s(&args.sync_dir)?;
    let seconds = run(&store, args.workers, args.jobs).await?;
    let after = fdatasync_per_s(&args.sync_dir)?;
    let backend = format!("{:?}", store.backend()).to_lowercase();
    let durability = "as shipped: WAL and synchronous=FULL (SQLite), synchronous_commit of the server (PostgreSQL)";
    args.publish(&args.report("flywheel", &backend, durability, seconds, [before, after]))
}
