//! A running query: one task on the threads for queries, in one of their slots, whose rows are handed out as they come. It ends at
//! its caps, at its deadline or when it is dropped, and no longer computes soon after.

use crate::cancel::Cancel;
use crate::lake::Inner;
use crate::sql::{SqlLimits, SqlResult, plan, query_error, refused};
use arrow::array::{Array, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use datafusion::execution::session_state::SessionState;
use datafusion::physical_plan::execute_stream;
use flywheel_types::{Error, ErrorKind};
use futures::StreamExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

/// Batches that wait for a reader; a query that is ahead of it by more waits.
const AHEAD: usize = 2;

/// What to do with a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Only say which columns it has.
    Describe,
    Run,
}

/// Rows of a query, as they come. Dropping it cancels the query.
pub struct SqlStream {
    schema: SchemaRef,
    pieces: Receiver<Piece>,
    truncated: bool,
    ended: bool,
    timeout: Duration,
    deadline: Instant,
    running: Running,
}

enum Piece {
    Schema(SchemaRef),
    Rows(RecordBatch),
    Failed(Error),
    End { truncated: bool },
}

impl SqlStream {
    /// Columns of the rows. Each may be NULL.
    #[must_use]
    pub fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    /// There were more rows than the caps allow; known after the last row.
    #[must_use]
    pub fn truncated(&self) -> bool {
        self.truncated
    }

    /// The next rows; `None` after the last ones.
    pub async fn next(&mut self) -> Option<Result<RecordBatch, Error>> {
        if self.ended {
            return None;
        }
        match self.receive().await {
            Piece::Rows(batch) => return Some(Ok(batch)),
            Piece::End { truncated } => self.truncated = truncated,
            Piece::Failed(e) => {
                self.end();
                return Some(Err(e));
            }
            Piece::Schema(_) => {}
        }
        self.end();
        None
    }

    /// All rows up to the caps.
    ///
    /// # Errors
    /// When the query fails.
    pub(crate) async fn collect(mut self) -> Result<SqlResult, Error> {
        let mut batches = Vec::new();
        while let Some(batch) = self.next().await {
            batches.push(batch?);
        }
        Ok(SqlResult { schema: self.schema(), batches, truncated: self.truncated })
    }

    async fn receive(&mut self) -> Piece {
        match timeout_at(self.deadline, self.pieces.recv()).await {
            Ok(Some(piece)) => piece,
            Ok(None) => Piece::Failed(Error::internal("the task of a query ended early")),
            Err(_) => Piece::Failed(timed_out(self.timeout)),
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.running.stop();
    }
}

/// The task of a query.
struct Running {
    cancel: Cancel,
    task: AbortHandle,
}

impl Running {
    fn stop(&self) {
        self.cancel.now();
        self.task.abort();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Queries that hold one of the slots.
#[derive(Debug, Clone, Default)]
pub(crate) struct Active(Arc<AtomicUsize>);

impl Active {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn enter(&self) -> Entered {
        self.0.fetch_add(1, Ordering::Relaxed);
        Entered(self.clone())
    }
}

/// One query of [`Active`], until everything it holds is freed.
struct Entered(Active);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Starts a query in a session that is made on the threads for queries; returns when its columns are known.
pub(crate) async fn start(
    inner: &Inner,
    task: Task,
    query: &str,
    limits: &SqlLimits,
    session: impl Future<Output = Result<SessionState, Error>> + Send + 'static,
) -> Result<SqlStream, Error> {
    if query.len() > limits.max_text {
        return Err(refused(format!("the query is {} bytes long, {} is the limit", query.len(), limits.max_text)));
    }
    let deadline = Instant::now() + limits.timeout;
    let slot = timeout_at(deadline, Arc::clone(&inner.queries.slots).acquire_owned()).await;
    let slot = slot.map_err(|_| busy(limits.timeout))?.map_err(Error::internal)?;
    let threads = inner.queries.handle().ok_or_else(|| Error::internal("the lake is closing"))?;
    let (send, pieces) = mpsc::channel(AHEAD);
    let cancel = Cancel::default();
    let (entered, query, limits, watched) = (inner.active.enter(), query.to_owned(), *limits, cancel.clone());
    let spawned = threads.spawn(async move {
        let work = Box::pin(async {
            let state = session.await?;
            run(&state, task, &query, &limits, &watched, &send).await
        });
        let last = match timeout_at(deadline, work).await {
            Ok(Ok(truncated)) => Piece::End { truncated },
            Ok(Err(e)) => Piece::Failed(e),
            Err(_) => Piece::Failed(timed_out(limits.timeout)),
        };
        // everything of the query is freed here; only its last word may wait for a reader
        drop((entered, slot));
        let _ = send.send(last).await;
    });
    let running = Running { cancel, task: spawned.abort_handle() };
    let schema = Arc::new(Schema::empty());
    let timeout = limits.timeout;
    let mut out = SqlStream { schema, pieces, truncated: false, ended: false, timeout, deadline, running };
    match out.receive().await {
        Piece::Schema(schema) => out.schema = schema,
        Piece::Failed(e) => return Err(e),
        Piece::Rows(_) | Piece::End { .. } => return Err(Error::internal("a query began without its columns")),
    }
    Ok(out)
}

/// Runs work of a person that answers no rows as a query: in a slot, with a time-out, and no longer than the caller waits.
pub(crate) async fn guarded<T: Send + 'static>(
    inner: &Inner,
    timeout: Duration,
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    let deadline = Instant::now() + timeout;
    let slot = timeout_at(deadline, Arc::clone(&inner.queries.slots).acquire_owned()).await;
    let slot = slot.map_err(|_| busy(timeout))?.map_err(Error::internal)?;
    let threads = inner.queries.handle().ok_or_else(|| Error::internal("the lake is closing"))?;
    let entered = inner.active.enter();
    let task = threads.spawn(async move {
        let _held = (slot, entered);
        work.await
    });
    let _running = Running { cancel: Cancel::default(), task: task.abort_handle() };
    let done = timeout_at(deadline, task).await.map_err(|_| timed_out(timeout))?;
    done.map_err(Error::internal)?
}

/// Sends columns and rows up to the caps; says whether there were more.
async fn run(
    state: &SessionState,
    task: Task,
    query: &str,
    limits: &SqlLimits,
    cancel: &Cancel,
    send: &Sender<Piece>,
) -> Result<bool, Error> {
    let plan = plan(state, query).await?;
    let physical = cancel.physical_plan(state, &plan).await.map_err(|e| query_error(&e))?;
    let schema = plain(&physical.schema());
    let gone = send.send(Piece::Schema(Arc::clone(&schema))).await.is_err();
    if gone || task == Task::Describe {
        return Ok(false);
    }
    let mut stream = execute_stream(physical, state.task_ctx()).map_err(|e| query_error(&e))?;
    let (mut rows, mut bytes) = (0, 0);
    while let Some(batch) = stream.next().await {
        let batch = batch.map_err(|e| query_error(&e))?;
        bytes += size(&batch);
        if bytes > limits.max_bytes {
            return Ok(true);
        }
        let taken = batch.num_rows().min(limits.max_rows - rows);
        rows += taken;
        let options = RecordBatchOptions::new().with_row_count(Some(taken));
        let columns = batch.slice(0, taken).columns().to_vec();
        let piece =
            RecordBatch::try_new_with_options(Arc::clone(&schema), columns, &options).map_err(Error::internal)?;
        let gone = taken > 0 && send.send(Piece::Rows(piece)).await.is_err();
        if gone || taken < batch.num_rows() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The columns without what changes from one moment to the next: whether a plan could prove that there are no NULLs.
pub(crate) fn plain(schema: &Schema) -> SchemaRef {
    let fields = schema.fields().iter();
    let fields = fields.map(|f| f.as_ref().clone().with_nullable(true).with_metadata(std::collections::HashMap::new()));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// Bytes of the rows themselves: a batch may be a slice of arrays that are shared with others.
fn size(batch: &RecordBatch) -> usize {
    let of = |column: &Arc<dyn Array>| {
        column.to_data().get_slice_memory_size().unwrap_or_else(|_| column.get_array_memory_size())
    };
    batch.columns().iter().map(of).sum()
}

fn timed_out(timeout: Duration) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "query_timeout",
        format!("the query ran longer than {} s and was cancelled", timeout.as_secs_f64()),
        "narrow it: filter on received_date, select fewer columns, or aggregate",
    )
}

fn busy(timeout: Duration) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "queries_busy",
        format!("other queries took all places for {} s", timeout.as_secs_f64()),
        "try again later; queries that are read slowly hold their place until they end",
    )
}
