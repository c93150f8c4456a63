//! Phones that come back at once, for `cargo xtask bench reconnect`: `--phase before` stores the first batch of each,
//! `--phase after` lets all of them connect at once and send their queues.
#![allow(clippy::print_stdout, reason = "a program for the command line")]

use anyhow::{Context, Result, bail};
use flywheel_tests::reconnect::Fleet;
use std::path::PathBuf;

fn main() -> Result<()> {
    let mut fleet = Fleet { address: String::new(), ingest_key: String::new(), devices: 10_000, batches: 3, events: 5 };
    let (mut phase, mut json) = (String::new(), None::<PathBuf>);
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--address" => fleet.address = value,
            "--key" => fleet.ingest_key = value,
            "--devices" => fleet.devices = value.parse()?,
            "--batches" => fleet.batches = value.parse()?,
            "--events" => fleet.events = value.parse()?,
            "--phase" => phase = value,
            "--json" => json = Some(value.into()),
            other => bail!("unknown option {other}"),
        }
    }
    flywheel_tests::raise_file_limit(fleet.devices + 64)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let report = match phase.as_str() {
        "before" => runtime.block_on(fleet.before()).map(|()| serde_json::Value::Null)?,
        "after" => runtime.block_on(fleet.reconnect(true))?,
        other => bail!("unknown phase `{other}`: before or after"),
    };
    if let Some(path) = json {
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    println!("{report}");
    Ok(())
}
