//! The audit log: append-only, one hash chain per app.
//!
//! `hash = SHA-256(prev_hash ‖ each field as 8-byte big-endian length ‖ bytes)` over app, seq, time, actor, action,
//! subject, detail. The head row keeps the last hash, so cutting off the tail shows as well; to detect a rewrite of
//! the whole table, note the head outside from time to time.

use crate::query::{FromRow, Row, json_text, q};
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest};
use serde::Serialize;

/// One audit entry. `detail` holds the numbers and reasons; it never holds prompt text, tokens or keys.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AuditRow {
    pub app_id: AppId,
    /// 1, 2, 3, … without holes.
    pub seq: i64,
    pub at: DateTime<Utc>,
    /// A token's name, or `system` for the controller itself.
    pub actor: String,
    /// What was done, for example `chunk.freeze`.
    pub action: String,
    /// To what, for example `chunk/returns-policy`.
    pub subject: String,
    pub detail: serde_json::Value,
    pub prev_hash: Digest,
    pub hash: Digest,
    #[serde(skip)]
    detail_text: String,
}

impl FromRow for AuditRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            seq: row.int("seq")?,
            at: row.time("at")?,
            actor: row.text("actor")?,
            action: row.text("action")?,
            subject: row.text("subject")?,
            detail: row.json("detail")?,
            prev_hash: row.parsed("prev_hash")?,
            hash: row.parsed("hash")?,
            detail_text: row.text("detail")?,
        })
    }
}

/// Last entry of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AuditHead {
    /// 0 when the log is empty.
    pub seq: i64,
    pub hash: Digest,
}

impl FromRow for AuditHead {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self { seq: row.int("seq")?, hash: row.parsed("hash")? })
    }
}

/// Result of checking a chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum AuditCheck {
    /// Every entry fits; this is the head.
    Intact { entries: i64, head: Digest },
    /// The first entry that does not fit, and why.
    Broken { seq: i64, reason: String },
}

/// Hash before the first entry.
const GENESIS: Digest = Digest([0; 32]);
const PAGE: i64 = 1000;
const SELECT: &str = "SELECT app_id, seq, at, actor, action, subject, detail, prev_hash, hash FROM audit";

fn entry_hash(prev: Digest, fields: [&str; 7]) -> Digest {
    let mut bytes = prev.0.to_vec();
    for field in fields {
        bytes.extend_from_slice(&(field.len() as u64).to_be_bytes());
        bytes.extend_from_slice(field.as_bytes());
    }
    Digest::of(&bytes)
}

fn row_hash(row: &AuditRow) -> Digest {
    let (seq, at) = (row.seq.to_string(), row.at.timestamp_micros().to_string());
    entry_hash(row.prev_hash, [row.app_id.as_str(), &seq, &at, &row.actor, &row.action, &row.subject, &row.detail_text])
}

impl Tx {
    /// Appends an entry. Takes the app's audit lock until the end of the transaction: call it last.
    ///
    /// # Errors
    /// Those of the statements.
    pub async fn audit_append(
        &mut self,
        app: &AppId,
        actor: &str,
        action: &str,
        subject: &str,
        detail: &serde_json::Value,
    ) -> Result<AuditHead> {
        let at = self.at();
        let lock = "INSERT INTO audit_heads (app_id, seq, hash) VALUES ($1, 1, $2) \
                    ON CONFLICT (app_id) DO UPDATE SET seq = audit_heads.seq + 1 RETURNING seq, hash";
        let head: Option<AuditHead> = self.fetch_opt(q(lock).bind(app).bind(GENESIS)).await?;
        let Some(AuditHead { seq, hash: prev }) = head else {
            return Err(Error::not_found("audit head", app));
        };
        let detail = json_text("audit detail", detail)?;
        let (seq_text, at_text) = (seq.to_string(), at.timestamp_micros().to_string());
        let fields = [app.as_str(), &seq_text, &at_text, actor, action, subject, &detail];
        let hash = entry_hash(prev, fields);
        let insert = "INSERT INTO audit (app_id, seq, at, actor, action, subject, detail, prev_hash, hash) \
                      VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)";
        let query = q(insert)
            .bind(app)
            .bind(seq)
            .bind(at)
            .bind(actor)
            .bind(action)
            .bind(subject)
            .bind(detail)
            .bind(prev)
            .bind(hash);
        self.execute(query).await?;
        self.execute(q("UPDATE audit_heads SET hash = $2 WHERE app_id = $1").bind(app).bind(hash)).await?;
        Ok(AuditHead { seq, hash })
    }
}

impl Store {
    /// Newest entries first, at most `limit`, before entry `before` when given (for pages).
    ///
    /// # Errors
    /// Those of the query.
    pub async fn audit_list(&self, app: &AppId, before: Option<i64>, limit: u32) -> Result<Vec<AuditRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND seq < $2 ORDER BY seq DESC LIMIT $3");
        self.fetch(q(sql).bind(app).bind(before.unwrap_or(i64::MAX)).bind(limit)).await
    }

    /// Entries about one subject, oldest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn audit_list_subject(&self, app: &AppId, subject: &str) -> Result<Vec<AuditRow>> {
        let sql = format!("{SELECT} WHERE app_id = $1 AND subject = $2 ORDER BY seq");
        self.fetch(q(sql).bind(app).bind(subject)).await
    }

    /// Head of the chain.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn audit_head(&self, app: &AppId) -> Result<AuditHead> {
        let sql = "SELECT seq, hash FROM audit_heads WHERE app_id = $1";
        Ok(self.fetch_opt(q(sql).bind(app)).await?.unwrap_or(AuditHead { seq: 0, hash: GENESIS }))
    }

    /// Recomputes the whole chain of an app up to the head it had when the check began.
    ///
    /// # Errors
    /// Those of the queries; a broken chain is an answer, not an error.
    pub async fn audit_verify(&self, app: &AppId) -> Result<AuditCheck> {
        let head = self.audit_head(app).await?;
        let (mut next, mut prev) = (1, GENESIS);
        let sql = format!("{SELECT} WHERE app_id = $1 AND seq >= $2 AND seq <= $3 ORDER BY seq LIMIT $4");
        while next <= head.seq {
            let query = q(sql.clone()).bind(app).bind(next).bind(head.seq).bind(PAGE);
            let page: Vec<AuditRow> = self.fetch(query).await?;
            if page.is_empty() {
                return Ok(broken(next, "entry is missing"));
            }
            for row in page {
                if row.seq != next {
                    return Ok(broken(next, "entry is missing"));
                }
                if row.prev_hash != prev {
                    return Ok(broken(next, "it does not follow the entry before it"));
                }
                if row_hash(&row) != row.hash {
                    return Ok(broken(next, "its content was changed"));
                }
                (next, prev) = (next + 1, row.hash);
            }
        }
        if prev != head.hash {
            return Ok(broken(head.seq, "it is not the entry the head names"));
        }
        Ok(AuditCheck::Intact { entries: head.seq, head: head.hash })
    }
}

fn broken(seq: i64, reason: &str) -> AuditCheck {
    AuditCheck::Broken { seq, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use serde_json::json;

    /// A log of five entries, changed by `sql` behind the program's back.
    async fn tampered(sql: &'static str) -> AuditCheck {
        let scratch = Scratch::sqlite(None).await.unwrap();
        let app: AppId = "shop".parse().unwrap();
        let mut tx = scratch.store.begin(DateTime::default()).await.unwrap();
        for i in 0..5 {
            tx.audit_append(&app, "ann", "freeze", "chunk/1", &json!({"i": i})).await.unwrap();
        }
        tx.script(sql).await.unwrap();
        tx.commit().await.unwrap();
        scratch.store.audit_verify(&app).await.unwrap()
    }

    #[tokio::test]
    async fn every_kind_of_tampering_is_found_where_it_is() {
        let at = |check: AuditCheck| match check {
            AuditCheck::Intact { .. } => 0,
            AuditCheck::Broken { seq, .. } => seq,
        };
        assert_eq!(at(tampered("SELECT 1").await), 0);
        assert_eq!(at(tampered("UPDATE audit SET detail = '{\"i\":9}' WHERE seq = 3").await), 3);
        assert_eq!(at(tampered("UPDATE audit SET actor = 'bob' WHERE seq = 1").await), 1);
        assert_eq!(at(tampered("UPDATE audit SET at = at + 1 WHERE seq = 4").await), 4);
        assert_eq!(at(tampered("DELETE FROM audit WHERE seq = 2").await), 2);
        assert_eq!(at(tampered("DELETE FROM audit WHERE seq = 5").await), 5);
        let rewritten = "UPDATE audit SET prev_hash = hash WHERE seq = 2";
        assert_eq!(at(tampered(rewritten).await), 2);
        let cut = "DELETE FROM audit WHERE seq = 5; UPDATE audit_heads SET seq = 4";
        assert_eq!(at(tampered(cut).await), 4);
    }

    #[test]
    fn the_hash_is_the_documented_one() {
        // SHA-256 of 32 zero bytes and seven empty fields (eight zero bytes each).
        assert_eq!(entry_hash(GENESIS, [""; 7]), Digest::of(&[0u8; 32 + 56]));
        assert_ne!(
            entry_hash(GENESIS, ["ab", "c", "", "", "", "", ""]),
            entry_hash(GENESIS, ["a", "bc", "", "", "", "", ""])
        );
    }
}
