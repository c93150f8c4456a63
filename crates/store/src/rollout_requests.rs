//! What operators asked of a rollout. The reconciler reads the open requests, applies or refuses them, and answers.

use crate::query::{FromRow, Row, json_text, q};
use crate::words::words;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, RolloutId};
use serde::Serialize;
use serde_json::Value;

words! {
    /// What is asked.
    RequestVerb {
        Approve = "approve",
        Pause = "pause",
        Resume = "resume",
        /// Pause and assign nobody new.
        Halt = "halt",
        Rollback = "rollback",
        /// Go to the next step without waiting; over a failed gate only together with an `override`.
        Promote = "promote",
        /// Another person's agreement to a `promote` over a failed gate.
        Override = "override",
    }
}
words! {
    /// What became of a request.
    RequestState { Open = "open", Applied = "applied", Refused = "refused" }
}

/// One request.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RequestRow {
    pub app_id: AppId,
    pub request_id: String,
    pub rollout_id: RolloutId,
    pub verb: RequestVerb,
    pub who: String,
    pub reason: String,
    /// What exactly is approved (generation and change); null for other verbs.
    pub detail: Value,
    pub state: RequestState,
    /// What the reconciler said.
    pub answer: Option<String>,
    pub created_at: DateTime<Utc>,
    pub decided_at: Option<DateTime<Utc>>,
}

impl FromRow for RequestRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            request_id: row.text("request_id")?,
            rollout_id: row.parsed("rollout_id")?,
            verb: row.parsed("verb")?,
            who: row.text("who")?,
            reason: row.text("reason")?,
            detail: row.json("detail")?,
            state: row.parsed("state")?,
            answer: row.opt_text("answer")?,
            created_at: row.time("created_at")?,
            decided_at: row.opt_time("decided_at")?,
        })
    }
}

const SELECT: &str = "SELECT app_id, request_id, rollout_id, verb, who, reason, detail, state, answer, created_at, \
    decided_at FROM rollout_requests";

impl Store {
    /// Requests about a rollout in the order they came; only undecided ones when `open`.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_request_list(&self, app: &AppId, rollout: &RolloutId, open: bool) -> Result<Vec<RequestRow>> {
        let which = if open { "AND state = 'open'" } else { "" };
        let sql = format!("{SELECT} WHERE app_id = $1 AND rollout_id = $2 {which} ORDER BY created_at, request_id");
        self.fetch(q(sql).bind(app).bind(rollout)).await
    }

    /// Names of the people who approved a rollout (their requests need not be decided yet, but not refused).
    ///
    /// # Errors
    /// Those of the query.
    pub async fn rollout_approver_list(&self, app: &AppId, rollout: &RolloutId) -> Result<Vec<String>> {
        struct Who(String);
        impl FromRow for Who {
            fn from_row(row: &Row) -> Result<Self> {
                row.text("who").map(Self)
            }
        }
        let sql = "SELECT DISTINCT who FROM rollout_requests WHERE app_id = $1 AND rollout_id = $2 \
                   AND verb = $3 AND state <> $4 ORDER BY who";
        let query = q(sql).bind(app).bind(rollout).bind(RequestVerb::Approve).bind(RequestState::Refused);
        Ok(self.fetch::<Who>(query).await?.into_iter().map(|w| w.0).collect())
    }
}

impl Tx {
    /// Queues a request; answers its id.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the rollout does not exist.
    pub async fn rollout_request_create(
        &mut self,
        app: &AppId,
        rollout: &RolloutId,
        verb: RequestVerb,
        who: &str,
        reason: &str,
        detail: &Value,
    ) -> Result<String> {
        let id = crate::ids::fresh("request");
        let at = self.at();
        let sql = "INSERT INTO rollout_requests (app_id, request_id, rollout_id, verb, who, reason, detail, state, created_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)";
        let query = q(sql)
            .bind(app)
            .bind(&id)
            .bind(rollout)
            .bind(verb)
            .bind(who)
            .bind(reason)
            .bind(json_text("detail", detail)?)
            .bind(RequestState::Open)
            .bind(at);
        self.execute(query).await?;
        Ok(id)
    }

    /// Answers an open request.
    ///
    /// # Errors
    /// [`Error::Conflict`] when it is decided already or does not exist.
    pub async fn rollout_request_decide(
        &mut self,
        app: &AppId,
        request_id: &str,
        applied: bool,
        answer: &str,
    ) -> Result<()> {
        let to = if applied { RequestState::Applied } else { RequestState::Refused };
        let at = self.at();
        let sql = "UPDATE rollout_requests SET state = $4, answer = $5, decided_at = $6 \
                   WHERE app_id = $1 AND request_id = $2 AND state = $3";
        let query = q(sql).bind(app).bind(request_id).bind(RequestState::Open).bind(to).bind(answer).bind(at);
        match self.execute(query).await? {
            0 => Err(Error::conflict("rollout request", request_id, "it is not open")),
            _ => Ok(()),
        }
    }
}
