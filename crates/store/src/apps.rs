//! Apps, the tenants, and their settings: how much the controller may do by itself.

use crate::query::{FromRow, Row, json_text, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Approval, AssignmentSource, Automation, InstallId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// App id of work that belongs to no tenant (compaction of shared tables and the like); no app may take it.
pub const SYSTEM_APP: &str = "system";

fn one() -> u8 {
    1
}
fn recommend() -> Automation {
    Automation::Recommend
}
fn approval_one() -> Approval {
    Approval::One
}
fn own() -> AssignmentSource {
    AssignmentSource::Own
}

/// Settings of an app. Missing fields take the defaults of DESIGN.md 1; unknown fields are kept in `extra`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppSettings {
    /// Format version, 1.
    #[serde(default = "one")]
    pub v: u8,
    #[serde(default = "recommend")]
    pub automation: Automation,
    #[serde(default = "approval_one")]
    pub approval: Approval,
    #[serde(default = "own")]
    pub assignment_source: AssignmentSource,
    /// Whether rows of anonymous senders count in gates and attribution.
    #[serde(default)]
    pub count_anonymous: bool,
    /// Whether the app shows a reject control, so that "no reaction" says something.
    #[serde(default)]
    pub visible_reject_control: bool,
    /// Stops every automatic freeze of chunks.
    #[serde(default)]
    pub freeze_kill_switch: bool,
    /// Named devices that get a bundle before any statistics.
    #[serde(default)]
    pub ring: Vec<InstallId>,
    /// Who gets mail about rollbacks and dead jobs.
    #[serde(default)]
    pub alert_recipients: Vec<String>,
    /// What other parts keep here.
    #[serde(flatten)]
    pub extra: BTreeMap<String, serde_json::Value>,
}

impl Default for AppSettings {
    fn default() -> Self {
        Self {
            v: 1,
            automation: recommend(),
            approval: approval_one(),
            assignment_source: own(),
            count_anonymous: false,
            visible_reject_control: false,
            freeze_kill_switch: false,
            ring: Vec::new(),
            alert_recipients: Vec::new(),
            extra: BTreeMap::new(),
        }
    }
}

/// One app.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AppRow {
    pub app_id: AppId,
    pub settings: AppSettings,
    /// Rises with each change of the settings (ETag).
    pub version: i64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for AppRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            settings: row.json("settings")?,
            version: row.int("version")?,
            created_at: row.time("created_at")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

const SELECT: &str = "SELECT app_id, settings, version, created_at, updated_at FROM apps";

impl Store {
    /// The app, if it exists.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn app_get(&self, app: &AppId) -> Result<Option<AppRow>> {
        self.fetch_opt(q(format!("{SELECT} WHERE app_id = $1")).bind(app)).await
    }

    /// Every app, by id.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn app_list(&self) -> Result<Vec<AppRow>> {
        self.fetch(q(format!("{SELECT} ORDER BY app_id"))).await
    }
}

impl Tx {
    /// Creates the app unless it exists; answers whether it was created. An existing app keeps its settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the reserved name.
    pub async fn app_create(&mut self, app: &AppId, settings: &AppSettings) -> Result<bool> {
        if app.as_str() == SYSTEM_APP {
            return Err(Error::invalid("app id", "`system` is reserved; choose another name"));
        }
        let at = self.at();
        let sql = "INSERT INTO apps (app_id, settings, version, created_at, updated_at) \
                   VALUES ($1, $2, 1, $3, $3) ON CONFLICT DO NOTHING";
        let query = q(sql).bind(app).bind(json_text("settings", settings)?).bind(at);
        Ok(self.execute(query).await? == 1)
    }

    /// Replaces the settings if `version` is still the current one; answers the new version.
    ///
    /// # Errors
    /// [`Error::Conflict`] when somebody else changed them, [`Error::NotFound`].
    pub async fn app_settings_set(&mut self, app: &AppId, version: i64, settings: &AppSettings) -> Result<i64> {
        let at = self.at();
        let sql = "UPDATE apps SET settings = $3, version = version + 1, updated_at = $4 \
                   WHERE app_id = $1 AND version = $2";
        let query = q(sql).bind(app).bind(version).bind(json_text("settings", settings)?).bind(at);
        if self.execute(query).await? == 1 {
            return Ok(version + 1);
        }
        let now: Option<AppRow> = self.fetch_opt(q(format!("{SELECT} WHERE app_id = $1")).bind(app)).await?;
        Err(match now {
            None => Error::not_found("app", app),
            Some(row) => {
                Error::conflict("app", app, format!("its settings are at version {}, not {version}", row.version))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_default_and_keep_what_they_do_not_know() {
        let s: AppSettings = serde_json::from_str("{}").unwrap();
        assert_eq!(s, AppSettings::default());
        assert_eq!(s.automation, Automation::Recommend);
        let s: AppSettings = serde_json::from_str(r#"{"automation":"act","later":7}"#).unwrap();
        assert_eq!(s.automation, Automation::Act);
        assert_eq!(s.extra["later"], 7);
        assert!(serde_json::to_string(&s).unwrap().contains("\"later\":7"));
    }
}
