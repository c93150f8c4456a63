//! apalis under the settings of our own job benchmark (`crates/jobs/examples/bench_jobs`), with its options and report.
//!
//! Equal to ours: every job is enqueued before the clock starts, in one transaction; four workers; one claim per worker
//! (`batch_size` 1, one job at a time); results persisted; WAL with synchronous=FULL on one writing connection (SQLite),
//! ten connections (PostgreSQL). The time ends when the last completion is committed and the workers have ended.
//!
//! Different by design: apalis claims and completes in two transactions, which may hold the completions of several jobs,
//! and a completion is not written before the next claim is.

#[path = "../../../../crates/jobs/examples/bench_jobs/common.rs"]
mod common;

use apalis::prelude::*;
use apalis_postgres::PostgresStorage;
use apalis_sqlite::SqliteStorage;
use common::{Args, fdatasync_per_s};
use futures::stream;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use std::error::Error;
use std::str::FromStr as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;

type Failure = Box<dyn Error + Send + Sync>;

const VERSION: &str = "apalis 1.0.0";

/// Jobs not run yet, and the word that all are.
struct Progress {
    left: AtomicUsize,
    done: watch::Sender<bool>,
}

async fn nothing(_: usize, progress: Data<Arc<Progress>>) -> Result<(), BoxDynError> {
    if progress.left.fetch_sub(1, Ordering::SeqCst) == 1 {
        progress.done.send_replace(true);
    }
    Ok(())
}

/// Enqueues, then works with one apalis worker per slot; the seconds from the first claim to the last commit. A macro,
/// because the two back ends have no common type.
macro_rules! work {
    ($backend:expr, $args:expr) => {{
        let mut backend = $backend;
        backend.push_all(&mut stream::iter((0..$args.jobs).map(|n| TaskBuilder::new(n).build()))).await?;
        let progress = Arc::new(Progress { left: AtomicUsize::new($args.jobs), done: watch::Sender::new(false) });
        let (began, mut workers) = (Instant::now(), JoinSet::new());
        for slot in 0..$args.workers {
            let mut done = progress.done.subscribe();
            let worker = WorkerBuilder::new(format!("worker-{slot}"))
                .backend(backend.clone())
                .data(Arc::clone(&progress))
                .concurrency(1)
                .build(nothing);
            workers.spawn(
                worker.run_until(
                    async move { done.wait_for(|all| *all).await.map(|_| ()).map_err(std::io::Error::other) },
                ),
            );
        }
        while let Some(ended) = workers.join_next().await {
            ended??;
        }
        began.elapsed().as_secs_f64()
    }};
}

async fn sqlite(args: &Args) -> Result<f64, Failure> {
    let options = SqliteConnectOptions::from_str(&args.url)?
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(Duration::from_secs(30));
    let pool: SqlitePool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await?;
    // not `setup`: it switches synchronous off
    SqliteStorage::migrations().run(&pool).await?;
    let config = apalis_sqlite::Config::default().queue("bench").batch_size(1);
    let seconds = work!(SqliteStorage::<usize>::new(&pool).with_config(config), args);
    let left = "SELECT COUNT(*) FROM Jobs WHERE status <> 'Done'";
    all_done(sqlx::query_scalar(left).fetch_one(&pool).await?)?;
    Ok(seconds)
}

async fn postgres(args: &Args) -> Result<f64, Failure> {
    let pool: PgPool = PgPoolOptions::new().max_connections(10).connect(&args.url).await?;
    PostgresStorage::setup(&pool).await?;
    let config = apalis_postgres::Config::default().queue("bench").batch_size(1);
    let seconds = work!(PostgresStorage::<usize>::new(&pool).with_config(config), args);
    let left = "SELECT COUNT(*) FROM apalis.jobs WHERE status <> 'Done'";
    all_done(sqlx::query_scalar(left).fetch_one(&pool).await?)?;
    Ok(seconds)
}

fn all_done(left: i64) -> Result<(), Failure> {
    if left > 0 { Err(format!("{left} jobs are not done").into()) } else { Ok(()) }
}

async fn measure(args: &Args) -> Result<f64, Failure> {
    if args.url.starts_with("sqlite:") { sqlite(args).await } else { postgres(args).await }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse()?;
    let backend = if args.url.starts_with("sqlite:") { "sqlite" } else { "postgres" };
    let before = fdatasync_per_s(&args.sync_dir)?;
    let seconds = measure(&args).await.map_err(|e| -> Box<dyn Error> { e })?;
    let after = fdatasync_per_s(&args.sync_dir)?;
    let durability = "WAL and synchronous=FULL (SQLite), synchronous_commit of the server (PostgreSQL)";
    args.publish(&args.report(VERSION, backend, durability, seconds, [before, after]))
}
