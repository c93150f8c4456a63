//! Audit chain, cursors, attribution state, publications, leases.

use crate::{World, assert_conflict, digest, id, on_both};
use flywheel_store::audit::AuditCheck;
use serde_json::json;
use std::time::Duration;

on_both!(
    the_audit_chain_is_whole_under_concurrency,
    a_step_commits_everything_or_nothing,
    cursors_move_by_compare_and_swap,
    publications_only_rise,
    named_leases_fence,
);

async fn the_audit_chain_is_whole_under_concurrency(w: &World) {
    let tasks: Vec<_> = (0..8)
        .map(|writer| {
            let (store, app) = (w.store().clone(), w.app.clone());
            tokio::spawn(async move {
                for i in 0..5 {
                    let mut tx = store.begin(crate::noon()).await.unwrap();
                    let detail = json!({"writer": writer, "i": i, "text": "naïve \"quotes\""});
                    tx.audit_append(&app, "system", "test", &format!("s/{writer}"), &detail).await.unwrap();
                    tx.commit().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let head = w.store().audit_head(&w.app).await.unwrap();
    assert_eq!(head.seq, 40);
    assert_eq!(w.store().audit_verify(&w.app).await.unwrap(), AuditCheck::Intact { entries: 40, head: head.hash });
    assert_eq!(w.store().audit_list_subject(&w.app, "s/3").await.unwrap().len(), 5);
    let page = w.store().audit_list(&w.app, Some(11), 3).await.unwrap();
    assert_eq!(page.iter().map(|r| r.seq).collect::<Vec<_>>(), vec![10, 9, 8]);
    assert_eq!(w.store().audit_head(&id("other")).await.unwrap().seq, 0);
}

async fn a_step_commits_everything_or_nothing(w: &World) {
    let step = |fail: bool| async move {
        let mut tx = w.begin().await;
        tx.attribution_state_set(&w.app, 0, digest("sums")).await.unwrap();
        tx.job_enqueue(&w.app, &flywheel_store::jobs::NewJob::new("freeze", json!({"v": 1}))).await.unwrap();
        tx.cursor_set(&w.app, "attribute", "outcomes", None, 7).await.unwrap();
        tx.audit_append(&w.app, "system", "attribute", "step/1", &json!({})).await.unwrap();
        if fail { tx.rollback().await.unwrap() } else { tx.commit().await.unwrap() }
    };
    step(true).await;
    assert_eq!(w.store().cursor_get(&w.app, "attribute", "outcomes").await.unwrap(), None);
    assert_eq!(w.store().audit_head(&w.app).await.unwrap().seq, 0);
    assert!(w.store().job_counts(Some(&w.app)).await.unwrap().is_empty());
    step(false).await;
    assert_eq!(w.store().cursor_get(&w.app, "attribute", "outcomes").await.unwrap(), Some(7));
    assert_eq!(w.store().attribution_state_get(&w.app).await.unwrap().unwrap().step, 1);
    assert_eq!(w.store().job_counts(Some(&w.app)).await.unwrap()[0].count, 1);
}

async fn cursors_move_by_compare_and_swap(w: &World) {
    let mut tx = w.begin().await;
    tx.cursor_set(&w.app, "s", "t", None, 3).await.unwrap();
    assert_conflict!(tx.cursor_set(&w.app, "s", "t", None, 4).await);
    assert_conflict!(tx.cursor_set(&w.app, "s", "t", Some(2), 4).await);
    assert!(matches!(tx.cursor_set(&w.app, "s", "t", Some(3), 2).await, Err(flywheel_store::Error::Invalid { .. })));
    tx.cursor_set(&w.app, "s", "t", Some(3), 4).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(w.store().cursor_get(&w.app, "s", "t").await.unwrap(), Some(4));
    assert_eq!(w.store().cursor_get(&id("other"), "s", "t").await.unwrap(), None);
}

async fn publications_only_rise(w: &World) {
    let mut tx = w.begin().await;
    assert_eq!(tx.publication_set(&w.app, "assignment", 0, "{}").await.unwrap(), 1);
    assert_conflict!(tx.publication_set(&w.app, "assignment", 0, "x").await);
    assert_eq!(tx.publication_set(&w.app, "assignment", 1, "{\"a\":1}").await.unwrap(), 2);
    assert_conflict!(tx.publication_set(&w.app, "assignment", 1, "x").await);
    tx.commit().await.unwrap();
    let row = w.store().publication_get(&w.app, "assignment").await.unwrap().unwrap();
    assert_eq!((row.version, row.digest), (2, digest("{\"a\":1}")));
}

async fn named_leases_fence(w: &World) {
    let ttl = Duration::from_secs(30);
    let mut tx = w.begin().await;
    let first = tx.lease_acquire("publish", "a", ttl).await.unwrap().unwrap();
    assert_eq!(tx.lease_acquire("publish", "b", ttl).await.unwrap(), None);
    w.pass(20);
    let renewed = tx.lease_acquire("publish", "a", ttl).await.unwrap().unwrap();
    assert_eq!(renewed.token, first.token);
    w.pass(31);
    let second = tx.lease_acquire("publish", "b", ttl).await.unwrap().unwrap();
    assert_eq!(second.token, first.token + 1);
    assert_conflict!(tx.lease_fence("publish", "a", first.token).await);
    tx.lease_fence("publish", "b", second.token).await.unwrap();
    tx.lease_release("publish", "b", second.token).await.unwrap();
    assert!(tx.lease_acquire("publish", "a", ttl).await.unwrap().is_some());
    tx.commit().await.unwrap();
}
