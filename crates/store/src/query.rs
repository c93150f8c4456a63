//! A query text with its arguments, and rows with typed, named columns. The only place that speaks to the driver.

use crate::error::{Error, Result};
use chrono::{DateTime, Utc};
use flywheel_types as types;
use serde::de::DeserializeOwned;
use sqlx::AnyConnection;
use sqlx::any::{AnyArguments, AnyRow};
use sqlx::{Arguments as _, AssertSqlSafe, Executor as _, Row as _};
use std::fmt::Display;
use std::str::FromStr;

/// SQL text plus bound arguments. Values never enter the text.
pub(crate) struct Query {
    sql: String,
    args: AnyArguments,
    failed: Option<Error>,
}

/// Starts a query. `sql` is made of our own constants only.
pub(crate) fn q(sql: impl Into<String>) -> Query {
    Query { sql: sql.into(), args: AnyArguments::default(), failed: None }
}

impl Query {
    /// Binds the next placeholder.
    pub(crate) fn bind(mut self, value: impl Arg) -> Self {
        if let Err(e) = value.add(&mut self.args) {
            self.failed.get_or_insert(e);
        }
        self
    }

    fn prepare(self) -> Result<(AssertSqlSafe<String>, AnyArguments)> {
        match self.failed {
            Some(e) => Err(e),
            None => Ok((AssertSqlSafe(self.sql), self.args)),
        }
    }

    /// Runs and returns how many rows were changed.
    pub(crate) async fn execute(self, conn: &mut AnyConnection) -> Result<u64> {
        let (sql, args) = self.prepare()?;
        Ok(conn.execute(sqlx::query_with(sql, args)).await?.rows_affected())
    }

    /// Runs and returns every row, mapped. The statement is always stepped to its end.
    pub(crate) async fn fetch<T: FromRow>(self, conn: &mut AnyConnection) -> Result<Vec<T>> {
        let (sql, args) = self.prepare()?;
        let rows = conn.fetch_all(sqlx::query_with(sql, args)).await?;
        rows.into_iter().map(|r| T::from_row(&Row(r))).collect()
    }

    /// Runs and returns the first row.
    pub(crate) async fn fetch_opt<T: FromRow>(self, conn: &mut AnyConnection) -> Result<Option<T>> {
        Ok(self.fetch(conn).await?.into_iter().next())
    }
}

/// A value that can be bound.
pub(crate) trait Arg {
    fn add(self, args: &mut AnyArguments) -> Result<()>;
}

fn add<'q, T>(args: &mut AnyArguments, value: T) -> Result<()>
where
    T: sqlx::Encode<'q, sqlx::Any> + sqlx::Type<sqlx::Any>,
{
    args.add(value).map_err(|e| Error::Database(sqlx::Error::Encode(e)))
}

macro_rules! arg {
    ($($t:ty => |$v:ident| $e:expr;)+) => {$(
        impl Arg for $t {
            fn add(self, args: &mut AnyArguments) -> Result<()> {
                let $v = self;
                add(args, $e)
            }
        }
    )+};
}

arg! {
    i64 => |v| v;
    Option<i64> => |v| v;
    i32 => |v| i64::from(v);
    u32 => |v| i64::from(v);
    bool => |v| i64::from(v);
    &str => |v| v.to_owned();
    String => |v| v;
    &String => |v| v.clone();
    Option<String> => |v| v;
    &Option<String> => |v| v.clone();
    Option<&str> => |v| v.map(str::to_owned);
    DateTime<Utc> => |v| v.timestamp_micros();
    Option<DateTime<Utc>> => |v| v.map(|t| t.timestamp_micros());
    types::Digest => |v| v.to_hex();
    Option<types::Digest> => |v| v.map(types::Digest::to_hex);
    types::InstallId => |v| v.to_string();
    Option<types::InstallId> => |v| v.map(|i| i.to_string());
}

macro_rules! text_arg {
    ($($t:ty),+ $(,)?) => {$(
        impl Arg for &$t {
            fn add(self, args: &mut AnyArguments) -> Result<()> {
                add(args, self.as_str().to_owned())
            }
        }
        impl Arg for Option<&$t> {
            fn add(self, args: &mut AnyArguments) -> Result<()> {
                add(args, self.map(|v| v.as_str().to_owned()))
            }
        }
        impl Arg for &Option<$t> {
            fn add(self, args: &mut AnyArguments) -> Result<()> {
                add(args, self.as_ref().map(|v| v.as_str().to_owned()))
            }
        }
    )+};
}

text_arg! {
    types::AppId, types::InteractionId, types::TemplateId, types::ChunkId, types::RolloutId,
    types::CandidateId, types::FindingId, types::JobId,
}

/// A stored JSON value as text.
pub(crate) fn json_text<T: serde::Serialize>(what: &'static str, value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::invalid(what, e.to_string()))
}

/// A word of an enumeration as it is stored.
macro_rules! word_arg {
    ($($t:ty),+ $(,)?) => {$(
        impl $crate::query::Arg for $t {
            fn add(self, args: &mut sqlx::any::AnyArguments) -> $crate::error::Result<()> {
                $crate::query::Arg::add(self.as_str(), args)
            }
        }
    )+};
}
pub(crate) use word_arg;

word_arg! {
    types::ChunkState, types::RolloutState, types::JobState, types::CandidateState, types::Verdict,
    types::Role, types::BundleKind,
}

/// One result row.
pub(crate) struct Row(AnyRow);

/// A type that is made from one row.
pub(crate) trait FromRow: Sized {
    fn from_row(row: &Row) -> Result<Self>;
}

fn corrupt(column: &str, e: impl Display) -> Error {
    Error::Corrupt { column: column.to_owned(), detail: e.to_string() }
}

fn time_of(column: &str, us: i64) -> Result<DateTime<Utc>> {
    DateTime::from_timestamp_micros(us).ok_or_else(|| corrupt(column, format!("{us} µs")))
}

impl Row {
    pub(crate) fn text(&self, c: &str) -> Result<String> {
        Ok(self.0.try_get(c)?)
    }
    pub(crate) fn opt_text(&self, c: &str) -> Result<Option<String>> {
        Ok(self.0.try_get(c)?)
    }
    pub(crate) fn int(&self, c: &str) -> Result<i64> {
        Ok(self.0.try_get(c)?)
    }
    pub(crate) fn opt_int(&self, c: &str) -> Result<Option<i64>> {
        Ok(self.0.try_get(c)?)
    }
    pub(crate) fn flag(&self, c: &str) -> Result<bool> {
        Ok(self.int(c)? != 0)
    }
    /// An integer that must fit the narrower type `T`.
    pub(crate) fn num<T: TryFrom<i64>>(&self, c: &str) -> Result<T> {
        let v = self.int(c)?;
        T::try_from(v).map_err(|_| corrupt(c, format!("{v} is out of range")))
    }
    pub(crate) fn time(&self, c: &str) -> Result<DateTime<Utc>> {
        time_of(c, self.int(c)?)
    }
    pub(crate) fn opt_time(&self, c: &str) -> Result<Option<DateTime<Utc>>> {
        self.opt_int(c)?.map(|us| time_of(c, us)).transpose()
    }
    /// An id, digest or word.
    pub(crate) fn parsed<T: FromStr<Err: Display>>(&self, c: &str) -> Result<T> {
        self.text(c)?.parse().map_err(|e| corrupt(c, e))
    }
    pub(crate) fn opt_parsed<T: FromStr<Err: Display>>(&self, c: &str) -> Result<Option<T>> {
        self.opt_text(c)?.map(|t| t.parse().map_err(|e| corrupt(c, e))).transpose()
    }
    pub(crate) fn json<T: DeserializeOwned>(&self, c: &str) -> Result<T> {
        serde_json::from_str(&self.text(c)?).map_err(|e| corrupt(c, e))
    }
    pub(crate) fn opt_json<T: DeserializeOwned>(&self, c: &str) -> Result<Option<T>> {
        self.opt_text(c)?.map(|t| serde_json::from_str(&t).map_err(|e| corrupt(c, e))).transpose()
    }
}

/// A single integer column named `n`.
pub(crate) struct Count(pub(crate) i64);

impl FromRow for Count {
    fn from_row(row: &Row) -> Result<Self> {
        row.int("n").map(Self)
    }
}
