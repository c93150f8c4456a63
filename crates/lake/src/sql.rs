//! SQL for people and dashboards: one SELECT over the caller's views, with caps on time, rows, bytes and memory.

use crate::error::LakeError;
use crate::lake::{Inner, Lake};
use crate::views::{self, QueryScope};
use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::common::config::Dialect;
use datafusion::error::DataFusionError;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::LogicalPlan;
use datafusion::physical_plan::execute_stream;
use datafusion::sql::parser::Statement;
use datafusion::sql::sqlparser::ast::Statement as SqlStatement;
use flywheel_types::{Error, ErrorKind};
use futures::StreamExt;
use std::sync::Arc;
use std::time::Duration;

/// Caps of one query.
#[derive(Debug, Clone, Copy)]
pub struct SqlLimits {
    pub timeout: Duration,
    /// Rows returned; more are cut off and `truncated` is set.
    pub max_rows: usize,
    /// Arrow memory of the result, bytes; more is cut off likewise.
    pub max_bytes: usize,
    /// Length of the query text, bytes.
    pub max_text: usize,
}

impl Default for SqlLimits {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), max_rows: 10_000, max_bytes: 16 << 20, max_text: 32 << 10 }
    }
}

/// Result of a query.
#[derive(Debug, Clone)]
pub struct SqlResult {
    pub schema: SchemaRef,
    pub batches: Vec<RecordBatch>,
    /// There were more rows than the caps allow.
    pub truncated: bool,
}

impl SqlResult {
    /// Rows in the result.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.batches.iter().map(RecordBatch::num_rows).sum()
    }
    /// The rows as a JSON array of objects, times in RFC 3339; NULL values are left out.
    ///
    /// # Errors
    /// When a value has no JSON form.
    pub fn to_json(&self) -> Result<Vec<serde_json::Value>, LakeError> {
        let mut writer = arrow::json::ArrayWriter::new(Vec::new());
        writer.write_batches(&self.batches.iter().collect::<Vec<_>>())?;
        writer.finish()?;
        let bytes = writer.into_inner();
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        serde_json::from_slice(&bytes).map_err(|e| LakeError::Unexpected(format!("result as JSON: {e}")))
    }
}

impl Lake {
    /// Runs one SELECT for an app over `interactions`, `feedback`, `device_events`, `dispositions`, `outcomes`, `rejects`
    /// and `metrics`, the built-in views and the saved ones of `scope` (an `&AppId` alone brings none, and no `now()`). It sees
    /// every acknowledged row exactly once.
    ///
    /// # Errors
    /// `Invalid` for anything but one valid SELECT over these views, `TooLarge` past the memory cap, `Unavailable`
    /// past the time-out.
    pub async fn sql(&self, scope: impl Into<QueryScope>, query: &str, limits: &SqlLimits) -> Result<SqlResult, Error> {
        if query.len() > limits.max_text {
            return Err(refused(format!("the query is {} bytes long, {} is the limit", query.len(), limits.max_text)));
        }
        self.inner.replay.ready(self.inner.buffers.bytes())?;
        let (inner, scope, query, caps) = (Arc::clone(&self.inner), scope.into(), query.to_owned(), *limits);
        let run = async move {
            let state = views::open(&inner, &scope).await?;
            views::add(&state, &query, &scope.views).await?;
            collect(&state, &query, &caps).await
        };
        guarded(&self.inner, limits.timeout, run).await
    }
}

/// Runs a query of a person on the threads for queries, in one of their slots; cancels it when its time is over or its
/// caller gives up.
pub(crate) async fn guarded<T: Send + 'static>(
    inner: &Inner,
    timeout: Duration,
    query: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    let run = async {
        let slot = Arc::clone(&inner.queries.slots).acquire_owned().await.map_err(Error::internal)?;
        let threads = inner.queries.handle().ok_or_else(|| Error::internal("the lake is closing"))?;
        let task = threads.spawn(async move {
            let _slot = slot;
            query.await
        });
        let _guard = AbortOnDrop(task.abort_handle());
        task.await.map_err(Error::internal)?
    };
    match tokio::time::timeout(timeout, run).await {
        Ok(result) => result,
        Err(_) => Err(Error::new(
            ErrorKind::Unavailable,
            "query_timeout",
            format!("the query ran longer than {} s and was cancelled", timeout.as_secs_f64()),
            "narrow it: filter on received_date, select fewer columns, or aggregate",
        )),
    }
}

/// Cancels the query when its caller gives up.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs one SELECT and takes its rows up to the caps.
pub(crate) async fn collect(state: &SessionState, query: &str, limits: &SqlLimits) -> Result<SqlResult, Error> {
    let plan = plan(state, query).await?;
    let physical = state.create_physical_plan(&plan).await.map_err(|e| query_error(&e))?;
    let mut stream = execute_stream(physical, state.task_ctx()).map_err(|e| query_error(&e))?;
    let mut out = SqlResult { schema: stream.schema(), batches: Vec::new(), truncated: false };
    let (mut rows, mut bytes) = (0, 0);
    while let Some(batch) = stream.next().await {
        let batch = batch.map_err(|e| query_error(&e))?;
        let left = limits.max_rows - rows;
        bytes += batch.get_array_memory_size();
        if batch.num_rows() > left || bytes > limits.max_bytes {
            out.truncated = true;
            if bytes <= limits.max_bytes {
                out.batches.push(batch.slice(0, left));
            }
            break;
        }
        rows += batch.num_rows();
        out.batches.push(batch);
    }
    Ok(out)
}

/// Parses one statement.
pub(crate) fn statement(state: &SessionState, query: &str) -> Result<Statement, Error> {
    state.sql_to_statement(query, &Dialect::Generic).map_err(|e| plan_error(&e))
}

/// Parses and plans; refuses everything but one SELECT before anything runs.
pub(crate) async fn plan(state: &SessionState, query: &str) -> Result<LogicalPlan, Error> {
    let statement = statement(state, query)?;
    let is_query = matches!(&statement, Statement::Statement(s) if matches!(**s, SqlStatement::Query(_)));
    if !is_query {
        return Err(refused("only SELECT is allowed".to_owned()));
    }
    let plan = state.statement_to_plan(statement).await.map_err(|e| plan_error(&e))?;
    SQLOptions::new()
        .with_allow_ddl(false)
        .with_allow_dml(false)
        .with_allow_statements(false)
        .verify_plan(&plan)
        .map_err(|e| plan_error(&e))?;
    Ok(plan)
}

fn refused(message: String) -> Error {
    Error::invalid(
        "bad_query",
        message,
        "send one SELECT over interactions, feedback, device_events, dispositions, outcomes, rejects, metrics or views",
    )
}

/// Planning errors speak of the query only.
pub(crate) fn plan_error(e: &DataFusionError) -> Error {
    refused(e.strip_backtrace().chars().take(500).collect())
}

/// Execution errors may name files, so the caller gets them only when they are about the query.
fn query_error(e: &DataFusionError) -> Error {
    match e.find_root() {
        DataFusionError::ResourcesExhausted(_) => Error::new(
            ErrorKind::TooLarge,
            "query_too_large",
            "the query needs more memory than queries may use",
            "narrow it: filter on received_date, select fewer columns, or aggregate",
        ),
        DataFusionError::ArrowError(inner, _) => refused(format!("the query failed while it ran: {inner}")),
        DataFusionError::Plan(_) | DataFusionError::SchemaError(..) | DataFusionError::NotImplemented(_) => {
            plan_error(e)
        }
        _ => Error::internal(e),
    }
}
