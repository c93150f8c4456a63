//! People who asked to be forgotten, and holds that forbid it for now. The subject of an erasure is kept until it is done and
//! then only as a digest; the audit log never names it.

use crate::query::{FromRow, Row, json_text, q};
use crate::words::words;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest};
use serde::Serialize;
use serde_json::Value;

words! {
    /// What names the subject.
    SubjectKind {
        /// Key of the app's user id.
        UserKey = "user_key",
        /// A device.
        Install = "install_id",
    }
}
words! {
    /// State of an erasure.
    ErasureState {
        /// Its job has not ended.
        Requested = "requested",
        /// Everything but what a hold keeps is erased; the rest follows when the hold is lifted.
        Held = "held",
        /// Final.
        Done = "done",
    }
}

/// One erasure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ErasureRow {
    pub app_id: AppId,
    pub erasure_id: String,
    pub subject_kind: SubjectKind,
    /// `None` once it is done.
    #[serde(skip)]
    pub subject: Option<String>,
    pub subject_digest: Digest,
    pub reason: String,
    pub requested_by: String,
    pub state: ErasureState,
    /// What its attempts have erased so far.
    pub progress: Value,
    pub receipt: Option<Value>,
    pub requested_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

impl FromRow for ErasureRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            erasure_id: row.text("erasure_id")?,
            subject_kind: row.parsed("subject_kind")?,
            subject: row.opt_text("subject")?,
            subject_digest: row.parsed("subject_digest")?,
            reason: row.text("reason")?,
            requested_by: row.text("requested_by")?,
            state: row.parsed("state")?,
            progress: row.json("progress")?,
            receipt: row.opt_json("receipt")?,
            requested_at: row.time("requested_at")?,
            updated_at: row.time("updated_at")?,
        })
    }
}

/// Who asked for what.
#[derive(Debug, Clone)]
pub struct NewErasure {
    pub erasure_id: String,
    pub subject_kind: SubjectKind,
    pub subject: String,
    pub reason: String,
    pub requested_by: String,
}

/// A hold: the subject's records stay, whatever retention and erasures say.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HoldRow {
    pub app_id: AppId,
    pub name: String,
    pub subject_kind: SubjectKind,
    pub subject: String,
    pub reason: String,
    pub created_by: String,
    pub created_at: DateTime<Utc>,
}

impl FromRow for HoldRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            name: row.text("name")?,
            subject_kind: row.parsed("subject_kind")?,
            subject: row.text("subject")?,
            reason: row.text("reason")?,
            created_by: row.text("created_by")?,
            created_at: row.time("created_at")?,
        })
    }
}

const SELECT: &str = "SELECT app_id, erasure_id, subject_kind, subject, subject_digest, reason, requested_by, state, \
    progress, receipt, requested_at, updated_at FROM erasures";
const HOLDS: &str = "SELECT app_id, name, subject_kind, subject, reason, created_by, created_at FROM legal_holds";

/// A secret value that is made once and then the same for every process on this database.
struct Salt(String);

impl FromRow for Salt {
    fn from_row(row: &Row) -> Result<Self> {
        row.text("value").map(Self)
    }
}

impl Store {
    /// The erasure.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn erasure_get(&self, app: &AppId, id: &str) -> Result<Option<ErasureRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND erasure_id = $2");
        self.fetch_opt(q(sql).bind(app).bind(id)).await
    }

    /// Erasures, newest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn erasure_list(&self, app: &AppId, limit: u32) -> Result<Vec<ErasureRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 ORDER BY requested_at DESC, erasure_id LIMIT $2");
        self.fetch(q(sql).bind(app).bind(limit)).await
    }

    /// Holds of an app, by name.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn hold_list(&self, app: &AppId) -> Result<Vec<HoldRow>> {
        let sql = format!("{HOLDS} WHERE app_id = $1 ORDER BY name");
        self.fetch(q(sql).bind(app)).await
    }
}

impl Tx {
    /// The salt called `name`; `fresh` becomes it when there is none yet.
    ///
    /// # Errors
    /// Those of the statements.
    pub async fn salt(&mut self, name: &str, fresh: &str) -> Result<String> {
        let sql = "INSERT INTO salts (name, value) VALUES ($1, $2) ON CONFLICT DO NOTHING";
        self.execute(q(sql).bind(name).bind(fresh)).await?;
        let found: Option<Salt> = self.fetch_opt(q("SELECT value FROM salts WHERE name = $1").bind(name)).await?;
        found.map(|v| v.0).ok_or_else(|| Error::not_found("salt", name))
    }

    /// Notes a request.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn erasure_create(&mut self, app: &AppId, new: &NewErasure) -> Result<()> {
        let at = self.at();
        let sql = "INSERT INTO erasures (app_id, erasure_id, subject_kind, subject, subject_digest, reason, \
                   requested_by, state, progress, requested_at, updated_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8, '{}', $9, $9)";
        let query = q(sql)
            .bind(app)
            .bind(&new.erasure_id)
            .bind(new.subject_kind)
            .bind(&new.subject)
            .bind(Digest::of(new.subject.as_bytes()))
            .bind(&new.reason)
            .bind(&new.requested_by)
            .bind(ErasureState::Requested)
            .bind(at);
        self.execute(query).await.map(|_| ())
    }

    /// Stores what was erased so far.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the erasure is done or unknown.
    pub async fn erasure_progress(&mut self, app: &AppId, id: &str, progress: &Value) -> Result<()> {
        let at = self.at();
        let sql = "UPDATE erasures SET progress = $3, updated_at = $4 \
                   WHERE app_id = $1 AND erasure_id = $2 AND state <> $5";
        let query = q(sql).bind(app).bind(id).bind(json_text("progress", progress)?).bind(at).bind(ErasureState::Done);
        self.one(query, id, "it is done or unknown").await
    }

    /// Ends an attempt with its receipt; a done erasure forgets its subject.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the erasure is done or unknown.
    pub async fn erasure_finish(&mut self, app: &AppId, id: &str, state: ErasureState, receipt: &Value) -> Result<()> {
        let at = self.at();
        let sql = "UPDATE erasures SET state = $3, receipt = $4, updated_at = $5, \
                   subject = CASE WHEN $3 = 'done' THEN NULL ELSE subject END \
                   WHERE app_id = $1 AND erasure_id = $2 AND state <> 'done'";
        let query = q(sql).bind(app).bind(id).bind(state).bind(json_text("receipt", receipt)?).bind(at);
        self.one(query, id, "it is done or unknown").await
    }

    /// Erasures that a hold keeps from their end are requested again; answers which.
    ///
    /// # Errors
    /// Those of the statements.
    pub async fn erasures_release(&mut self, app: &AppId) -> Result<Vec<ErasureRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND state = $2 ORDER BY requested_at");
        let rows: Vec<ErasureRow> = self.fetch(q(sql).bind(app).bind(ErasureState::Held)).await?;
        let at = self.at();
        let sql = "UPDATE erasures SET state = $3, updated_at = $4 WHERE app_id = $1 AND state = $2";
        let query = q(sql).bind(app).bind(ErasureState::Held).bind(ErasureState::Requested).bind(at);
        self.execute(query).await?;
        Ok(rows)
    }

    /// Puts or replaces a hold.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn hold_put(&mut self, app: &AppId, hold: &HoldRow) -> Result<()> {
        let at = self.at();
        let sql = "INSERT INTO legal_holds (app_id, name, subject_kind, subject, reason, created_by, created_at) \
                   VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (app_id, name) DO UPDATE SET \
                   subject_kind = excluded.subject_kind, subject = excluded.subject, reason = excluded.reason, \
                   created_by = excluded.created_by, created_at = excluded.created_at";
        let query = q(sql)
            .bind(app)
            .bind(&hold.name)
            .bind(hold.subject_kind)
            .bind(&hold.subject)
            .bind(&hold.reason)
            .bind(&hold.created_by)
            .bind(at);
        self.execute(query).await.map(|_| ())
    }

    /// Lifts a hold and forgets whom it was about; answers whose it was.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn hold_lift(&mut self, app: &AppId, name: &str) -> Result<HoldRow> {
        let sql = format!("{HOLDS} WHERE app_id = $1 AND name = $2");
        let row: Option<HoldRow> = self.fetch_opt(q(sql).bind(app).bind(name)).await?;
        let row = row.ok_or_else(|| Error::not_found("hold", name))?;
        self.execute(q("DELETE FROM legal_holds WHERE app_id = $1 AND name = $2").bind(app).bind(name)).await?;
        Ok(row)
    }

    async fn one(&mut self, query: crate::query::Query, id: &str, why: &str) -> Result<()> {
        match self.execute(query).await? {
            0 => Err(Error::conflict("erasure", id, why)),
            _ => Ok(()),
        }
    }
}
