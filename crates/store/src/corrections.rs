//! Corrections of answers by annotators. They train only after a second person agreed or a trusted role spoke.
//!
//! Each annotator has one vote per interaction; voting again replaces it. Equal means equal after runs of white space
//! are folded. The state follows from the votes ([`decide`]) until the correction is rejected or used.

use crate::dialect::placeholders;
use crate::query::{FromRow, Row, json_text, q};
use crate::words::words;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, ChunkId, Digest, InstallId, InteractionId, TemplateId};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

words! {
    /// State of a correction.
    CorrectionState {
        /// One voice so far.
        Pending = "pending",
        /// Two people agree, or a trusted role spoke: it may train.
        Accepted = "accepted",
        /// People disagree.
        Disputed = "disputed",
        /// Turned down by a person or erased; final.
        Rejected = "rejected",
        /// Part of a dataset; final.
        Used = "used",
    }
}

/// One correction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CorrectionRow {
    pub app_id: AppId,
    pub correction_id: String,
    pub interaction_id: InteractionId,
    /// Whose interaction it was, for erasure.
    pub install_id: Option<InstallId>,
    pub template_id: Option<TemplateId>,
    /// Prompt or question, masked.
    pub prompt: String,
    pub chunk_ids: Vec<ChunkId>,
    pub wrong_answer: String,
    /// The leading text: the accepted one, else that of the newest vote.
    pub corrected_answer: String,
    pub state: CorrectionState,
    /// What the span diff made of it.
    pub spans: Option<Value>,
    pub reason: Option<String>,
    /// The dataset it went into.
    pub dataset: Option<Digest>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for CorrectionRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            correction_id: row.text("correction_id")?,
            interaction_id: row.parsed("interaction_id")?,
            install_id: row.opt_parsed("install_id")?,
            template_id: row.opt_parsed("template_id")?,
            prompt: row.text("prompt")?,
            chunk_ids: row.json("chunk_ids")?,
            wrong_answer: row.text("wrong_answer")?,
            corrected_answer: row.text("corrected_answer")?,
            state: row.parsed("state")?,
            spans: row.opt_json("spans")?,
            reason: row.opt_text("reason")?,
            dataset: row.opt_parsed("dataset")?,
            created_at: row.time("created_at")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

/// One annotator's text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VoteRow {
    pub annotator: String,
    /// Whether the annotator's role counts alone.
    pub trusted: bool,
    pub answer: String,
    pub at: DateTime<Utc>,
}

impl FromRow for VoteRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            annotator: row.text("annotator")?,
            trusted: row.flag("trusted")?,
            answer: row.text("answer")?,
            at: row.time("at")?,
        })
    }
}

/// What an annotator sends.
#[derive(Debug, Clone, PartialEq)]
pub struct NewCorrection {
    /// Used only when this is the first voice about the interaction.
    pub correction_id: String,
    pub interaction_id: InteractionId,
    pub install_id: Option<InstallId>,
    pub template_id: Option<TemplateId>,
    pub prompt: String,
    pub chunk_ids: Vec<ChunkId>,
    pub wrong_answer: String,
    pub corrected_answer: String,
    pub annotator: String,
    pub trusted: bool,
}

fn folded(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// State and leading text that follow from the votes, oldest first. The newest trusted vote decides alone. Otherwise a
/// text with at least two votes and more than any other is accepted; one text alone is pending; else disputed.
///
/// # Panics
/// Never; without votes the answer is pending with an empty text.
#[must_use]
pub fn decide(votes: &[VoteRow]) -> (CorrectionState, String) {
    if let Some(v) = votes.iter().rfind(|v| v.trusted) {
        return (CorrectionState::Accepted, v.answer.clone());
    }
    let mut counts: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for v in votes {
        let entry = counts.entry(folded(&v.answer)).or_insert((0, &v.answer));
        *entry = (entry.0 + 1, &v.answer);
    }
    let most = counts.values().map(|(n, _)| *n).max().unwrap_or(0);
    let mut leaders = counts.values().filter(|(n, _)| *n == most);
    let newest = votes.last().map_or("", |v| v.answer.as_str());
    match (leaders.next(), leaders.next()) {
        (Some((n, text)), None) if *n >= 2 => (CorrectionState::Accepted, (*text).to_owned()),
        _ if counts.len() > 1 => (CorrectionState::Disputed, newest.to_owned()),
        _ => (CorrectionState::Pending, newest.to_owned()),
    }
}

const SELECT: &str = "SELECT app_id, correction_id, interaction_id, install_id, template_id, prompt, chunk_ids, \
    wrong_answer, corrected_answer, state, spans, reason, dataset, created_at, updated_at FROM corrections";
const VOTES: &str = "SELECT annotator, trusted, answer, at FROM correction_votes \
    WHERE app_id = $1 AND correction_id = $2 ORDER BY at, annotator";

impl Store {
    /// The correction.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn correction_get(&self, app: &AppId, id: &str) -> Result<Option<CorrectionRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND correction_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(id)).await
    }

    /// Corrections, oldest first, in one state or in all, at most `limit`.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn correction_list(
        &self,
        app: &AppId,
        state: Option<CorrectionState>,
        limit: u32,
    ) -> Result<Vec<CorrectionRow>> {
        let which = state.map_or("$2 = ''", |_| "state = $2");
        let sql = format!("{SELECT} WHERE app_id = $1 AND {which} ORDER BY created_at, correction_id LIMIT $3");
        let word = state.map_or("", CorrectionState::as_str);
        self.fetch(q(sql).bind(app).bind(word).bind(limit)).await
    }

    /// The votes behind a correction, oldest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn correction_vote_list(&self, app: &AppId, id: &str) -> Result<Vec<VoteRow>> {
        self.fetch(q(VOTES).bind(app).bind(id)).await
    }
}

impl Tx {
    /// Takes an annotator's correction of an interaction and answers the correction as it is now.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the correction is rejected or used already.
    pub async fn correction_submit(&mut self, app: &AppId, new: &NewCorrection) -> Result<CorrectionRow> {
        let at = self.at();
        // The no-op update takes the row lock, so that two annotators at once are counted one after the other.
        let sql = "INSERT INTO corrections (app_id, correction_id, interaction_id, install_id, template_id, prompt, \
                   chunk_ids, wrong_answer, corrected_answer, state, created_at, updated_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $11) \
                   ON CONFLICT (app_id, interaction_id) DO UPDATE SET updated_at = excluded.updated_at \
                   RETURNING app_id, correction_id, interaction_id, install_id, template_id, prompt, chunk_ids, \
                   wrong_answer, corrected_answer, state, spans, reason, dataset, created_at, updated_at";
        let query = q(sql)
            .bind(app)
            .bind(&new.correction_id)
            .bind(&new.interaction_id)
            .bind(new.install_id)
            .bind(&new.template_id)
            .bind(&new.prompt)
            .bind(json_text("chunk ids", &new.chunk_ids)?)
            .bind(&new.wrong_answer)
            .bind(&new.corrected_answer)
            .bind(CorrectionState::Pending)
            .bind(at);
        let row: Option<CorrectionRow> = self.fetch_opt(query).await?;
        let mut row = row.ok_or_else(|| Error::not_found("correction", &new.correction_id))?;
        if matches!(row.state, CorrectionState::Rejected | CorrectionState::Used) {
            return Err(Error::conflict(
                "correction",
                &row.correction_id,
                format!("it is {} and takes no more votes", row.state),
            ));
        }
        self.correction_vote_put(app, &row.correction_id, new).await?;
        let votes: Vec<VoteRow> = self.fetch(q(VOTES).bind(app).bind(&row.correction_id)).await?;
        (row.state, row.corrected_answer) = decide(&votes);
        let sql = "UPDATE corrections SET state = $3, corrected_answer = $4 \
                   WHERE app_id = $1 AND correction_id = $2";
        let query = q(sql).bind(app).bind(&row.correction_id).bind(row.state).bind(&row.corrected_answer);
        self.execute(query).await?;
        Ok(row)
    }

    async fn correction_vote_put(&mut self, app: &AppId, id: &str, new: &NewCorrection) -> Result<()> {
        let at = self.at();
        let sql = "INSERT INTO correction_votes (app_id, correction_id, annotator, trusted, answer, at) \
                   VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (app_id, correction_id, annotator) DO UPDATE SET \
                   trusted = excluded.trusted, answer = excluded.answer, at = excluded.at";
        let query =
            q(sql).bind(app).bind(id).bind(&new.annotator).bind(new.trusted).bind(&new.corrected_answer).bind(at);
        self.execute(query).await.map(|_| ())
    }

    /// Stores what the span diff made of the accepted text.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn correction_spans_set(&mut self, app: &AppId, id: &str, spans: &Value) -> Result<()> {
        let sql = "UPDATE corrections SET spans = $3 WHERE app_id = $1 AND correction_id = $2";
        match self.execute(q(sql).bind(app).bind(id).bind(json_text("spans", spans)?)).await? {
            0 => Err(Error::not_found("correction", id)),
            _ => Ok(()),
        }
    }

    /// Turns a correction down.
    ///
    /// # Errors
    /// [`Error::Conflict`] when it is no longer in state `from`; [`Error::Invalid`] from a final state.
    pub async fn correction_reject(
        &mut self,
        app: &AppId,
        id: &str,
        from: CorrectionState,
        reason: &str,
    ) -> Result<()> {
        if matches!(from, CorrectionState::Used | CorrectionState::Rejected) {
            return Err(Error::invalid("correction state", format!("{from} is final")));
        }
        self.correction_finish(app, id, from, CorrectionState::Rejected, Some(reason), None).await
    }

    /// Marks accepted corrections as part of a dataset, all or nothing.
    ///
    /// # Errors
    /// [`Error::Conflict`] when one of them is no longer accepted.
    pub async fn correction_mark_used(&mut self, app: &AppId, ids: &[String], dataset: Digest) -> Result<()> {
        for id in ids {
            let (from, to) = (CorrectionState::Accepted, CorrectionState::Used);
            self.correction_finish(app, id, from, to, None, Some(dataset)).await?;
        }
        Ok(())
    }

    async fn correction_finish(
        &mut self,
        app: &AppId,
        id: &str,
        from: CorrectionState,
        to: CorrectionState,
        reason: Option<&str>,
        dataset: Option<Digest>,
    ) -> Result<()> {
        let at = self.at();
        let sql = "UPDATE corrections SET state = $4, reason = COALESCE($5, reason), dataset = $6, updated_at = $7 \
                   WHERE app_id = $1 AND correction_id = $2 AND state = $3";
        let query = q(sql).bind(app).bind(id).bind(from).bind(to).bind(reason).bind(dataset).bind(at);
        match self.execute(query).await? {
            0 => Err(Error::conflict("correction", id, format!("it is not {from}"))),
            _ => Ok(()),
        }
    }

    /// Deletes the corrections of these interactions, and those of an installation, with their votes; answers how many.
    ///
    /// # Errors
    /// Those of the statements.
    pub async fn correction_erase(
        &mut self,
        app: &AppId,
        install: Option<&str>,
        interactions: &[String],
    ) -> Result<u64> {
        let mut erased = 0;
        for part in interactions.chunks(IDS_AT_ONCE) {
            let which = format!("interaction_id IN ({})", placeholders(2, part.len()));
            erased += self.correction_delete(app, &which, part.iter().map(String::as_str)).await?;
        }
        if let Some(install) = install {
            erased += self.correction_delete(app, "install_id = $2", [install].into_iter()).await?;
        }
        Ok(erased)
    }

    async fn correction_delete<'a>(
        &mut self,
        app: &AppId,
        which: &str,
        values: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<u64> {
        let votes = format!(
            "DELETE FROM correction_votes WHERE app_id = $1 AND correction_id IN \
             (SELECT correction_id FROM corrections WHERE app_id = $1 AND {which})"
        );
        let bound = |sql: String| values.clone().fold(q(sql).bind(app), |query, v| query.bind(v));
        self.execute(bound(votes)).await?;
        self.execute(bound(format!("DELETE FROM corrections WHERE app_id = $1 AND {which}"))).await
    }

    /// Corrections that a dataset used are said to be in the one that replaced it.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn correction_dataset_move(&mut self, app: &AppId, from: Digest, to: Digest) -> Result<()> {
        let sql = "UPDATE corrections SET dataset = $3 WHERE app_id = $1 AND dataset = $2";
        self.execute(q(sql).bind(app).bind(from).bind(to)).await.map(|_| ())
    }
}

/// Ids in one statement.
const IDS_AT_ONCE: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(annotator: &str, trusted: bool, answer: &str) -> VoteRow {
        VoteRow { annotator: annotator.into(), trusted, answer: answer.into(), at: DateTime::default() }
    }

    #[test]
    fn votes_decide_as_documented() {
        use CorrectionState as S;
        let (a, b, c) = (vote("a", false, "30  days"), vote("b", false, "30 days\n"), vote("c", false, "14 days"));
        assert_eq!(decide(&[]).0, S::Pending);
        assert_eq!(decide(std::slice::from_ref(&a)).0, S::Pending);
        assert_eq!(decide(&[a.clone(), b.clone()]), (S::Accepted, "30 days\n".into()));
        assert_eq!(decide(&[a.clone(), c.clone()]), (S::Disputed, "14 days".into()));
        assert_eq!(decide(&[a.clone(), c.clone(), b]).0, S::Accepted);
        assert_eq!(decide(&[a, vote("t", true, "7 days"), c]), (S::Accepted, "7 days".into()));
    }
}
