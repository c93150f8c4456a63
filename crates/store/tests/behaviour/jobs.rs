//! Jobs: claim order, fencing, keys, cancel, expiry. Policies are tested in the jobs crate.

use crate::{World, assert_conflict, id, on_both};
use flywheel_store::jobs::{Enqueued, JobCancel, JobClaim, JobFilter, JobRow, NewJob};
use flywheel_types::JobState;
use serde_json::json;
use std::time::Duration;

on_both!(
    claims_go_by_priority_and_time,
    a_stale_attempt_can_write_nothing,
    dedup_holds_while_open,
    a_look_waits_behind_one_that_has_begun,
    concurrency_keys_hold_between_claims,
    cancel_reaches_queued_and_running,
    dead_jobs_are_revived_and_old_ones_pruned,
    many_claimers_share_without_loss,
    a_turn_ends_one_job_and_claims_the_next,
    a_stale_turn_changes_nothing,
    a_turn_leaves_keyed_jobs_to_the_claim,
    many_turns_share_without_loss,
);

fn job(kind: &str) -> NewJob {
    NewJob::new(kind, json!({"v": 1}))
}

async fn claim(w: &World, kinds: &[&str]) -> Option<JobRow> {
    let kinds: Vec<String> = kinds.iter().map(|k| (*k).to_owned()).collect();
    let mut tx = w.begin().await;
    let claim = JobClaim { owner: "w1", kinds: &kinds, ttl: Duration::from_secs(60) };
    let row = tx.job_claim(&claim).await.unwrap();
    tx.commit().await.unwrap();
    row
}

async fn enqueue(w: &World, new: &NewJob) -> Enqueued {
    let mut tx = w.begin().await;
    let done = tx.job_enqueue(&w.app, new).await.unwrap();
    tx.commit().await.unwrap();
    done
}

async fn claims_go_by_priority_and_time(w: &World) {
    let later = w.store().lease_now() + chrono::TimeDelta::seconds(100);
    let a = enqueue(w, &job("a")).await;
    w.pass(1);
    let b = enqueue(w, &job("a")).await;
    let c = enqueue(w, &job("a").priority(5)).await;
    let d = enqueue(w, &job("a").priority(9).run_at(later)).await;
    enqueue(w, &job("other")).await;
    let mut order = Vec::new();
    while let Some(row) = claim(w, &["a"]).await {
        assert_eq!((row.state, row.attempt), (JobState::Running, 1));
        order.push(row.job_id);
    }
    assert_eq!(order, vec![c.id().clone(), a.id().clone(), b.id().clone()]);
    w.pass(100);
    assert_eq!(claim(w, &["a"]).await.unwrap().job_id, *d.id());
    assert!(claim(w, &[]).await.is_none());
}

async fn a_stale_attempt_can_write_nothing(w: &World) {
    enqueue(w, &job("a")).await;
    let first = claim(w, &["a"]).await.unwrap();
    let stale = first.token();
    let mut tx = w.begin().await;
    assert!(tx.job_list_expired(9).await.unwrap().is_empty());
    w.pass(60);
    let expired = tx.job_list_expired(9).await.unwrap();
    assert_eq!(expired[0].job_id, first.job_id);
    tx.job_requeue(&stale, Duration::ZERO, true, "gone").await.unwrap();
    tx.commit().await.unwrap();
    // The same worker name claims again: only the attempt tells the two apart.
    let second = claim(w, &["a"]).await.unwrap();
    assert_eq!(second.attempt, 2);
    let mut tx = w.begin().await;
    assert_conflict!(tx.job_fence(&stale).await);
    assert_conflict!(tx.job_heartbeat(&stale, Duration::from_secs(60)).await);
    assert_conflict!(tx.job_progress_set(&stale, &json!(1)).await);
    assert_conflict!(tx.job_checkpoint_set(&stale, "x").await);
    assert_conflict!(tx.job_succeed(&stale, None).await);
    assert_conflict!(tx.job_bury(&stale, "x").await);
    assert_conflict!(tx.job_requeue(&stale, Duration::ZERO, true, "x").await);
    let live = second.token();
    tx.job_fence(&live).await.unwrap();
    tx.job_progress_set(&live, &json!({"done": 1})).await.unwrap();
    tx.job_checkpoint_set(&live, "s3://b/ck").await.unwrap();
    tx.job_succeed(&live, Some(&json!({"ok": true}))).await.unwrap();
    assert_conflict!(tx.job_fence(&live).await);
    tx.commit().await.unwrap();
    let row = w.store().job_get(&w.app, &live.job_id).await.unwrap().unwrap();
    assert_eq!((row.state, row.attempt), (JobState::Succeeded, 2));
    assert_eq!((row.progress, row.checkpoint_uri.as_deref()), (Some(json!({"done": 1})), Some("s3://b/ck")));
    assert!(row.finished_at.is_some() && row.lease_owner.is_none());
    assert!(w.store().job_get(&id("other"), &live.job_id).await.unwrap().is_none());
}

async fn dedup_holds_while_open(w: &World) {
    let new = job("lora").dedup("dataset-1");
    let first = enqueue(w, &new).await;
    assert_eq!(enqueue(w, &new).await, Enqueued::Existing(first.id().clone()));
    assert!(matches!(enqueue(w, &job("lora").dedup("dataset-2")).await, Enqueued::New(_)));
    assert!(matches!(enqueue(w, &job("evaluate").dedup("dataset-1")).await, Enqueued::New(_)));
    let running = claim(w, &["lora"]).await.unwrap();
    assert_eq!(enqueue(w, &new).await, Enqueued::Existing(first.id().clone()));
    let mut tx = w.begin().await;
    tx.job_succeed(&running.token(), None).await.unwrap();
    tx.commit().await.unwrap();
    assert!(matches!(enqueue(w, &new).await, Enqueued::New(_)));
}

async fn look(w: &World, new: &NewJob) -> Enqueued {
    let mut tx = w.begin().await;
    let done = tx.job_enqueue_look(&w.app, new).await.unwrap();
    tx.commit().await.unwrap();
    done
}

async fn a_look_waits_behind_one_that_has_begun(w: &World) {
    let new = job("look").dedup("shop").concurrency("look:shop", 1);
    let first = look(w, &new).await;
    assert_eq!(look(w, &new).await, Enqueued::Existing(first.id().clone()), "it waits and will see the change");
    let running = claim(w, &["look"]).await.unwrap();
    let second = look(w, &new).await;
    assert!(matches!(second, Enqueued::New(_)), "the first has begun");
    assert_eq!(look(w, &new).await, Enqueued::Existing(second.id().clone()), "one waits already");
    assert!(claim(w, &["look"]).await.is_none(), "one at a time");
    let mut tx = w.begin().await;
    tx.job_succeed(&running.token(), None).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(claim(w, &["look"]).await.unwrap().job_id, *second.id());
    assert!(matches!(look(w, &new).await, Enqueued::New(_)), "and behind the second as well");
}

async fn concurrency_keys_hold_between_claims(w: &World) {
    for _ in 0..3 {
        enqueue(w, &job("train").concurrency("train:shop", 1)).await;
    }
    for _ in 0..3 {
        enqueue(w, &job("train").concurrency("gpu", 2)).await;
    }
    enqueue(w, &job("train")).await;
    // Six claims at once: each key is held to its limit.
    let tasks: Vec<_> = (0..6)
        .map(|i| {
            let store = w.store().clone();
            tokio::spawn(async move {
                let kinds = ["train".to_owned()];
                let owner = format!("w{i}");
                let mut got = None;
                // A claim that met a held key gives up until the next poll.
                for _ in 0..20 {
                    let mut tx = store.begin(crate::noon()).await.unwrap();
                    let claim = JobClaim { owner: &owner, kinds: &kinds, ttl: Duration::from_secs(60) };
                    got = tx.job_claim(&claim).await.unwrap();
                    tx.commit().await.unwrap();
                    if got.is_some() {
                        break;
                    }
                }
                got
            })
        })
        .collect();
    let mut got = Vec::new();
    for task in tasks {
        got.extend(task.await.unwrap());
    }
    let of = |key: Option<&str>| got.iter().filter(|j| j.concurrency_key.as_deref() == key).count();
    assert_eq!((of(Some("train:shop")), of(Some("gpu")), of(None)), (1, 2, 1));
    assert!(claim(w, &["train"]).await.is_none());
    let one = got.iter().find(|j| j.concurrency_key.as_deref() == Some("train:shop")).unwrap();
    let mut tx = w.begin().await;
    tx.job_succeed(&one.token(), None).await.unwrap();
    tx.commit().await.unwrap();
    let next = claim(w, &["train"]).await.unwrap();
    assert_eq!((next.concurrency_key.as_deref(), next.attempt), (Some("train:shop"), 1));
    let mut tx = w.begin().await;
    assert!(tx.job_enqueue(&w.app, &job("train").concurrency("x", 0)).await.is_err());
}

async fn cancel_reaches_queued_and_running(w: &World) {
    let queued = enqueue(w, &job("a").priority(-1)).await;
    let running = enqueue(w, &job("a")).await;
    let row = claim(w, &["a"]).await.unwrap();
    assert_eq!(row.job_id, *running.id());
    let mut tx = w.begin().await;
    assert_eq!(tx.job_cancel(&w.app, queued.id(), "ann").await.unwrap(), JobCancel::Done);
    assert!(!tx.job_heartbeat(&row.token(), Duration::from_secs(60)).await.unwrap().cancel_requested);
    assert_eq!(tx.job_cancel(&w.app, running.id(), "ann").await.unwrap(), JobCancel::Requested);
    assert!(tx.job_heartbeat(&row.token(), Duration::from_secs(60)).await.unwrap().cancel_requested);
    let ended = tx.job_cancelled_set(&row.token(), "x").await.unwrap();
    assert_eq!((ended.state, ended.last_error.as_deref()), (JobState::Cancelled, Some("cancelled by ann")));
    assert_eq!(tx.job_cancel(&w.app, running.id(), "ann").await.unwrap(), JobCancel::TooLate(JobState::Cancelled));
    assert!(tx.job_cancel(&id("other"), running.id(), "eve").await.is_err());
    tx.commit().await.unwrap();
}

async fn dead_jobs_are_revived_and_old_ones_pruned(w: &World) {
    let new = job("a").dedup("k");
    enqueue(w, &new).await;
    let row = claim(w, &["a"]).await.unwrap();
    let mut tx = w.begin().await;
    let dead = tx.job_bury(&row.token(), "no such tensor").await.unwrap();
    assert_eq!((dead.state, dead.last_error.as_deref()), (JobState::Dead, Some("no such tensor")));
    tx.commit().await.unwrap();
    let twin = enqueue(w, &new).await;
    let mut tx = w.begin().await;
    assert_conflict!(tx.job_revive(&w.app, &row.job_id).await);
    tx.job_cancel(&w.app, twin.id(), "ann").await.unwrap();
    tx.job_revive(&w.app, &row.job_id).await.unwrap();
    tx.commit().await.unwrap();
    let again = claim(w, &["a"]).await.unwrap();
    assert_eq!((again.attempt, again.counted_attempts()), (2, 1), "the token rises, the count starts afresh");
    w.pass(1000);
    let mut tx = w.begin().await;
    let now = w.store().lease_now();
    assert_eq!(tx.job_prune(now).await.unwrap(), 1);
    tx.commit().await.unwrap();
    let left = w.store().job_list(&w.app, &JobFilter::default(), 9).await.unwrap();
    assert_eq!((left.len(), left[0].state), (1, JobState::Running));
}

async fn many_claimers_share_without_loss(w: &World) {
    for i in 0..40 {
        enqueue(w, &job("a").dedup(format!("{i}"))).await;
    }
    let tasks: Vec<_> = (0..4)
        .map(|i| {
            let store = w.store().clone();
            tokio::spawn(async move {
                let (kinds, owner) = (["a".to_owned()], format!("w{i}"));
                let mut mine = Vec::new();
                loop {
                    let mut tx = store.begin(crate::noon()).await.unwrap();
                    let claim = JobClaim { owner: &owner, kinds: &kinds, ttl: Duration::from_secs(60) };
                    let Some(row) = tx.job_claim(&claim).await.unwrap() else {
                        return mine;
                    };
                    tx.commit().await.unwrap();
                    mine.push(row.job_id);
                }
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!((count, all.len()), (40, 40));
}

const TTL: Duration = Duration::from_secs(60);

/// The turn of a worker that runs kind `a` and holds `row`.
async fn turn(w: &World, row: &JobRow) -> flywheel_store::Result<Option<JobRow>> {
    let kinds = ["a".to_owned()];
    let claim = JobClaim { owner: "w1", kinds: &kinds, ttl: TTL };
    w.store().job_succeed_and_claim(&row.token(), Some(&json!({"ok": 1})), &claim).await
}

async fn a_turn_ends_one_job_and_claims_the_next(w: &World) {
    let (a, _, b) = (enqueue(w, &job("a")).await, enqueue(w, &job("other")).await, enqueue(w, &job("a")).await);
    let first = claim(w, &["a"]).await.unwrap();
    assert_eq!(first.job_id, *a.id());
    w.pass(5);
    let second = turn(w, &first).await.unwrap().unwrap();
    assert_eq!((&second.job_id, second.state, second.attempt), (b.id(), JobState::Running, 1));
    let now = w.store().lease_now();
    assert_eq!((second.lease_owner.as_deref(), second.lease_expires_at), (Some("w1"), Some(now + TTL)));
    assert_eq!((second.started_at, second.finished_at, second.result.clone()), (Some(now), None, None));
    let ended = w.store().job_get(&w.app, a.id()).await.unwrap().unwrap();
    assert_eq!((ended.state, ended.attempt, ended.result), (JobState::Succeeded, 1, Some(json!({"ok": 1}))));
    assert_eq!((ended.finished_at, ended.lease_owner, ended.lease_expires_at), (Some(now), None, None));
    assert_eq!(ended.started_at, first.started_at);
    assert_eq!(turn(w, &second).await.unwrap(), None, "the other kind is none of this worker's");
    assert_conflict!(turn(w, &second).await);
}

async fn a_stale_turn_changes_nothing(w: &World) {
    enqueue(w, &job("a")).await;
    let stale = claim(w, &["a"]).await.unwrap();
    let mut tx = w.begin().await;
    tx.job_requeue(&stale.token(), Duration::ZERO, true, "gone").await.unwrap();
    tx.commit().await.unwrap();
    enqueue(w, &job("a").priority(9)).await;
    assert_conflict!(turn(w, &stale).await);
    let rows = w.store().job_list(&w.app, &JobFilter::default(), 9).await.unwrap();
    assert!(rows.iter().all(|r| r.state == JobState::Queued && r.result.is_none()), "{rows:?}");
    // The same owner holds it again: only the attempt tells the two apart.
    let live = loop {
        let row = claim(w, &["a"]).await.unwrap();
        if row.job_id == stale.job_id {
            break row;
        }
    };
    assert_conflict!(turn(w, &stale).await);
    assert_eq!(turn(w, &live).await.unwrap(), None);
}

async fn a_turn_leaves_keyed_jobs_to_the_claim(w: &World) {
    enqueue(w, &job("a").priority(9)).await;
    let keyed = enqueue(w, &job("a").priority(5).concurrency("train:shop", 1)).await;
    let plain = enqueue(w, &job("a")).await;
    let first = claim(w, &["a"]).await.unwrap();
    assert_eq!(turn(w, &first).await.unwrap(), None, "the job next in line has a key, and nobody is passed over");
    let second = claim(w, &["a"]).await.unwrap();
    assert_eq!(second.job_id, *keyed.id());
    // A key without room is stepped over, as by a claim.
    enqueue(w, &job("a").priority(7).concurrency("train:shop", 1)).await;
    let third = claim(w, &["a"]).await.unwrap();
    assert_eq!(third.job_id, *plain.id());
    let last = enqueue(w, &job("a")).await;
    assert_eq!(turn(w, &third).await.unwrap().map(|r| r.job_id), Some(last.id().clone()));
}

async fn many_turns_share_without_loss(w: &World) {
    for _ in 0..60 {
        enqueue(w, &job("a")).await;
    }
    let tasks: Vec<_> = (0..4)
        .map(|i| {
            let store = w.store().clone();
            tokio::spawn(async move {
                let (kinds, owner) = (["a".to_owned()], format!("w{i}"));
                let claim = JobClaim { owner: &owner, kinds: &kinds, ttl: TTL };
                let mut tx = store.begin(crate::noon()).await.unwrap();
                let mut next = tx.job_claim(&claim).await.unwrap();
                tx.commit().await.unwrap();
                let mut mine = Vec::new();
                while let Some(row) = next {
                    next = store.job_succeed_and_claim(&row.token(), None, &claim).await.unwrap();
                    mine.push(row.job_id);
                }
                mine
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!((count, all.len()), (60, 60));
    let counts = w.store().job_counts(Some(&w.app)).await.unwrap();
    assert_eq!((counts.len(), counts[0].state, counts[0].count), (1, JobState::Succeeded, 60));
}
