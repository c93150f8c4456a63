//! Mail outbox: once per cause and recipient, leased, fenced, retried, dead.

use crate::{World, assert_conflict, on_both};
use flywheel_store::mail_outbox::{MailState, NewMail};
use std::time::Duration;

on_both!(one_bad_recipient_stops_nobody, a_dead_sender_is_replaced_and_fenced);

fn mail(max_attempts: i64) -> NewMail {
    NewMail {
        dedup_key: "rollback/r1/3".into(),
        recipients: vec!["a@example.org".into(), "b@example.org".into()],
        subject: "Rolled back".into(),
        body_text: "…".into(),
        body_html: None,
        max_attempts,
    }
}
const TTL: Duration = Duration::from_secs(60);

async fn one_bad_recipient_stops_nobody(w: &World) {
    let mut tx = w.begin().await;
    assert_eq!(tx.mail_enqueue(&w.app, &mail(2)).await.unwrap(), 2);
    assert_eq!(tx.mail_enqueue(&w.app, &mail(2)).await.unwrap(), 0, "the same cause mails once");
    tx.commit().await.unwrap();
    let mut tx = w.begin().await;
    let (one, two) = (tx.mail_claim("s", TTL).await.unwrap().unwrap(), tx.mail_claim("s", TTL).await.unwrap().unwrap());
    assert!(tx.mail_claim("s", TTL).await.unwrap().is_none());
    assert_ne!(one.message_id, two.message_id);
    let state = tx.mail_failed(&one, "421 try later", Some(Duration::from_secs(10))).await.unwrap();
    assert_eq!(state, MailState::Queued);
    tx.mail_sent(&two).await.unwrap();
    assert!(tx.mail_claim("s", TTL).await.unwrap().is_none(), "not before its time");
    w.pass(11);
    let again = tx.mail_claim("s", TTL).await.unwrap().unwrap();
    assert_eq!((&again.message_id, again.attempt), (&one.message_id, 2));
    let state = tx.mail_failed(&again, "421", Some(Duration::from_secs(10))).await.unwrap();
    assert_eq!(state, MailState::Dead, "its attempts are used up");
    tx.commit().await.unwrap();
    let states: Vec<_> = w.store().mail_list(&w.app, 9).await.unwrap().into_iter().map(|m| m.state).collect();
    assert!(states.contains(&MailState::Dead) && states.contains(&MailState::Sent));
}

async fn a_dead_sender_is_replaced_and_fenced(w: &World) {
    let mut tx = w.begin().await;
    tx.mail_enqueue(&w.app, &NewMail { recipients: vec!["a@example.org".into()], ..mail(2) }).await.unwrap();
    let first = tx.mail_claim("one", TTL).await.unwrap().unwrap();
    w.pass(61);
    let second = tx.mail_claim("two", TTL).await.unwrap().unwrap();
    assert_eq!((second.mail_id.clone(), second.attempt), (first.mail_id.clone(), 2));
    assert_conflict!(tx.mail_sent(&first).await);
    w.pass(61);
    assert!(tx.mail_claim("three", TTL).await.unwrap().is_none());
    tx.commit().await.unwrap();
    assert_eq!(w.store().mail_list(&w.app, 9).await.unwrap()[0].state, MailState::Dead);
}
