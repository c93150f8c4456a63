//! Chunk registry, index feed, templates, findings.

use crate::{World, assert_conflict, digest, id, noon, on_both};
use chrono::TimeDelta;
use flywheel_store::chunks::{ChunkMove, ChunkPut, NewChunk};
use flywheel_store::findings::{FindingKind, FindingState, NewFinding};
use flywheel_store::templates::NewTemplate;
use flywheel_store::{Error, Tx};
use flywheel_types::{AppId, ChunkId, ChunkState as S};
use serde_json::json;

on_both!(
    a_chunk_goes_the_whole_way_round,
    puts_are_idempotent_and_checked,
    templates_version_by_text,
    findings_are_upserted
);

fn chunk(text: &str) -> NewChunk {
    NewChunk {
        chunk_id: id("returns"),
        collection: "kb".into(),
        source: "kb/returns.md".into(),
        tags: vec!["policy".into()],
        text: Some(text.into()),
        text_digest: digest(text),
    }
}

fn step(from: S, to: S) -> ChunkMove {
    ChunkMove::new(from, to)
}

fn canary(from: S, to: S) -> ChunkMove {
    ChunkMove {
        canary_salt: Some("s1".into()),
        canary_ppm: 500_000,
        ttl_until: Some(noon() + TimeDelta::days(7)),
        finding_id: Some(id("f1")),
        ..step(from, to)
    }
}

/// ACTIVE → SUSPECT → CANARY_FROZEN → FROZEN, with every wrong step refused.
async fn freeze(tx: &mut Tx, app: &AppId, chunk_id: &ChunkId) {
    tx.chunk_state_set(app, chunk_id, 1, &step(S::Active, S::Suspect)).await.unwrap();
    assert_conflict!(tx.chunk_state_set(app, chunk_id, 1, &step(S::Active, S::Suspect)).await);
    let no_salt = tx.chunk_state_set(app, chunk_id, 1, &step(S::Suspect, S::CanaryFrozen)).await;
    assert!(matches!(no_salt, Err(Error::Invalid { .. })));
    let half = canary(S::Suspect, S::CanaryFrozen);
    tx.chunk_state_set(app, chunk_id, 1, &half).await.unwrap();
    tx.chunk_state_set(app, chunk_id, 1, &step(S::CanaryFrozen, S::Frozen)).await.unwrap();
    let silent = tx.chunk_state_set(app, chunk_id, 1, &step(S::Frozen, S::Active)).await;
    assert!(matches!(silent, Err(Error::Invalid { .. })));
}

/// FROZEN(v2) → REEMBED_QUEUED → SHADOW → CANARY_ACTIVE → ACTIVE; answers the index version.
async fn return_to_service(tx: &mut Tx, app: &AppId, chunk_id: &ChunkId) -> i64 {
    let old = tx.chunk_state_set(app, chunk_id, 1, &step(S::Frozen, S::ReembedQueued)).await;
    assert_conflict!(old);
    tx.chunk_state_set(app, chunk_id, 2, &step(S::Frozen, S::ReembedQueued)).await.unwrap();
    tx.chunk_embedding_set(app, chunk_id, 2, digest("e2")).await.unwrap();
    tx.chunk_state_set(app, chunk_id, 2, &step(S::ReembedQueued, S::Shadow)).await.unwrap();
    let half = canary(S::Shadow, S::CanaryActive);
    tx.chunk_state_set(app, chunk_id, 2, &half).await.unwrap();
    tx.chunk_state_set(app, chunk_id, 2, &step(S::CanaryActive, S::Active)).await.unwrap()
}

async fn a_chunk_goes_the_whole_way_round(w: &World) {
    let (app, chunk_id) = (&w.app, id("returns"));
    let mut tx = w.begin().await;
    assert_eq!(tx.chunk_put(app, &chunk("30 days")).await.unwrap(), ChunkPut::Created);
    tx.chunk_embedding_set(app, &chunk_id, 1, digest("e1")).await.unwrap();
    freeze(&mut tx, app, &chunk_id).await;
    // The corrected text is a new version; it stays frozen until verified.
    assert_eq!(tx.chunk_put(app, &chunk("14 days")).await.unwrap(), ChunkPut::NewVersion);
    let row = tx.chunk_get(app, &chunk_id).await.unwrap().unwrap();
    assert_eq!((row.version, row.state, row.embedding), (2, S::Frozen, None));
    assert_conflict!(tx.chunk_embedding_set(app, &chunk_id, 1, digest("e1")).await);
    let version = return_to_service(&mut tx, app, &chunk_id).await;
    tx.commit().await.unwrap();

    let s = w.store();
    assert_eq!(s.index_version_get(app).await.unwrap(), version);
    let changes = s.index_change_list(app, 0, 100).await.unwrap();
    let numbers: Vec<i64> = changes.iter().map(|c| c.index_version).collect();
    assert_eq!(numbers, (1..=version).collect::<Vec<_>>());
    assert_eq!(changes[3].canary_ppm, 500_000);
    assert_eq!(changes[4].canary_salt, None, "the canary ends with its state");
    let then = s.index_change_at(app, &chunk_id, 2).await.unwrap().unwrap();
    assert_eq!(then.text.as_deref(), Some("30 days"));
    let last = s.index_change_list(app, version - 1, 100).await.unwrap();
    assert_eq!(last[0].state, S::Active);
    assert_eq!(s.chunk_version_list(app, &chunk_id).await.unwrap().len(), 2);
    let row = s.chunk_get(app, &chunk_id).await.unwrap().unwrap();
    assert_eq!((row.state, row.ttl_until, row.finding_id), (S::Active, None, Some(id("f1"))));
    let foreign = s.chunk_get(&id("other"), &chunk_id).await.unwrap();
    assert!(foreign.is_none(), "another app sees nothing");
}

async fn puts_are_idempotent_and_checked(w: &World) {
    let mut tx = w.begin().await;
    tx.chunk_put(&w.app, &chunk("a")).await.unwrap();
    assert_eq!(tx.chunk_put(&w.app, &chunk("a")).await.unwrap(), ChunkPut::Unchanged);
    let moved = NewChunk { collection: "faq".into(), ..chunk("a") };
    assert_eq!(tx.chunk_put(&w.app, &moved).await.unwrap(), ChunkPut::Relabelled);
    let lie = NewChunk { text_digest: digest("b"), ..chunk("a") };
    assert!(matches!(tx.chunk_put(&w.app, &lie).await, Err(Error::Invalid { .. })));
    let digest_only = NewChunk { chunk_id: id("d"), text: None, ..chunk("secret") };
    assert_eq!(tx.chunk_put(&w.app, &digest_only).await.unwrap(), ChunkPut::Created);
    // Suspicion concerns a text; a new text starts afresh.
    tx.chunk_state_set(&w.app, &id("returns"), 1, &ChunkMove::new(S::Active, S::Suspect)).await.unwrap();
    tx.chunk_put(&w.app, &chunk("b")).await.unwrap();
    assert_eq!(tx.chunk_get(&w.app, &id("returns")).await.unwrap().unwrap().state, S::Active);
    let end = ChunkMove { ttl_until: Some(noon()), ..ChunkMove::new(S::Active, S::Retired) };
    tx.chunk_state_set(&w.app, &id("returns"), 2, &end).await.unwrap();
    assert_conflict!(tx.chunk_put(&w.app, &chunk("c")).await);
    tx.commit().await.unwrap();
    let s = w.store();
    assert_eq!(s.chunk_list(&w.app, None, None, 10).await.unwrap().len(), 2);
    assert_eq!(s.chunk_list(&w.app, Some(S::Retired), None, 10).await.unwrap().len(), 1);
    assert_eq!(s.chunk_list(&w.app, None, Some(&id("d")), 10).await.unwrap().len(), 1);
    assert_eq!(s.chunk_list_expired(&w.app, noon()).await.unwrap().len(), 1);
}

async fn templates_version_by_text(w: &World) {
    let t = |text: &str, name: &str| NewTemplate {
        template_id: id("answer"),
        name: name.into(),
        text: text.into(),
        tags: vec![],
    };
    let mut tx = w.begin().await;
    assert_eq!(tx.template_put(&w.app, &t("Q: {q}", "n")).await.unwrap(), 1);
    assert_eq!(tx.template_put(&w.app, &t("Q: {q}", "m")).await.unwrap(), 1);
    assert_eq!(tx.template_put(&w.app, &t("Ask: {q}", "m")).await.unwrap(), 2);
    tx.commit().await.unwrap();
    let row = w.store().template_get(&w.app, &id("answer")).await.unwrap().unwrap();
    assert_eq!((row.version, row.name.as_str()), (2, "m"));
    assert_eq!(w.store().template_list(&w.app).await.unwrap().len(), 1);
}

async fn findings_are_upserted(w: &World) {
    let new = |n: i64, finding: &str| NewFinding {
        finding_id: id(finding),
        kind: FindingKind::Chunk,
        subject: "returns".into(),
        version: 1,
        evidence: json!({"e_value": n}),
    };
    let mut tx = w.begin().await;
    tx.finding_upsert(&w.app, &new(20, "f1")).await.unwrap();
    let row = tx.finding_upsert(&w.app, &new(40, "f2")).await.unwrap();
    assert_eq!((row.finding_id, row.evidence["e_value"].clone()), (id("f1"), json!(40)));
    let (open, dismissed) = (FindingState::Open, FindingState::Dismissed);
    tx.finding_state_set(&w.app, &id("f1"), open, dismissed, "seasonal").await.unwrap();
    assert_conflict!(tx.finding_state_set(&w.app, &id("f1"), open, FindingState::Acted, "x").await);
    let row = tx.finding_upsert(&w.app, &new(60, "f1")).await.unwrap();
    assert_eq!((row.state, row.reason.as_deref()), (dismissed, Some("seasonal")));
    assert!(matches!(
        tx.finding_state_set(&w.app, &id("f1"), FindingState::Resolved, open, "x").await,
        Err(Error::Invalid { .. })
    ));
    assert!(matches!(
        tx.finding_state_set(&w.app, &id("f9"), open, FindingState::Acted, "x").await,
        Err(Error::NotFound { .. })
    ));
    tx.commit().await.unwrap();
    assert_eq!(w.store().finding_list(&w.app, Some(dismissed), 5).await.unwrap().len(), 1);
    assert_eq!(w.store().finding_list(&w.app, Some(open), 5).await.unwrap().len(), 0);
}
