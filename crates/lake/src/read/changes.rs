//! Rows a table gained between two Delta versions: how a step with a cursor `(table, version)` reads on.

use super::{LIVE, Take, drain, received_between};
use crate::error::LakeError;
use crate::lake::Lake;
use crate::provider::session_over;
use arrow::array::RecordBatch;
use chrono::{DateTime, NaiveDate, Utc};
use deltalake::kernel::Add;
use flywheel_telemetry::Table;
use flywheel_types::{AppId, Error};
use serde::Deserialize;

/// The actions of a commit that matter here.
#[derive(Deserialize)]
struct Action {
    add: Option<Add>,
    #[serde(rename = "commitInfo")]
    info: Option<Info>,
}

#[derive(Deserialize)]
struct Info {
    operation: Option<String>,
}

impl Lake {
    /// Rows of `app` that live telemetry added to `table` in versions `after < v <= upto`, in no particular order. Rewrites
    /// (compaction, erasure) add nothing; rows erased since are still returned until the old files are vacuumed.
    ///
    /// # Errors
    /// When a version is newer than the table, or its log entry or files are gone (vacuum or log clean-up ran past the
    /// cursor).
    pub async fn rows_between(
        &self,
        app: &AppId,
        table: Table,
        after: u64,
        upto: u64,
    ) -> Result<Vec<RecordBatch>, Error> {
        Ok(self.changes(app, table, (after, upto), "*", None).await?)
    }

    /// [`Lake::rows_between`] of the versions `after < v <= upto` with the given columns only, and only what was received
    /// by `until`: files that hold nothing so old are not opened.
    pub(crate) async fn changes(
        &self,
        app: &AppId,
        table: Table,
        (after, upto): (u64, u64),
        columns: &str,
        until: Option<DateTime<Utc>>,
    ) -> Result<Vec<RecordBatch>, LakeError> {
        let mut out = Vec::new();
        self.each_change(app, table, (after, upto), columns, until, &mut |batch| {
            out.push(batch);
            Ok(())
        })
        .await?;
        Ok(out)
    }

    /// [`Lake::changes`] piece by piece.
    pub(crate) async fn each_change(
        &self,
        app: &AppId,
        table: Table,
        (after, upto): (u64, u64),
        columns: &str,
        until: Option<DateTime<Utc>>,
        take: &mut Take<'_>,
    ) -> Result<(), LakeError> {
        let handle = self.inner.table(table);
        let live = if matches!(table, Table::Outcomes) { "true" } else { LIVE };
        let log_store = handle.view().delta.log_store();
        for version in after + 1..=upto {
            let entry = log_store.read_commit_entry(version).await?.ok_or_else(|| {
                LakeError::Unexpected(format!("{}: the log entry of version {version} is gone", table.name()))
            })?;
            let mut adds = appended(&entry)?;
            adds.retain(|a| is_of(a, app) && until.is_none_or(|t| may_hold(a, t)));
            if adds.is_empty() {
                continue;
            }
            let delta = handle.at(version).await?;
            let state = session_over(&self.inner, app, table, &delta, Some(adds))?;
            let old = until.map(|t| format!(" AND {}", received_between(DateTime::UNIX_EPOCH, t))).unwrap_or_default();
            let query = format!("SELECT {columns} FROM {} WHERE {live}{old}", table.name());
            drain(state, &query, take).await?;
        }
        Ok(())
    }
}

fn partition<'a>(add: &'a Add, column: &str) -> Option<&'a str> {
    add.partition_values.get(column).and_then(Option::as_deref)
}

fn is_of(add: &Add, app: &AppId) -> bool {
    partition(add, "app").is_none_or(|a| a == app.as_str())
}

/// False only when the file's partition or statistics say that all its rows were received after `until`.
fn may_hold(add: &Add, until: DateTime<Utc>) -> bool {
    let date = partition(add, "received_date").and_then(|d| d.parse::<NaiveDate>().ok());
    if date.is_some_and(|d| d > until.date_naive()) {
        return false;
    }
    let stats = add.stats.as_deref().and_then(|s| serde_json::from_str::<Stats>(s).ok());
    let first = stats.and_then(|s| DateTime::parse_from_rfc3339(&s.min_values?.received_at?).ok());
    first.is_none_or(|at| at <= until)
}

/// The part of a file's statistics that matters here. The least time is rounded down when it is written.
#[derive(Deserialize)]
struct Stats {
    #[serde(rename = "minValues")]
    min_values: Option<MinValues>,
}

#[derive(Deserialize)]
struct MinValues {
    received_at: Option<String>,
}

/// Files an append added; none for other operations.
fn appended(entry: &[u8]) -> Result<Vec<Add>, LakeError> {
    let mut adds = Vec::new();
    let mut is_write = false;
    for line in entry.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
        let action: Action =
            serde_json::from_slice(line).map_err(|e| LakeError::Unexpected(format!("delta log entry: {e}")))?;
        is_write |= action.info.and_then(|i| i.operation).as_deref() == Some("WRITE");
        adds.extend(action.add.filter(|a| a.data_change));
    }
    Ok(if is_write { adds } else { Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_skipped_only_when_all_their_rows_are_newer() {
        let add = |date: &str, first: &str| Add {
            partition_values: [("app", "shop"), ("received_date", date)]
                .map(|(k, v)| (k.to_owned(), Some(v.to_owned())))
                .into(),
            stats: Some(format!(r#"{{"numRecords":1,"minValues":{{"received_at":"{first}"}}}}"#)),
            ..Add::default()
        };
        let until: DateTime<Utc> = "2026-03-01T08:00:00Z".parse().unwrap();
        assert!(may_hold(&add("2026-03-01", "2026-03-01T07:59:59.999Z"), until));
        assert!(!may_hold(&add("2026-03-01", "2026-03-01T08:00:00.001Z"), until));
        assert!(!may_hold(&add("2026-03-02", "2026-03-01T07:00:00.000Z"), until));
        assert!(may_hold(&add("2026-03-01", "unreadable"), until));
        assert!(may_hold(&Add { stats: None, ..add("2026-02-27", "") }, until));
        assert!(is_of(&add("2026-03-01", ""), &"shop".parse().unwrap()));
        assert!(!is_of(&add("2026-03-01", ""), &"news".parse().unwrap()));
    }
}
