//! What a program registers: one handler per job kind, and what to do when a job is dead.

use crate::{JobContext, JobError};
use async_trait::async_trait;
use flywheel_store as store;
use flywheel_store::Tx;
use flywheel_store::jobs::JobRow;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How an attempt succeeds.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The worker shall mark the job as succeeded, with an optional result to show.
    Done(Option<Value>),
    /// The handler marked it itself with [`JobContext::succeed`] in the transaction that made its effect.
    Committed,
}

impl Outcome {
    /// Done with a result.
    #[must_use]
    pub fn with(result: Value) -> Self {
        Self::Done(Some(result))
    }
}

/// Does the work of one kind of job.
#[async_trait]
pub trait JobHandler: Send + Sync + 'static {
    /// Runs one attempt. Look at [`JobContext::check`] between units of work; after a stop was asked for there is a grace
    /// time, then the future is dropped.
    ///
    /// # Errors
    /// The class of the [`JobError`] decides what happens next.
    async fn run(&self, ctx: &JobContext) -> Result<Outcome, JobError>;
}

/// Takes part in the transaction in which a job becomes dead: to queue the alert mail.
#[async_trait]
pub trait JobEvents: Send + Sync + 'static {
    /// `job` is dead and will not run again by itself.
    ///
    /// # Errors
    /// An error undoes the whole transaction; the job then is buried later.
    async fn dead(&self, tx: &mut Tx, job: &JobRow) -> store::Result<()>;
}

/// For programs that need no alert: writes a log line.
pub(crate) struct LogOnly;

#[async_trait]
impl JobEvents for LogOnly {
    async fn dead(&self, _: &mut Tx, job: &JobRow) -> store::Result<()> {
        tracing::error!(job.id = %job.job_id, job.kind, job.attempt, error = job.last_error, "job is dead");
        Ok(())
    }
}

/// Handlers by kind.
#[derive(Clone, Default)]
pub struct Handlers {
    by_kind: BTreeMap<String, Arc<dyn JobHandler>>,
}

impl Handlers {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// Registers the handler of a kind; a second registration replaces the first.
    #[must_use]
    pub fn with(mut self, kind: impl Into<String>, handler: impl JobHandler) -> Self {
        self.by_kind.insert(kind.into(), Arc::new(handler));
        self
    }
    pub(crate) fn get(&self, kind: &str) -> Option<Arc<dyn JobHandler>> {
        self.by_kind.get(kind).cloned()
    }
    /// The kinds a worker with these handlers claims.
    #[must_use]
    pub fn kinds(&self) -> Vec<String> {
        self.by_kind.keys().cloned().collect()
    }
}
