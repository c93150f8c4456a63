//! Developer commands: `cargo xtask demo | test | check | bench | browser | docs | fuzz | model`. Everything a newcomer needs
//! is here, so that the README can promise two commands.
#![expect(clippy::print_stdout, reason = "a command-line program talks to its user")]

mod bench;
mod browser;
mod check;
mod demo;
mod docs;
mod fuzz;
mod large;
mod measured_models;
mod memory;
mod model;
mod postgres;
mod process;
mod python;
mod smtp;
mod test;
mod tidy;

mod vocab;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Flywheel developer commands")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The main job: the whole loop on a real model with a simulated fleet (about ten minutes on two cores).
    Demo(demo::Args),
    /// Everything CI runs: unit and behaviour tests on SQLite and PostgreSQL, whole-flow tests, then the demo.
    Test {
        /// Leave out the demo at the end.
        #[arg(long)]
        no_demo: bool,
    },
    /// fmt, clippy, tidy and cargo-deny.
    Check,
    /// Run one benchmark by name; results go to docs/benchmarks.md by hand.
    Bench(bench::Args),
    /// Look at the dashboard of a running server with a real browser.
    Browser(browser::Args),
    /// Fuzz the decoders of bytes from outside (docs/fuzzing.md).
    Fuzz(fuzz::Args),
    /// Make the pages that are made from other files.
    Docs,
    /// Fetch and verify the demo's models into the cache folder; `tiny` and `large` are for measurements.
    Model(measured_models::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Test { no_demo } => test::run(no_demo),
        Command::Check => check::run(),
        Command::Bench(args) => bench::run(&args),
        Command::Browser(args) => browser::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Docs => docs::run(&process::root()),
        Command::Model(args) => {
            if args.run()? {
                return Ok(());
            }
            let models = model::ensure()?;
            println!("models are in {}", models.display());
            if let Some(vocabularies) = vocab::ensure() {
                println!("vocabularies are in {}", vocabularies.display());
            }
            Ok(())
        }
    }
}
