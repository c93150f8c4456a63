//! Candidates: models (or prompts, indexes, …) that may become a bundle. A job's result and a candidate registered
//! from outside are the same object.

use crate::query::{FromRow, Row, json_text, q};
use crate::words::words;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, BundleKind, CandidateId, CandidateState, Digest, JobId};
use serde::Serialize;
use serde_json::Value;

words! {
    /// Where a candidate comes from.
    CandidateSource { Job = "job", External = "external" }
}

/// One candidate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CandidateRow {
    pub app_id: AppId,
    pub candidate_id: CandidateId,
    pub state: CandidateState,
    pub kind: BundleKind,
    /// Digest of what it was made from.
    pub base: Option<Digest>,
    /// Digest of the artefact's bytes, and where they lie.
    pub artefact: Digest,
    pub object_path: String,
    pub size_bytes: u64,
    /// Dataset snapshot it was trained on.
    pub dataset: Option<Digest>,
    pub source: CandidateSource,
    /// Job and attempt that made it.
    pub job: Option<(JobId, i64)>,
    /// Training or quantisation report.
    pub report: Value,
    pub created_by: String,
    /// Why it is in this state.
    pub reason: Option<String>,
    pub created_at: DateTime<Utc>,
    pub state_since: DateTime<Utc>,
}

impl FromRow for CandidateRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            candidate_id: row.parsed("candidate_id")?,
            state: row.parsed("state")?,
            kind: row.parsed("kind")?,
            base: row.opt_parsed("base")?,
            artefact: row.parsed("artefact")?,
            object_path: row.text("object_path")?,
            size_bytes: row.num("size_bytes")?,
            dataset: row.opt_parsed("dataset")?,
            source: row.parsed("source")?,
            job: row.opt_parsed("job_id")?.zip(row.opt_int("attempt")?),
            report: row.json("report")?,
            created_by: row.text("created_by")?,
            reason: row.opt_text("reason")?,
            created_at: row.time("created_at")?,
            state_since: row.time("state_since")?,
        })
    }
}

/// A candidate to register. Its artefact must be stored before.
#[derive(Debug, Clone, PartialEq)]
pub struct NewCandidate {
    pub candidate_id: CandidateId,
    pub kind: BundleKind,
    pub base: Option<Digest>,
    pub artefact: Digest,
    pub object_path: String,
    pub size_bytes: u64,
    pub dataset: Option<Digest>,
    pub source: CandidateSource,
    pub job: Option<(JobId, i64)>,
    pub report: Value,
    pub created_by: String,
}

const SELECT: &str = "SELECT app_id, candidate_id, state, kind, base, artefact, object_path, size_bytes, dataset, \
    source, job_id, attempt, report, created_by, reason, created_at, state_since FROM candidates";

impl Store {
    /// The candidate.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn candidate_get(&self, app: &AppId, candidate: &CandidateId) -> Result<Option<CandidateRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND candidate_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(candidate)).await
    }

    /// Candidates, newest first, in one state or in all, at most `limit`.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn candidate_list(
        &self,
        app: &AppId,
        state: Option<CandidateState>,
        limit: u32,
    ) -> Result<Vec<CandidateRow>> {
        let which = state.map_or("$2 = ''", |_| "state = $2");
        let sql = format!("{SELECT} WHERE app_id = $1 AND {which} ORDER BY created_at DESC, candidate_id LIMIT $3");
        let word = state.map_or("", CandidateState::as_str);
        self.fetch(q(sql).bind(app).bind(word).bind(limit)).await
    }
}

impl Tx {
    /// The candidate as this transaction sees it.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn candidate_get(&mut self, app: &AppId, candidate: &CandidateId) -> Result<Option<CandidateRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND candidate_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(candidate)).await
    }

    /// Registers a candidate; answers whether it is new. The same id with the same artefact is no error.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the id names other bytes.
    pub async fn candidate_register(&mut self, app: &AppId, new: &NewCandidate) -> Result<bool> {
        let at = self.at();
        let size =
            i64::try_from(new.size_bytes).map_err(|_| Error::invalid("candidate size", "it is beyond 2^63 bytes"))?;
        let sql = "INSERT INTO candidates (app_id, candidate_id, state, kind, base, artefact, object_path, \
                   size_bytes, dataset, source, job_id, attempt, report, created_by, created_at, state_since) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $15) \
                   ON CONFLICT DO NOTHING";
        let query = q(sql)
            .bind(app)
            .bind(&new.candidate_id)
            .bind(CandidateState::Registered)
            .bind(new.kind)
            .bind(new.base)
            .bind(new.artefact)
            .bind(&new.object_path)
            .bind(size)
            .bind(new.dataset)
            .bind(new.source)
            .bind(new.job.as_ref().map(|(id, _)| id))
            .bind(new.job.as_ref().map(|(_, attempt)| *attempt))
            .bind(json_text("report", &new.report)?)
            .bind(&new.created_by)
            .bind(at);
        if self.execute(query).await? == 1 {
            return Ok(true);
        }
        match self.candidate_get(app, &new.candidate_id).await? {
            Some(row) if row.artefact == new.artefact && row.kind == new.kind => Ok(false),
            _ => Err(Error::conflict("candidate", &new.candidate_id, "this id names other bytes")),
        }
    }

    /// Moves a candidate from the state the caller saw.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an illegal step, [`Error::Conflict`] when it is in another state by now,
    /// [`Error::NotFound`].
    pub async fn candidate_state_set(
        &mut self,
        app: &AppId,
        candidate: &CandidateId,
        from: CandidateState,
        to: CandidateState,
        reason: &str,
    ) -> Result<()> {
        if !from.can_become(to) {
            return Err(Error::invalid("candidate state", format!("{from} cannot become {to}")));
        }
        let at = self.at();
        let sql = "UPDATE candidates SET state = $4, reason = $5, state_since = $6 \
                   WHERE app_id = $1 AND candidate_id = $2 AND state = $3";
        let query = q(sql).bind(app).bind(candidate).bind(from).bind(to).bind(reason).bind(at);
        if self.execute(query).await? == 1 {
            return Ok(());
        }
        Err(match self.candidate_get(app, candidate).await? {
            None => Error::not_found("candidate", candidate),
            Some(c) => Error::conflict("candidate", candidate, format!("it is {}, not {from}", c.state)),
        })
    }
}
