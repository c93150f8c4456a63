//! `bench cancel`: the intake under load alone, then beside queries that all hit a cap. Reports what the queries cost the
//! acknowledgements, and how long after its cap the last work of a query ran.

use super::server::{Server, gauge, load};
use super::{Args, Bench};
use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Each of the two runs, seconds; `FLYWHEEL_BENCH_SECONDS` changes it.
const SECONDS: u64 = 30;
/// Time-out of `POST /v1/sql`.
const TIME_CAP: Duration = Duration::from_secs(10);
/// Requests of the second run are numbered apart from those of the first.
const SECOND_RUN: u64 = 1 << 24;

/// All of them would take hours or gigabytes; the first two reach the memory cap, the others the time-out.
const HARD: [&str; 4] = [
    "SELECT count(DISTINCT a.interaction_id || b.interaction_id) FROM interactions a, interactions b",
    "SELECT array_agg(a.interaction_id || b.interaction_id) FROM interactions a, interactions b",
    "SELECT count(*) FROM interactions a JOIN interactions b ON a.ttft_ms + b.ttft_ms < 0 JOIN interactions c ON true",
    "SELECT sum(a.ttft_ms * b.ttft_ms) FROM interactions a, interactions b, interactions c",
];

/// What happened to the hard queries.
#[derive(Default)]
struct Seen {
    ended: Vec<Value>,
    /// From the answer until nothing of the query ran any more, longest.
    left: Duration,
    /// Time of an answer beyond the time-out, longest.
    late: Duration,
}

/// Runs both.
pub fn drive(bench: &Bench, args: &Args) -> Result<Value> {
    if args.peer {
        bail!("`cancel` has no peer to compare with");
    }
    load::build(bench)?;
    let seconds = std::env::var("FLYWHEEL_BENCH_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(SECONDS);
    let load_before = fs::read_to_string("/proc/loadavg")?;
    // no step of the pipeline asks for a core or a query
    let server = Server::start("[worker]\nembedded = false\n")?;
    let alone = load::run(bench, &server, "protobuf", seconds, 0)?;
    let over = AtomicBool::new(false);
    let (beside, seen) = std::thread::scope(|s| {
        let hard = s.spawn(|| ask(&server, &over));
        let beside = load::run(bench, &server, "protobuf", seconds, SECOND_RUN);
        over.store(true, Ordering::Relaxed);
        let seen = hard.join().map_err(|_| anyhow!("the thread of the hard queries panicked"))?;
        anyhow::Ok((beside?, seen?))
    })?;
    let out = json!({
        "bench": "cancel", "load_average_before": load_before.trim(),
        "ack_p99_ms_alone": alone["ack_p99_ms"], "ack_p99_ms_beside": beside["ack_p99_ms"],
        "events_per_s_alone": alone["events_per_s"], "events_per_s_beside": beside["events_per_s"],
        "queries": seen.ended, "cap_to_cancelled_ms_max": seen.left.as_secs_f64() * 1000.0,
        "answer_after_time_out_ms_max": seen.late.as_secs_f64() * 1000.0,
    });
    println!("{}", serde_json::to_string_pretty(&out)?);
    Ok(out)
}

/// One hard query after the other until the load is over.
fn ask(server: &Server, over: &AtomicBool) -> Result<Seen> {
    let mut seen = Seen::default();
    for query in HARD.iter().cycle() {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let begin = Instant::now();
        let answer = server.sql(query)?;
        let took = begin.elapsed();
        match answer["code"].as_str() {
            Some("query_timeout") => seen.late = seen.late.max(took.saturating_sub(TIME_CAP)),
            Some("query_too_large") => {}
            _ => bail!("a query that hits a cap was answered with {answer}"),
        }
        let ended = Instant::now();
        while gauge(&server.address, "flywheel_query_tasks") != Some(0.0) {
            if ended.elapsed() > Duration::from_secs(60) {
                bail!("a query still runs a minute after its cap: {query}");
            }
        }
        seen.left = seen.left.max(ended.elapsed());
        seen.ended.push(json!({ "code": answer["code"], "after_s": took.as_secs_f64() }));
    }
    Ok(seen)
}
