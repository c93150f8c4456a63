//! The command line: server roles, set-up commands on the database, operator commands over HTTP, and work on model files.
//!
//! Exit codes: 0, 1 for a failure, 2 for a command line that cannot be, 130 for a run that Ctrl-C stopped.

pub mod api;
pub mod import;
pub mod keys;
pub mod model;
pub mod setup;
pub mod sql;

use clap::{Args, Parser, Subcommand};
use flywheel_types::Role;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Writes one line of a command's result to standard output.
pub fn say(text: &str) {
    // a reader that has seen enough (`| head`) is no failure
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// The command line is in itself wrong, in a way that the parser cannot see.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for Usage {}

/// A person stopped the run.
#[derive(Debug)]
pub struct Stopped(pub String);

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for Stopped {}

/// Exit code of a run that Ctrl-C stopped: 128 and the number of the signal.
pub const STOPPED: u8 = 130;

/// Shows why a command failed; answers its exit code.
pub fn failed(e: &anyhow::Error) -> ExitCode {
    let mut err = std::io::stderr().lock();
    let _ = writeln!(err, "Error: {e:#}");
    if let Some(known) = e.chain().find_map(|cause| cause.downcast_ref::<flywheel_types::Error>()) {
        let inside = known.inside.as_deref().map(|inside| format!("\n  inside: {inside}")).unwrap_or_default();
        let _ = writeln!(err, "  what to do: {}{inside}", known.hint);
    }
    if e.is::<Usage>() {
        return ExitCode::from(2);
    }
    if e.is::<Stopped>() { ExitCode::from(STOPPED) } else { ExitCode::FAILURE }
}

/// Control plane for fleets of phones that run small language models.
#[derive(Debug, Parser)]
#[command(name = "flywheel", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Where the configuration is.
#[derive(Debug, Clone, Args)]
pub struct ConfigArg {
    /// TOML configuration; defaults apply when left out.
    #[arg(long, env = "FLYWHEEL_CONFIG", global = true)]
    pub config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one of it in a run")]
pub enum Command {
    /// Run the HTTP server, the controllers and (by default) the worker.
    Serve(ConfigArg),
    /// Run jobs only; for more workers beside `serve` on PostgreSQL.
    Worker(ConfigArg),
    /// The release signer: own process, own user, no listening port.
    #[command(subcommand)]
    Signer(SignerCommand),
    /// Bring the control database to this version.
    Migrate(ConfigArg),
    /// Apps (tenants).
    #[command(subcommand)]
    App(AppCommand),
    /// Signing keys.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// API tokens.
    #[command(subcommand)]
    Token(TokenCommand),
    /// Ingest keys that ship inside an app.
    #[command(subcommand)]
    IngestKey(IngestKeyCommand),
    /// Call the admin API of a running server.
    Api(ApiArgs),
    /// Ask the telemetry tables of an app with one SELECT.
    Sql(SqlArgs),
    /// Bring history from Parquet or JSON lines into the telemetry tables.
    Import(ImportArgs),
    /// Work on model files without a server.
    #[command(subcommand)]
    Model(model::ModelCommand),
}

#[derive(Debug, Subcommand)]
pub enum AppCommand {
    /// Create an app with the default settings (automation `recommend`, approval `one`).
    Create {
        app: String,
        #[command(flatten)]
        config: ConfigArg,
    },
}

#[derive(Debug, Subcommand)]
pub enum KeysCommand {
    /// Make all keys of an app and publish its first signed metadata. Move the offline folder away afterwards.
    Init {
        #[arg(long)]
        app: String,
        /// Folder for the root, targets and release keys.
        #[arg(long)]
        offline_dir: PathBuf,
        #[command(flatten)]
        config: ConfigArg,
    },
}

#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Create a token and print it once.
    Create {
        /// App; a token for all apps when left out.
        #[arg(long)]
        app: Option<String>,
        #[arg(long)]
        role: Role,
        /// Shown in the audit log.
        #[arg(long)]
        name: String,
        #[command(flatten)]
        config: ConfigArg,
    },
}

#[derive(Debug, Subcommand)]
pub enum IngestKeyCommand {
    /// Create an ingest key and print it once.
    Create {
        #[arg(long)]
        app: String,
        #[arg(long, default_value = "default")]
        name: String,
        /// Events the key may send in a minute; no quota when left out.
        #[arg(long)]
        events_per_minute: Option<u32>,
        #[command(flatten)]
        config: ConfigArg,
    },
}

#[derive(Debug, Subcommand)]
pub enum SignerCommand {
    /// Poll the server for releases to sign.
    Run(SignerArgs),
    /// A person approves a release that the signing policy does not allow by itself.
    Approve {
        /// Manifest digest.
        release: String,
        /// Why; goes into the audit log.
        #[arg(long)]
        reason: String,
        #[command(flatten)]
        signer: SignerArgs,
    },
}

#[derive(Debug, Clone, Args)]
pub struct SignerArgs {
    /// TOML configuration of the signer.
    #[arg(long, env = "FLYWHEEL_SIGNER_CONFIG")]
    pub config: PathBuf,
}

#[derive(Debug, Args)]
pub struct ApiArgs {
    /// `GET`, `POST` or `PUT`.
    pub method: String,
    /// Path, for example `/v1/rollouts`.
    pub path: String,
    /// JSON body; `-` reads it from standard input.
    pub body: Option<String>,
    #[arg(long, env = "FLYWHEEL_SERVER", default_value = "http://127.0.0.1:8080")]
    pub server: String,
    #[arg(long, env = "FLYWHEEL_TOKEN", hide_env_values = true)]
    pub token: String,
}

/// Form of the answer of `flywheel sql`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SqlFormat {
    Table,
    Json,
    Csv,
    /// Arrow IPC stream.
    Arrow,
    Parquet,
}

#[derive(Debug, Args)]
pub struct SqlArgs {
    /// The SELECT; `-` reads it from standard input.
    pub query: String,
    #[arg(long, value_enum, default_value = "table")]
    pub format: SqlFormat,
    /// Write the answer to a file instead of standard output.
    #[arg(long, short)]
    pub output: Option<PathBuf>,
    #[arg(long, env = "FLYWHEEL_SERVER", default_value = "http://127.0.0.1:8080")]
    pub server: String,
    #[arg(long, env = "FLYWHEEL_TOKEN", hide_env_values = true)]
    pub token: String,
}

#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Folder, bucket prefix or one object as the server sees it: `file:///srv/history/`, `s3://bucket/prefix/`, or a path.
    pub source: String,
    /// App; needed with a token for all apps.
    #[arg(long)]
    pub app: Option<String>,
    /// Table of Parquet files: `interactions`, `feedback` or `device_events`. JSON lines say what they are.
    #[arg(long)]
    pub table: Option<String>,
    /// Form of all files whatever their names: `parquet`, `jsonl`, `jsonl_gzip` or `jsonl_zstd`.
    #[arg(long)]
    pub format: Option<String>,
    /// Wait for the end and show how far it is; fails when a file could not be read.
    #[arg(long)]
    pub follow: bool,
    #[arg(long, env = "FLYWHEEL_SERVER", default_value = "http://127.0.0.1:8080")]
    pub server: String,
    #[arg(long, env = "FLYWHEEL_TOKEN", hide_env_values = true)]
    pub token: String,
}
