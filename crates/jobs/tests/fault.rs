//! Four worker processes, 500 jobs, one of them killed with SIGKILL about every second: each job's side effect happens
//! exactly once and none is lost. Real processes and real time: this is the one test that waits.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests: a failure must fail the test, a skip must be seen"
)]

use async_trait::async_trait;
use flywheel_jobs::{Backoff, Handlers, JobContext, JobError, JobHandler, NewJob, Outcome, Worker, WorkerOptions};
use flywheel_store::Store;
use flywheel_store::jobs::JobFilter;
use flywheel_store::scratch::{POSTGRES_URL, Scratch};
use flywheel_types::clock::SystemClock;
use flywheel_types::{AppId, BusinessClock as _, JobState};
use serde_json::json;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CHILD: &str = "FLYWHEEL_FAULT_WORKER_URL";
const JOBS: usize = 500;
const WORKERS: usize = 4;

fn app() -> AppId {
    "shop".parse().unwrap()
}

/// Works a little, then appends one audit entry as its side effect: for even jobs together with the completion, for odd
/// ones before it, so that a kill can fall between the two and only the fence's caller must notice.
struct Effect;

#[async_trait]
impl JobHandler for Effect {
    async fn run(&self, ctx: &JobContext) -> Result<Outcome, JobError> {
        tokio::time::sleep(Duration::from_millis(40)).await;
        let n = ctx.payload::<serde_json::Value>()?["n"].as_u64().unwrap_or_default();
        let mut tx = ctx.begin(SystemClock.now()).await?;
        let detail = json!({"attempt": ctx.job().attempt});
        if n % 2 == 0 {
            ctx.succeed(&mut tx, None).await?;
        } else {
            ctx.fence(&mut tx).await?;
            if ctx.job().checkpoint_uri.is_some() {
                // The attempt before was killed between its effect and its completion.
                return Ok(Outcome::Done(None));
            }
            tx.job_checkpoint_set(ctx.token(), "effect-made").await?;
        }
        tx.audit_append(ctx.app(), "system", "effect", &format!("job/{n}"), &detail).await?;
        tx.commit().await?;
        if n % 2 == 0 {
            return Ok(Outcome::Committed);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        Ok(Outcome::Done(None))
    }
}

/// The body of a child process; in the parent's run it returns at once.
#[tokio::test]
async fn child_worker() {
    let Ok(url) = std::env::var(CHILD) else {
        return;
    };
    let store = Store::connect(&url).await.unwrap();
    let options = WorkerOptions {
        lease: Duration::from_millis(2000),
        heartbeat: Duration::from_millis(500),
        poll: Duration::from_millis(100),
        reap_every: Duration::from_millis(500),
        backoff: Backoff {
            base: Duration::from_millis(200),
            cap: Duration::from_secs(1),
            floor: Duration::from_millis(10),
        },
        ..WorkerOptions::default()
    };
    let worker = Worker::new(store, Handlers::new().with("effect", Effect), options);
    worker.run(std::future::pending()).await;
}

fn spawn(url: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["child_worker", "--exact", "--nocapture"])
        .env(CHILD, url)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

async fn succeeded(store: &Store) -> i64 {
    let counts = store.job_counts(Some(&app())).await.unwrap();
    counts.iter().filter(|c| c.state == JobState::Succeeded).map(|c| c.count).sum()
}

async fn survive(scratch: Scratch, name: &str) {
    let store = &scratch.store;
    let mut tx = store.begin(SystemClock.now()).await.unwrap();
    for n in 0..JOBS {
        let job = NewJob::new("effect", json!({"v": 1, "n": n})).max_attempts(50);
        tx.job_enqueue(&app(), &job).await.unwrap();
    }
    tx.commit().await.unwrap();

    let began = Instant::now();
    let mut children: Vec<Child> = (0..WORKERS).map(|_| spawn(&scratch.url)).collect();
    let mut kills = 0;
    while succeeded(store).await < JOBS as i64 {
        assert!(began.elapsed() < Duration::from_secs(240), "{name}: only {} done", succeeded(store).await);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let victim = &mut children[kills % WORKERS];
        victim.kill().unwrap(); // SIGKILL
        victim.wait().unwrap();
        *victim = spawn(&scratch.url);
        kills += 1;
    }
    for mut child in children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let rows = store.job_list(&app(), &JobFilter::default(), 2 * JOBS as u32).await.unwrap();
    assert_eq!(rows.len(), JOBS);
    let retried = rows.iter().filter(|r| r.attempt > 1).count();
    for n in 0..JOBS {
        let effects = store.audit_list_subject(&app(), &format!("job/{n}")).await.unwrap();
        assert_eq!(effects.len(), 1, "{name}: job {n} made its effect {} times", effects.len());
    }
    let head = store.audit_head(&app()).await.unwrap();
    assert_eq!(head.seq, JOBS as i64);
    println!(
        "{name}: {JOBS} jobs, {kills} kills, {retried} jobs needed another attempt, {:.1} s",
        began.elapsed().as_secs_f64()
    );
    assert!(kills >= 3 && retried >= 1, "{name}: the test must have hurt somebody");
    scratch.remove().await.unwrap();
}

#[tokio::test]
async fn kills_lose_nothing_and_repeat_nothing_on_sqlite() {
    survive(Scratch::sqlite(None).await.unwrap(), "sqlite").await;
}

#[tokio::test]
async fn kills_lose_nothing_and_repeat_nothing_on_postgres() {
    match Scratch::postgres(None).await.unwrap() {
        Some(scratch) => survive(scratch, "postgres").await,
        None => println!("skipped: {POSTGRES_URL} is not set"),
    }
}
