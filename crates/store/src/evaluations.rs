//! Evaluations of candidates: the verdict of the offline gate, the gate's specification and the measured numbers.

use crate::candidates::CandidateSource;
use crate::query::{FromRow, Row, json_text, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, CandidateId, JobId, Verdict};
use serde::Serialize;
use serde_json::Value;

/// One evaluation; immutable.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvaluationRow {
    pub app_id: AppId,
    pub evaluation_id: String,
    pub candidate_id: CandidateId,
    pub verdict: Verdict,
    /// The gate as it was frozen.
    pub spec: Value,
    /// What was measured.
    pub report: Value,
    pub source: CandidateSource,
    pub job: Option<(JobId, i64)>,
    pub created_at: DateTime<Utc>,
}

impl FromRow for EvaluationRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            evaluation_id: row.text("evaluation_id")?,
            candidate_id: row.parsed("candidate_id")?,
            verdict: row.parsed("verdict")?,
            spec: row.json("spec")?,
            report: row.json("report")?,
            source: row.parsed("source")?,
            job: row.opt_parsed("job_id")?.zip(row.opt_int("attempt")?),
            created_at: row.time("created_at")?,
        })
    }
}

/// An evaluation to store.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvaluation {
    /// Derive it from candidate and specification, so that a repeated job agrees.
    pub evaluation_id: String,
    pub candidate_id: CandidateId,
    pub verdict: Verdict,
    pub spec: Value,
    pub report: Value,
    pub source: CandidateSource,
    pub job: Option<(JobId, i64)>,
}

const SELECT: &str = "SELECT app_id, evaluation_id, candidate_id, verdict, spec, report, source, job_id, attempt, \
    created_at FROM evaluations";

impl Store {
    /// Evaluations of a candidate, newest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn evaluation_list(&self, app: &AppId, candidate: &CandidateId) -> Result<Vec<EvaluationRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND candidate_id = $2 ORDER BY created_at DESC, evaluation_id");
        self.fetch(q(sql).bind(app).bind(candidate)).await
    }
}

impl Tx {
    /// Stores an evaluation; answers whether it is new. An existing one is never changed.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the id holds another verdict; [`Error::Invalid`] when the candidate does not exist.
    pub async fn evaluation_create(&mut self, app: &AppId, new: &NewEvaluation) -> Result<bool> {
        let at = self.at();
        let sql = "INSERT INTO evaluations (app_id, evaluation_id, candidate_id, verdict, spec, report, source, \
                   job_id, attempt, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) \
                   ON CONFLICT DO NOTHING";
        let query = q(sql)
            .bind(app)
            .bind(&new.evaluation_id)
            .bind(&new.candidate_id)
            .bind(new.verdict)
            .bind(json_text("spec", &new.spec)?)
            .bind(json_text("report", &new.report)?)
            .bind(new.source)
            .bind(new.job.as_ref().map(|(id, _)| id))
            .bind(new.job.as_ref().map(|(_, attempt)| *attempt))
            .bind(at);
        if self.execute(query).await? == 1 {
            return Ok(true);
        }
        let sql = format!("{SELECT} WHERE app_id = $1 AND evaluation_id = $2");
        let row: Option<EvaluationRow> = self.fetch_opt(q(sql).bind(app).bind(&new.evaluation_id)).await?;
        match row {
            Some(r) if r.verdict == new.verdict && r.candidate_id == new.candidate_id => Ok(false),
            _ => Err(Error::conflict(
                "evaluation",
                &new.evaluation_id,
                "this id holds another result; evaluations are never changed",
            )),
        }
    }
}
