//! Rows as they come in: what a person watches while a phone is being tested. Rows are read from the log right after they were
//! acknowledged, a quarter of a second at a time, through the same views and caps as any query.

use crate::lake::{Inner, Lake};
use crate::provider::session_over_rows;
use crate::query::{Task, start};
use crate::sql::SqlLimits;
use flywheel_telemetry::Table;
use flywheel_telemetry::wal::Stored;
use flywheel_types::{AppId, Error};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

/// Rows that came in the meantime are shown together.
const GATHER: Duration = Duration::from_millis(250);
/// Rows of one piece: nobody reads more in a quarter of a second.
const MAX_ROWS: usize = 200;

/// Watches one table of one app.
pub struct Tail {
    inner: Arc<Inner>,
    app: AppId,
    table: Table,
    query: String,
    fresh: Receiver<Stored>,
}

/// Rows that came in, as JSON objects without their NULLs.
#[derive(Debug, Default)]
pub struct TailRows {
    pub rows: Vec<serde_json::Value>,
    /// More came than are shown.
    pub skipped: bool,
}

impl Lake {
    /// Begins to watch `table`; `filter` is the condition of a WHERE.
    ///
    /// # Errors
    /// `Invalid` for a condition that is none over the table's columns.
    pub async fn tail(&self, app: &AppId, table: Table, filter: Option<&str>) -> Result<Tail, Error> {
        let fresh = self.inner.ingestor.subscribe();
        let condition = filter.map(|f| format!(" WHERE ({f})")).unwrap_or_default();
        let query = format!("SELECT * FROM {}{condition}", table.name());
        let tail = Tail { inner: Arc::clone(&self.inner), app: app.clone(), table, query, fresh };
        tail.read(Vec::new()).await?;
        Ok(tail)
    }
}

impl Tail {
    /// The next rows that fit; waits for them. `None` when the lake is closed.
    ///
    /// # Errors
    /// Of the log, or of the condition on these rows.
    pub async fn next(&mut self) -> Result<Option<TailRows>, Error> {
        loop {
            let mut stored = Vec::new();
            let mut missed = false;
            match self.fresh.recv().await {
                Ok(first) => stored.push(first),
                Err(RecvError::Lagged(_)) => missed = true,
                Err(RecvError::Closed) => return Ok(None),
            }
            tokio::time::sleep(GATHER).await;
            loop {
                match self.fresh.try_recv() {
                    Ok(next) => stored.push(next),
                    Err(TryRecvError::Lagged(_)) => missed = true,
                    Err(TryRecvError::Empty | TryRecvError::Closed) => break,
                }
            }
            stored.retain(|s| s.table == self.table);
            let mut found = self.read(stored).await?;
            found.skipped |= missed;
            if found.skipped || !found.rows.is_empty() {
                return Ok(Some(found));
            }
        }
    }

    async fn read(&self, stored: Vec<Stored>) -> Result<TailRows, Error> {
        let limits = SqlLimits { max_rows: MAX_ROWS, ..SqlLimits::default() };
        let state = session_over_rows(&self.inner, &self.app, self.table, stored);
        let result = start(&self.inner, Task::Run, &self.query, &limits, async { Ok(state?) }).await?.collect().await?;
        Ok(TailRows { rows: result.to_json()?, skipped: result.truncated })
    }
}
