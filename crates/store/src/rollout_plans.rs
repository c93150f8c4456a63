//! Rollout plans: immutable, numbered by generation, each naming its parent. Appending one is the compare-and-swap
//! that keeps two executors from planning from the same state.

use crate::query::{FromRow, Row, json_text, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest, RolloutId};
use serde::Serialize;
use serde_json::Value;

/// One plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanRow {
    pub rollout_id: RolloutId,
    /// 1, 2, 3, …
    pub generation: i64,
    /// Generation it was made from; `None` for the first.
    pub parent: Option<i64>,
    /// SHA-256 of the stored JSON text.
    pub digest: Digest,
    pub plan: Value,
    pub created_at: DateTime<Utc>,
}

impl FromRow for PlanRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            rollout_id: row.parsed("rollout_id")?,
            generation: row.int("generation")?,
            parent: row.opt_int("parent")?,
            digest: row.parsed("digest")?,
            plan: row.json("plan")?,
            created_at: row.time("created_at")?,
        })
    }
}

const SELECT: &str = "SELECT rollout_id, generation, parent, digest, plan, created_at FROM rollout_plans";

impl Store {
    /// The newest plan of a rollout.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_plan_latest(&self, app: &AppId, rollout: &RolloutId) -> Result<Option<PlanRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND rollout_id = $2 ORDER BY generation DESC LIMIT 1");
        self.fetch_opt(q(sql).bind(app).bind(rollout)).await
    }

    /// Every plan of a rollout, oldest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_plan_list(&self, app: &AppId, rollout: &RolloutId) -> Result<Vec<PlanRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND rollout_id = $2 ORDER BY generation");
        self.fetch(q(sql).bind(app).bind(rollout)).await
    }
}

impl Tx {
    /// Appends the plan that follows generation `parent` (0: none); answers the new generation.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the rollout has another generation by now or does not exist.
    pub async fn rollout_plan_append(
        &mut self,
        app: &AppId,
        rollout: &RolloutId,
        parent: i64,
        plan: &Value,
    ) -> Result<i64> {
        let sql = "UPDATE rollouts SET generation = generation + 1 \
                   WHERE app_id = $1 AND rollout_id = $2 AND generation = $3";
        if self.execute(q(sql).bind(app).bind(rollout).bind(parent)).await? == 0 {
            return Err(Error::conflict("rollout", rollout, format!("its plan is no longer of generation {parent}")));
        }
        let text = json_text("plan", plan)?;
        let at = self.at();
        let sql = "INSERT INTO rollout_plans (app_id, rollout_id, generation, parent, digest, plan, created_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7)";
        let query = q(sql)
            .bind(app)
            .bind(rollout)
            .bind(parent + 1)
            .bind((parent > 0).then_some(parent))
            .bind(Digest::of(text.as_bytes()))
            .bind(text)
            .bind(at);
        self.execute(query).await?;
        Ok(parent + 1)
    }
}
