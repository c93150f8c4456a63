//! The plan node: a partial aggregation over words that reads its Parquet files itself.

use super::read::Source;
use super::table::{GroupTable, Words};
use arrow::array::{ArrayRef, AsArray as _, BooleanArray, RecordBatch};
use arrow::datatypes::SchemaRef;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::aggregate::AggregateFunctionExpr;
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType, ReplaceChildrenOptions};
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc::Sender;

/// Groups after which the partial states are handed on: the final aggregation, which may use the disk, holds them then.
const MOST_GROUPS: usize = 1 << 16;

/// One aggregate: what it computes of which arguments, of rows that meet its `FILTER (WHERE ...)`.
#[derive(Debug, Clone)]
pub(super) struct Aggregate {
    pub function: Arc<AggregateFunctionExpr>,
    pub arguments: Vec<Arc<dyn PhysicalExpr>>,
    pub filter: Option<Arc<dyn PhysicalExpr>>,
}

impl Aggregate {
    fn evaluate(&self, rows: &RecordBatch) -> Result<(Vec<ArrayRef>, Option<BooleanArray>)> {
        let array = |e: &Arc<dyn PhysicalExpr>| e.evaluate(rows)?.into_array(rows.num_rows());
        let values = self.arguments.iter().map(array).collect::<Result<_>>()?;
        let filter = self.filter.as_ref().map(array).transpose()?;
        Ok((values, filter.and_then(|f| f.as_boolean_opt().cloned())))
    }
}

/// Takes the place of a partial aggregation and the scan below it.
#[derive(Debug)]
pub(crate) struct GroupScan {
    source: Arc<Source>,
    aggregates: Vec<Aggregate>,
    partitions: usize,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl GroupScan {
    /// Partial states with `schema`, as the aggregation that this replaces would hand them out.
    pub(super) fn new(source: Source, aggregates: Vec<Aggregate>, schema: SchemaRef, partitions: usize) -> Self {
        let properties = Arc::new(PlanProperties::new(
            EquivalenceProperties::new(schema),
            Partitioning::UnknownPartitioning(partitions),
            EmissionType::Final,
            Boundedness::Bounded,
        ));
        let metrics = ExecutionPlanMetricsSet::new();
        Self { source: Arc::new(source), aggregates, partitions, properties, metrics }
    }
}

impl DisplayAs for GroupScan {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.source.words.iter().map(|c| self.source.schema.field(*c).name().as_str()).collect();
        write!(f, "GroupScan: files={}, gby=[{}]", self.source.files.len(), words.join(", "))
    }
}

impl ExecutionPlan for GroupScan {
    fn name(&self) -> &'static str {
        "GroupScan"
    }
    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }
    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }
    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        let aggregates = self.aggregates.iter().flat_map(|a| a.arguments.iter().chain(&a.filter));
        for expression in self.source.conditions.iter().chain(aggregates) {
            if f(expression)? == TreeNodeRecursion::Stop {
                return Ok(TreeNodeRecursion::Stop);
            }
        }
        Ok(TreeNodeRecursion::Continue)
    }
    fn replace_children(
        self: Arc<Self>,
        _: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }
    fn with_new_children(self: Arc<Self>, _: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }
    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let functions: Vec<_> = self.aggregates.iter().map(|a| Arc::clone(&a.function)).collect();
        let schema = self.schema();
        let table = GroupTable::new(Arc::clone(&schema), self.source.words.len(), &functions)?;
        let reservation = MemoryConsumer::new(format!("GroupScan[{partition}]")).register(context.memory_pool());
        let mut stream = RecordBatchReceiverStream::builder(schema, 2);
        let work = Work {
            source: Arc::clone(&self.source),
            aggregates: self.aggregates.clone(),
            place: (partition, self.partitions),
            metrics: self.metrics.clone(),
            table: Mutex::new((table, reservation)),
            to: stream.tx(),
        };
        stream.spawn(async move { work.run().await });
        Ok(stream.build())
    }
}

/// One partition at work.
struct Work {
    source: Arc<Source>,
    aggregates: Vec<Aggregate>,
    place: (usize, usize),
    metrics: ExecutionPlanMetricsSet,
    /// Only one side uses it at a time: rows come in, then the partial states go out.
    table: Mutex<(GroupTable, MemoryReservation)>,
    to: Sender<Result<RecordBatch>>,
}

impl Work {
    async fn run(&self) -> Result<()> {
        let mut take = |words: &[&Words], rows: &RecordBatch| self.take(words, rows);
        self.source.read(self.place, &self.metrics, &mut take, || self.hand_on(MOST_GROUPS)).await?;
        self.hand_on(0).await
    }

    fn take(&self, words: &[&Words], rows: &RecordBatch) -> Result<()> {
        let arguments = self.aggregates.iter().map(|a| a.evaluate(rows)).collect::<Result<Vec<_>>>()?;
        let mut held = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        held.0.add(words, &arguments)
    }

    /// Sends the groups on when there are more than `above`.
    async fn hand_on(&self, above: usize) -> Result<()> {
        let states = {
            let mut held = self.table.lock().unwrap_or_else(PoisonError::into_inner);
            let (table, reservation) = &mut *held;
            reservation.try_resize(table.size())?;
            if table.groups() > above { table.take()? } else { None }
        };
        let Some(states) = states else { return Ok(()) };
        let closed = |_| DataFusionError::Execution("nobody reads the groups any more".to_owned());
        self.to.send(Ok(states)).await.map_err(closed)
    }
}
