//! What is there to query, for programs that ask before they do: names, columns, and that no table has keys.

use crate::error::LakeError;
use crate::query::plain;
use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flywheel_telemetry::Table;
use std::sync::Arc;

/// The only catalogue of a query.
pub const CATALOG: &str = "lake";
/// The only schema in it: the app of the caller.
pub const SCHEMA: &str = "app";

/// Columns of a table as a query answers them.
#[must_use]
pub fn columns(table: Table) -> SchemaRef {
    plain(&table.schema())
}

/// Flight SQL's answer about primary keys.
///
/// # Errors
/// Never, short of a bug here.
pub fn no_primary_keys() -> Result<RecordBatch, LakeError> {
    empty(&[
        ("catalog_name", DataType::Utf8, true),
        ("db_schema_name", DataType::Utf8, true),
        ("table_name", DataType::Utf8, false),
        ("column_name", DataType::Utf8, false),
        ("key_name", DataType::Utf8, true),
        ("key_sequence", DataType::Int32, false),
    ])
}

/// Flight SQL's answer about foreign keys, in either direction.
///
/// # Errors
/// Never, short of a bug here.
pub fn no_foreign_keys() -> Result<RecordBatch, LakeError> {
    empty(&[
        ("pk_catalog_name", DataType::Utf8, true),
        ("pk_db_schema_name", DataType::Utf8, true),
        ("pk_table_name", DataType::Utf8, false),
        ("pk_column_name", DataType::Utf8, false),
        ("fk_catalog_name", DataType::Utf8, true),
        ("fk_db_schema_name", DataType::Utf8, true),
        ("fk_table_name", DataType::Utf8, false),
        ("fk_column_name", DataType::Utf8, false),
        ("key_sequence", DataType::Int32, false),
        ("fk_key_name", DataType::Utf8, true),
        ("pk_key_name", DataType::Utf8, true),
        ("update_rule", DataType::UInt8, false),
        ("delete_rule", DataType::UInt8, false),
    ])
}

fn empty(columns: &[(&str, DataType, bool)]) -> Result<RecordBatch, LakeError> {
    let fields = columns.iter().map(|(name, kind, nullable)| Field::new(*name, kind.clone(), *nullable));
    Ok(RecordBatch::new_empty(Arc::new(Schema::new(fields.collect::<Vec<_>>()))))
}
