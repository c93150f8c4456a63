//! Columns of a Parquet file as columns of one of our tables: by name, cast where the meaning cannot change. What is no column
//! of ours becomes an attribute.

use crate::column::{Column, Text};
use crate::decode::short;
use crate::rows::Table;
use arrow::array::{Array, ArrayRef, AsArray, Float64Array, Int64Array, RecordBatch, StringArray, new_null_array};
use arrow::compute::{CastOptions, can_cast_types, cast_with_options};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef};
use arrow::error::ArrowError;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Texts that are checked as a whole with their row; all others are short words.
const LONG: [&str; 6] = ["interaction_id", "label", "event", "question_text", "answer_text", "reason"];
/// Set for every row, whatever the file says.
const OURS: [&str; 4] = ["app", "received_date", "source", "trust"];

/// Ids of persons are no attributes: they are left out where the table has no column for them.
const PERSONS: [&str; 2] = ["user_id", "enduser.id"];

/// How the columns of one file become those of a table.
pub struct Mapping {
    pub(crate) table: Table,
    /// The table's columns, all nullable: what is missing is found with its row.
    schema: SchemaRef,
    /// Place in the file of each column of the table.
    from: Vec<Option<usize>>,
    /// Places in the file of columns that the table does not have, with their names.
    extra: Vec<(usize, String)>,
    /// Columns that are not kept, because the table has no attributes or they cannot be written as text.
    pub ignored: Vec<String>,
}

/// Rows of a file in the columns of the table.
pub struct Mapped {
    pub(crate) rows: RecordBatch,
    /// Rows with a value that its column cannot hold.
    pub(crate) bad: BTreeMap<usize, String>,
    /// Numbers of a row that were NaN or infinite.
    pub(crate) nonfinite: Vec<i32>,
    pub(crate) extra: Vec<(String, StringArray)>,
}

impl Mapping {
    /// For the files of one schema.
    ///
    /// # Errors
    /// The reason, when a column of the table's name has a type that cannot be read as the table's.
    pub fn new(table: Table, file: &Schema) -> Result<Self, String> {
        let own = table.schema();
        let schema = own.fields().iter().map(|f| f.as_ref().clone().with_nullable(true)).collect::<Vec<_>>();
        let mut from = Vec::new();
        for field in own.fields() {
            let place = file.fields().iter().position(|f| f.name() == field.name());
            let place = place.filter(|_| !OURS.contains(&field.name().as_str()));
            if let Some(have) = place.map(|i| file.field(i).data_type())
                && !is_readable(have, field.data_type())
            {
                return Err(format!(
                    "column `{}` is {have}, which cannot be read as {}",
                    field.name(),
                    field.data_type()
                ));
            }
            from.push(place);
        }
        let foreign = file.fields().iter().enumerate().filter(|(_, f)| own.column_with_name(f.name()).is_none());
        let keeps = own.column_with_name("attrs").is_some();
        let (extra, ignored): (Vec<_>, Vec<_>) = foreign.partition(|(_, f)| keeps && can_be_attribute(f));
        let extra = extra.into_iter().map(|(i, f)| (i, f.name().clone())).collect();
        let ignored = ignored.into_iter().map(|(_, f)| f.name().clone()).collect();
        Ok(Self { table, schema: Arc::new(Schema::new(schema)), from, extra, ignored })
    }

    /// The rows of one batch of the file.
    ///
    /// # Errors
    /// When Arrow refuses a cast that it promised.
    pub fn apply(&self, file: &RecordBatch) -> Result<Mapped, ArrowError> {
        let mut bad = BTreeMap::new();
        let mut nonfinite = vec![0; file.num_rows()];
        let mut columns = Vec::new();
        for (field, place) in self.schema.fields().iter().zip(&self.from) {
            let Some(array) = place.map(|i| file.column(i)) else {
                columns.push(new_null_array(field.data_type(), file.num_rows()));
                continue;
            };
            let mut column = convert(array, field.data_type())?;
            for row in lost(array, &column) {
                bad.entry(row).or_insert_with(|| format!("the value of `{}` does not fit its column", field.name()));
            }
            match field.data_type() {
                DataType::Float64 => column = finite(&column, &mut nonfinite),
                DataType::Utf8 if !LONG.contains(&field.name().as_str()) => column = shorten(column),
                _ => {}
            }
            columns.push(column);
        }
        let extra = self.extra.iter().map(|(i, name)| {
            let text = convert(file.column(*i), &DataType::Utf8)?;
            Ok((name.clone(), text.as_string::<i32>().clone()))
        });
        let extra = extra.collect::<Result<Vec<_>, ArrowError>>()?;
        Ok(Mapped { rows: RecordBatch::try_new(Arc::clone(&self.schema), columns)?, bad, nonfinite, extra })
    }
}

fn can_be_attribute(field: &Field) -> bool {
    !PERSONS.contains(&field.name().as_str()) && can_cast_types(field.data_type(), &DataType::Utf8)
}

/// Whether a value of type `have` means the same as one of type `want`.
fn is_readable(have: &DataType, want: &DataType) -> bool {
    let have = if let DataType::Dictionary(_, values) = have { values } else { have };
    let text = matches!(have, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let number = have.is_integer() || have.is_floating();
    let fits = match want {
        DataType::Utf8 => {
            text || number || matches!(have, DataType::Binary | DataType::LargeBinary | DataType::BinaryView)
        }
        DataType::Int32 | DataType::Int64 => number,
        DataType::Float64 | DataType::Float32 => number || have.is_decimal(),
        DataType::Timestamp(..) => {
            text || matches!(have, DataType::Timestamp(..) | DataType::Date32 | DataType::Date64)
        }
        DataType::List(want) => match have {
            DataType::List(have) | DataType::LargeList(have) | DataType::FixedSizeList(have, _) => {
                is_readable(have.data_type(), want.data_type())
            }
            _ => false,
        },
        DataType::Map(..) => matches!(have, DataType::Map(..)),
        other => have == other,
    };
    *have == DataType::Null || have == want || (fits && can_cast_types(have, want))
}

fn convert(array: &ArrayRef, to: &DataType) -> Result<ArrayRef, ArrowError> {
    if array.data_type() == to {
        return Ok(Arc::clone(array));
    }
    let options = CastOptions { safe: true, ..CastOptions::default() };
    if array.data_type().is_floating() && to.is_integer() {
        // frameworks without nullable integers write them as floats, with NaN for none
        let floats = cast_with_options(array, &DataType::Float64, &options)?;
        let whole = |v: f64| (v.fract() == 0.0 && v.abs() < 2f64.powi(63)).then_some(v as i64);
        let ints: Int64Array = floats.as_primitive::<Float64Type>().iter().map(|v| v.and_then(whole)).collect();
        return cast_with_options(&ints, to, &options);
    }
    cast_with_options(array, to, &options)
}

/// Rows that had a value before the cast and have none after it.
fn lost(before: &ArrayRef, after: &ArrayRef) -> Vec<usize> {
    let nulls = before.logical_nulls();
    if after.null_count() == nulls.as_ref().map_or(0, |n| n.null_count()) {
        return Vec::new();
    }
    let nan = before.data_type().is_floating().then(|| convert(before, &DataType::Float64).ok()).flatten();
    let is_nan = |i: usize| nan.as_ref().is_some_and(|a| a.as_primitive::<Float64Type>().value(i).is_nan());
    let had = |i: &usize| nulls.as_ref().is_none_or(|n| n.is_valid(*i));
    (0..after.len()).filter(|i| after.is_null(*i)).filter(had).filter(|i| !is_nan(*i)).collect()
}

/// Numbers that are NaN or infinite become NULL and are counted.
fn finite(column: &ArrayRef, counts: &mut [i32]) -> ArrayRef {
    let Some(numbers) = column.as_primitive_opt::<Float64Type>() else { return Arc::clone(column) };
    if numbers.values().iter().all(|v| v.is_finite()) {
        return Arc::clone(column);
    }
    let kept = numbers.iter().zip(counts).map(|(v, count)| {
        let kept = v.filter(|v| v.is_finite());
        *count += i32::from(v.is_some() && kept.is_none());
        kept
    });
    Arc::new(kept.collect::<Float64Array>())
}

/// Words without control characters, of at most 128 bytes.
fn shorten(column: ArrayRef) -> ArrayRef {
    let Some(texts) = column.as_string_opt::<i32>() else { return column };
    let same = texts.iter().flatten().all(|t| short(t.into()).is_some_and(|s| matches!(s, Text::Borrowed(_))));
    if same {
        return column;
    }
    let mut out = <Option<Text<'_>> as Column>::builder(texts.len());
    for text in texts {
        out.append_option(text.and_then(|t| short(t.into())));
    }
    Arc::new(out.finish())
}
