//! Findings: suspected causes of failures with their evidence. One per (kind, subject, version of the subject).

use crate::query::{FromRow, Row, json_text, q};
use crate::words::words;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, FindingId};
use serde::Serialize;
use serde_json::Value;

words! {
    /// What is suspected.
    FindingKind { Chunk = "chunk", Template = "template", Slice = "slice" }
}
words! {
    /// What became of a finding.
    FindingState {
        Open = "open",
        /// Something was done about it (a freeze, an editor's task).
        Acted = "acted",
        /// A person said it is none. New evidence updates it but does not open it again.
        Dismissed = "dismissed",
        Resolved = "resolved",
    }
}

impl FindingState {
    /// Whether `self → next` is a legal step. Resolved is final: a relapse concerns a new version of the subject.
    #[must_use]
    pub fn can_become(self, next: Self) -> bool {
        use FindingState as S;
        matches!(
            (self, next),
            (S::Open, S::Acted | S::Dismissed | S::Resolved)
                | (S::Acted, S::Open | S::Dismissed | S::Resolved)
                | (S::Dismissed, S::Open)
        )
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FindingRow {
    pub app_id: AppId,
    pub finding_id: FindingId,
    pub kind: FindingKind,
    /// Chunk id, template id, or a slice written as `bundle=…;device=…;locale=…`.
    pub subject: String,
    /// Version of the subject; 0 for slices.
    pub version: i64,
    pub state: FindingState,
    pub evidence: Value,
    /// Why it is in this state, in a person's or the controller's words.
    pub reason: Option<String>,
    pub opened_at: DateTime<Utc>,
    pub state_since: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for FindingRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            finding_id: row.parsed("finding_id")?,
            kind: row.parsed("kind")?,
            subject: row.text("subject")?,
            version: row.int("version")?,
            state: row.parsed("state")?,
            evidence: row.json("evidence")?,
            reason: row.opt_text("reason")?,
            opened_at: row.time("opened_at")?,
            state_since: row.time("state_since")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

/// What attribution found.
#[derive(Debug, Clone, PartialEq)]
pub struct NewFinding {
    /// Used only when the finding is new; derive it from kind, subject and version so that a repeated step agrees.
    pub finding_id: FindingId,
    pub kind: FindingKind,
    pub subject: String,
    pub version: i64,
    pub evidence: Value,
}

const SELECT: &str = "SELECT app_id, finding_id, kind, subject, version, state, evidence, reason, opened_at, \
    state_since, updated_at FROM findings";

impl Store {
    /// The finding.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn finding_get(&self, app: &AppId, finding: &FindingId) -> Result<Option<FindingRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND finding_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(finding)).await
    }

    /// Findings, newest first, in one state or in all, at most `limit`.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn finding_list(&self, app: &AppId, state: Option<FindingState>, limit: u32) -> Result<Vec<FindingRow>> {
        let which = state.map_or("$2 = ''", |_| "state = $2");
        let sql = format!("{SELECT} WHERE app_id = $1 AND {which} ORDER BY opened_at DESC, finding_id LIMIT $3");
        let word = state.map_or("", FindingState::as_str);
        self.fetch(q(sql).bind(app).bind(word).bind(limit)).await
    }
}

impl Tx {
    /// Opens a finding, or gives the existing one about the same subject and version the new evidence; its state
    /// stays. Answers the row as it is now.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the id is taken by a finding about something else.
    pub async fn finding_upsert(&mut self, app: &AppId, new: &NewFinding) -> Result<FindingRow> {
        let at = self.at();
        let sql = "INSERT INTO findings (app_id, finding_id, kind, subject, version, state, evidence, opened_at, \
                   state_since, updated_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $8, $8) \
                   ON CONFLICT (app_id, kind, subject, version) DO UPDATE SET \
                   evidence = excluded.evidence, updated_at = excluded.updated_at \
                   RETURNING app_id, finding_id, kind, subject, version, state, evidence, reason, opened_at, \
                   state_since, updated_at";
        let query = q(sql)
            .bind(app)
            .bind(&new.finding_id)
            .bind(new.kind)
            .bind(&new.subject)
            .bind(new.version)
            .bind(FindingState::Open)
            .bind(json_text("evidence", &new.evidence)?)
            .bind(at);
        self.fetch_opt(query).await?.ok_or_else(|| Error::not_found("finding", &new.finding_id))
    }

    /// Moves a finding from the state the caller saw.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an illegal step, [`Error::Conflict`] when it is in another state by now,
    /// [`Error::NotFound`].
    pub async fn finding_state_set(
        &mut self,
        app: &AppId,
        finding: &FindingId,
        from: FindingState,
        to: FindingState,
        reason: &str,
    ) -> Result<()> {
        if !from.can_become(to) {
            return Err(Error::invalid("finding state", format!("{from} cannot become {to}")));
        }
        let at = self.at();
        let sql = "UPDATE findings SET state = $4, reason = $5, state_since = $6, updated_at = $6 \
                   WHERE app_id = $1 AND finding_id = $2 AND state = $3";
        let query = q(sql).bind(app).bind(finding).bind(from).bind(to).bind(reason).bind(at);
        if self.execute(query).await? == 1 {
            return Ok(());
        }
        let sql = format!("{SELECT} WHERE app_id = $1 AND finding_id = $2");
        let now: Option<FindingRow> = self.fetch_opt(q(sql).bind(app).bind(finding)).await?;
        Err(match now {
            None => Error::not_found("finding", finding),
            Some(f) => Error::conflict("finding", finding, format!("it is {}, not {from}", f.state)),
        })
    }
}
