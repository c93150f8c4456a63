//! SELECTs that people saved under a name. Whether a text is one that may be saved is the lake's knowledge.

use crate::query::{Count, FromRow, Row, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::AppId;
use serde::Serialize;

/// One saved view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ViewRow {
    pub app_id: AppId,
    pub name: String,
    pub query: String,
    pub description: String,
    /// Who saved it last.
    pub created_by: String,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for ViewRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            name: row.text("name")?,
            query: row.text("query")?,
            description: row.text("description")?,
            created_by: row.text("created_by")?,
            created_at: row.time("created_at")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

/// What is saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewView {
    pub name: String,
    pub query: String,
    pub description: String,
    pub created_by: String,
}

const SELECT: &str =
    "SELECT app_id, name, query, description, created_by, created_at, updated_at FROM saved_views WHERE app_id = $1";

impl Store {
    /// Every view of the app, by name.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn view_list(&self, app: &AppId) -> Result<Vec<ViewRow>> {
        self.fetch(q(format!("{SELECT} ORDER BY name")).bind(app)).await
    }
}

impl Tx {
    /// The view of this name as this transaction sees it.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn view_get(&mut self, app: &AppId, name: &str) -> Result<Option<ViewRow>> {
        self.fetch_opt(q(format!("{SELECT} AND name = $2")).bind(app).bind(name)).await
    }

    /// How many views the app has.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn view_count(&mut self, app: &AppId) -> Result<i64> {
        let row: Option<Count> =
            self.fetch_opt(q("SELECT COUNT(*) AS n FROM saved_views WHERE app_id = $1").bind(app)).await?;
        Ok(row.map_or(0, |c| c.0))
    }

    /// Creates the view or replaces the one of that name.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn view_put(&mut self, app: &AppId, new: &NewView) -> Result<()> {
        let at = self.at();
        let sql = "INSERT INTO saved_views (app_id, name, query, description, created_by, created_at, updated_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $6) ON CONFLICT (app_id, name) DO UPDATE SET \
                   query = excluded.query, description = excluded.description, created_by = excluded.created_by, \
                   updated_at = excluded.updated_at";
        let query =
            q(sql).bind(app).bind(&new.name).bind(&new.query).bind(&new.description).bind(&new.created_by).bind(at);
        self.execute(query).await.map(|_| ())
    }

    /// Deletes a view.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn view_delete(&mut self, app: &AppId, name: &str) -> Result<()> {
        let sql = "DELETE FROM saved_views WHERE app_id = $1 AND name = $2";
        match self.execute(q(sql).bind(app).bind(name)).await? {
            0 => Err(Error::not_found("view", name)),
            _ => Ok(()),
        }
    }
}
