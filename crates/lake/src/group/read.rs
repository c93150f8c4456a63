//! Reads Parquet files row group by row group, the group columns as the dictionaries they are stored with.

use super::table::Words;
use arrow::array::{Array as _, ArrayRef, AsArray as _, BooleanArray, RecordBatch, new_null_array};
use arrow::compute::{and, cast, filter_record_batch, prep_null_mask_filter};
use arrow::datatypes::{DataType, Field, Int32Type, Schema, SchemaRef};
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::parquet::{ParquetAccessPlan, RowGroupAccessPlanFilter};
use datafusion::datasource::physical_plan::{ParquetFileMetrics, ParquetFileReaderFactory};
use datafusion::error::{DataFusionError, Result};
use datafusion::parquet::arrow::ProjectionMask;
use datafusion::parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use datafusion::parquet::arrow::async_reader::{AsyncFileReader, ParquetRecordBatchStreamBuilder};
use datafusion::physical_expr::utils::reassign_expr_columns;
use datafusion::physical_expr::{PhysicalExpr, conjunction_opt};
use datafusion::physical_optimizer::pruning::PruningPredicateBuilder;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use futures::StreamExt as _;
use std::sync::Arc;

/// Rows decoded at once.
const BATCH_ROWS: usize = 16 << 10;

/// What is read of which files.
#[derive(Debug)]
pub(super) struct Source {
    pub files: Vec<PartitionedFile>,
    pub factory: Arc<dyn ParquetFileReaderFactory>,
    /// The columns that the plan reads, as the plan knows them.
    pub schema: SchemaRef,
    /// Group columns in `schema`.
    pub words: Vec<usize>,
    /// Columns in `schema` that the arguments of the aggregates need.
    pub arguments: Vec<usize>,
    /// Conditions over `schema`, all of which a row must meet.
    pub conditions: Vec<Arc<dyn PhysicalExpr>>,
    /// Columns in `schema` that the conditions need.
    pub tested: Vec<usize>,
}

/// An open file: its footer, and the row groups that may hold rows that meet the conditions.
struct Opened {
    plain: SchemaRef,
    encoded: ArrowReaderMetadata,
    /// Row group, and whether all its rows meet the conditions.
    row_groups: Vec<(usize, bool)>,
}

/// Takes rows of [`Source::schema`] by name: the words of the group columns, and the rows for the other expressions.
pub(super) type Take<'a> = dyn FnMut(&[&Words], &RecordBatch) -> Result<()> + Send + 'a;

impl Source {
    /// Reads the row groups that fall to `partition` of `partitions`; after each of them `pause` may hand on what was
    /// gathered.
    pub async fn read<F>(
        &self,
        (partition, partitions): (usize, usize),
        metrics: &ExecutionPlanMetricsSet,
        take: &mut Take<'_>,
        mut pause: impl FnMut() -> F + Send,
    ) -> Result<()>
    where
        F: Future<Output = Result<()>> + Send,
    {
        for (number, file) in self.files.iter().enumerate() {
            let opened = self.open(file, partition, metrics).await?;
            for (row_group, all) in opened.row_groups.iter().copied() {
                if (number + row_group) % partitions == partition {
                    self.row_group(file, &opened, (row_group, all), (partition, metrics), take).await?;
                    pause().await?;
                }
            }
        }
        Ok(())
    }

    async fn open(
        &self,
        file: &PartitionedFile,
        partition: usize,
        metrics: &ExecutionPlanMetricsSet,
    ) -> Result<Opened> {
        let mut reader = self.factory.create_reader(partition, file.clone(), None, metrics)?;
        let footer = reader.get_metadata(Some(&ArrowReaderOptions::new())).await?;
        let plain = ArrowReaderMetadata::try_new(Arc::clone(&footer), ArrowReaderOptions::new())?;
        let name = |c: &usize| self.schema.field(*c).name();
        let fields = plain.schema().fields().iter().map(|f| {
            let is_word = f.data_type() == &DataType::Utf8 && self.words.iter().any(|c| name(c) == f.name());
            if is_word { Arc::new(f.as_ref().clone().with_data_type(encoded())) } else { Arc::clone(f) }
        });
        let schema = Arc::new(Schema::new_with_metadata(fields.collect::<Vec<_>>(), plain.schema().metadata().clone()));
        let encoded = ArrowReaderMetadata::try_new(footer, ArrowReaderOptions::new().with_schema(schema))?;
        let file_metrics = ParquetFileMetrics::new(partition, file.object_meta.location.as_ref(), metrics);
        let row_groups = self.prune(&plain, &file_metrics);
        Ok(Opened { plain: Arc::clone(plain.schema()), encoded, row_groups })
    }

    /// The row groups whose statistics do not exclude them.
    fn prune(&self, file: &ArrowReaderMetadata, metrics: &ParquetFileMetrics) -> Vec<(usize, bool)> {
        let count = file.metadata().num_row_groups();
        let Some(condition) = conjunction_opt(self.conditions.iter().cloned()) else {
            return (0..count).map(|i| (i, true)).collect();
        };
        // a file of an earlier version may lack a column: then nothing is known
        let predicate = reassign_expr_columns(condition, file.schema())
            .and_then(|c| PruningPredicateBuilder::new().with_file_schema(Arc::clone(file.schema())).try_build(c));
        let Ok(predicate) = predicate else {
            return (0..count).map(|i| (i, false)).collect();
        };
        let mut filter = RowGroupAccessPlanFilter::new(ParquetAccessPlan::new_all(count));
        let groups = file.metadata().row_groups();
        filter.prune_by_statistics(file.schema(), file.parquet_schema(), groups, &predicate, metrics);
        let full = filter.is_fully_matched().clone();
        filter.row_group_indexes().map(|i| (i, full.get(i).copied().unwrap_or(false))).collect()
    }

    async fn row_group(
        &self,
        file: &PartitionedFile,
        opened: &Opened,
        (row_group, all): (usize, bool),
        (partition, metrics): (usize, &ExecutionPlanMetricsSet),
        take: &mut Take<'_>,
    ) -> Result<()> {
        let tested: &[usize] = if all { &[] } else { &self.tested };
        let needed = |c: &usize| self.words.contains(c) || self.arguments.contains(c) || tested.contains(c);
        let columns: Vec<usize> = (0..self.schema.fields().len()).filter(needed).collect();
        let roots = columns.iter().filter_map(|c| opened.plain.index_of(self.schema.field(*c).name()).ok());
        let mask = ProjectionMask::roots(opened.encoded.parquet_schema(), roots);
        let reader: Box<dyn AsyncFileReader> = self.factory.create_reader(partition, file.clone(), None, metrics)?;
        let mut rows = ParquetRecordBatchStreamBuilder::new_with_metadata(reader, opened.encoded.clone())
            .with_row_groups(vec![row_group])
            .with_projection(mask)
            .with_batch_size(BATCH_ROWS)
            .build()?;
        while let Some(batch) = rows.next().await {
            let mut batch = self.in_order(&batch?, &columns)?;
            if !all {
                let Some(mask) = self.matching(&batch)? else { continue };
                batch = filter_record_batch(&batch, &mask)?;
            }
            if batch.num_rows() > 0 {
                let words = self.words.iter().map(|c| self.word_column(&batch, *c)).collect::<Result<Vec<_>>>()?;
                take(&words.iter().collect::<Vec<_>>(), &self.decoded(&batch, &self.arguments)?)?;
            }
        }
        Ok(())
    }

    /// The rows with the columns of the schema at their places; those that are not read, and those that the file does not
    /// have, are NULL.
    fn in_order(&self, batch: &RecordBatch, read: &[usize]) -> Result<RecordBatch> {
        let mut fields = Vec::new();
        let mut columns: Vec<ArrayRef> = Vec::new();
        for (c, field) in self.schema.fields().iter().enumerate() {
            let found = batch.column_by_name(field.name()).filter(|_| read.contains(&c));
            let column = match found {
                Some(column) if self.words.contains(&c) => Arc::clone(column),
                Some(column) => cast(column, field.data_type())?,
                None if read.contains(&c) && self.words.contains(&c) => new_null_array(&encoded(), batch.num_rows()),
                // nobody looks at it unless it is read: NULL costs nothing
                None if read.contains(&c) => new_null_array(field.data_type(), batch.num_rows()),
                None => new_null_array(&DataType::Null, batch.num_rows()),
            };
            fields.push(Field::new(field.name(), column.data_type().clone(), true));
            columns.push(column);
        }
        Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?)
    }

    /// The rows that meet all conditions; `None` when there are none.
    fn matching(&self, batch: &RecordBatch) -> Result<Option<BooleanArray>> {
        let batch = self.decoded(batch, &self.tested)?;
        let mut mask: Option<BooleanArray> = None;
        for condition in &self.conditions {
            let found = condition.evaluate(&batch)?.into_array(batch.num_rows())?;
            let found = found
                .as_boolean_opt()
                .ok_or_else(|| DataFusionError::Internal("a condition that is no yes or no".to_owned()))?;
            let found = if found.null_count() > 0 { prep_null_mask_filter(found) } else { found.clone() };
            mask = Some(match mask {
                Some(mask) => and(&mask, &found)?,
                None => found,
            });
        }
        Ok(mask.filter(|m| m.true_count() > 0))
    }

    /// The rows with `columns` as the expressions know them, which is never as dictionaries.
    fn decoded(&self, batch: &RecordBatch, columns: &[usize]) -> Result<RecordBatch> {
        if !columns.iter().any(|c| self.words.contains(c)) {
            return Ok(batch.clone());
        }
        let mut fields: Vec<_> = batch.schema().fields().iter().cloned().collect();
        let mut arrays = batch.columns().to_vec();
        for c in columns.iter().filter(|c| self.words.contains(c)) {
            let field = self.schema.field(*c);
            if let (Some(array), Some(slot)) = (arrays.get_mut(*c), fields.get_mut(*c)) {
                *array = cast(array, field.data_type())?;
                *slot = Arc::new(Field::new(field.name(), field.data_type().clone(), true));
            }
        }
        Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays)?)
    }

    fn word_column(&self, batch: &RecordBatch, column: usize) -> Result<Words> {
        // another program may have written the file with another type of text
        let array = cast(batch.column(column), &encoded())?;
        let words = array.as_dictionary_opt::<Int32Type>().cloned();
        words.ok_or_else(|| {
            DataFusionError::Internal(format!("`{}` is no dictionary", self.schema.field(column).name()))
        })
    }
}

/// The type in which words are read.
fn encoded() -> DataType {
    DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8))
}
