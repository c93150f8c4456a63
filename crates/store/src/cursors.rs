//! How far a pipeline step has read a lake table: `(step, app, table) → Delta version`. Committed together with what
//! the step made of the rows, so that a crash re-reads the same range.

use crate::query::{FromRow, Row, q};
use crate::{Error, Result, Store, Tx};
use flywheel_types::AppId;

struct Version(i64);

impl FromRow for Version {
    fn from_row(row: &Row) -> Result<Self> {
        row.int("delta_version").map(Self)
    }
}

const SELECT: &str = "SELECT delta_version FROM cursors WHERE app_id = $1 AND step = $2 AND table_name = $3";

impl Store {
    /// The Delta version up to which `step` has read `table` (inclusive); `None` before the first run.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn cursor_get(&self, app: &AppId, step: &str, table: &str) -> Result<Option<i64>> {
        let row: Option<Version> = self.fetch_opt(q(SELECT).bind(app).bind(step).bind(table)).await?;
        Ok(row.map(|v| v.0))
    }
}

impl Tx {
    /// Moves the cursor from `from` (what [`Store::cursor_get`] answered) to `to`.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another run of the step moved it meanwhile: throw the work away and read again.
    /// [`Error::Invalid`] when it would move backwards.
    pub async fn cursor_set(&mut self, app: &AppId, step: &str, table: &str, from: Option<i64>, to: i64) -> Result<()> {
        if from.is_some_and(|f| to < f) {
            return Err(Error::invalid("cursor", format!("{to} lies before {from:?}")));
        }
        let at = self.at();
        let changed = match from {
            None => {
                let sql = "INSERT INTO cursors (step, app_id, table_name, delta_version, updated_at) \
                           VALUES ($2, $1, $3, $4, $5) ON CONFLICT DO NOTHING";
                self.execute(q(sql).bind(app).bind(step).bind(table).bind(to).bind(at)).await?
            }
            Some(from) => {
                let sql = "UPDATE cursors SET delta_version = $4, updated_at = $5 \
                           WHERE app_id = $1 AND step = $2 AND table_name = $3 AND delta_version = $6";
                let query = q(sql).bind(app).bind(step).bind(table).bind(to).bind(at).bind(from);
                self.execute(query).await?
            }
        };
        match changed {
            0 => Err(Error::conflict(
                "cursor",
                format!("{step}/{table}"),
                format!("it is no longer at {from:?}; another run was faster"),
            )),
            _ => Ok(()),
        }
    }
}
