//! Prompt templates as the app registered them or as mining found them. A guilty one becomes an editor's task.

use crate::query::{FromRow, Row, json_text, q};
use crate::{Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest, TemplateId};
use serde::Serialize;

/// One template.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TemplateRow {
    pub app_id: AppId,
    pub template_id: TemplateId,
    /// Rises when the text changes.
    pub version: i64,
    pub name: String,
    pub text: String,
    pub text_digest: Digest,
    pub tags: Vec<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for TemplateRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            template_id: row.parsed("template_id")?,
            version: row.int("version")?,
            name: row.text("name")?,
            text: row.text("text")?,
            text_digest: row.parsed("text_digest")?,
            tags: row.json("tags")?,
            created_at: row.time("created_at")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

/// What is registered.
#[derive(Debug, Clone, PartialEq)]
pub struct NewTemplate {
    pub template_id: TemplateId,
    pub name: String,
    pub text: String,
    pub tags: Vec<String>,
}

const SELECT: &str = "SELECT app_id, template_id, version, name, text, text_digest, tags, created_at, \
    updated_at FROM templates";

impl Store {
    /// The template, if registered.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn template_get(&self, app: &AppId, template: &TemplateId) -> Result<Option<TemplateRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND template_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(template)).await
    }

    /// Every template of the app, by id.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn template_list(&self, app: &AppId) -> Result<Vec<TemplateRow>> {
        self.fetch(q(format!("{SELECT} WHERE app_id = $1 ORDER BY template_id")).bind(app)).await
    }
}

impl Tx {
    /// Registers a template or changes it; new text makes a new version. Answers the version.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn template_put(&mut self, app: &AppId, new: &NewTemplate) -> Result<i64> {
        struct Version(i64);
        impl FromRow for Version {
            fn from_row(row: &Row) -> Result<Self> {
                row.int("version").map(Self)
            }
        }
        let at = self.at();
        let sql = "INSERT INTO templates (app_id, template_id, version, name, text, text_digest, tags, \
                   created_at, updated_at) VALUES ($1, $2, 1, $3, $4, $5, $6, $7, $7) \
                   ON CONFLICT (app_id, template_id) DO UPDATE SET \
                   version = templates.version + CASE WHEN templates.text_digest = excluded.text_digest THEN 0 ELSE 1 END, \
                   name = excluded.name, text = excluded.text, text_digest = excluded.text_digest, \
                   tags = excluded.tags, updated_at = excluded.updated_at RETURNING version";
        let query = q(sql)
            .bind(app)
            .bind(&new.template_id)
            .bind(&new.name)
            .bind(&new.text)
            .bind(Digest::of(new.text.as_bytes()))
            .bind(json_text("tags", &new.tags)?)
            .bind(at);
        let row: Option<Version> = self.fetch_opt(query).await?;
        Ok(row.map_or(1, |v| v.0))
    }
}
