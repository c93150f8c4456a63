//! `bench restart`: a server that is killed with gigabytes in its log. Reports how long until telemetry is taken again and
//! until queries are answered, what it costs in memory, and whether every acknowledged row is there once.

use super::server::{Server, gauge, load, request, rss_kb};
use super::{Args, Bench};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Bytes that the log holds before the kill.
const LOG_BYTES: f64 = 5.0 * (1u64 << 30) as f64;
/// Commits are put off until the restart: no time, no size, and no step of the pipeline that asks for them.
const NO_COMMITS: &str = "[worker]\nembedded = false\n\
    [ingest]\nflush_s = 86400\nflush_bytes = 1000000000000\nmax_backlog_bytes = 1000000000000\n";
/// Requests of one piece of load are numbered apart from those of the next.
const PIECE: u64 = 1 << 24;

/// Fills the log, kills, starts again, and asks until everything is answered.
pub fn drive(bench: &Bench, args: &Args) -> Result<Value> {
    if args.peer {
        bail!("`restart` has no peer to compare with");
    }
    load::build(bench)?;
    let mut server = Server::start(NO_COMMITS)?;
    let (mut acked, mut pieces) = (0, 0);
    while gauge(&server.address, "flywheel_ingest_backlog_bytes").unwrap_or(0.0) < LOG_BYTES {
        let report = load::run(bench, &server, "protobuf", 10, pieces * PIECE)?;
        acked += report["events"].as_u64().unwrap_or(0);
        pieces += 1;
    }
    let log_bytes = gauge(&server.address, "flywheel_ingest_backlog_bytes").unwrap_or(0.0);
    let killed = Instant::now();
    server.kill_and_restart("")?;
    let mut out = json!({ "bench": "restart", "backlog_mb": log_bytes / 1e6, "acknowledged": acked });
    let (mut intake_s, mut refused, mut rss) = (None, 0, 0);
    let query_s = loop {
        rss = rss.max(rss_kb(server.child.id()));
        let ready = request(&server.address, "GET", "/readyz", None, "")?;
        if ready["intake"] == true && intake_s.is_none() {
            intake_s = Some(killed.elapsed().as_secs_f64());
        }
        if ready["query"] == true {
            break killed.elapsed().as_secs_f64();
        }
        let answer = server.sql("SELECT count(*) FROM interactions")?;
        if answer["code"] != "replaying" {
            bail!("a query during the replay was answered with {answer}");
        }
        refused += 1;
        std::thread::sleep(Duration::from_millis(100));
    };
    server.wait_until_committed()?;
    let replay_s = killed.elapsed().as_secs_f64();
    rss = rss.max(rss_kb(server.child.id()));
    let (stored, distinct) = server.count()?;
    out["intake_ready_s"] = json!(intake_s);
    out["queries_ready_s"] = json!(query_s);
    out["queries_refused_meanwhile"] = json!(refused);
    out["replay_mb_per_s"] = json!(log_bytes / 1e6 / replay_s);
    out["rss_mb"] = json!(rss as f64 / 1000.0);
    out["lost"] = json!(acked as i64 - distinct as i64);
    out["doubled"] = json!(stored as i64 - distinct as i64);
    println!("{}", serde_json::to_string_pretty(&out)?);
    Ok(out)
}
