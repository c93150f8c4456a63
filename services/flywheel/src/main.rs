//! `flywheel`: one binary, several roles. Wiring only.

mod cli;
mod config;
mod controller;
mod dashboard;
mod delivery;
mod descriptors;
mod flight;
mod http;
mod ingest;
mod mail;
mod metrics;
mod models;
mod objects;
mod pipeline;
mod serve;
mod server;
mod signer;

use anyhow::Result;
use clap::Parser;
use cli::{AppCommand, Cli, Command, IngestKeyCommand, KeysCommand, SignerCommand, TokenCommand};
use config::Config;
use flywheel_types::clock::SystemClock;
use flywheel_types::{AppId, BusinessClock};
use std::process::ExitCode;

fn main() -> ExitCode {
    match start(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => cli::failed(&e),
    }
}

fn start(cli: Cli) -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| "info,datafusion=warn,deltalake=warn,delta_kernel=warn,buoyant_kernel=warn".into()),
        )
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    // two TLS libraries are in the tree; say which one is used before anything asks
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_stack_size(8 << 20).build()?;
    runtime.block_on(run(cli.command))
}

async fn run(command: Command) -> Result<()> {
    match command {
        Command::Serve(c) => serve::serve(load(&c)?).await,
        Command::Worker(c) => serve::worker(load(&c)?).await,
        Command::Signer(SignerCommand::Run(a)) => signer::run(signer::load(&a.config)?).await,
        Command::Signer(SignerCommand::Approve { release, reason, signer: a }) => {
            signer::approve(&signer::load(&a.config)?, &release, &reason)
        }
        Command::Migrate(c) => cli::setup::migrate(&load(&c)?).await,
        Command::App(AppCommand::Create { app, config }) => cli::setup::app_create(&load(&config)?, &app).await,
        Command::Keys(KeysCommand::Init { app, offline_dir, config }) => {
            let config = load(&config)?;
            cli::keys::init(&config, &AppId::new(app)?, &offline_dir, start_time(&config))
        }
        Command::Token(TokenCommand::Create { app, role, name, config }) => {
            cli::say(&cli::setup::token_create(&load(&config)?, app.as_deref(), role, &name).await?);
            Ok(())
        }
        Command::IngestKey(IngestKeyCommand::Create { app, name, events_per_minute, config }) => {
            cli::say(&cli::setup::ingest_key_create(&load(&config)?, &app, &name, events_per_minute).await?);
            Ok(())
        }
        Command::Api(a) => cli::api::call(a).await,
        Command::Sql(a) => cli::sql::run(a).await,
        Command::Import(a) => cli::import::run(a).await,
        Command::Model(m) => cli::model::run(m).await,
    }
}

fn load(c: &cli::ConfigArg) -> Result<Config> {
    Config::load(c.config.as_deref())
}

/// Business time at set-up: that of the configured clock.
fn start_time(config: &Config) -> chrono::DateTime<chrono::Utc> {
    match config.clock {
        config::ClockConfig::Virtual { start } => start,
        config::ClockConfig::System { .. } => SystemClock.now(),
    }
}
