//! Answers to the questions that drivers ask before the first query: what there is, and what this server can do.

use crate::config::FlightConfig;
use arrow_flight::error::FlightError;
use arrow_flight::sql::metadata::{SqlInfoDataBuilder, XdbcTypeInfoDataBuilder};
use arrow_flight::sql::{
    CommandGetCatalogs, CommandGetDbSchemas, CommandGetSqlInfo, CommandGetTableTypes, CommandGetTables,
    CommandGetXdbcTypeInfo, SqlInfo, SqlSupportedTransaction,
};
use flywheel_lake::catalogue::{CATALOG, SCHEMA, columns};
use flywheel_lake::{RecordBatch, Table};

type Answer = Result<RecordBatch, FlightError>;

/// Views to us; most tools look for tables only.
const TABLE: &str = "TABLE";

pub fn catalogs(ask: CommandGetCatalogs) -> Answer {
    let mut out = ask.into_builder();
    out.append(CATALOG);
    out.build()
}

pub fn schemas(ask: CommandGetDbSchemas) -> Answer {
    let mut out = ask.into_builder();
    out.append(CATALOG, SCHEMA);
    out.build()
}

pub fn tables(ask: CommandGetTables) -> Answer {
    let mut out = ask.into_builder();
    for table in Table::ALL {
        out.append(CATALOG, SCHEMA, table.name(), TABLE, &columns(table))?;
    }
    out.build()
}

pub fn table_types(ask: CommandGetTableTypes) -> Answer {
    let mut out = ask.into_builder();
    out.append(TABLE);
    out.build()
}

pub fn sql_info(ask: CommandGetSqlInfo, config: &FlightConfig) -> Answer {
    let mut info = SqlInfoDataBuilder::new();
    info.append(SqlInfo::FlightSqlServerName, "Flywheel");
    info.append(SqlInfo::FlightSqlServerVersion, env!("CARGO_PKG_VERSION"));
    // the version of the format, as the messages have no other
    info.append(SqlInfo::FlightSqlServerArrowVersion, "1.5");
    info.append(SqlInfo::FlightSqlServerReadOnly, true);
    info.append(SqlInfo::FlightSqlServerSql, true);
    info.append(SqlInfo::FlightSqlServerSubstrait, false);
    info.append(SqlInfo::FlightSqlServerTransaction, SqlSupportedTransaction::None as i32);
    // a query ends when its call does; there is no message for it
    info.append(SqlInfo::FlightSqlServerCancel, false);
    info.append(SqlInfo::FlightSqlServerBulkIngestion, false);
    info.append(SqlInfo::FlightSqlServerStatementTimeout, i32::try_from(config.timeout_s * 1000).unwrap_or(i32::MAX));
    info.append(SqlInfo::SqlIdentifierQuoteChar, "\"");
    info.append(SqlInfo::SqlAllTablesAreSelectable, true);
    let info = info.build()?;
    ask.into_builder(&info).build()
}

/// Types have no names of their own here: the Arrow types of the columns say everything.
pub fn types(ask: CommandGetXdbcTypeInfo) -> Answer {
    XdbcTypeInfoDataBuilder::new().build()?.record_batch(ask.data_type)
}
