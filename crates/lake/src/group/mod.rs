//! Grouping by words. Telemetry repeats the same few hundred words in a column (templates, bundles, device classes), and Parquet
//! stores them as dictionaries; the query engine, though, decodes every word of every row and compares it with those of its
//! group. [`GroupByWords`] finds partial aggregations over such columns of our tables and puts a [`exec::GroupScan`] in their
//! place, which groups by the codes of the dictionaries. Everything else of the plan stays: aggregates are the engine's own, the
//! final aggregation joins the partial states with those of rows that are only acknowledged. A plan that is not exactly of the
//! known form is left as it is.

mod exec;
mod read;
mod table;

use crate::append::UNIQUE;
use arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult as _, TreeNode as _};
use datafusion::datasource::physical_plan::{FileSource as _, ParquetSource};
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::physical_expr::expressions::{Column, DynamicFilterPhysicalExpr};
use datafusion::physical_expr::utils::{collect_columns, reassign_expr_columns};
use datafusion::physical_expr::{PhysicalExpr, split_conjunction};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::union::UnionExec;
use exec::{Aggregate, GroupScan};
use read::Source;
use std::collections::HashSet;
use std::sync::Arc;

/// Text that is not words: a dictionary of it would be as large as the column.
const FREE_TEXT: [&str; 4] = ["question_text", "answer_text", "detail", "reason"];
/// Nodes between an aggregation and its scan that only hand rows on.
const HAND_ON: [&str; 4] = ["CoalesceBatchesExec", "CoalescePartitionsExec", "CooperativeExec", "RepartitionExec"];

type Expr = Arc<dyn PhysicalExpr>;

/// The rule; it runs after all of the engine's own.
#[derive(Debug)]
pub(crate) struct GroupByWords;

impl PhysicalOptimizerRule for GroupByWords {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, config: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        let partitions = config.execution.target_partitions.max(1);
        plan.transform_down(|node| {
            let Some(aggregation) = node.downcast_ref::<AggregateExec>() else { return Ok(Transformed::no(node)) };
            match replace(aggregation, partitions)? {
                Some(plan) => Ok(Transformed::yes(plan)),
                None => Ok(Transformed::no(node)),
            }
        })
        .data()
    }
    fn name(&self) -> &'static str {
        "group_by_words"
    }
    fn schema_check(&self) -> bool {
        true
    }
}

/// What is to stand for an aggregation; `None`: itself.
fn replace(aggregation: &AggregateExec, partitions: usize) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    if !is_simple(aggregation) {
        return Ok(None);
    }
    if let Some(scan) = over_scan(aggregation, aggregation.input(), partitions) {
        return Ok(Some(Arc::new(scan)));
    }
    // tables and rows that are only acknowledged: each side is aggregated for itself
    let mut input = aggregation.input();
    while let Some(below) = handed_on(input) {
        input = below;
    }
    let Some(union) = input.downcast_ref::<UnionExec>() else { return Ok(None) };
    let mut sides: Vec<Arc<dyn ExecutionPlan>> = Vec::new();
    let mut found = false;
    for side in union.inputs() {
        if let Some(scan) = over_scan(aggregation, side, partitions) {
            found = true;
            sides.push(Arc::new(scan));
            continue;
        }
        sides.push(Arc::new(AggregateExec::try_new(
            AggregateMode::Partial,
            aggregation.group_expr().clone(),
            aggregation.aggr_expr().to_vec(),
            aggregation.filter_expr().to_vec(),
            Arc::clone(side),
            Arc::clone(&aggregation.input_schema),
        )?));
    }
    Ok(if found { Some(UnionExec::try_new(sides)?) } else { None })
}

/// Whether it groups by plain columns, and its aggregates can take rows in any order.
fn is_simple(aggregation: &AggregateExec) -> bool {
    let by = aggregation.group_expr();
    matches!(aggregation.mode(), AggregateMode::Partial)
        && by.is_single()
        && !by.is_empty()
        && aggregation.limit_options().is_none()
        && aggregation.aggr_expr().iter().all(|a| a.order_bys().is_empty() && a.groups_accumulator_supported())
}

/// The node below one that only hands rows on.
fn handed_on(plan: &Arc<dyn ExecutionPlan>) -> Option<&Arc<dyn ExecutionPlan>> {
    if !HAND_ON.contains(&plan.name()) || plan.fetch().is_some() {
        return None;
    }
    match plan.children().as_slice() {
        [below] => Some(*below),
        _ => None,
    }
}

/// The scan that does the work of `aggregation` over `input`, if that comes from files of a table as they are.
fn over_scan(aggregation: &AggregateExec, input: &Arc<dyn ExecutionPlan>, partitions: usize) -> Option<GroupScan> {
    let mut groups: Vec<Expr> = aggregation.group_expr().expr().iter().map(|(e, _)| Arc::clone(e)).collect();
    let mut aggregates: Vec<Aggregate> = aggregation
        .aggr_expr()
        .iter()
        .zip(aggregation.filter_expr())
        .map(|(a, filter)| Aggregate { function: Arc::clone(a), arguments: a.expressions(), filter: filter.clone() })
        .collect();
    let mut conditions: Vec<Expr> = Vec::new();
    let mut plan = input;
    loop {
        if let Some(below) = handed_on(plan) {
            plan = below;
        } else if let Some(filter) = plan.downcast_ref::<FilterExec>() {
            if plan.fetch().is_some() {
                return None;
            }
            if let Some(columns) = filter.projection() {
                let schema = filter.input().schema();
                let through = |i: usize| {
                    let place = *columns.get(i)?;
                    Some(Arc::new(Column::new(schema.field(place).name(), place)) as Expr)
                };
                rewrite(&mut groups, &mut aggregates, &mut conditions, &through)?;
            }
            conditions.extend(split_conjunction(filter.predicate()).into_iter().cloned());
            plan = filter.input();
        } else if let Some(projection) = plan.downcast_ref::<ProjectionExec>() {
            let through = |i: usize| projection.expr().get(i).map(|p| Arc::clone(&p.expr));
            rewrite(&mut groups, &mut aggregates, &mut conditions, &through)?;
            plan = projection.input();
        } else {
            break;
        }
    }
    let (mut source, below) = files(plan)?;
    conditions.extend(below);
    let schema = Arc::clone(&source.schema);
    let by_name = |e: &Expr| reassign_expr_columns(Arc::clone(e), &schema).ok();
    for group in &groups {
        let column = group.downcast_ref::<Column>()?;
        source.words.push(word_column(&schema, column.name())?);
    }
    for a in &mut aggregates {
        a.arguments = a.arguments.iter().map(by_name).collect::<Option<_>>()?;
        a.filter = a.filter.as_ref().map(|f| by_name(f).ok_or(())).transpose().ok()?;
    }
    for condition in conditions.iter().map(by_name) {
        let condition = condition?;
        // the same condition may stand at the scan and above it
        if !source.conditions.contains(&condition) {
            source.conditions.push(condition);
        }
    }
    source.tested = columns(&source.conditions);
    let in_aggregates: Vec<Expr> =
        aggregates.iter().flat_map(|a| a.arguments.iter().chain(&a.filter)).cloned().collect();
    source.arguments = columns(&in_aggregates);
    Some(GroupScan::new(source, aggregates, aggregation.schema(), partitions))
}

/// Puts every expression in terms of the node below; `through` gives what stands for a column.
fn rewrite(
    groups: &mut [Expr],
    aggregates: &mut [Aggregate],
    conditions: &mut [Expr],
    through: &dyn Fn(usize) -> Option<Expr>,
) -> Option<()> {
    let aggregated = aggregates.iter_mut().flat_map(|a| a.arguments.iter_mut().chain(&mut a.filter));
    for expression in groups.iter_mut().chain(conditions).chain(aggregated) {
        let mut lost = false;
        let new = Arc::clone(expression).transform_down(|e| {
            let Some(column) = e.downcast_ref::<Column>() else { return Ok(Transformed::no(e)) };
            let Some(new) = through(column.index()) else {
                lost = true;
                return Ok(Transformed::no(e));
            };
            // what was put in is of the node below already
            Ok(Transformed::new(new, true, datafusion::common::tree_node::TreeNodeRecursion::Jump))
        });
        *expression = new.data().ok().filter(|_| !lost)?;
    }
    Some(())
}

/// The files below a scan of a Delta table without anything that the files do not say (deleted rows, renamed columns), and the
/// conditions that were pushed down to it.
fn files(plan: &Arc<dyn ExecutionPlan>) -> Option<(Source, Vec<Expr>)> {
    if plan.name() != "DeltaScanExec" {
        return None;
    }
    let logical = plan.schema();
    let mut plan = *plan.children().first()?;
    while let Some(below) = handed_on(plan) {
        plan = below;
    }
    let (config, parquet) = plan.downcast_ref::<DataSourceExec>()?.downcast_to_file_source::<ParquetSource>()?;
    let table = parquet.table_schema();
    let schema = Arc::clone(table.file_schema());
    if config.limit.is_some() || !table.virtual_columns().is_empty() {
        return None;
    }
    // partition columns are not in the files, and a renamed column has another name there
    let same = |f: &arrow::datatypes::FieldRef| {
        schema.field_with_name(f.name()).is_ok_and(|stored| stored.data_type() == f.data_type())
    };
    if !logical.fields().iter().all(same) {
        return None;
    }
    let factory = Arc::clone(parquet.parquet_file_reader_factory()?);
    // a large file may stand in several groups, a piece in each
    let mut seen = HashSet::new();
    let files = config.file_groups.iter().flat_map(|g| g.files());
    let files = files.filter(|f| seen.insert(f.object_meta.location.clone())).cloned();
    let files = files.map(|mut f| {
        f.range = None;
        f
    });
    let pushed = parquet.filter();
    let conditions = pushed.as_ref().map(split_conjunction).unwrap_or_default();
    // those of joins and sorts only save work
    let conditions = conditions.into_iter().filter(|c| !is_dynamic(c)).cloned().collect();
    let source = Source {
        files: files.collect(),
        factory,
        schema,
        words: Vec::new(),
        arguments: Vec::new(),
        conditions: Vec::new(),
        tested: Vec::new(),
    };
    Some((source, conditions))
}

fn is_dynamic(condition: &Expr) -> bool {
    condition.exists(|e| Ok(e.downcast_ref::<DynamicFilterPhysicalExpr>().is_some())).unwrap_or(true)
}

/// Place of a column that holds words.
fn word_column(schema: &SchemaRef, name: &str) -> Option<usize> {
    let place = schema.index_of(name).ok()?;
    let is_text = schema.field(place).data_type() == &DataType::Utf8;
    (is_text && !UNIQUE.contains(&name) && !FREE_TEXT.contains(&name)).then_some(place)
}

/// Columns that the expressions name.
fn columns(expressions: &[Expr]) -> Vec<usize> {
    let found: HashSet<usize> = expressions.iter().flat_map(collect_columns).map(|c| c.index()).collect();
    let mut found: Vec<usize> = found.into_iter().collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use crate::provider::{Scope, session};
    use crate::{Lake, LakeConfig};
    use datafusion::physical_plan::displayable;
    use flywheel_telemetry::Table;
    use flywheel_telemetry::column::Micros;
    use flywheel_telemetry::rows::InteractionRow;
    use flywheel_types::AppId;

    async fn plan(lake: &Lake, query: &str) -> String {
        let app = AppId::new("shop").unwrap();
        let state = session(&lake.inner, &app, Scope::Now, &Table::ALL).await.unwrap();
        let plan = state.create_logical_plan(query).await.unwrap();
        let plan = state.create_physical_plan(&plan).await.unwrap();
        displayable(plan.as_ref()).indent(false).to_string()
    }

    #[tokio::test]
    async fn plans_of_the_known_form_are_replaced_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let lake = Lake::open(LakeConfig::local(dir.path()).unwrap()).await.unwrap();
        let row = |n: i64| InteractionRow {
            app: "shop".into(),
            received_at: Micros(n),
            source: "events".into(),
            trust: "anonymous".into(),
            interaction_id: format!("i-{n}").into(),
            template_id: Some("t".into()),
            ..InteractionRow::default()
        };
        let rows = InteractionRow::encode(&(0..20_000).map(row).collect::<Vec<_>>()).unwrap();
        lake.append_bulk(Table::Interactions, "test", 1, futures::stream::iter([rows])).await.unwrap();
        let fast = [
            "SELECT template_id, bundle, count(*) FROM interactions WHERE received_at > now() - INTERVAL '24 hours' GROUP BY 1, 2",
            "SELECT template_id AS t, avg(ttft_ms) FROM interactions GROUP BY template_id",
            "WITH x AS (SELECT template_id, bundle FROM interactions) SELECT bundle, count(*) FROM x GROUP BY bundle",
        ];
        for query in fast {
            let plan = plan(&lake, query).await;
            assert!(plan.contains("GroupScan: files=1"), "{query}\n{plan}");
        }
        let slow = [
            "SELECT interaction_id, count(*) FROM interactions GROUP BY 1",
            "SELECT app, count(*) FROM interactions GROUP BY 1",
            "SELECT phase, count(*) FROM interactions GROUP BY 1",
            "SELECT upper(template_id), count(*) FROM interactions GROUP BY 1",
            "SELECT template_id, array_agg(bundle ORDER BY ttft_ms) FROM interactions GROUP BY 1",
            "SELECT count(*) FROM interactions WHERE template_id = 't'",
        ];
        for query in slow {
            let plan = plan(&lake, query).await;
            assert!(!plan.contains("GroupScan"), "{query}\n{plan}");
        }
    }
}
