//! The server-side loop. One file or folder per step, always the same order: **load** (through a store), **decide**
//! (one call into a pure crate), **do** (external work, idempotent), **commit** (one SQL transaction: new state, audit
//! entry, cursor, next job). Reading one step teaches all.

pub mod attribute;
pub mod blocking;
pub mod build_dataset;
pub mod compact;
pub mod erase;
pub mod evaluate;
pub mod freeze;
pub mod import;
pub mod lora;
pub mod notify;
pub mod publish;
pub mod reconcile_rollout;
pub mod reembed;
pub mod requantize;

use crate::server::Server;
use flywheel_jobs::{Handlers, JobContext, JobError, JobHandler, Outcome};
use flywheel_types::{AppId, Error};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::sync::Arc;

/// Kinds of jobs, in the order in which the loop runs through them.
pub const KINDS: &[&str] = &[
    attribute::KIND,
    freeze::KIND,
    reembed::KIND,
    build_dataset::KIND,
    lora::KIND,
    requantize::KIND,
    evaluate::KIND,
    publish::KIND,
    reconcile_rollout::KIND,
    compact::KIND,
    erase::KIND,
    import::KIND,
    notify::KIND,
];

/// What the payload of a kind must name; kinds that are not here need nothing.
const NEEDS: &[(&str, &[&str])] = &[
    (freeze::KIND, &["proposal", "finding"]),
    (lora::KIND, &["dataset"]),
    (requantize::KIND, &["merged", "base", "profile"]),
    (evaluate::KIND, &["candidate"]),
    (publish::KIND, &["candidate"]),
    (reconcile_rollout::KIND, &["rollout"]),
    (erase::KIND, &["erasure"]),
    (import::KIND, &["source"]),
];

/// Whether a schedule can start `kind` with this payload. Without the check each slot would make a dead job.
///
/// # Errors
/// `Invalid` naming what is missing.
pub fn check_scheduled(kind: &str, payload: &Value) -> Result<(), Error> {
    let needs = NEEDS.iter().find(|(k, _)| *k == kind).map_or(&[][..], |(_, needs)| *needs);
    let missing: Vec<&str> =
        needs.iter().copied().filter(|name| payload.get(name).is_none_or(Value::is_null)).collect();
    if missing.is_empty() && (payload.is_null() || payload.is_object()) {
        return Ok(());
    }
    let message = format!("the payload of `{kind}` must be an object with {}", needs.join(", "));
    Err(Error::invalid(
        "bad_schedule_payload",
        message,
        "name what the job works on; to train on new corrections, schedule `build_dataset`",
    ))
}

/// Every step as a handler of the jobs crate.
#[derive(Clone)]
pub struct Steps(pub Arc<Server>);

impl Steps {
    /// One handler per kind.
    #[must_use]
    pub fn handlers(&self) -> Handlers {
        KINDS.iter().fold(Handlers::new(), |h, kind| h.with(*kind, self.clone()))
    }
}

#[async_trait::async_trait]
impl JobHandler for Steps {
    async fn run(&self, ctx: &JobContext) -> Result<Outcome, JobError> {
        let kind = ctx.job().kind.clone();
        let done = run(&self.0, ctx, &kind).await;
        let state = if done.is_ok() { "succeeded" } else { "failed" };
        self.0.metrics.add("flywheel_jobs_total", &[("kind", &kind), ("state", state)], 1);
        match done {
            Ok(value) => {
                tracing::info!(kind, "job done");
                tracing::debug!(kind, result = %value, "what it did");
                Ok(Outcome::with(value))
            }
            Err(e) => {
                tracing::warn!(kind, error = %e, inside = e.inside.as_deref(), "job failed");
                Err(class(&e))
            }
        }
    }
}

async fn run(server: &Server, ctx: &JobContext, kind: &str) -> Result<Value, Error> {
    match kind {
        attribute::KIND => attribute::run(server, ctx).await,
        freeze::KIND => freeze::run(server, ctx).await,
        reembed::KIND => reembed::run(server, ctx).await,
        build_dataset::KIND => build_dataset::run(server, ctx).await,
        lora::KIND => lora::run(server, ctx).await,
        requantize::KIND => requantize::run(server, ctx).await,
        evaluate::KIND => evaluate::run(server, ctx).await,
        publish::KIND => publish::run(server, ctx).await,
        reconcile_rollout::KIND => reconcile_rollout::run(server, ctx).await,
        compact::KIND => compact::run(server, ctx).await,
        erase::KIND => erase::run(server, ctx).await,
        import::KIND => import::run(server, ctx).await,
        notify::KIND => notify::run(server, ctx).await,
        other => {
            Err(Error::invalid("unknown_job_kind", format!("no step is called `{other}`"), "check the job's kind"))
        }
    }
}

/// Code of an error that means: another worker owns this job now.
const LEASE_LOST: &str = "lease_lost";

/// A fencing failure as a step's error; [`class`] turns it back.
pub fn lost(e: JobError) -> Error {
    match e {
        JobError::Retryable(text) => Error::internal(text),
        JobError::Permanent(text) => Error::invalid("job_refused", text, "see the job's last error"),
        JobError::LeaseLost | JobError::Cancelled | JobError::Interrupted => {
            Error::conflict(LEASE_LOST, "this attempt does not own the job any more", "nothing: its successor works")
        }
    }
}

/// Which errors are worth another attempt.
fn class(e: &Error) -> JobError {
    let text = match &e.inside {
        Some(inside) => format!("{e}: {inside}"),
        None => e.to_string(),
    };
    match e.kind {
        _ if e.code == LEASE_LOST => JobError::LeaseLost,
        flywheel_types::ErrorKind::Unavailable
        | flywheel_types::ErrorKind::Quota
        | flywheel_types::ErrorKind::Internal
        // somebody was faster: the next attempt sees the new state
        | flywheel_types::ErrorKind::Conflict => JobError::Retryable(text),
        _ => JobError::Permanent(text),
    }
}

/// Payload of a job.
///
/// # Errors
/// `Invalid` when it does not have the step's form.
pub fn payload<T: DeserializeOwned>(ctx: &JobContext) -> Result<T, Error> {
    serde_json::from_value(ctx.job().payload.clone()).map_err(|e| {
        Error::invalid("bad_payload", format!("payload of `{}`: {e}", ctx.job().kind), "enqueue the job again")
    })
}

/// Settings of an app, or `NotFound`.
///
/// # Errors
/// `NotFound` for an unknown app; database errors.
pub async fn app(server: &Server, id: &AppId) -> Result<flywheel_store::apps::AppRow, Error> {
    server.store.app_get(id).await?.ok_or_else(|| Error::not_found("app_not_found", format!("there is no app `{id}`")))
}
