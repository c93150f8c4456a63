//! `bench query`: "rejection rate by template, model bundle and device class, last 24 h" over `--rows` interactions, asked of
//! the real server over HTTP, warm and with an empty page cache. Once with all rows in the last 24 hours, once with the rows
//! spread over 30 days.

use super::server::{Server, rss_kb};
use super::{Args, Bench};
use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Rows that the target is about.
const ROWS: u64 = 50_000_000;
/// Queries of a server that has answered one before.
const WARM: usize = 40;
/// Restarts with an empty page cache, one query each.
const COLD: usize = 7;
/// Steps of the pipeline would read the same rows at the same time.
const NO_JOBS: &str = "[worker]\nembedded = false\n";
/// The rate is a count of outcomes over a count of interactions, group by group: never a join by id.
const RATE: &str = "\
WITH seen AS (
  SELECT template_id, bundle, device_class, count(*) AS interactions FROM interactions
  WHERE received_date >= CAST(now() - INTERVAL '24 hours' AS DATE) AND received_at > now() - INTERVAL '24 hours'
  GROUP BY template_id, bundle, device_class
), rejected AS (
  SELECT template_id, bundle, device_class, count(*) AS rejected FROM outcomes
  WHERE received_date >= CAST(now() - INTERVAL '24 hours' AS DATE) AND interaction_at > now() - INTERVAL '24 hours'
    AND label = 'rejected'
  GROUP BY template_id, bundle, device_class
)
SELECT seen.template_id, seen.bundle, seen.device_class, interactions, coalesce(rejected, 0) AS rejected,
  coalesce(rejected, 0) / CAST(interactions AS DOUBLE) AS rate
FROM seen LEFT JOIN rejected ON (seen.template_id IS NOT DISTINCT FROM rejected.template_id)
  AND (seen.bundle IS NOT DISTINCT FROM rejected.bundle)
  AND (seen.device_class IS NOT DISTINCT FROM rejected.device_class)
ORDER BY interactions DESC, template_id, bundle, device_class";

/// Both layouts, each on a server of its own.
pub fn drive(bench: &Bench, args: &Args) -> Result<Value> {
    if args.peer {
        bail!("`query` has no peer to compare with");
    }
    let mut build = process::cargo();
    // the whole workspace, so that no dependency is compiled again with other features
    build.args(["build", "--quiet", "--workspace", "--bins", "--example", bench.example]);
    process::run("building the loader", &mut build)?;
    let rows = args.rows.unwrap_or(ROWS);
    let mut out = json!({ "bench": "query", "rows": rows });
    for (name, days) in [("last_24_h", 1), ("over_30_days", 30)] {
        let found = layout(bench, rows, days).with_context(|| format!("rows {name}"))?;
        println!("{name}: {}", serde_json::to_string_pretty(&found)?);
        out[name] = found;
    }
    Ok(out)
}

fn layout(bench: &Bench, rows: u64, days: u32) -> Result<Value> {
    let mut server = Server::start(NO_JOBS)?;
    server.stop()?;
    let lake = server.dir.join("data/lake");
    let report = server.dir.join("loaded.json");
    let mut load = Command::new(process::bin_dir()?.join("examples").join(bench.example));
    load.arg("--dir").arg(&lake).args(["--rows", &rows.to_string(), "--days", &days.to_string()]);
    load.arg("--json").arg(&report);
    process::run("loading the rows", &mut load)?;
    let mut out: Value = serde_json::from_slice(&fs::read(&report)?)?;
    let (files, bytes) = parquet(&lake.join("tables"))?;
    (out["files"], out["bytes_on_disk"]) = (json!(files), json!(bytes));
    let mut cold = Vec::new();
    for run in 0..COLD {
        if run > 0 {
            server.stop()?;
        }
        if !drop_page_cache()? {
            println!("left out: an empty page cache needs the rights of root");
            break;
        }
        server.restart()?;
        cold.push(ask(&server)?.0);
    }
    if cold.is_empty() {
        server.restart()?;
    }
    ask(&server)?;
    let mut warm = Vec::new();
    for _ in 0..WARM {
        let (ms, answer) = ask(&server)?;
        warm.push(ms);
        out["answer"] = answer;
    }
    out["warm"] = summary(warm);
    out["cold"] = summary(cold);
    out["rss_mb"] = json!(rss_kb(server.child.id()) as f64 / 1000.0);
    out["rss_mb_most"] = json!(peak_kb(server.child.id()) as f64 / 1000.0);
    Ok(out)
}

/// Milliseconds of one query, and what the groups add up to.
fn ask(server: &Server) -> Result<(f64, Value)> {
    let began = Instant::now();
    let answer = server.sql(RATE)?;
    let ms = began.elapsed().as_secs_f64() * 1000.0;
    let groups = answer["rows"].as_array().with_context(|| answer.to_string())?;
    let sum = |column: usize| groups.iter().filter_map(|g| g[column].as_u64()).sum::<u64>();
    Ok((ms, json!({ "groups": groups.len(), "interactions": sum(3), "rejected": sum(4) })))
}

fn summary(mut ms: Vec<f64>) -> Value {
    ms.sort_by(f64::total_cmp);
    let Some(most) = ms.last().copied() else { return Value::Null };
    // the nearest rank: of seven the 95th percentile is the greatest
    let at = |q: f64| ms.get(((ms.len() as f64 * q).ceil() as usize).saturating_sub(1)).copied().unwrap_or(most);
    json!({ "queries": ms.len(), "p50_ms": at(0.5), "p95_ms": at(0.95), "most_ms": most })
}

/// Whether it could be emptied.
fn drop_page_cache() -> Result<bool> {
    process::run("sync", &mut Command::new("sync"))?;
    Ok(fs::write("/proc/sys/vm/drop_caches", "3").is_ok())
}

/// Most resident memory of a process so far.
fn peak_kb(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

/// Parquet files below a folder, and their bytes.
fn parquet(root: &Path) -> Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for entry in fs::read_dir(root)? {
        let path = entry?.path();
        if path.is_dir() {
            let below = parquet(&path)?;
            (files, bytes) = (files + below.0, bytes + below.1);
        } else if path.extension().is_some_and(|e| e == "parquet") && !path.to_string_lossy().contains("_delta_log") {
            (files, bytes) = (files + 1, bytes + fs::metadata(&path)?.len());
        }
    }
    Ok((files, bytes))
}
