//! SQL for people and dashboards: one SELECT over the caller's views, with caps on time, rows, bytes and memory.

use crate::error::LakeError;
use crate::lake::Lake;
use crate::query::{SqlStream, Task, start};
use crate::views::{self, QueryScope};
use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::common::config::Dialect;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::DataFusionError;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::sql::parser::Statement;
use datafusion::sql::sqlparser::ast::Statement as SqlStatement;
use flywheel_types::{Error, ErrorKind};
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
        self.sql_stream(scope, query, limits).await?.collect().await
    }

    /// As [`Self::sql`], with the rows as they come.
    ///
    /// # Errors
    /// As [`Self::sql`]; what is wrong with the rows is told in their place.
    pub async fn sql_stream(
        &self,
        scope: impl Into<QueryScope>,
        query: &str,
        limits: &SqlLimits,
    ) -> Result<SqlStream, Error> {
        self.begin(Task::Run, scope.into(), query, limits).await
    }

    /// Columns of the rows that [`Self::sql_stream`] would answer.
    ///
    /// # Errors
    /// As [`Self::sql`].
    pub async fn sql_schema(
        &self,
        scope: impl Into<QueryScope>,
        query: &str,
        limits: &SqlLimits,
    ) -> Result<SchemaRef, Error> {
        Ok(self.begin(Task::Describe, scope.into(), query, limits).await?.schema())
    }

    async fn begin(&self, task: Task, scope: QueryScope, query: &str, limits: &SqlLimits) -> Result<SqlStream, Error> {
        self.inner.replay.ready(self.inner.buffers.bytes())?;
        let (inner, text) = (Arc::clone(&self.inner), query.to_owned());
        let everything = async move {
            let state = views::open(&inner, &scope).await?;
            views::add(&state, &text, &scope.views).await?;
            Ok(state)
        };
        start(&self.inner, task, query, limits, everything).await
    }

    /// What queries hold at this moment.
    #[must_use]
    pub fn query_load(&self) -> QueryLoad {
        let tasks = self.inner.queries.handle().map_or(0, |h| h.metrics().num_alive_tasks());
        QueryLoad { running: self.inner.active.count(), tasks, memory_bytes: self.inner.runtime.memory_pool.reserved() }
    }
}

/// What queries hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryLoad {
    /// Queries of people that run.
    pub running: usize,
    /// Tasks on the threads for queries; a query may have several.
    pub tasks: usize,
    /// Memory that queries and the reads of the pipeline have reserved.
    pub memory_bytes: usize,
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
    if plan.get_parameter_names().map_err(|e| plan_error(&e))?.is_empty() {
        check_windows(&plan)?;
        return Ok(plan);
    }
    Err(refused("parameters (`?`, `$1`) are not taken: write their values into the query".to_owned()))
}

/// A window makes one value for every row: with lists or texts that grow along, memory grows with the square of the rows, and
/// no operator counts it.
fn check_windows(plan: &LogicalPlan) -> Result<(), Error> {
    let mut found = None;
    let mut look = |e: &Expr| {
        if let Expr::WindowFunction(w) = e
            && ["array_agg", "string_agg"].contains(&w.fun.name())
        {
            found = Some(w.fun.name().to_owned());
            return Ok(TreeNodeRecursion::Stop);
        }
        Ok(TreeNodeRecursion::Continue)
    };
    plan.apply_with_subqueries(|node| node.apply_expressions(|e| e.apply(&mut look))).map_err(|e| plan_error(&e))?;
    found.map_or(Ok(()), |name| Err(refused(format!("`{name}` cannot be used with OVER: use it with GROUP BY"))))
}

pub(crate) fn refused(message: String) -> Error {
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
pub(crate) fn query_error(e: &DataFusionError) -> Error {
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
