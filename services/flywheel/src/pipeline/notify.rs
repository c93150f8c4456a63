//! Mail to people. What is worth a mail is written to the outbox in the transaction that causes it; this step sends
//! what is due, one message at a time, outside of any transaction. Without a mail server the outbox just waits.

mod dead;
mod text;

pub use dead::DeadJobs;

use crate::mail::{Mail, Mailer};
use crate::server::Server;
use chrono::TimeDelta;
use flywheel_attribution::culprit::Proposal;
use flywheel_experiment::gate::GateReportV1;
use flywheel_experiment::planner::{Action, Next, PlanV1};
use flywheel_jobs::JobContext;
use flywheel_store::Tx;
use flywheel_store::jobs::NewJob;
use flywheel_store::mail_outbox::{MailRow, MailState, NewMail};
use flywheel_types::{AppId, ChunkState, Digest, Error, ErrorKind};
use serde_json::{Value, json};
use std::time::Duration;

pub const KIND: &str = "notify";

/// Attempts per message; with the back-off below the last one is about 17 hours after the first.
const MAX_ATTEMPTS: i64 = 24;
/// First wait after a failure; it doubles up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_secs(30);
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// Messages of one run; a full run queues the next one.
const BATCH: u32 = 100;
/// Failures in a row after which the server counts as down and the rest waits for the next run.
const GIVE_UP_AFTER: u32 = 3;

/// Queues mail about a chunk that was frozen, in the transaction that freezes it.
///
/// # Errors
/// Those of the database.
pub async fn enqueue_chunk(tx: &mut Tx, server: &Server, app: &AppId, proposal: &Proposal) -> Result<(), Error> {
    let Some(to @ (ChunkState::CanaryFrozen | ChunkState::Frozen)) = proposal.transition.target() else {
        return Ok(());
    };
    // the same version can be frozen again after its freeze ran out, so the time belongs to the cause
    let cause = format!("chunk/{}/{to}/{}", proposal.name, tx.at().timestamp());
    let (subject, body) = text::chunk(app, proposal, to, &server.config.public_url());
    enqueue(tx, server, app, cause, subject, body).await
}

/// Queues the alerts and questions of a planning round. Safe to call in every round: the same cause is mailed once.
///
/// # Errors
/// Those of the database.
pub async fn enqueue_rollout(
    tx: &mut Tx,
    server: &Server,
    app: &AppId,
    before: &PlanV1,
    next: &Next,
    report: Option<&GateReportV1>,
) -> Result<(), Error> {
    let round = text::Round { app, before, next, report, url: &server.config.public_url() };
    let alerts: Vec<(bool, &str)> = next
        .actions
        .iter()
        .filter_map(|a| match a {
            Action::Alert { urgent, text } => Some((*urgent, text.as_str())),
            Action::AskApproval { .. } | Action::PublishAssignment | Action::SetDefaultBundle { .. } => None,
        })
        .collect();
    let rollout = &before.rollout_id;
    if !alerts.is_empty() {
        let said = Digest::of(alerts.iter().map(|(_, t)| *t).collect::<Vec<_>>().join("\n").as_bytes()).to_hex();
        let cause = format!("rollout/{rollout}/{}/alert/{}", next.plan.generation, &said[..16]);
        let (subject, body) = text::alert(&round, &alerts);
        enqueue(tx, server, app, cause, subject, body).await?;
    }
    for action in &next.actions {
        if let Action::AskApproval { generation, change } = action {
            let cause = format!("rollout/{rollout}/{generation}/ask/{}", change.as_str());
            let (subject, body) = text::question(&round, *generation, *change);
            enqueue(tx, server, app, cause, subject, body).await?;
        }
    }
    Ok(())
}

async fn enqueue(
    tx: &mut Tx,
    server: &Server,
    app: &AppId,
    cause: String,
    subject: String,
    body_text: String,
) -> Result<(), Error> {
    let recipients = recipients(server, app).await?;
    let new = NewMail { dedup_key: cause, recipients, subject, body_text, body_html: None, max_attempts: MAX_ATTEMPTS };
    if tx.mail_enqueue(app, &new).await? > 0 {
        enqueue_run(tx, app, &new.dedup_key).await?;
    }
    Ok(())
}

/// Queues a run. `key` names the reason: a run that is about to end must not swallow the request for the next one.
///
/// # Errors
/// Those of the database.
pub async fn enqueue_run(tx: &mut Tx, app: &AppId, key: &str) -> Result<(), Error> {
    let job = NewJob::new(KIND, json!({ "v": 1 })).dedup(key).concurrency("notify", 1);
    tx.job_enqueue(app, &job).await?;
    Ok(())
}

/// Queues a run for mail that waits since before this start: a mail server may be configured by now.
///
/// # Errors
/// Those of the database.
pub async fn enqueue_pending(server: &Server) -> Result<(), Error> {
    let apps = server.store.app_list().await?;
    let (Some(_), Some(first)) = (&server.mailer, apps.first()) else { return Ok(()) };
    let mut tx = server.begin().await?;
    // a run sends what is due of every app
    enqueue_run(&mut tx, &first.app_id, "start").await?;
    tx.commit().await?;
    Ok(())
}

/// The app's own list, else the one of the configuration.
async fn recipients(server: &Server, app: &AppId) -> Result<Vec<String>, Error> {
    let own = super::app(server, app).await?.settings.alert_recipients;
    if !own.is_empty() {
        return Ok(own);
    }
    Ok(server.config.mail.as_ref().map(|m| m.to.clone()).unwrap_or_default())
}

#[derive(serde::Deserialize)]
struct Payload {
    /// A job that died; its mail is written by this run.
    dead: Option<dead::Dead>,
}

/// The step: sends what is due, of every app.
///
/// # Errors
/// Those of the database; a message that cannot be sent is no error of the step but waits in the outbox.
pub async fn run(server: &Server, ctx: &JobContext) -> Result<Value, Error> {
    if let Some(Payload { dead: Some(dead) }) = super::payload::<Option<Payload>>(ctx)? {
        dead::tell(server, ctx, &dead).await?;
    }
    let owner = format!("{}/{}", ctx.job().job_id, ctx.job().attempt);
    deliver(server, ctx.app(), &owner, &|| ctx.check().is_err()).await
}

/// What became of the messages of one run.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Tally {
    sent: u32,
    failed: u32,
    dead: u32,
}

async fn deliver(
    server: &Server,
    app: &AppId,
    owner: &str,
    stop: &(dyn Fn() -> bool + Send + Sync),
) -> Result<Value, Error> {
    let Some(mailer) = &server.mailer else {
        return Ok(json!({ "skipped": "no mail server is configured; mail stays in the outbox" }));
    };
    // longer than a send can take, so that no second sender takes over while this one waits
    let lease = Duration::from_secs(server.config.mail.as_ref().map_or(20, |m| m.timeout_s)) + Duration::from_secs(60);
    let (mut tally, mut in_a_row) = (Tally::default(), 0);
    for _ in 0..BATCH {
        if stop() || in_a_row >= GIVE_UP_AFTER {
            return Ok(shown(tally));
        }
        let mut tx = server.begin().await?;
        let mail = tx.mail_claim(owner, lease).await?;
        tx.commit().await?;
        let Some(mail) = mail else { return Ok(shown(tally)) };
        match deliver_one(server, mailer, &mail).await? {
            MailState::Sent => (tally.sent, in_a_row) = (tally.sent + 1, 0),
            MailState::Dead => tally.dead += 1,
            MailState::Queued | MailState::Sending => (tally.failed, in_a_row) = (tally.failed + 1, in_a_row + 1),
        }
    }
    let mut tx = server.begin().await?;
    enqueue_run(&mut tx, app, &format!("after/{owner}")).await?;
    tx.commit().await?;
    Ok(shown(tally))
}

fn shown(t: Tally) -> Value {
    json!({ "sent": t.sent, "failed": t.failed, "dead": t.dead })
}

/// Sends one claimed message and writes down what became of it.
async fn deliver_one(server: &Server, mailer: &Mailer, mail: &MailRow) -> Result<MailState, Error> {
    let message =
        Mail { message_id: &mail.message_id, to: &mail.recipient, subject: &mail.subject, body: &mail.body_text };
    let result = mailer.send(&message).await;
    let mut tx = server.begin().await?;
    let state = match &result {
        Ok(()) => tx.mail_sent(mail).await.map(|()| MailState::Sent),
        Err(e) => {
            let text = e.inside.clone().unwrap_or_else(|| e.to_string());
            let wait = (e.kind == ErrorKind::Unavailable).then(|| back_off(mail.attempt));
            tx.mail_failed(mail, &text, wait).await
        }
    };
    let state = match state {
        Ok(state) => state,
        // the lease ran out and another sender has the message: what it finds counts
        Err(flywheel_store::Error::Conflict { .. }) => return Ok(MailState::Sending),
        Err(e) => return Err(e.into()),
    };
    if state == MailState::Queued {
        let at = server.store.lease_now() + TimeDelta::from_std(back_off(mail.attempt)).unwrap_or_default();
        let job = NewJob::new(KIND, json!({ "v": 1 }))
            .dedup(format!("{}/{}", mail.mail_id, mail.attempt))
            .concurrency("notify", 1)
            .run_at(at);
        tx.job_enqueue(&mail.app_id, &job).await?;
    }
    tx.commit().await?;
    note(server, mail, state, result.err().as_ref());
    Ok(state)
}

fn note(server: &Server, mail: &MailRow, state: MailState, error: Option<&Error>) {
    let inside = error.and_then(|e| e.inside.as_deref()).unwrap_or("");
    let word = match state {
        MailState::Sent => "sent",
        MailState::Dead => {
            tracing::error!(mail = mail.mail_id, attempt = mail.attempt, inside, "mail is given up");
            "dead"
        }
        MailState::Queued | MailState::Sending => {
            tracing::warn!(mail = mail.mail_id, attempt = mail.attempt, inside, "mail was not sent; it is tried again");
            "failed"
        }
    };
    server.metrics.add("flywheel_mails_total", &[("result", word)], 1);
}

/// 30 s, 1 min, 2 min, … up to an hour.
fn back_off(attempt: i64) -> Duration {
    let doublings = u32::try_from(attempt.saturating_sub(1)).unwrap_or(0).min(16);
    FIRST_WAIT.saturating_mul(1 << doublings).min(LONGEST_WAIT)
}

#[cfg(test)]
mod tests;
