//! What makes a running query stop. DataFusion sets a query aside only between batches of its sources, so a join, or a condition
//! that is slow to evaluate, computes for seconds after its task was aborted. Here every operator and every condition of a join
//! looks first whether the query is still wanted.

use arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::session_state::SessionState;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::{
    ColumnarValue, JoinType, LogicalPlan, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility, lit,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PhysicalExpr, PlanProperties};
use futures::StreamExt;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether one query is to stop.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Lets the query fail at the next place that looks.
    pub fn now(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            return Err(DataFusionError::Execution("the query was cancelled".to_owned()));
        }
        Ok(())
    }

    /// The plan to execute, with a look before every batch of every operator.
    pub async fn physical_plan(&self, state: &SessionState, plan: &LogicalPlan) -> Result<Arc<dyn ExecutionPlan>> {
        let plan = self.watch_joins(state.optimize(plan)?)?;
        let plan = state.query_planner().create_physical_plan(&plan, state).await?;
        let watched = plan.transform_up(|node| {
            let watched: Arc<dyn ExecutionPlan> = Arc::new(Watched { input: node, cancel: self.clone() });
            Ok(Transformed::yes(watched))
        })?;
        Ok(watched.data)
    }

    /// A join with a condition, and one that only asks whether there is a match, can go through all pairs of rows without handing
    /// out a batch: the look is a part of the condition.
    fn watch_joins(&self, plan: LogicalPlan) -> Result<LogicalPlan> {
        let wanted = ScalarUDF::new_from_impl(StillWanted::new(self.clone()));
        let watched = plan.transform_up_with_subqueries(|node| match node {
            // NOT IN knows three values of truth, which a condition would change
            LogicalPlan::Join(mut join) if !join.null_aware && (join.filter.is_some() || only_asks(join.join_type)) => {
                let condition = join.filter.take().unwrap_or_else(|| lit(true));
                join.filter = Some(wanted.call(vec![condition]));
                Ok(Transformed::yes(LogicalPlan::Join(join)))
            }
            other => Ok(Transformed::no(other)),
        })?;
        Ok(watched.data)
    }
}

fn only_asks(kind: JoinType) -> bool {
    !matches!(kind, JoinType::Inner | JoinType::Left | JoinType::Right | JoinType::Full)
}

/// An operator that looks before every batch.
#[derive(Debug)]
struct Watched {
    input: Arc<dyn ExecutionPlan>,
    cancel: Cancel,
}

impl DisplayAs for Watched {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watched")
    }
}

impl ExecutionPlan for Watched {
    fn name(&self) -> &'static str {
        "Watched"
    }
    /// Operators that look for the type of their input find it.
    fn downcast_delegate(&self) -> Option<&dyn ExecutionPlan> {
        Some(self.input.as_ref())
    }
    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }
    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }
    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }
    fn with_new_children(self: Arc<Self>, mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let (Some(input), None) = (children.pop(), children.pop()) else {
            return Err(DataFusionError::Internal("a watched operator has one input".to_owned()));
        };
        Ok(Arc::new(Self { input, cancel: self.cancel.clone() }))
    }
    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let input = self.input.execute(partition, context)?;
        let (schema, cancel): (SchemaRef, _) = (input.schema(), self.cancel.clone());
        let batches = input.map(move |batch| cancel.check().and(batch));
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
    }
}

/// SQL's `condition`, unless the query is to stop.
#[derive(Debug)]
struct StillWanted {
    cancel: Cancel,
    signature: Signature,
}

impl StillWanted {
    fn new(cancel: Cancel) -> Self {
        // volatile: nobody may compute it once and for all
        Self { cancel, signature: Signature::exact(vec![DataType::Boolean], Volatility::Volatile) }
    }
}

impl PartialEq for StillWanted {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.cancel.0, &other.cancel.0)
    }
}
impl Eq for StillWanted {}
impl Hash for StillWanted {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.cancel.0).hash(state);
    }
}

impl ScalarUDFImpl for StillWanted {
    fn name(&self) -> &'static str {
        "still_wanted"
    }
    fn signature(&self) -> &Signature {
        &self.signature
    }
    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Boolean)
    }
    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        self.cancel.check()?;
        args.args.into_iter().next().ok_or_else(|| DataFusionError::Internal("no condition".to_owned()))
    }
}
