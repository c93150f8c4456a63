//! History from files into the telemetry tables. The work is the lake's; what it did is the job's result, and an object that
//! could not be read is listed there instead of failing the job: the others are in, and starting it again tries the rest.

use super::blocking;
use crate::server::Server;
use chrono::{DateTime, Utc};
use flywheel_jobs::{JobContext, NewJob};
use flywheel_lake::Table;
use flywheel_lake::import::{Form, PIECE_ROWS, Report, Request, Source};
use flywheel_types::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

pub const KIND: &str = "import";
/// Imports at the same time, over all apps: each takes a slot of the worker for a long time.
const AT_ONCE: u32 = 1;
/// Attempts: a server that is stopped in the middle goes on with the piece it came to.
const ATTEMPTS: u32 = 5;
/// Everything else goes first.
const PRIORITY: i64 = -10;

/// What to import.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Payload {
    #[serde(default = "one")]
    pub v: u8,
    /// URL of a folder, a bucket's prefix or one object.
    pub source: String,
    /// Table of Parquet files.
    #[serde(default)]
    pub table: Option<String>,
    #[serde(default)]
    pub format: Option<Form>,
    /// Receipt of rows that do not know theirs; the same in every attempt.
    #[serde(default)]
    pub start: Option<DateTime<Utc>>,
}

fn one() -> u8 {
    1
}

/// A job that does it.
#[must_use]
pub fn job(payload: &Payload) -> NewJob {
    let key = format!("{} {:?} {:?}", payload.source, payload.table, payload.format);
    NewJob::new(KIND, json!(payload)).dedup(key).concurrency(KIND, AT_ONCE).priority(PRIORITY).max_attempts(ATTEMPTS)
}

/// The table of that name, if history may go there.
///
/// # Errors
/// `Invalid` for a table that is made from others, or none.
pub fn table(name: &str) -> Result<Table, Error> {
    match Table::from_name(name) {
        Some(table @ (Table::Interactions | Table::Feedback | Table::DeviceEvents)) => Ok(table),
        _ => Err(Error::invalid(
            "bad_import_table",
            format!("history cannot go into `{}`", name.chars().take(64).collect::<String>()),
            "use `interactions`, `feedback` or `device_events`",
        )),
    }
}

/// Variables that can be read as text: some of them configure the store of a bucket.
fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// The step.
///
/// # Errors
/// Of the source as a whole, the lake and the database.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let payload: Payload = super::payload(ctx)?;
    if payload.v != 1 {
        let message = format!("an import of version {}", payload.v);
        return Err(Error::new(ErrorKind::Invalid, "unknown_version", message, "start it again"));
    }
    let request = Request {
        app: ctx.app().clone(),
        source: Source::open(&payload.source, &server.config.import.sources, environment())?,
        table: payload.table.as_deref().map(table).transpose()?,
        form: payload.format,
        start: payload.start.unwrap_or_else(|| server.now()),
        piece_rows: PIECE_ROWS,
    };
    let importer = server.lake.importer();
    let runtime = tokio::runtime::Handle::current();
    let report = blocking::watched(ctx, move |watch| {
        let watch = watch.clone();
        runtime.block_on(importer.run(request, Arc::new(move |report: &Report| watch.report(json!(report)))))
    });
    let report = report.await?;
    if !report.failed.is_empty() {
        tracing::warn!(source = payload.source, failed = report.failed.len(), "some files could not be imported");
    }
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    let detail = json!({ "job": ctx.job().job_id, "rows": report.rows, "already": report.already,
        "stored": report.stored, "quarantined": report.quarantined, "failed": report.failed.len() });
    tx.audit_append(ctx.app(), "import", "import.done", &payload.source, &detail).await?;
    tx.commit().await?;
    Ok(json!(report))
}
