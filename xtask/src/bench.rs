//! `cargo xtask bench NAME [--json FILE]`: runs a benchmark program of the crate it measures.

use crate::process;
use anyhow::{Result, bail};
use std::path::Path;

pub fn run(name: &str, json: Option<&Path>) -> Result<()> {
    let (package, example) = match name {
        "jobs" => ("flywheel-jobs", "bench_jobs"),
        other => bail!("no benchmark named `{other}`; there is: jobs"),
    };
    let mut command = process::cargo();
    command.args(["run", "--quiet", "--package", package, "--example", example, "--"]);
    if let Some(path) = json {
        command.arg("--json").arg(std::path::absolute(path)?);
    }
    process::run(&format!("bench {name}"), &mut command)
}
