//! From the outbox to the mailbox: what is queued, what arrives, what is tried again and what waits.

use super::*;
use crate::config::MailConfig;
use crate::mail::smtp_server::{Mode, SmtpServer};
use crate::server::testing::{TestServer, now};
use flywheel_attribution::culprit::{SubjectKind, Transition};
use flywheel_experiment::gate::{BaselineV1, GateSpecV1};
use flywheel_experiment::planner::{Inventory, RolloutDraft, RolloutPolicyV1, plan_next};
use flywheel_jobs::{Handlers, JobError, JobHandler, Outcome, Worker, WorkerOptions};
use flywheel_store::jobs::{JobFilter, JobRow};
use flywheel_types::{Digest, JobState, RolloutId};
use std::collections::BTreeMap;

fn config(url: String) -> MailConfig {
    let to = vec!["a@example.com".into(), "b@example.com".into()];
    MailConfig { smtp_url: url, from: "flywheel@example.com".into(), to, timeout_s: 1 }
}

fn proposal(transition: Transition) -> Proposal {
    Proposal {
        kind: SubjectKind::Chunk,
        name: "returns@3".into(),
        transition,
        automatic: true,
        reason: "41 of 60 answers with it failed".into(),
    }
}

async fn freeze(t: &TestServer) {
    let mut tx = t.server.begin().await.unwrap();
    enqueue_chunk(&mut tx, &t.server, &t.app, &proposal(Transition::Freeze)).await.unwrap();
    tx.commit().await.unwrap();
}

async fn jobs(t: &TestServer) -> Vec<JobRow> {
    t.server.store.job_list(&t.app, &JobFilter { kind: Some(KIND.into()), ..JobFilter::default() }, 10).await.unwrap()
}

async fn send(t: &TestServer) -> Value {
    deliver(&t.server, &t.app, "test/1", &|| false).await.unwrap()
}

#[tokio::test]
async fn a_freeze_reaches_each_recipient_once() {
    let smtp = SmtpServer::start(Mode::Takes).await;
    let t = TestServer::start(Some(config(smtp.url()))).await;
    freeze(&t).await;
    freeze(&t).await; // the same cause again
    assert_eq!(jobs(&t).await.len(), 1);
    assert_eq!(send(&t).await, json!({ "sent": 2, "failed": 0, "dead": 0 }));
    assert_eq!(send(&t).await["sent"], 0);
    let got = smtp.received();
    let mut to: Vec<_> = got.iter().flat_map(|m| m.to.clone()).collect();
    to.sort();
    assert_eq!(to, ["a@example.com", "b@example.com"]);
    assert!(got[0].body().contains("41 of 60 answers with it failed"), "{}", got[0].body());
    assert!(got[0].body().contains("http://fly.example/findings"), "{}", got[0].body());
    let rows = t.server.store.mail_list(&t.app, 10).await.unwrap();
    assert!(rows.iter().all(|m| m.state == MailState::Sent && m.attempt == 1), "{rows:?}");
    for row in rows {
        let arrived = got.iter().find(|m| m.to == [row.recipient.clone()]).unwrap();
        assert_eq!(arrived.header("Message-ID"), Some(row.message_id.as_str()));
    }
}

#[tokio::test]
async fn what_is_no_freeze_is_no_mail() {
    let smtp = SmtpServer::start(Mode::Takes).await;
    let t = TestServer::start(Some(config(smtp.url()))).await;
    let mut tx = t.server.begin().await.unwrap();
    for transition in [Transition::MarkSuspect, Transition::Activate, Transition::NeedsPerson { why: "budget".into() }]
    {
        enqueue_chunk(&mut tx, &t.server, &t.app, &proposal(transition)).await.unwrap();
    }
    tx.commit().await.unwrap();
    assert!(t.server.store.mail_list(&t.app, 10).await.unwrap().is_empty());
    assert!(jobs(&t).await.is_empty());
}

#[tokio::test]
async fn a_silent_server_costs_one_time_out_a_message_and_nothing_is_lost() {
    let smtp = SmtpServer::start(Mode::SilentFromStart).await;
    let t = TestServer::start(Some(config(smtp.url()))).await;
    freeze(&t).await;
    assert_eq!(send(&t).await, json!({ "sent": 0, "failed": 2, "dead": 0 }));
    // not due yet: nothing is tried twice in a row
    assert_eq!(send(&t).await, json!({ "sent": 0, "failed": 0, "dead": 0 }));
    let rows = t.server.store.mail_list(&t.app, 10).await.unwrap();
    assert!(rows.iter().all(|m| m.state == MailState::Queued && m.attempt == 1 && m.last_error.is_some()), "{rows:?}");
    let later = t.server.store.lease_now() + TimeDelta::seconds(15);
    let again: Vec<_> =
        jobs(&t).await.into_iter().filter(|j| j.run_at > later && j.state == JobState::Queued).collect();
    assert_eq!(again.len(), 2, "one run per message that failed");
}

#[tokio::test]
async fn an_address_that_is_none_is_given_up_and_stops_nobody_else() {
    let smtp = SmtpServer::start(Mode::Takes).await;
    let mut mail = config(smtp.url());
    mail.to.insert(0, "nobody".into());
    let t = TestServer::start(Some(mail)).await;
    freeze(&t).await;
    assert_eq!(send(&t).await, json!({ "sent": 2, "failed": 0, "dead": 1 }));
    assert!(t.server.metrics.render(&[]).contains("flywheel_mails_total{result=\"dead\"} 1"));
}

#[tokio::test]
async fn without_a_mail_server_the_outbox_waits() {
    let t = TestServer::start(None).await;
    let app = t.server.store.app_get(&t.app).await.unwrap().unwrap();
    let mut settings = app.settings;
    settings.alert_recipients = vec!["team@example.com".into()];
    let mut tx = t.server.begin().await.unwrap();
    tx.app_settings_set(&t.app, app.version, &settings).await.unwrap();
    tx.commit().await.unwrap();
    freeze(&t).await;
    assert!(send(&t).await["skipped"].is_string());
    let rows = t.server.store.mail_list(&t.app, 10).await.unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].recipient.as_str(), rows[0].state), ("team@example.com", MailState::Queued));
}

/// A draft under the default policy: the planner asks one person to approve the start.
fn asked() -> (PlanV1, Next) {
    let spec =
        GateSpecV1::freeze(&BaselineV1 { rejection_rate: 0.02, ttft_ms: BTreeMap::new(), planned_devices: 1000 })
            .unwrap();
    let policy = RolloutPolicyV1::default();
    let draft = RolloutDraft {
        rollout_id: RolloutId::new("r-1").unwrap(),
        eligible: Vec::new(),
        ring: Vec::new(),
        candidate_bundle: Digest::of(b"new"),
        control_bundle: Digest::of(b"old"),
        created_by: "test".into(),
    };
    let plan = PlanV1::draft(draft, &policy, &spec, now()).unwrap();
    let next = plan_next(&policy, &plan, &Inventory::default(), None, now(), &[]).unwrap();
    (plan, next)
}

#[tokio::test]
async fn approvers_are_asked_once_with_what_to_send() {
    let smtp = SmtpServer::start(Mode::Takes).await;
    let t = TestServer::start(Some(config(smtp.url()))).await;
    let (plan, next) = asked();
    for _ in 0..2 {
        let mut tx = t.server.begin().await.unwrap();
        enqueue_rollout(&mut tx, &t.server, &t.app, &plan, &next, None).await.unwrap();
        tx.commit().await.unwrap();
    }
    assert_eq!(send(&t).await["sent"], 2);
    let mail = &smtp.received()[0];
    assert_eq!(mail.header("Subject"), Some("[shop] approval needed: rollout r-1: start"));
    assert!(mail.body().contains("\"approves\": {\"generation\": 3, \"change\": \"start\"}"), "{}", mail.body());
    assert!(mail.body().contains("http://fly.example/rollouts/r-1"), "{}", mail.body());
}

#[tokio::test]
async fn an_urgent_alert_says_so() {
    let smtp = SmtpServer::start(Mode::Takes).await;
    let t = TestServer::start(Some(config(smtp.url()))).await;
    let (plan, mut next) = asked();
    next.actions =
        vec![Action::Alert { urgent: true, text: "rolled back: rejection FAIL".into() }, Action::PublishAssignment];
    let mut tx = t.server.begin().await.unwrap();
    enqueue_rollout(&mut tx, &t.server, &t.app, &plan, &next, None).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(send(&t).await["sent"], 2);
    let mail = &smtp.received()[0];
    assert_eq!(mail.header("Subject"), Some("[shop] URGENT: rollout r-1 is awaiting approval"));
    assert!(mail.body().contains("rolled back: rejection FAIL"), "{}", mail.body());
}

struct Fails;

#[async_trait::async_trait]
impl JobHandler for Fails {
    async fn run(&self, _: &JobContext) -> Result<Outcome, JobError> {
        Err(JobError::Permanent("no space left".into()))
    }
}

#[tokio::test]
async fn a_dead_job_is_audited_and_mailed() {
    let smtp = SmtpServer::start(Mode::Takes).await;
    let t = TestServer::start(Some(config(smtp.url()))).await;
    let mut tx = t.server.begin().await.unwrap();
    let job = tx.job_enqueue(&t.app, &NewJob::new("compact", json!({ "v": 1 }))).await.unwrap().id().clone();
    tx.commit().await.unwrap();
    let handlers = Handlers::new().with("compact", Fails).with(KIND, crate::pipeline::Steps(t.server.clone()));
    let worker =
        Worker::with_events(t.server.store.clone(), handlers, WorkerOptions::default(), std::sync::Arc::new(DeadJobs));
    worker.drain().await.unwrap();
    let got = smtp.received();
    assert_eq!(got.len(), 2, "one mail for each recipient");
    assert_eq!(got[0].header("Subject"), Some("[shop] job failed for good: compact"));
    assert!(got[0].body().contains("no space left"), "{}", got[0].body());
    assert!(got[0].body().contains(&format!("POST /v1/jobs/{job}/retry")), "{}", got[0].body());
    let entries = t.server.store.audit_list(&t.app, None, 10).await.unwrap();
    let entry = entries.iter().find(|e| e.action == "job.dead").unwrap();
    assert_eq!((entry.subject.as_str(), entry.at), (job.as_str(), now()), "at business time");
    assert_eq!(entry.detail["kind"], "compact");
}

#[tokio::test]
async fn mail_that_waited_for_a_start_is_sent() {
    let smtp = SmtpServer::start(Mode::Takes).await;
    let t = TestServer::start(Some(config(smtp.url()))).await;
    enqueue_pending(&t.server).await.unwrap();
    enqueue_pending(&t.server).await.unwrap();
    assert_eq!(jobs(&t).await.len(), 1);
    let silent = TestServer::start(None).await;
    enqueue_pending(&silent.server).await.unwrap();
    assert!(jobs(&silent).await.is_empty(), "without a mail server there is nothing to run");
}

#[test]
fn the_wait_doubles_up_to_an_hour() {
    let waits: Vec<u64> = [1, 2, 3, 7, 8, 24].map(|n| back_off(n).as_secs()).into();
    assert_eq!(waits, [30, 60, 120, 1920, 3600, 3600]);
}
