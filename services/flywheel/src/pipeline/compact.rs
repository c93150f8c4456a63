//! Housekeeping of the telemetry tables: deletes what is older than the app keeps it, merges small files, removes files that no
//! snapshot names any more, cuts the tables' logs, and prunes finished jobs.

use crate::server::Server;
use chrono::TimeDelta;
use flywheel_jobs::JobContext;
use flywheel_lake::Table;
use flywheel_store::apps::AppSettings;
use flywheel_types::{AppId, Error};
use serde::Deserialize;
use serde_json::{Value, json};
use std::num::NonZeroU16;

pub const KIND: &str = "compact";
/// Finished jobs are kept this long, days.
const JOB_DAYS: i64 = 90;
/// Files that no snapshot names any more stay this long, for readers that still have them open and steps that lag.
const KEEP: chrono::Duration = chrono::Duration::days(7);
/// Log entries of the tables before the last checkpoint stay this long, days; Delta's own default.
const LOG_DAYS: i64 = 30;

/// The setting `retention` of an app. Without it everything is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// Whole days that telemetry is kept after the day of its receipt.
    pub telemetry_days: NonZeroU16,
}

impl Retention {
    /// What the settings say.
    ///
    /// # Errors
    /// `Invalid` when the setting cannot be read, which `PUT /v1/settings` does not let in.
    pub fn of(settings: &AppSettings) -> Result<Option<Self>, Error> {
        let Some(value) = settings.extra.get("retention").filter(|v| !v.is_null()) else { return Ok(None) };
        serde_json::from_value(value.clone()).map(Some).map_err(|e| {
            Error::invalid(
                "bad_settings",
                format!("`retention`: {e}"),
                "send `{ \"telemetry_days\": N }` with N of 1 or more",
            )
        })
    }
}

/// The step.
///
/// # Errors
/// Of the lake and the database.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    let retained = retain(server, ctx.app()).await?;
    let expired = server.store.lease_now() - TimeDelta::days(LOG_DAYS);
    let mut tables = serde_json::Map::new();
    for table in Table::ALL {
        let compacted = server.lake.compact(table).await?;
        let vacuumed = server.lake.vacuum(table, KEEP).await?;
        let entries = server.lake.checkpoint(table, expired).await?;
        tables.insert(
            table.name().to_owned(),
            json!({
                "files_joined": compacted.files_removed, "files_written": compacted.files_added,
                "files_deleted": vacuumed.files_deleted.len(), "log_entries_deleted": entries,
            }),
        );
    }
    let mut tx = server.begin().await?;
    ctx.fence(&mut tx).await.map_err(super::lost)?;
    let pruned = tx.job_prune(server.store.lease_now() - TimeDelta::days(JOB_DAYS)).await?;
    tx.commit().await?;
    Ok(json!({ "retained": retained, "tables": tables, "jobs_pruned": pruned }))
}

/// Deletes what the app does not keep any more; counts per table, NULL when it keeps everything.
async fn retain(server: &Server, app: &AppId) -> Result<Value, Error> {
    // the schedule of an app that is gone
    let Some(row) = server.store.app_get(app).await? else { return Ok(Value::Null) };
    let Some(retention) = Retention::of(&row.settings)? else { return Ok(Value::Null) };
    let first = server.now().date_naive() - TimeDelta::days(i64::from(retention.telemetry_days.get()));
    let held = super::erase::held(&server.store.hold_list(app).await?);
    let mut out = serde_json::Map::from_iter([("first_day".to_owned(), json!(first))]);
    for table in Table::ALL {
        let report = server.lake.retain(table, app, first, &held).await?;
        out.insert(table.name().to_owned(), serde_json::to_value(report).map_err(Error::internal)?);
    }
    Ok(Value::Object(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_deleted_until_days_are_set() {
        let with = |value: Value| {
            let mut settings = AppSettings::default();
            settings.extra.insert("retention".into(), value);
            Retention::of(&settings)
        };
        assert_eq!(Retention::of(&AppSettings::default()).unwrap(), None);
        assert_eq!(with(Value::Null).unwrap(), None);
        assert_eq!(with(json!({ "telemetry_days": 90 })).unwrap().unwrap().telemetry_days.get(), 90);
        for bad in [json!({ "telemetry_days": 0 }), json!({ "days": 9 }), json!(90), json!({ "telemetry_days": -1 })] {
            assert_eq!(with(bad.clone()).unwrap_err().code, "bad_settings", "{bad}");
        }
    }
}
