//! Connections that stay warm between two uses.
//!
//! sqlx's pool asks the server whether a connection still answers when it is given back and again when it is taken: two
//! of the six round trips of a small transaction on PostgreSQL. Here a connection whose last use ended well less than
//! [`WARM`] ago is handed on without asking; everything else goes through sqlx's pool with its checks. A warm connection
//! that turns out to be dead at BEGIN is thrown away and the next one tried: nothing was done on it yet.

use crate::error::Result;
use sqlx::pool::PoolConnection;
use sqlx::{Any, AnyConnection, AnyPool, Executor as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long a connection is trusted after it answered.
const WARM: Duration = Duration::from_secs(1);

/// How long a connection may be handed on before sqlx's pool looks at it again (age, health).
const LONGEST: Duration = Duration::from_secs(600);

/// A pool with as many connections as `cold` has. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    cold: AnyPool,
    /// One per connection: whoever holds one finds a connection here or in `cold`.
    permits: Arc<Semaphore>,
    shelf: Mutex<Shelf>,
    wait: Duration,
}

/// Warm connections, the latest used last.
#[derive(Default)]
struct Shelf {
    warm: Vec<Warm>,
    closed: bool,
}

struct Warm {
    conn: PoolConnection<Any>,
    /// When it was taken out of sqlx's pool.
    taken: Instant,
    used: Instant,
}

/// A connection in use. Dropped without [`Lent::keep`], it is rolled back, or checked by sqlx's pool.
pub(crate) struct Lent {
    conn: Option<PoolConnection<Any>>,
    taken: Instant,
    was_warm: bool,
    in_transaction: bool,
    home: Arc<Shared>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Pool {
    /// Wraps a pool of `size` connections; a caller waits at most `wait` for one.
    pub(crate) fn new(cold: AnyPool, size: u32, wait: Duration) -> Self {
        let permits = Arc::new(Semaphore::new(size as usize));
        Self { shared: Arc::new(Shared { cold, permits, shelf: Mutex::default(), wait }) }
    }

    /// A connection that answered a moment ago.
    ///
    /// # Errors
    /// `Unavailable` when none comes free in time or the server cannot be reached.
    pub(crate) async fn take(&self) -> Result<Lent> {
        let permit = tokio::time::timeout(self.shared.wait, Arc::clone(&self.shared.permits).acquire_owned());
        let permit = permit.await.map_err(|_| sqlx::Error::PoolTimedOut)?.map_err(|_| sqlx::Error::PoolClosed)?;
        let (conn, taken, was_warm) = match self.shared.warm() {
            Some(warm) => (warm.conn, warm.taken, true),
            None => (self.shared.cold.acquire().await?, Instant::now(), false),
        };
        let home = Arc::clone(&self.shared);
        Ok(Lent { conn: Some(conn), taken, was_warm, in_transaction: false, home, permit: Some(permit) })
    }

    /// A connection on which `statement` opened a transaction.
    ///
    /// # Errors
    /// As [`Pool::take`], or those of the statement.
    pub(crate) async fn begin(&self, statement: &'static str) -> Result<Lent> {
        loop {
            let mut lent = self.take().await?;
            // Set before: a BEGIN that is given up half-way is rolled back.
            lent.in_transaction = true;
            match lent.conn().execute(sqlx::raw_sql(statement)).await {
                Ok(_) => return Ok(lent),
                Err(error) if lent.was_warm && is_dead(&error) => {
                    tracing::info!(%error, "a connection died between two uses; taking another");
                    lent.throw_away();
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Closes every connection after its current use.
    pub(crate) async fn close(&self) {
        let warm = {
            let mut shelf = self.shared.shelf();
            shelf.closed = true;
            std::mem::take(&mut shelf.warm)
        };
        drop(warm);
        self.shared.cold.close().await;
    }
}

impl Shared {
    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection used last, if that was a moment ago. Older ones go back to sqlx's pool.
    fn warm(&self) -> Option<Warm> {
        let mut shelf = self.shelf();
        match shelf.warm.pop() {
            Some(last) if last.used.elapsed() < WARM => Some(last),
            Some(last) => {
                let old = std::mem::take(&mut shelf.warm);
                drop(shelf);
                drop((last, old));
                None
            }
            None => None,
        }
    }

    fn put(&self, conn: PoolConnection<Any>, taken: Instant) {
        let used = Instant::now();
        let mut shelf = self.shelf();
        if shelf.closed || used.duration_since(taken) >= LONGEST {
            drop(shelf);
            return drop(conn);
        }
        shelf.warm.push(Warm { conn, taken, used });
        // More than the load needs: let sqlx's pool have it, which closes what stays idle.
        let spare = shelf.warm.first().is_some_and(|first| used.duration_since(first.used) >= WARM);
        let spare = spare.then(|| shelf.warm.remove(0));
        drop(shelf);
        drop(spare);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Giving a connection back needs a runtime, which may be gone by now; a detached one just closes.
        for warm in std::mem::take(&mut self.shelf().warm) {
            drop(warm.conn.detach());
        }
    }
}

impl Lent {
    /// The connection.
    #[expect(clippy::expect_used, reason = "only the consuming methods below take it out")]
    pub(crate) fn conn(&mut self) -> &mut AnyConnection {
        self.conn.as_mut().expect("a lent connection is present until it is given back")
    }

    /// Gives back a connection that answered everything it was asked.
    pub(crate) fn keep(mut self) {
        if let Some(conn) = self.conn.take() {
            self.home.put(conn, self.taken);
        }
    }

    /// Makes the transaction durable and gives the connection back.
    ///
    /// # Errors
    /// Those of the COMMIT; the transaction is rolled back then, or nobody knows.
    pub(crate) async fn commit(mut self) -> Result<()> {
        self.conn().execute(sqlx::raw_sql("COMMIT")).await?;
        self.in_transaction = false;
        self.keep();
        Ok(())
    }

    /// Rolls back now and gives the connection back.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) async fn rollback(mut self) -> Result<()> {
        self.conn().execute(sqlx::raw_sql("ROLLBACK")).await?;
        self.in_transaction = false;
        self.keep();
        Ok(())
    }

    fn throw_away(mut self) {
        if let Some(conn) = self.conn.take() {
            drop(conn.detach());
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let (true, Some(mut conn)) = (self.in_transaction, self.conn.take()) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            // Closing it makes the server roll back.
            return drop(conn.detach());
        };
        let (home, taken, permit) = (Arc::clone(&self.home), self.taken, self.permit.take());
        runtime.spawn(async move {
            match conn.execute(sqlx::raw_sql("ROLLBACK")).await {
                Ok(_) => home.put(conn, taken),
                Err(error) => {
                    tracing::debug!(%error, "a connection did not roll back; closing it");
                    drop(conn.detach());
                }
            }
            // Held until the connection is back.
            drop(permit);
        });
    }
}

/// Whether the connection, not the statement, is to blame: nothing it was asked has happened or will.
fn is_dead(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        // 57P01 to 57P03: the server was shut down or restarted; class 08: connection lost.
        sqlx::Error::Database(db) => db.code().is_some_and(|c| c.starts_with("57P") || c.starts_with("08")),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::query::{Count, q};
    use crate::scratch::Scratch;
    use crate::{Store, Tx};
    use chrono::DateTime;

    async fn begin(store: &Store) -> Tx {
        store.begin(DateTime::default()).await.unwrap()
    }

    async fn count(tx: &mut Tx, sql: &'static str) -> i64 {
        tx.fetch_opt::<Count>(q(sql)).await.unwrap().unwrap().0
    }

    const PID: &str = "SELECT CAST(pg_backend_pid() AS BIGINT) AS n";
    const APPS: &str = "SELECT COUNT(*) AS n FROM apps";
    const ADD: &str =
        "INSERT INTO apps (app_id, settings, version, created_at, updated_at) VALUES ('a', '{}', 1, 0, 0)";

    #[tokio::test]
    async fn a_connection_is_handed_on_warm_and_without_the_last_transaction() {
        for scratch in [Some(Scratch::sqlite(None).await.unwrap()), Scratch::postgres(None).await.unwrap()] {
            let Some(scratch) = scratch else { continue };
            let mut tx = begin(&scratch.store).await;
            tx.execute(q(ADD)).await.unwrap();
            drop(tx);
            let mut tx = begin(&scratch.store).await;
            assert_eq!(count(&mut tx, APPS).await, 0, "a dropped transaction is rolled back");
            tx.execute(q(ADD)).await.unwrap();
            tx.commit().await.unwrap();
            let lent = scratch.store.writer().take().await.unwrap();
            assert!(lent.was_warm, "a clean commit keeps the connection at hand");
            drop(lent);
            let mut tx = begin(&scratch.store).await;
            assert_eq!(count(&mut tx, APPS).await, 1);
            tx.rollback().await.unwrap();
            scratch.remove().await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_connection_that_died_while_warm_is_replaced() {
        let Some(scratch) = Scratch::postgres(None).await.unwrap() else { return };
        let writer = scratch.store.writer();
        let (mut victim, mut killer) = (writer.take().await.unwrap(), writer.take().await.unwrap());
        let Count(pid) = q(PID).fetch_opt(victim.conn()).await.unwrap().unwrap();
        victim.keep();
        let kill = "SELECT CASE WHEN pg_terminate_backend(CAST($1 AS INTEGER)) THEN 1 ELSE 0 END AS n";
        let mut left: Count = q(kill).bind(pid).fetch_opt(killer.conn()).await.unwrap().unwrap();
        assert_eq!(left.0, 1);
        while left.0 > 0 {
            let seen = "SELECT COUNT(*) AS n FROM pg_stat_activity WHERE pid = CAST($1 AS INTEGER)";
            left = q(seen).bind(pid).fetch_opt(killer.conn()).await.unwrap().unwrap();
        }
        let mut tx = begin(&scratch.store).await;
        assert_ne!(count(&mut tx, PID).await, pid);
        drop((tx, killer));
        scratch.remove().await.unwrap();
    }
}
