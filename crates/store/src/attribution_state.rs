//! The attribution engine's sums for an app: an object by digest and the number of the step that wrote it.

use crate::query::{FromRow, Row, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest};
use serde::Serialize;

/// Where the state of an app is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AttributionState {
    /// Digest of the object that holds the state.
    pub blob: Digest,
    /// 1 for the first step, then rising by one.
    pub step: i64,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for AttributionState {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self { blob: row.parsed("blob")?, step: row.int("step")?, updated_at: row.time("updated_at")? })
    }
}

impl Store {
    /// The current state; `None` before the first step.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn attribution_state_get(&self, app: &AppId) -> Result<Option<AttributionState>> {
        let sql = "SELECT blob, step, updated_at FROM attribution_state WHERE app_id = $1";
        self.fetch_opt(q(sql).bind(app)).await
    }
}

impl Tx {
    /// Replaces the state of step `from` (0: none) by that of step `from + 1`; answers the new step number.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another run wrote that step already.
    pub async fn attribution_state_set(&mut self, app: &AppId, from: i64, blob: Digest) -> Result<i64> {
        let at = self.at();
        let changed = if from == 0 {
            let sql = "INSERT INTO attribution_state (app_id, blob, step, updated_at) \
                       VALUES ($1, $2, 1, $3) ON CONFLICT DO NOTHING";
            self.execute(q(sql).bind(app).bind(blob).bind(at)).await?
        } else {
            let sql = "UPDATE attribution_state SET blob = $2, step = step + 1, updated_at = $3 \
                       WHERE app_id = $1 AND step = $4";
            self.execute(q(sql).bind(app).bind(blob).bind(at).bind(from)).await?
        };
        match changed {
            0 => Err(Error::conflict("attribution state", app, format!("step {from} is not the last"))),
            _ => Ok(from + 1),
        }
    }
}
