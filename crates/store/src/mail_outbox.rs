//! Mail to be sent: one message per recipient, written in the transaction that causes it, claimed under a lease like a
//! job. The Message-ID stays the same over retries, so that a receiver can drop a second copy.

use crate::query::{FromRow, Row, q};
use crate::words::words;
use crate::{Error, Result, Store, Tx};
use chrono::{DateTime, Utc};
use flywheel_types::{AppId, Digest};
use serde::Serialize;
use std::time::Duration;

words! {
    /// State of a mail.
    MailState { Queued = "queued", Sending = "sending", Sent = "sent", Dead = "dead" }
}

/// One mail to one recipient.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MailRow {
    pub app_id: AppId,
    pub mail_id: String,
    /// Value of the Message-ID header, with angle brackets.
    pub message_id: String,
    pub recipient: String,
    pub subject: String,
    pub body_text: String,
    pub body_html: Option<String>,
    pub state: MailState,
    /// Fencing token of the current sender.
    pub attempt: i64,
    pub max_attempts: i64,
    pub last_error: Option<String>,
    pub created_at: DateTime<Utc>,
    pub sent_at: Option<DateTime<Utc>>,
}

impl FromRow for MailRow {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            app_id: row.parsed("app_id")?,
            mail_id: row.text("mail_id")?,
            message_id: row.text("message_id")?,
            recipient: row.text("recipient")?,
            subject: row.text("subject")?,
            body_text: row.text("body_text")?,
            body_html: row.opt_text("body_html")?,
            state: row.parsed("state")?,
            attempt: row.int("attempt")?,
            max_attempts: row.int("max_attempts")?,
            last_error: row.opt_text("last_error")?,
            created_at: row.time("created_at")?,
            sent_at: row.opt_time("sent_at")?,
        })
    }
}

/// A message for one or more recipients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMail {
    /// Names the cause, for example `rollback/<rollout>/<generation>`: the same cause is mailed once per recipient.
    pub dedup_key: String,
    pub recipients: Vec<String>,
    pub subject: String,
    pub body_text: String,
    pub body_html: Option<String>,
    pub max_attempts: i64,
}

const COLUMNS: &str = "app_id, mail_id, message_id, recipient, subject, body_text, body_html, state, attempt, \
    max_attempts, last_error, created_at, sent_at";

impl Store {
    /// Mails of the app, newest first.
    ///
    /// # Errors
    /// Those of the query.
    pub async fn mail_list(&self, app: &AppId, limit: u32) -> Result<Vec<MailRow>> {
        let sql =
            format!("SELECT {COLUMNS} FROM mail_outbox WHERE app_id = $1 ORDER BY created_at DESC, mail_id LIMIT $2");
        self.fetch(q(sql).bind(app).bind(limit)).await
    }
}

impl Tx {
    /// Queues a message; answers how many recipients are new for this cause. Ids are derived from app, cause and
    /// recipient.
    ///
    /// # Errors
    /// Those of the statement.
    pub async fn mail_enqueue(&mut self, app: &AppId, new: &NewMail) -> Result<u64> {
        let (at, now) = (self.at(), self.lease_now_us());
        let mut added = 0;
        for recipient in &new.recipients {
            let name = Digest::of(format!("{app}\n{}\n{recipient}", new.dedup_key).as_bytes());
            let short = name.to_hex()[..32].to_owned();
            let sql = "INSERT INTO mail_outbox (app_id, mail_id, dedup_key, message_id, recipient, subject, \
                       body_text, body_html, state, attempt, max_attempts, run_at, created_at) \
                       VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10, $11, $12) ON CONFLICT DO NOTHING";
            let query = q(sql)
                .bind(app)
                .bind(format!("mail-{short}"))
                .bind(&new.dedup_key)
                .bind(format!("<{short}@flywheel.invalid>"))
                .bind(recipient)
                .bind(&new.subject)
                .bind(&new.body_text)
                .bind(&new.body_html)
                .bind(MailState::Queued)
                .bind(new.max_attempts.max(1))
                .bind(now)
                .bind(at);
            added += self.execute(query).await?;
        }
        Ok(added)
    }

    /// Claims the next mail that is due, or whose sender's lease ran out; a mail out of attempts becomes dead here.
    ///
    /// # Errors
    /// Those of the statements.
    pub async fn mail_claim(&mut self, owner: &str, ttl: Duration) -> Result<Option<MailRow>> {
        let now = self.lease_now_us();
        let until = now.saturating_add(i64::try_from(ttl.as_micros()).unwrap_or(i64::MAX));
        let sql = "UPDATE mail_outbox SET state = 'dead', lease_owner = NULL, lease_expires_at = NULL, \
                   last_error = COALESCE(last_error, 'its sender stopped each time') \
                   WHERE state = 'sending' AND lease_expires_at <= $1 AND attempt >= max_attempts";
        self.execute(q(sql).bind(now)).await?;
        let sql = format!(
            "UPDATE mail_outbox SET state = 'sending', attempt = attempt + 1, lease_owner = $2, \
             lease_expires_at = $3 WHERE mail_id = (SELECT mail_id FROM mail_outbox WHERE \
             (state = 'queued' AND run_at <= $1) OR (state = 'sending' AND lease_expires_at <= $1) \
             ORDER BY run_at, mail_id LIMIT 1{}) RETURNING {COLUMNS}",
            self.backend().skip_locked()
        );
        self.fetch_opt(q(sql).bind(now).bind(owner).bind(until)).await
    }

    /// The server took the mail.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease was lost: another sender has it.
    pub async fn mail_sent(&mut self, mail: &MailRow) -> Result<()> {
        let at = self.at();
        let sql = "UPDATE mail_outbox SET state = 'sent', sent_at = $3, lease_owner = NULL, \
                   lease_expires_at = NULL, last_error = NULL \
                   WHERE mail_id = $1 AND attempt = $2 AND state = 'sending'";
        self.mail_fenced(mail, q(sql).bind(&mail.mail_id).bind(mail.attempt).bind(at)).await
    }

    /// Sending failed: again after `retry_in`, or never when `retry_in` is `None` or the attempts are used up.
    ///
    /// # Errors
    /// [`Error::Conflict`] when the lease was lost.
    pub async fn mail_failed(&mut self, mail: &MailRow, error: &str, retry_in: Option<Duration>) -> Result<MailState> {
        let wait = retry_in.filter(|_| mail.attempt < mail.max_attempts);
        let to = if wait.is_some() { MailState::Queued } else { MailState::Dead };
        let wait_us = i64::try_from(wait.unwrap_or_default().as_micros()).unwrap_or(i64::MAX);
        let run_at = self.lease_now_us().saturating_add(wait_us);
        let sql = "UPDATE mail_outbox SET state = $3, run_at = $4, last_error = $5, lease_owner = NULL, \
                   lease_expires_at = NULL WHERE mail_id = $1 AND attempt = $2 AND state = 'sending'";
        let query = q(sql).bind(&mail.mail_id).bind(mail.attempt).bind(to).bind(run_at).bind(error);
        self.mail_fenced(mail, query).await.map(|()| to)
    }

    async fn mail_fenced(&mut self, mail: &MailRow, query: crate::query::Query) -> Result<()> {
        match self.execute(query).await? {
            0 => Err(Error::conflict("mail", &mail.mail_id, "another sender has taken it over")),
            _ => Ok(()),
        }
    }
}
