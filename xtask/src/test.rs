//! `cargo xtask test`: all tests on SQLite and PostgreSQL, then the demo.

use crate::{demo, model, postgres, process, python, vocab};
use anyhow::Result;

pub fn run(no_demo: bool) -> Result<()> {
    let models = model::ensure()?;
    // the whole-flow tests run the real binary
    process::run("building the binaries", process::cargo().args(["build", "--workspace", "--bins"]))?;
    let cluster = postgres::Cluster::start()?;
    let mut tests = process::cargo();
    tests.args(["nextest", "run", "--workspace", "--no-fail-fast"]).env("FLYWHEEL_MODELS", &models);
    match &cluster {
        Some(c) => {
            tests.env("FLYWHEEL_TEST_POSTGRES_URL", c.url());
        }
        None => skipped(),
    }
    if let Some(vocabularies) = vocab::ensure() {
        tests.env(vocab::VARIABLE, vocabularies);
    }
    if let Some(python) = python::ensure() {
        tests.env(python::VARIABLE, python);
    }
    process::run("the tests", &mut tests)?;
    drop(cluster);
    if no_demo { Ok(()) } else { demo::run(&demo::Args::shipped()) }
}

#[expect(clippy::print_stderr, reason = "a skipped suite must be seen")]
fn skipped() {
    eprintln!("skipped: the PostgreSQL suites (initdb is not on the PATH)");
}
