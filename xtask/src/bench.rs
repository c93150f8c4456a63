//! `cargo xtask bench NAME [--json FILE]`: runs a benchmark program of the crate it measures.

mod cancel;
mod decode;
mod import;
mod ingest;
mod jobs;
mod large;
mod lora;
mod peer;
mod quant;
mod query;
mod reconnect;
mod restart;
mod server;

use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A benchmark: an example program that takes `--json FILE`.
struct Bench {
    name: &'static str,
    package: &'static str,
    example: &'static str,
    /// Prepares what the program needs and runs it as often as it takes; `None`: once, without further options.
    drive: Option<fn(&Bench, &Args) -> Result<Value>>,
}

/// All of them. A new one is a line here and an example in the crate that it measures.
const BENCHES: &[Bench] = &[
    Bench { name: "ingest", package: "flywheel-tests", example: "otlp_load", drive: Some(ingest::drive) },
    Bench { name: "restart", package: "flywheel-tests", example: "otlp_load", drive: Some(restart::drive) },
    Bench { name: "cancel", package: "flywheel-tests", example: "otlp_load", drive: Some(cancel::drive) },
    Bench { name: "import", package: "flywheel-tests", example: "otlp_load", drive: Some(import::drive) },
    Bench { name: "reconnect", package: "flywheel-tests", example: "reconnect", drive: Some(reconnect::drive) },
    Bench { name: "query", package: "flywheel-lake", example: "bulk_load", drive: Some(query::drive) },
    Bench { name: "decode", package: "flywheel-inference", example: "bench_decode", drive: Some(decode::drive) },
    Bench { name: "lora", package: "flywheel-inference", example: "lora_bench", drive: Some(lora::drive) },
    Bench { name: "quant", package: "flywheel-inference", example: "quant_quality", drive: Some(quant::drive) },
    Bench { name: "jobs", package: "flywheel-jobs", example: "bench_jobs", drive: Some(jobs::drive) },
    Bench { name: "large", package: "flywheel-inference", example: "large", drive: Some(large::drive) },
];

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Which one.
    name: String,
    /// Write the figures as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Run the peer package (`tests/peers`) beside it, where there is one.
    #[arg(long)]
    peer: bool,
    /// Phones of `reconnect`.
    #[arg(long, default_value_t = 10_000)]
    devices: u64,
    /// Body format of `ingest`, where one is enough: `protobuf` or `json`.
    #[arg(long)]
    format: Option<String>,
    /// Rows of `import` and `query`.
    #[arg(long)]
    rows: Option<u64>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let Some(bench) = BENCHES.iter().find(|b| b.name == args.name) else {
        let names: Vec<&str> = BENCHES.iter().map(|b| b.name).collect();
        bail!("no benchmark named `{}`; there is: {}", args.name, names.join(", "));
    };
    let json = args.json.as_deref().map(std::path::absolute).transpose()?;
    let Some(drive) = bench.drive else {
        if args.peer {
            bail!("`{}` has no peer to compare with", bench.name);
        }
        let mut command = bench.program();
        if let Some(path) = json {
            command.arg("--json").arg(path);
        }
        return process::run(&format!("bench {}", bench.name), &mut command);
    };
    let report = drive(bench, args)?;
    match json {
        Some(path) => write(&path, &report),
        None => Ok(()),
    }
}

impl Bench {
    /// The program; options may follow.
    fn program(&self) -> Command {
        let mut command = process::cargo();
        command.args(["run", "--quiet", "--package", self.package, "--example", self.example, "--"]);
        command
    }
}

fn write(path: &Path, report: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(report)?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}
