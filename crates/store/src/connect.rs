//! Opening the database: one writer and a reader pool on SQLite, one pool on PostgreSQL.

use crate::dialect::Backend;
use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::query::{FromRow, Query, Row, q};
use crate::tx::Tx;
use chrono::{DateTime, Utc};
use flywheel_types::LeaseClock;
use flywheel_types::clock::SystemClock;
use sqlx::any::{AnyConnectOptions, AnyPoolOptions};
use sqlx::{ConnectOptions as _, Executor as _};
use std::str::FromStr as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// How a store is opened.
#[derive(Clone)]
pub struct StoreOptions {
    /// Connections that only read (SQLite).
    pub readers: u32,
    /// Connections in all (PostgreSQL).
    pub connections: u32,
    /// How long a caller waits for a free connection.
    pub acquire_timeout: Duration,
    /// The clock of leases, retry times and time-outs. `None`: the database's own clock in PostgreSQL (measured
    /// against ours when the store is opened and by [`Store::lease_clock_sync`]), the machine's clock in SQLite.
    pub lease_clock: Option<Arc<dyn LeaseClock>>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { readers: 4, connections: 10, acquire_timeout: Duration::from_secs(30), lease_clock: None }
    }
}

/// The control database. Cheap to clone; reads are methods here, writes are methods of [`Tx`].
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    backend: Backend,
    write: Pool,
    read: Pool,
    clock: SharedClock,
    jobs: Arc<Notify>,
}

/// The lease clock plus the measured distance to the database's clock.
#[derive(Clone)]
pub(crate) struct SharedClock {
    clock: Arc<dyn LeaseClock>,
    injected: bool,
    offset_us: Arc<AtomicI64>,
}

impl SharedClock {
    pub(crate) fn now_us(&self) -> i64 {
        self.clock.now_ms() * 1000 + self.offset_us.load(Ordering::Relaxed)
    }
}

async fn pool(options: &StoreOptions, url: &str, writer: bool, size: u32) -> Result<Pool> {
    sqlx::any::install_default_drivers();
    let backend = Backend::of_url(url)?;
    let connect = AnyConnectOptions::from_str(url)
        .map_err(|_| Error::invalid("database url", "it cannot be parsed"))?
        .disable_statement_logging();
    let pool = AnyPoolOptions::new()
        .max_connections(size)
        .acquire_timeout(options.acquire_timeout)
        .after_connect(move |conn, _| {
            Box::pin(async move { conn.execute(sqlx::raw_sql(backend.session(writer))).await.map(|_| ()) })
        })
        .connect_with(connect)
        .await?;
    Ok(Pool::new(pool, size, options.acquire_timeout))
}

/// SQLite creates the file; an in-memory database would be another one for each connection.
fn sqlite_url(url: &str) -> Result<String> {
    if url.contains(":memory:") || url.contains("mode=memory") {
        return Err(Error::invalid(
            "database url",
            "an in-memory SQLite database cannot be shared by connections; name a file",
        ));
    }
    Ok(match (url.contains("mode="), url.contains('?')) {
        (true, _) => url.to_owned(),
        (false, true) => format!("{url}&mode=rwc"),
        (false, false) => format!("{url}?mode=rwc"),
    })
}

impl Store {
    /// Opens `sqlite:PATH` (created when missing; its folder must exist) or `postgres://…` with default options.
    /// Call [`Store::migrate`] before first use.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that names neither, [`Error::Unavailable`] or [`Error::Database`] when the
    /// database cannot be opened.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(url, StoreOptions::default()).await
    }

    /// [`Store::connect`] with options.
    ///
    /// # Errors
    /// As [`Store::connect`].
    pub async fn connect_with(url: &str, options: StoreOptions) -> Result<Self> {
        let backend = Backend::of_url(url)?;
        let (write, read) = match backend {
            Backend::Sqlite => {
                let url = sqlite_url(url)?;
                let write = pool(&options, &url, true, 1).await?;
                (write, pool(&options, &url, false, options.readers.max(1)).await?)
            }
            Backend::Postgres => {
                let both = pool(&options, url, true, options.connections.max(2)).await?;
                (both.clone(), both)
            }
        };
        let injected = options.lease_clock.is_some();
        let clock = options.lease_clock.unwrap_or_else(|| Arc::new(SystemClock));
        let clock = SharedClock { clock, injected, offset_us: Arc::default() };
        let store = Self { inner: Arc::new(Inner { backend, write, read, clock, jobs: Arc::default() }) };
        store.lease_clock_sync().await?;
        Ok(store)
    }

    /// Which database this is.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.inner.backend
    }

    /// Begins a write transaction (`BEGIN IMMEDIATE` on SQLite). `at` is the business time that every row written
    /// in it carries as its time of creation or change. Dropping the transaction rolls it back.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when no connection or lock comes free in time.
    pub async fn begin(&self, at: DateTime<Utc>) -> Result<Tx> {
        let inner = self.inner.write.begin(self.inner.backend.begin()).await?;
        let Inner { backend, clock, jobs, .. } = &*self.inner;
        Ok(Tx::new(inner, *backend, at, clock.clone(), jobs.clone()))
    }

    /// Lease time now, microseconds since the epoch.
    #[must_use]
    pub fn lease_now_us(&self) -> i64 {
        self.inner.clock.now_us()
    }

    /// Lease time now.
    #[must_use]
    pub fn lease_now(&self) -> DateTime<Utc> {
        DateTime::from_timestamp_micros(self.lease_now_us()).unwrap_or_default()
    }

    /// Measures the distance between the database's clock and ours again. Does nothing on SQLite and with an
    /// injected clock.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn lease_clock_sync(&self) -> Result<()> {
        let (Some(sql), false) = (self.inner.backend.now_us(), self.inner.clock.injected) else {
            return Ok(());
        };
        let before = self.inner.clock.clock.now_ms();
        let Some(Micros(theirs)) = self.fetch_opt(q(sql)).await? else {
            return Ok(());
        };
        let after = self.inner.clock.clock.now_ms();
        let ours = (before + after) * 500;
        self.inner.clock.offset_us.store(theirs - ours, Ordering::Relaxed);
        Ok(())
    }

    /// Resolves when a transaction of this process that enqueued or freed a job is committed after this call. A hint
    /// only: jobs of other processes are found by polling.
    pub fn job_hint(&self) -> impl Future<Output = ()> + Send + '_ {
        self.inner.jobs.notified()
    }

    /// Answers when the database does (for readiness checks).
    ///
    /// # Errors
    /// [`Error::Unavailable`] when it does not.
    pub async fn ping(&self) -> Result<()> {
        let _: Option<crate::query::Count> = self.fetch_opt(q("SELECT 1 AS n")).await?;
        Ok(())
    }

    /// Closes every connection after its current statement.
    pub async fn close(&self) {
        self.inner.write.close().await;
        self.inner.read.close().await;
    }

    pub(crate) async fn fetch<T: FromRow>(&self, query: Query) -> Result<Vec<T>> {
        let mut lent = self.inner.read.take().await?;
        let rows = query.fetch(lent.conn()).await?;
        lent.keep();
        Ok(rows)
    }

    pub(crate) async fn fetch_opt<T: FromRow>(&self, query: Query) -> Result<Option<T>> {
        Ok(self.fetch(query).await?.into_iter().next())
    }

    /// Runs one writing statement as a transaction of its own and returns its rows.
    pub(crate) async fn write_one<T: FromRow>(&self, query: Query) -> Result<Vec<T>> {
        if self.inner.backend.begins_by_itself() {
            let mut lent = self.inner.write.take().await?;
            let rows = query.fetch(lent.conn()).await?;
            lent.keep();
            return Ok(rows);
        }
        let mut tx = self.begin(DateTime::default()).await?;
        let rows = tx.fetch(query).await?;
        tx.commit().await?;
        Ok(rows)
    }

    #[cfg(test)]
    pub(crate) fn writer(&self) -> &Pool {
        &self.inner.write
    }
}

struct Micros(i64);

impl FromRow for Micros {
    fn from_row(row: &Row) -> Result<Self> {
        row.int("us").map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::query::Count;

    #[test]
    fn sqlite_urls_create_the_file_and_refuse_memory() {
        assert_eq!(sqlite_url("sqlite:a.db").unwrap(), "sqlite:a.db?mode=rwc");
        assert_eq!(sqlite_url("sqlite:a.db?mode=rw").unwrap(), "sqlite:a.db?mode=rw");
        assert!(sqlite_url("sqlite::memory:").is_err());
    }

    #[tokio::test]
    async fn sqlite_is_opened_durable_and_strict() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", dir.path().join("c.db").display());
        let store = Store::connect(&url).await.unwrap();
        let mut lent = store.writer().take().await.unwrap();
        for (pragma, want) in [("synchronous", 2), ("foreign_keys", 1), ("busy_timeout", 30000)] {
            let sql = format!(
                "SELECT CAST(v.{0} AS INTEGER) AS n FROM pragma_{1} AS v",
                if pragma == "busy_timeout" { "timeout" } else { pragma },
                pragma
            );
            let Count(got) = q(sql).fetch_opt(lent.conn()).await.unwrap().unwrap();
            assert_eq!(got, want, "{pragma}");
        }
        struct Mode(String);
        impl FromRow for Mode {
            fn from_row(row: &Row) -> Result<Self> {
                row.text("journal_mode").map(Self)
            }
        }
        let Mode(mode) = q("PRAGMA journal_mode").fetch_opt(lent.conn()).await.unwrap().unwrap();
        assert_eq!(mode, "wal");
    }

    #[tokio::test]
    async fn a_reader_cannot_write() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", dir.path().join("c.db").display());
        let store = Store::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        let refused = store.fetch::<Count>(q("DELETE FROM apps RETURNING 1 AS n")).await;
        assert!(refused.is_err());
    }
}
