//! What a handler knows about its attempt and may do with it.

use crate::JobError;
use chrono::{DateTime, Utc};
use flywheel_store as store;
use flywheel_store::jobs::{JobRow, JobToken};
use flywheel_store::{Store, Tx};
use flywheel_types::AppId;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::watch;

/// Why an attempt shall stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    Cancelled,
    LeaseLost,
    Interrupted,
}

impl From<StopReason> for JobError {
    fn from(reason: StopReason) -> Self {
        match reason {
            StopReason::Cancelled => Self::Cancelled,
            StopReason::LeaseLost => Self::LeaseLost,
            StopReason::Interrupted => Self::Interrupted,
        }
    }
}

/// One attempt of a job. Cheap to clone into blocking threads.
#[derive(Clone)]
pub struct JobContext {
    store: Store,
    job: JobRow,
    token: JobToken,
    stop: watch::Receiver<Option<StopReason>>,
}

/// A fenced statement that touched no row means the lease is gone; everything else is an ordinary store error.
fn fenced(e: store::Error) -> JobError {
    match e {
        store::Error::Conflict { .. } => JobError::LeaseLost,
        other => other.into(),
    }
}

impl JobContext {
    pub(crate) fn new(store: Store, job: JobRow, stop: watch::Receiver<Option<StopReason>>) -> Self {
        let token = job.token();
        Self { store, job, token, stop }
    }

    /// The job as it was when this attempt began; `checkpoint_uri` tells where an earlier attempt came to.
    #[must_use]
    pub fn job(&self) -> &JobRow {
        &self.job
    }
    #[must_use]
    pub fn app(&self) -> &AppId {
        &self.job.app_id
    }
    /// The fencing token of this attempt: give it to whatever the job starts outside.
    #[must_use]
    pub fn token(&self) -> &JobToken {
        &self.token
    }
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The payload as a type.
    ///
    /// # Errors
    /// [`JobError::Permanent`] when it does not fit.
    pub fn payload<T: DeserializeOwned>(&self) -> Result<T, JobError> {
        serde_json::from_value(self.job.payload.clone())
            .map_err(|e| JobError::Permanent(format!("payload of `{}`: {e}", self.job.kind)))
    }

    /// Fails when the attempt shall stop. Cheap: call it between units of work, also in blocking threads.
    ///
    /// # Errors
    /// The [`JobError`] to return.
    pub fn check(&self) -> Result<(), JobError> {
        match *self.stop.borrow() {
            Some(reason) => Err(reason.into()),
            None => Ok(()),
        }
    }

    /// Resolves when the attempt shall stop: for `select!` beside long waits.
    pub async fn stopped(&self) -> StopReason {
        let mut stop = self.stop.clone();
        // A dropped sender means the worker is gone, and with it the lease.
        match stop.wait_for(Option::is_some).await {
            Ok(reason) => reason.unwrap_or(StopReason::LeaseLost),
            Err(_) => StopReason::LeaseLost,
        }
    }

    /// Begins a transaction for this attempt's effect.
    ///
    /// # Errors
    /// Those of [`Store::begin`].
    pub async fn begin(&self, at: DateTime<Utc>) -> Result<Tx, JobError> {
        Ok(self.store.begin(at).await?)
    }

    /// Checks inside `tx` that this attempt still owns the job, and holds it until `tx` ends. Call it in every
    /// transaction that makes an effect.
    ///
    /// # Errors
    /// [`JobError::LeaseLost`]: drop `tx` and return.
    pub async fn fence(&self, tx: &mut Tx) -> Result<(), JobError> {
        tx.job_fence(&self.token).await.map_err(fenced)
    }

    /// Fences and marks the job as succeeded inside `tx`, so that effect and completion are one commit. Return
    /// [`crate::Outcome::Committed`] after `tx` was committed.
    ///
    /// # Errors
    /// [`JobError::LeaseLost`]: drop `tx` and return.
    pub async fn succeed(&self, tx: &mut Tx, result: Option<&Value>) -> Result<(), JobError> {
        tx.job_succeed(&self.token, result).await.map_err(fenced)
    }

    /// Shows progress, for example `{"done":3,"of":10,"note":"calibrating"}`.
    ///
    /// # Errors
    /// [`JobError::LeaseLost`], or those of the transaction.
    pub async fn progress(&self, value: &Value) -> Result<(), JobError> {
        let mut tx = self.begin(DateTime::default()).await?;
        tx.job_progress_set(&self.token, value).await.map_err(fenced)?;
        Ok(tx.commit().await?)
    }

    /// Remembers where the next attempt may go on.
    ///
    /// # Errors
    /// [`JobError::LeaseLost`], or those of the transaction.
    pub async fn checkpoint(&self, uri: &str) -> Result<(), JobError> {
        let mut tx = self.begin(DateTime::default()).await?;
        tx.job_checkpoint_set(&self.token, uri).await.map_err(fenced)?;
        Ok(tx.commit().await?)
    }
}
