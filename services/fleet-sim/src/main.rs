//! `fleet-sim`: runs a fleet of simulated phones against a server, and the scenario of the demo.
#![expect(clippy::print_stdout, reason = "a program whose result is what it prints")]

mod scenario;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Simulated phones for Flywheel.
#[derive(Debug, Parser)]
#[command(name = "fleet-sim", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a whole story with a fleet and the people around it, and check that it ends well.
    #[command(subcommand)]
    Scenario(Story),
    /// Measure how well a model answers the knowledge base, before and after a short LoRA training.
    #[command(hide = true)]
    Probe(scenario::probe::Args),
}

#[derive(Debug, Subcommand)]
enum Story {
    /// The support app of the demo.
    Support(Box<scenario::Args>),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match run(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            println!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<bool> {
    match cli.command {
        Command::Probe(args) => scenario::probe::run(&args).map(|()| true),
        Command::Scenario(Story::Support(args)) => scenario::run(&args),
    }
}
