//! A write transaction. A pipeline step commits its new state, audit entry, cursor and next job in one of these.

use crate::connect::SharedClock;
use crate::dialect::Backend;
use crate::error::{Error, Result};
use crate::pool::Lent;
use crate::query::{FromRow, Query};
use chrono::{DateTime, Utc};
use std::sync::Arc;
use tokio::sync::Notify;

/// An open write transaction; nothing is visible to others before [`Tx::commit`].
pub struct Tx {
    inner: Lent,
    backend: Backend,
    at: DateTime<Utc>,
    clock: SharedClock,
    broken: bool,
    jobs: Arc<Notify>,
    wake: bool,
}

impl Tx {
    pub(crate) fn new(inner: Lent, backend: Backend, at: DateTime<Utc>, clock: SharedClock, jobs: Arc<Notify>) -> Self {
        Self { inner, backend, at, clock, broken: false, jobs, wake: false }
    }

    /// The business time that rows of this transaction carry.
    #[must_use]
    pub fn at(&self) -> DateTime<Utc> {
        self.at
    }

    /// Lease time now, microseconds since the epoch.
    #[must_use]
    pub fn lease_now_us(&self) -> i64 {
        self.clock.now_us()
    }

    /// Makes everything durable and visible.
    ///
    /// # Errors
    /// A transaction in which a statement failed at the database is never committed: PostgreSQL would answer
    /// COMMIT with a silent rollback.
    pub async fn commit(self) -> Result<()> {
        if self.broken {
            return Err(Error::invalid("transaction", "a statement failed in it; begin again instead of committing"));
        }
        self.inner.commit().await?;
        if self.wake {
            self.jobs.notify_waiters();
        }
        Ok(())
    }

    /// Gives everything up now instead of at the drop.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn rollback(self) -> Result<()> {
        self.inner.rollback().await
    }

    /// Workers of this process look for jobs as soon as the transaction is committed.
    pub(crate) fn wake_on_commit(&mut self) {
        self.wake = true;
    }

    pub(crate) fn backend(&self) -> Backend {
        self.backend
    }

    pub(crate) async fn execute(&mut self, query: Query) -> Result<u64> {
        let done = query.execute(self.inner.conn()).await;
        self.note(done)
    }

    pub(crate) async fn fetch<T: FromRow>(&mut self, query: Query) -> Result<Vec<T>> {
        let done = query.fetch(self.inner.conn()).await;
        self.note(done)
    }

    pub(crate) async fn fetch_opt<T: FromRow>(&mut self, query: Query) -> Result<Option<T>> {
        let done = query.fetch_opt(self.inner.conn()).await;
        self.note(done)
    }

    /// Runs several statements without arguments (migrations).
    pub(crate) async fn script(&mut self, sql: &'static str) -> Result<()> {
        use sqlx::Executor as _;
        let done = self.inner.conn().execute(sqlx::raw_sql(sql)).await.map(|_| ()).map_err(Error::from);
        self.note(done)
    }

    fn note<T>(&mut self, done: Result<T>) -> Result<T> {
        self.broken |= done.is_err();
        done
    }
}
