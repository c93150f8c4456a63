//! `bench reconnect`: a server is killed and started again, and every phone of a fleet connects at once and sends what it has
//! queued. Reports how long that takes, what it costs in memory, and whether every batch is there once.

use super::server::{Server, load, peak_rss_kb};
use super::{Args, Bench};
use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs;

/// Stores one batch per phone, kills, starts again, and lets all of them come back.
pub fn drive(bench: &Bench, args: &Args) -> Result<Value> {
    if args.peer {
        bail!("`reconnect` has no peer to compare with");
    }
    load::build(bench)?;
    let mut server = Server::start("")?;
    phase(bench, &server, args.devices, "before")?;
    server.kill_and_restart("")?;
    let mut out = phase(bench, &server, args.devices, "after")?;
    let peak = peak_rss_kb(server.child.id());
    let number = |name: &str| out[name].as_u64().with_context(|| format!("the report has no {name}"));
    let rows = number("devices")? * number("batches_each")? * number("events_each")?;
    let (stored, distinct) = server.count()?;
    let log = fs::read_to_string(server.dir.join("log"))?;
    let sums = server.sql("SELECT disposition, sum(items) FROM dispositions GROUP BY 1 ORDER BY 1")?;
    out["bench"] = json!("reconnect");
    out["rss_mb"] = json!(peak as f64 / 1000.0);
    out["accept_errors"] = json!(log.matches("not accepted").count());
    out["dispositions"] = sums["rows"].clone();
    out["lost"] = json!(rows as i64 - distinct as i64);
    out["doubled"] = json!(stored as i64 - distinct as i64);
    println!("{}", serde_json::to_string_pretty(&out)?);
    Ok(out)
}

fn phase(bench: &Bench, server: &Server, devices: u64, phase: &str) -> Result<Value> {
    let report = server.dir.join("phones.json");
    let mut phones = std::process::Command::new(process::bin_dir()?.join("examples").join(bench.example));
    phones.args(["--address", &server.address, "--key", &server.key, "--devices", &devices.to_string()]);
    phones.args(["--phase", phase]).arg("--json").arg(&report);
    process::run_quiet(&format!("{devices} phones, {phase} the restart"), &mut phones)?;
    serde_json::from_slice(&fs::read(&report)?).context("the report of the phones")
}
