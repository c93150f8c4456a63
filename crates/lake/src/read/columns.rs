//! Columns of a result by name, as Rust values.

use crate::error::LakeError;
use arrow::array::{Array, AsArray, BooleanArray, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Int32Type, Int64Type, TimeUnit, TimestampMicrosecondType};
use std::str::FromStr;

pub(crate) struct Columns<'a>(&'a RecordBatch);

/// A text column.
pub(crate) struct Text(StringArray);

impl Text {
    /// Value at `i`; the empty string for NULL.
    pub fn get(&self, i: usize) -> &str {
        if self.0.is_null(i) { "" } else { self.0.value(i) }
    }
    pub fn opt(&self, i: usize) -> Option<&str> {
        (!self.0.is_null(i)).then(|| self.0.value(i))
    }
}

impl<'a> Columns<'a> {
    pub fn new(batch: &'a RecordBatch) -> Self {
        Self(batch)
    }
    fn column(&self, name: &str, as_type: &DataType) -> Result<arrow::array::ArrayRef, LakeError> {
        let found = self.0.column_by_name(name);
        let column = found.ok_or_else(|| LakeError::Unexpected(format!("the result has no column `{name}`")))?;
        Ok(cast(column, as_type)?)
    }
    pub fn text(&self, name: &str) -> Result<Text, LakeError> {
        Ok(Text(self.column(name, &DataType::Utf8)?.as_string::<i32>().clone()))
    }
    /// A text column of words of an enumeration; unknown words are `None`.
    pub fn words<T: FromStr>(&self, name: &str) -> Result<Vec<Option<T>>, LakeError> {
        let text = self.text(name)?;
        Ok((0..self.0.num_rows()).map(|i| text.opt(i).and_then(|w| w.parse().ok())).collect())
    }
    pub fn micros(&self, name: &str) -> Result<Vec<Option<i64>>, LakeError> {
        let utc = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
        Ok(self.column(name, &utc)?.as_primitive::<TimestampMicrosecondType>().iter().collect())
    }
    pub fn doubles(&self, name: &str) -> Result<Vec<Option<f64>>, LakeError> {
        Ok(self.column(name, &DataType::Float64)?.as_primitive::<Float64Type>().iter().collect())
    }
    pub fn ints(&self, name: &str) -> Result<Vec<Option<i64>>, LakeError> {
        Ok(self.column(name, &DataType::Int64)?.as_primitive::<Int64Type>().iter().collect())
    }
    /// A list column of text, as one vector per row; NULL is empty.
    pub fn text_lists(&self, name: &str) -> Result<Vec<Vec<String>>, LakeError> {
        self.lists(name, |items| {
            let items = cast(items, &DataType::Utf8)?;
            Ok(items.as_string::<i32>().iter().map(|s| s.unwrap_or_default().to_owned()).collect())
        })
    }
    pub fn int_lists(&self, name: &str) -> Result<Vec<Vec<i32>>, LakeError> {
        self.lists(name, |items| {
            let items = cast(items, &DataType::Int32)?;
            Ok(items.as_primitive::<Int32Type>().iter().map(Option::unwrap_or_default).collect())
        })
    }
    pub fn bool_lists(&self, name: &str) -> Result<Vec<Vec<bool>>, LakeError> {
        self.lists(name, |items| {
            let bools: &BooleanArray = items.as_boolean();
            Ok(bools.iter().map(Option::unwrap_or_default).collect())
        })
    }
    fn lists<T>(
        &self,
        name: &str,
        read: impl Fn(&dyn Array) -> Result<Vec<T>, LakeError>,
    ) -> Result<Vec<Vec<T>>, LakeError> {
        let found = self.0.column_by_name(name);
        let column = found.ok_or_else(|| LakeError::Unexpected(format!("the result has no column `{name}`")))?;
        let lists =
            column.as_list_opt::<i32>().ok_or_else(|| LakeError::Unexpected(format!("column `{name}` is no list")))?;
        (0..lists.len()).map(|i| if lists.is_null(i) { Ok(Vec::new()) } else { read(&lists.value(i)) }).collect()
    }
}
