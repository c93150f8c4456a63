//! Rollouts, plans, verdicts, operators' requests.

use crate::{World, assert_conflict, digest, id, noon, on_both};
use flywheel_store::Error;
use flywheel_store::rollout_requests::RequestVerb as Verb;
use flywheel_store::rollouts::{NewRollout, VerdictRow};
use flywheel_types::{RolloutState as S, Verdict};
use serde_json::json;

on_both!(one_executor_wins_each_generation, verdicts_and_states_are_kept, requests_are_answered_once);

async fn create(w: &World) {
    let new = NewRollout {
        rollout_id: id("r1"),
        candidate_id: Some(id("cand-1")),
        treatment: digest("new"),
        control: Some(digest("old")),
        policy: json!({"v": 1}),
        created_by: "ops".into(),
    };
    let mut tx = w.begin().await;
    assert!(tx.rollout_create(&w.app, &new).await.unwrap());
    assert!(!tx.rollout_create(&w.app, &new).await.unwrap());
    let other = NewRollout { treatment: digest("third"), ..new };
    assert_conflict!(tx.rollout_create(&w.app, &other).await);
    tx.commit().await.unwrap();
}

async fn one_executor_wins_each_generation(w: &World) {
    create(w).await;
    let plan = |n: i64| {
        let (store, app) = (w.store().clone(), w.app.clone());
        tokio::spawn(async move {
            let mut tx = store.begin(noon()).await.unwrap();
            let done = tx.rollout_plan_append(&app, &id("r1"), 0, &json!({"n": n})).await;
            if done.is_ok() {
                tx.commit().await.unwrap();
            }
            done
        })
    };
    let (a, b) = tokio::join!(plan(1), plan(2));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert!(a.is_ok() != b.is_ok(), "{a:?} {b:?}");
    let mut tx = w.begin().await;
    assert_eq!(tx.rollout_plan_append(&w.app, &id("r1"), 1, &json!({"n": 3})).await.unwrap(), 2);
    tx.commit().await.unwrap();
    let plans = w.store().rollout_plan_list(&w.app, &id("r1")).await.unwrap();
    assert_eq!(plans.iter().map(|p| p.parent).collect::<Vec<_>>(), vec![None, Some(1)]);
    assert_eq!(w.store().rollout_plan_latest(&w.app, &id("r1")).await.unwrap().unwrap(), plans[1]);
    assert_eq!(w.store().rollout_get(&w.app, &id("r1")).await.unwrap().unwrap().generation, 2);
}

async fn verdicts_and_states_are_kept(w: &World) {
    create(w).await;
    let verdict = |verdict| VerdictRow {
        rollout_id: id("r1"),
        look: 1,
        gate: "rejection_rate".into(),
        generation: 1,
        verdict,
        numbers: json!({"low": -0.01, "high": 0.02}),
        at: noon(),
    };
    let mut tx = w.begin().await;
    assert!(tx.rollout_verdict_append(&w.app, &verdict(Verdict::Continue)).await.unwrap());
    assert!(!tx.rollout_verdict_append(&w.app, &verdict(Verdict::Fail)).await.unwrap(), "a look never changes");
    let second = VerdictRow { look: 2, ..verdict(Verdict::Pass) };
    let other_gate = VerdictRow { look: 3, gate: "all".into(), ..verdict(Verdict::Warn) };
    for row in [&other_gate, &second] {
        assert!(tx.rollout_verdict_append(&w.app, row).await.unwrap());
    }
    for (from, to) in
        [(S::Draft, S::Signed), (S::Signed, S::Canary), (S::Canary, S::RollingBack), (S::RollingBack, S::RolledBack)]
    {
        tx.rollout_state_set(&w.app, &id("r1"), from, to, "gate").await.unwrap();
    }
    assert_conflict!(tx.rollout_state_set(&w.app, &id("r1"), S::Canary, S::Ramping, "late").await);
    assert!(matches!(
        tx.rollout_state_set(&w.app, &id("r1"), S::RolledBack, S::Canary, "zombie").await,
        Err(Error::Invalid { .. })
    ));
    tx.commit().await.unwrap();
    let rows = w.store().rollout_verdict_list(&w.app, &id("r1")).await.unwrap();
    assert_eq!(rows, vec![verdict(Verdict::Continue), second.clone(), other_gate]);
    let latest =
        |gate: &'static str| async move { w.store().rollout_verdict_latest(&w.app, &id("r1"), gate).await.unwrap() };
    assert_eq!(latest("rejection_rate").await, Some(second));
    assert_eq!(latest("latency").await, None);
    assert_eq!(w.store().rollout_list(&w.app, true, 9).await.unwrap().len(), 0);
    assert_eq!(w.store().rollout_list(&w.app, false, 9).await.unwrap().len(), 1);
}

async fn requests_are_answered_once(w: &World) {
    create(w).await;
    let r = id("r1");
    let mut tx = w.begin().await;
    let pause =
        tx.rollout_request_create(&w.app, &r, Verb::Pause, "ann", "looks odd", &serde_json::Value::Null).await.unwrap();
    tx.rollout_request_create(&w.app, &r, Verb::Approve, "ann", "", &serde_json::Value::Null).await.unwrap();
    tx.rollout_request_create(&w.app, &r, Verb::Approve, "ann", "", &serde_json::Value::Null).await.unwrap();
    let bob = tx.rollout_request_create(&w.app, &r, Verb::Approve, "bob", "", &serde_json::Value::Null).await.unwrap();
    tx.rollout_request_decide(&w.app, &pause, true, "paused").await.unwrap();
    assert_conflict!(tx.rollout_request_decide(&w.app, &pause, false, "no").await);
    tx.commit().await.unwrap();
    assert_eq!(w.store().rollout_approver_list(&w.app, &r).await.unwrap(), vec!["ann", "bob"]);
    assert_eq!(w.store().rollout_request_list(&w.app, &r, true).await.unwrap().len(), 3);
    let mut tx = w.begin().await;
    tx.rollout_request_decide(&w.app, &bob, false, "not an approver").await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(w.store().rollout_approver_list(&w.app, &r).await.unwrap(), vec!["ann"]);
    assert_eq!(w.store().rollout_request_list(&w.app, &r, false).await.unwrap().len(), 4);
}
