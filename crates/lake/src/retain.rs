//! Retention: the rows of an app that were received before a day are deleted, whole partitions at once, and the log of a table is
//! kept short. A delete takes files away from the newest version; their bytes go with the vacuum that follows. A version range
//! read across it yields what appends added and nothing twice.

use crate::append::properties;
use crate::erase::{Subjects, all_but, people_columns};
use crate::error::LakeError;
use crate::lake::{Inner, Lake};
use crate::rewrite::remove_rows;
use crate::table::View;
use arrow::array::RecordBatch;
use chrono::{DateTime, NaiveDate, Utc};
use deltalake::protocol::checkpoints::{cleanup_expired_logs_for, create_checkpoint};
use flywheel_telemetry::Table;
use flywheel_types::{AppId, Error};
use serde::Serialize;
use std::sync::Arc;

/// What a deletion did to one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct RetainReport {
    pub files_removed: u64,
    /// `None` when the files do not say how many rows they hold.
    pub rows_removed: Option<u64>,
    /// Rows that a hold keeps.
    pub rows_kept: u64,
}

/// Deletes the rows of `app` in `table` that were received before the day `first`. No file is read or written: the partitions go
/// as they are.
async fn delete_before(inner: &Inner, table: Table, app: &AppId, first: NaiveDate) -> Result<RetainReport, LakeError> {
    let handle = inner.table(table);
    let _alone = handle.rewrite.lock().await;
    let _one = handle.commit.lock().await;
    let View { mut delta, committed } = handle.view();
    delta.update_state().await?;
    let doomed = format!("app = '{}' AND received_date < DATE '{first}'", app.as_str().replace('\'', "''"));
    let (delta, done) = delta.delete().with_predicate(doomed).with_writer_properties(properties()).await?;
    handle.install(delta, committed, &inner.buffers);
    Ok(RetainReport {
        files_removed: done.num_removed_files as u64,
        rows_removed: done.num_deleted_rows.map(|n| n as u64),
        rows_kept: 0,
    })
}

/// [`delete_before`] with rows that must stay: the files that hold some are written again. The log of the table must not name whose
/// they are, so this is no delete of Delta's (ADR 011).
async fn delete_others_before(
    inner: &Inner,
    table: Table,
    app: &AppId,
    first: NaiveDate,
    held: &Subjects,
) -> Result<RetainReport, LakeError> {
    let Some(columns) = people_columns(table) else { return delete_before(inner, table, app, first).await };
    let pick = |batch: &RecordBatch| all_but(batch, held);
    let before = |day: &str| day.parse::<NaiveDate>().is_ok_and(|d| d < first);
    let done = remove_rows(inner, app, table, columns, &pick, &before).await?;
    Ok(RetainReport { files_removed: done.files, rows_removed: Some(done.rows), rows_kept: done.held })
}

/// Writes a checkpoint of the table and deletes the log entries before it that are older than `expired`; answers how many. A
/// version range that begins in them cannot be read any more.
async fn checkpoint(inner: &Inner, table: Table, expired: DateTime<Utc>) -> Result<u64, LakeError> {
    let handle = inner.table(table);
    let _one = handle.commit.lock().await;
    let delta = handle.view().delta;
    let Some(version) = delta.version().filter(|v| *v > 0) else { return Ok(0) };
    create_checkpoint(&delta, None).await?;
    let log = delta.log_store();
    Ok(cleanup_expired_logs_for(version, log.as_ref(), expired.timestamp_millis(), None).await? as u64)
}

impl Lake {
    /// Deletes what `app` has in `table` from before the day `first`, except for whose records are `held`. Rows that are not committed yet stay until the next time.
    ///
    /// # Errors
    /// When the table cannot be read or written, or another process changed it meanwhile; it is unchanged then.
    pub async fn retain(
        &self,
        table: Table,
        app: &AppId,
        first: NaiveDate,
        held: &Subjects,
    ) -> Result<RetainReport, Error> {
        let (inner, app, held) = (Arc::clone(&self.inner), app.clone(), held.clone());
        let run = async move {
            if held.is_empty() {
                return delete_before(&inner, table, &app, first).await;
            }
            delete_others_before(&inner, table, &app, first, &held).await
        };
        Ok(self.inner.rewrites.run(run).await?)
    }

    /// Makes opening the table fast and its log short: a checkpoint of now, without the log entries before it that were written
    /// before `expired` (real time). Answers how many were deleted.
    ///
    /// # Errors
    /// When the log cannot be read, written or deleted; the table is as before then.
    pub async fn checkpoint(&self, table: Table, expired: DateTime<Utc>) -> Result<u64, Error> {
        let inner = Arc::clone(&self.inner);
        Ok(self.inner.upkeep.run(async move { checkpoint(&inner, table, expired).await }).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LakeConfig, SqlLimits};
    use chrono::Duration;
    use flywheel_telemetry::column::Micros;
    use flywheel_telemetry::rows::InteractionRow;

    fn app(name: &str) -> AppId {
        AppId::new(name).unwrap()
    }
    fn day(n: i64) -> DateTime<Utc> {
        "2026-03-01T12:00:00Z".parse::<DateTime<Utc>>().unwrap() + Duration::days(n)
    }

    /// One row per app and day, and a second one of a phone that must be kept.
    async fn add(lake: &Lake, seq: u64, days: std::ops::Range<i64>) {
        let mut rows = Vec::new();
        for app in ["news", "shop"] {
            for n in days.clone() {
                for phone in [None, Some("held")] {
                    let at = Micros::from(day(n));
                    rows.push(InteractionRow {
                        app: app.into(),
                        received_date: at.day(),
                        received_at: at,
                        occurred_at: at,
                        source: "events".into(),
                        trust: "keyed".into(),
                        install_id: phone.map(Into::into),
                        interaction_id: format!("{app}-{n}-{phone:?}").into(),
                        ..InteractionRow::default()
                    });
                }
            }
        }
        let batch = InteractionRow::encode(&rows).unwrap();
        let rows = futures::stream::iter([batch]);
        assert!(lake.append_bulk(Table::Interactions, "test", seq, rows).await.unwrap());
    }

    async fn count(lake: &Lake, name: &str) -> i64 {
        let query = "SELECT count(*) AS n FROM interactions";
        lake.sql(&app(name), query, &SqlLimits::default()).await.unwrap().to_json().unwrap()[0]["n"].as_i64().unwrap()
    }

    async fn between(lake: &Lake, after: u64, upto: u64) -> usize {
        let rows = lake.rows_between(&app("shop"), Table::Interactions, after, upto).await.unwrap();
        rows.iter().map(arrow::array::RecordBatch::num_rows).sum()
    }

    #[tokio::test]
    async fn old_days_of_one_app_go_and_no_reader_sees_rows_twice() {
        let dir = tempfile::tempdir().unwrap();
        let lake = Lake::open(LakeConfig::local(dir.path()).unwrap()).await.unwrap();
        let table = Table::Interactions;
        add(&lake, 1, 0..10).await;
        let begin = lake.version(table);
        let first = day(7).date_naive();
        let report = lake.retain(table, &app("shop"), first, &Subjects::default()).await.unwrap();
        let all = RetainReport { files_removed: 7, rows_removed: Some(14), rows_kept: 0 };
        assert_eq!(report, all);
        assert_eq!((count(&lake, "shop").await, count(&lake, "news").await), (6, 20));
        assert_eq!(
            lake.retain(table, &app("shop"), first, &Subjects::default()).await.unwrap(),
            RetainReport { rows_removed: Some(0), ..RetainReport::default() }
        );
        let deleted = lake.version(table);
        assert_eq!(deleted, begin + 1, "nothing to delete is no commit");
        assert_eq!(between(&lake, begin, deleted).await, 0, "a delete adds nothing");
        add(&lake, 2, 10..12).await;
        let end = lake.version(table);
        assert_eq!(between(&lake, begin, end).await, 4, "a cursor from before the delete reads on");
        // the bytes go with the vacuum, and only then a range from before them fails
        assert_eq!(between(&lake, begin - 1, end).await, 24);
        let gone = lake.vacuum(table, Duration::zero()).await.unwrap();
        assert_eq!(gone.files_deleted.len(), 7);
        assert_eq!(between(&lake, begin, end).await, 4);
        assert_eq!((count(&lake, "shop").await, count(&lake, "news").await), (10, 24));
    }

    #[tokio::test]
    async fn rows_that_are_held_stay_and_are_not_new() {
        let dir = tempfile::tempdir().unwrap();
        let lake = Lake::open(LakeConfig::local(dir.path()).unwrap()).await.unwrap();
        add(&lake, 1, 0..4).await;
        let begin = lake.version(Table::Interactions);
        let first = day(3).date_naive();
        let held = Subjects { installs: ["held", "other"].map(str::to_owned).into(), ..Subjects::default() };
        let report = lake.retain(Table::Interactions, &app("shop"), first, &held).await.unwrap();
        assert_eq!((report.files_removed, report.rows_removed, report.rows_kept), (3, Some(3), 3), "{report:?}");
        assert_eq!((count(&lake, "shop").await, count(&lake, "news").await), (5, 8));
        assert_eq!(between(&lake, begin, lake.version(Table::Interactions)).await, 0, "rewritten rows are not new");
    }

    #[tokio::test]
    async fn the_log_is_cut_behind_a_checkpoint_and_the_table_opens_from_it() {
        let dir = tempfile::tempdir().unwrap();
        let config = LakeConfig::local(dir.path()).unwrap();
        let lake = Lake::open(config.clone()).await.unwrap();
        for n in 0..6 {
            add(&lake, n as u64 + 1, n..n + 1).await;
        }
        let version = lake.version(Table::Interactions);
        assert_eq!(lake.checkpoint(Table::Interactions, day(-3650)).await.unwrap(), 0, "nothing is old enough");
        let cut = lake.checkpoint(Table::Interactions, DateTime::<Utc>::MAX_UTC).await.unwrap();
        assert_eq!(cut, version, "all entries before the checkpoint");
        assert_eq!(lake.checkpoint(Table::Outcomes, DateTime::<Utc>::MAX_UTC).await.unwrap(), 0, "an empty table");
        add(&lake, 7, 6..7).await;
        drop(lake);
        let lake = Lake::open(config).await.unwrap();
        assert_eq!((count(&lake, "shop").await, lake.version(Table::Interactions)), (14, version + 1));
        assert_eq!(between(&lake, version, version + 1).await, 2);
        assert!(
            lake.rows_between(&app("shop"), Table::Interactions, 0, version).await.is_err(),
            "says that it is gone"
        );
    }
}
