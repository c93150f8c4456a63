//! Rollouts: one bundle on its way to the fleet, and the gate verdicts along it. Plans and requests have own modules.

use crate::query::{FromRow, Row, json_text, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, CandidateId, Digest, RolloutId, RolloutState, Verdict};
use serde::Serialize;
use serde_json::Value;

/// One rollout.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutRow {
    pub app_id: AppId,
    pub rollout_id: RolloutId,
    pub candidate_id: Option<CandidateId>,
    /// Manifest digest of the new bundle.
    pub treatment: Digest,
    /// What it is compared with and falls back to; `None` when the app had no bundle.
    pub control: Option<Digest>,
    pub state: RolloutState,
    /// Generation of the current plan; 0 before the first.
    pub generation: i64,
    /// Policy and gate specification, frozen at creation.
    pub policy: Value,
    pub reason: Option<String>,
    pub created_by: String,
    pub created_at: DateTime<Utc>,
    pub state_since: DateTime<Utc>,
}

impl FromRow for RolloutRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            rollout_id: row.parsed("rollout_id")?,
            candidate_id: row.opt_parsed("candidate_id")?,
            treatment: row.parsed("treatment")?,
            control: row.opt_parsed("control")?,
            state: row.parsed("state")?,
            generation: row.int("generation")?,
            policy: row.json("policy")?,
            reason: row.opt_text("reason")?,
            created_by: row.text("created_by")?,
            created_at: row.time("created_at")?,
            state_since: row.time("state_since")?,
        })
    }
}

/// A rollout to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewRollout {
    pub rollout_id: RolloutId,
    pub candidate_id: Option<CandidateId>,
    pub treatment: Digest,
    pub control: Option<Digest>,
    pub policy: Value,
    pub created_by: String,
}

/// Verdict of one gate at one look at the data.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VerdictRow {
    pub rollout_id: RolloutId,
    /// Number of the look; rises by one with each analysis.
    pub look: i64,
    pub gate: String,
    /// Plan generation in force.
    pub generation: i64,
    pub verdict: Verdict,
    /// Interval, counts and thresholds, as shown to people.
    pub numbers: Value,
    pub at: DateTime<Utc>,
}

impl VerdictRow {
    /// The gate under which the whole report of a look is stored.
    pub const WHOLE: &'static str = "all";
}

impl FromRow for VerdictRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            rollout_id: row.parsed("rollout_id")?,
            look: row.int("look")?,
            gate: row.text("gate")?,
            generation: row.int("generation")?,
            verdict: row.parsed("verdict")?,
            numbers: row.json("numbers")?,
            at: row.time("at")?,
        })
    }
}

const SELECT: &str = "SELECT app_id, rollout_id, candidate_id, treatment, control, state, generation, policy, reason, \
    created_by, created_at, state_since FROM rollouts";
const VERDICTS: &str = "SELECT rollout_id, look, gate, generation, verdict, numbers, at FROM rollout_verdicts";

impl Store {
    /// The rollout.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_get(&self, app: &AppId, rollout: &RolloutId) -> Result<Option<RolloutRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND rollout_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(rollout)).await
    }

    /// Rollouts, newest first, at most `limit`; only those that can still change when `open`.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_list(&self, app: &AppId, open: bool, limit: u32) -> Result<Vec<RolloutRow>> {
        let which = if open { "AND state NOT IN ('rolled_back', 'complete', 'superseded')" } else { "" };
        let sql = format!("{SELECT} WHERE app_id = $1 {which} ORDER BY created_at DESC, rollout_id LIMIT $2");
        self.fetch(q(sql).bind(app).bind(limit)).await
    }

    /// Verdicts of a rollout in the order they fell.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_verdict_list(&self, app: &AppId, rollout: &RolloutId) -> Result<Vec<VerdictRow>> {
        let sql = format!("{VERDICTS} WHERE app_id = $1 AND rollout_id = $2 ORDER BY look, gate");
        self.fetch(q(sql).bind(app).bind(rollout)).await
    }

    /// The newest verdict of one gate of a rollout.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_verdict_latest(
        &self,
        app: &AppId,
        rollout: &RolloutId,
        gate: &str,
    ) -> Result<Option<VerdictRow>> {
        let sql = format!("{VERDICTS} WHERE app_id = $1 AND rollout_id = $2 AND gate = $3 ORDER BY look DESC LIMIT 1");
        self.fetch_opt(q(sql).bind(app).bind(rollout).bind(gate)).await
    }
}

impl Tx {
    /// The rollout as this transaction sees it.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_get(&mut self, app: &AppId, rollout: &RolloutId) -> Result<Option<RolloutRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND rollout_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(rollout)).await
    }

    /// Creates a rollout as a draft; answers whether it is new. The same id for the same bundles is no error.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the id names another rollout.
    pub async fn rollout_create(&mut self, app: &AppId, new: &NewRollout) -> Result<bool> {
        let at = self.at();
        let sql = "INSERT INTO rollouts (app_id, rollout_id, candidate_id, treatment, control, state, generation, \
                   policy, created_by, created_at, state_since) \
                   VALUES ($1, $2, $3, $4, $5, $6, 0, $7, $8, $9, $9) ON CONFLICT DO NOTHING";
        let query = q(sql)
            .bind(app)
            .bind(&new.rollout_id)
            .bind(&new.candidate_id)
            .bind(new.treatment)
            .bind(new.control)
            .bind(RolloutState::Draft)
            .bind(json_text("policy", &new.policy)?)
            .bind(&new.created_by)
            .bind(at);
        if self.execute(query).await? == 1 {
            return Ok(true);
        }
        match self.rollout_get(app, &new.rollout_id).await? {
            Some(r) if r.treatment == new.treatment && r.control == new.control => Ok(false),
            _ => Err(Error::conflict("rollout", &new.rollout_id, "this id names another rollout")),
        }
    }

    /// Moves a rollout from the state the caller saw.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an illegal step, [`Error::Conflict`] when it is in another state by now,
    /// [`Error::NotFound`].
    pub async fn rollout_state_set(
        &mut self,
        app: &AppId,
        rollout: &RolloutId,
        from: RolloutState,
        to: RolloutState,
        reason: &str,
    ) -> Result<()> {
        if !from.can_become(to) {
            return Err(Error::invalid("rollout state", format!("{from} cannot become {to}")));
        }
        let at = self.at();
        let sql = "UPDATE rollouts SET state = $4, reason = $5, state_since = $6 \
                   WHERE app_id = $1 AND rollout_id = $2 AND state = $3";
        let query = q(sql).bind(app).bind(rollout).bind(from).bind(to).bind(reason).bind(at);
        if self.execute(query).await? == 1 {
            return Ok(());
        }
        Err(match self.rollout_get(app, rollout).await? {
            None => Error::not_found("rollout", rollout),
            Some(r) => Error::conflict("rollout", rollout, format!("it is {}, not {from}", r.state)),
        })
    }

    /// Stores a gate's verdict at a look; answers whether it is new. A look is never changed afterwards.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the rollout does not exist.
    pub async fn rollout_verdict_append(&mut self, app: &AppId, new: &VerdictRow) -> Result<bool> {
        let sql = "INSERT INTO rollout_verdicts (app_id, rollout_id, look, gate, generation, verdict, numbers, at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING";
        let query = q(sql)
            .bind(app)
            .bind(&new.rollout_id)
            .bind(new.look)
            .bind(&new.gate)
            .bind(new.generation)
            .bind(new.verdict)
            .bind(json_text("numbers", &new.numbers)?)
            .bind(new.at);
        Ok(self.execute(query).await? == 1)
    }
}
