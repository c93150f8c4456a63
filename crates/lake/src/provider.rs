//! What a query can see. [`AppTable`] is the only table provider ever registered: its plan is Delta ∪ buffers with
//! `app = <the caller's app>` built in below everything a caller can write, so no query text can avoid the filter.

use crate::catalogue::{CATALOG, SCHEMA};
use crate::error::LakeError;
use crate::group::GroupByWords;
use crate::lake::Inner;
use crate::versions::Versions;
use arrow::array::{RecordBatch, new_null_array};
use arrow::datatypes::{Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::catalog::streaming::StreamingTable;
use datafusion::catalog::{
    CatalogProvider, MemoryCatalogProvider, MemoryCatalogProviderList, MemorySchemaProvider, SchemaProvider, Session,
};
use datafusion::datasource::{TableProvider, TableType, provider_as_source};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::FunctionRegistry as _;
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::execution::session_state::{SessionState, SessionStateBuilder};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, TableProviderFilterPushDown, cast, col, lit};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use datafusion::prelude::SessionConfig;
use datafusion::scalar::ScalarValue;
use deltalake::DeltaTable;
use deltalake::delta_datafusion::{DeltaScanConfig, DeltaScanNext};
use deltalake::kernel::Add;
use flywheel_telemetry::Table;
use flywheel_telemetry::wal::Stored;
use flywheel_types::AppId;
use std::collections::HashMap;
use std::sync::Arc;

/// Which rows a read sees.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scope {
    /// Everything acknowledged.
    Now,
    /// What the given Delta versions hold; repeatable.
    At(Versions),
}

/// A view of one app on one table.
#[derive(Debug)]
pub(crate) struct AppTable {
    plan: LogicalPlan,
    schema: SchemaRef,
}

impl AppTable {
    fn new(
        app: &AppId,
        table: Table,
        delta: &DeltaTable,
        files: Option<Vec<Add>>,
        rows: Vec<Stored>,
    ) -> std::result::Result<Self, LakeError> {
        let schema = table.schema();
        let plain = Arc::new(Schema::new(schema.fields().clone()));
        let mut scan = delta_scan(delta)?;
        if let Some(files) = files {
            scan = scan.with_adds(files);
        }
        let stored = scan.schema();
        let columns: Vec<Expr> = plain
            .fields()
            .iter()
            .map(|f| match stored.field_with_name(f.name()) {
                Ok(have) if have.data_type() == f.data_type() => col(quoted(f.name())),
                Ok(_) => cast(col(quoted(f.name())), f.data_type().clone()).alias(f.name()),
                // A column added after the table was made.
                Err(_) => cast(lit(ScalarValue::Null), f.data_type().clone()).alias(f.name()),
            })
            .collect();
        let mut plan =
            LogicalPlanBuilder::scan(table.name(), provider_as_source(Arc::new(scan)), None)?.project(columns)?;
        if !rows.is_empty() {
            let fresh = fresh_rows(plain, rows)?;
            plan = plan.union(LogicalPlanBuilder::scan(table.name(), provider_as_source(fresh), None)?.build()?)?;
        }
        let plan = plan.filter(col("app").eq(lit(app.as_str())))?.build()?;
        let schema = Arc::new(plan.schema().as_arrow().clone());
        Ok(Self { plan, schema })
    }
}

/// Rows that are only acknowledged, read from the log while the query runs: a backlog takes no memory.
fn fresh_rows(schema: SchemaRef, rows: Vec<Stored>) -> Result<Arc<dyn TableProvider>> {
    let (even, odd): (Vec<_>, Vec<_>) = rows.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
    let partition = |rows: Vec<(usize, Stored)>| -> Arc<dyn PartitionStream> {
        Arc::new(Fresh { schema: Arc::clone(&schema), rows: rows.into_iter().map(|(_, r)| r).collect() })
    };
    Ok(Arc::new(StreamingTable::try_new(Arc::clone(&schema), vec![partition(even), partition(odd)])?))
}

/// Rows of the log as one partition of a plan.
#[derive(Debug)]
struct Fresh {
    schema: SchemaRef,
    rows: Vec<Stored>,
}

impl PartitionStream for Fresh {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }
    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let schema = Arc::clone(&self.schema);
        let batches = self.rows.clone().into_iter().map(move |stored| {
            let batch = stored.load().map_err(|e| DataFusionError::External(Box::new(e)))?;
            // columns that a record of an earlier program does not have are NULL
            let columns = schema.fields().iter().map(|f| {
                let found = batch.column_by_name(f.name()).cloned();
                found.unwrap_or_else(|| new_null_array(f.data_type(), batch.num_rows()))
            });
            Ok(RecordBatch::try_new(Arc::clone(&schema), columns.collect())?)
        });
        Box::pin(RecordBatchStreamAdapter::new(Arc::clone(&self.schema), futures::stream::iter(batches)))
    }
}

/// A column name as it is, without SQL's folding to lower case.
fn quoted(name: &str) -> datafusion::common::Column {
    datafusion::common::Column::from_name(name)
}

/// Plain Arrow types, so that rows of both sources fit together.
fn delta_scan(delta: &DeltaTable) -> std::result::Result<DeltaScanNext, LakeError> {
    let mut config = DeltaScanConfig::new().with_wrap_partition_values(false);
    config.schema_force_view_types = false;
    Ok(DeltaScanNext::new(delta.snapshot()?.snapshot().clone(), config)?)
}

#[async_trait]
impl TableProvider for AppTable {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }
    fn table_type(&self) -> TableType {
        TableType::View
    }
    fn supports_filters_pushdown(&self, filters: &[&Expr]) -> Result<Vec<TableProviderFilterPushDown>> {
        Ok(vec![TableProviderFilterPushDown::Exact; filters.len()])
    }
    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mut plan = LogicalPlanBuilder::from(self.plan.clone());
        for filter in filters {
            plan = plan.filter(filter.clone())?;
        }
        if let Some(indices) = projection {
            let columns = indices.iter().map(|i| Expr::Column(self.plan.schema().qualified_field(*i).into()));
            plan = plan.project(columns.collect::<Vec<_>>())?;
        }
        plan = plan.limit(0, limit)?;
        state.create_physical_plan(&plan.build()?).await
    }
}

/// A session in which nothing exists but the views of one app.
pub(crate) async fn session(
    inner: &Inner,
    app: &AppId,
    scope: Scope,
    wanted: &[Table],
) -> std::result::Result<SessionState, LakeError> {
    let schema = MemorySchemaProvider::new();
    let mut tables = Vec::new();
    for table in wanted {
        let handle = inner.table(*table);
        let (delta, rows) = match scope {
            Scope::Now => {
                let (view, rows) = handle.view_with_rows(&inner.buffers);
                (view.delta, rows)
            }
            Scope::At(versions) => (handle.at(versions.get(*table)).await?, Vec::new()),
        };
        schema.register_table(table.name().to_owned(), Arc::new(AppTable::new(app, *table, &delta, None, rows)?))?;
        tables.push(delta);
    }
    let state = bare_session(Arc::clone(&inner.runtime), Arc::new(schema))?;
    for delta in tables {
        delta.update_datafusion_session(&state)?;
    }
    Ok(state)
}

/// A session over rows of the log alone.
pub(crate) fn session_over_rows(
    inner: &Inner,
    app: &AppId,
    table: Table,
    rows: Vec<Stored>,
) -> std::result::Result<SessionState, LakeError> {
    let plain = Arc::new(Schema::new(table.schema().fields().clone()));
    let scan = LogicalPlanBuilder::scan(table.name(), provider_as_source(fresh_rows(plain, rows)?), None)?;
    let plan = scan.filter(col("app").eq(lit(app.as_str())))?.build()?;
    let view = AppTable { schema: Arc::new(plan.schema().as_arrow().clone()), plan };
    let schema = MemorySchemaProvider::new();
    schema.register_table(table.name().to_owned(), Arc::new(view))?;
    bare_session(Arc::clone(&inner.runtime), Arc::new(schema))
}

/// A session over explicit files of one table, for reading a version range.
pub(crate) fn session_over(
    inner: &Inner,
    app: &AppId,
    table: Table,
    delta: &DeltaTable,
    files: Option<Vec<Add>>,
) -> std::result::Result<SessionState, LakeError> {
    let schema = MemorySchemaProvider::new();
    schema.register_table(table.name().to_owned(), Arc::new(AppTable::new(app, table, delta, files, Vec::new())?))?;
    let state = bare_session(Arc::clone(&inner.runtime), Arc::new(schema))?;
    delta.update_datafusion_session(&state)?;
    Ok(state)
}

fn bare_session(
    runtime: Arc<RuntimeEnv>,
    schema: Arc<MemorySchemaProvider>,
) -> std::result::Result<SessionState, LakeError> {
    let catalog = MemoryCatalogProvider::new();
    catalog.register_schema(SCHEMA, schema)?;
    let catalogs = MemoryCatalogProviderList::new();
    datafusion::catalog::CatalogProviderList::register_catalog(&catalogs, CATALOG.to_owned(), Arc::new(catalog));
    let mut config = SessionConfig::new()
        .with_default_catalog_and_schema(CATALOG, SCHEMA)
        .with_create_default_catalog_and_schema(false)
        .with_information_schema(false)
        .with_target_partitions(2);
    // A recursive query can run for ever in constant memory.
    config.options_mut().execution.enable_recursive_ctes = false;
    let mut state = SessionStateBuilder::new_with_default_features()
        .with_config(config)
        .with_runtime_env(runtime)
        .with_catalog_list(Arc::new(catalogs))
        // `generate_series` and its like make rows out of nothing; nobody needs them on telemetry.
        .with_table_functions(HashMap::new())
        .with_table_factories(HashMap::new())
        .with_physical_optimizer_rule(Arc::new(GroupByWords))
        .build();
    for name in UNBOUNDED {
        state.deregister_udf(name)?;
    }
    Ok(state)
}

/// Functions whose one call can make gigabytes out of two numbers, or compute for minutes: neither is counted by the memory cap or
/// can be cancelled.
const UNBOUNDED: [&str; 8] =
    ["array_repeat", "array_resize", "generate_series", "levenshtein", "lpad", "range", "repeat", "rpad"];
